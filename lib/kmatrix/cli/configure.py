"""The configuration targets. They need no torch, no GPU and no network, and either do all that was asked or nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.overlay import as_lines, broken_rules, judge_matrix, lay_over, settings
from kmatrix.cli.project import PROJECT, former_project, is_computed, own_project
from kmatrix.cli.session import (
    ROOT,
    config_path,
    load_config,
    open_tree,
    shown,
    write_config,
    write_out,
)
from kmatrix.errors import ConfigError
from kmatrix.kconfig import Assignment, Tree, put_in_force, read_assignments
from kmatrix.kconfig.assign import header
from kmatrix.kconfig.generate import in_force, randomize, set_bools
from kmatrix.kconfig.strict import check_text, refuse
from kmatrix.kconfig.tree import help_text, unknown
from kmatrix.records import write_bytes

TRIES = 100


def defconfig(arguments: Arguments) -> int:
    """Load a ready configuration, with fragments and assignments laid over it."""
    name = _asked_defconfig(arguments)
    tree = open_tree(arguments)
    base: list[Assignment] = []
    for path in _layers(name):
        lines = read_assignments(tree, path)
        _refuse_computed(tree, lines)
        base = lay_over(tree, base, lines)
    return _finish(tree, arguments, lay_over(tree, base, as_lines(tree, arguments)), f"from {name}")


def olddefconfig(arguments: Arguments) -> int:
    """Put .config in force again: new symbols take their defaults, assignments are laid over it."""
    tree = open_tree(arguments)
    path = config_path(arguments)
    base = load_config(tree, path) if path.exists() else []
    return _finish(tree, arguments, lay_over(tree, base, as_lines(tree, arguments)), "olddefconfig")


def oldconfig(arguments: Arguments) -> int:
    """Ask for each symbol that .config does not hold yet."""
    tree = open_tree(arguments)
    base = load_config(tree, config_path(arguments))
    new = _new_symbols(tree, arguments)
    if new and not sys.stdin.isatty():
        raise ConfigError(
            f"oldconfig asks for {len(new)} new symbols and there is no terminal",
            fix="make olddefconfig gives them their defaults",
        )
    for symbol in new:
        text = _ask(tree, symbol)
        if text is not None:
            base.append(Assignment(symbol.name, text, "oldconfig"))
    return _finish(tree, arguments, lay_over(tree, base, as_lines(tree, arguments)), "oldconfig")


def alldefconfig(arguments: Arguments) -> int:
    """Every symbol at its default."""
    return _finish(open_tree(arguments), arguments, [], "alldefconfig")


def allyesconfig(arguments: Arguments) -> int:
    """Every bool y, as far as its dependencies allow. The matrix gets large: look at the dry run first."""
    return _all_bools(arguments, "y")


def allnoconfig(arguments: Arguments) -> int:
    """Every bool n."""
    return _all_bools(arguments, "n")


def randconfig(arguments: Arguments) -> int:
    """A random legal configuration; the same KCONFIG_SEED gives the same one."""
    seed = arguments.get("KCONFIG_SEED") or str(random.randrange(2**32))
    if not seed.isdecimal():
        raise ConfigError(f"KCONFIG_SEED={seed} is not a whole number")
    tree = open_tree(arguments)
    draw = random.Random(int(seed))
    for trial in range(TRIES):
        tree.reset()
        randomize(tree, draw, share=1 - trial / TRIES)
        if not tree.forbidden() and not broken_rules(tree, []):
            print(f"KCONFIG_SEED={seed}")
            return _finish(tree, arguments, in_force(tree, "randconfig"), "randconfig")
    raise ConfigError(f"no legal configuration in {TRIES} tries with KCONFIG_SEED={seed}")


def savedefconfig(arguments: Arguments) -> int:
    """Write what .config has beyond the defaults, to DEFCONFIG= or to ./defconfig."""
    tree = open_tree(arguments)
    base = load_config(tree, config_path(arguments))
    out = Path(arguments.get("DEFCONFIG", "defconfig"))
    if is_computed(tree.value(PROJECT) or ""):  # it belongs to this machine, and a defconfig travels
        base = [item for item in base if item.name != PROJECT]
        tree.kconf.syms[PROJECT].unset_value()
    text = tree.minimal_text()
    moving = [
        item for item in base if len(tree.kconf.syms[item.name].defaults) > 1 and f"CONFIG_{item.name}" not in text
    ]
    text += "".join(tree.kconf.syms[item.name].config_string for item in moving)
    write_out(out, text)
    print(f"{shown(out)}: {text.count(chr(10))} lines")
    return 0


def listnewconfig(arguments: Arguments) -> int:
    """Print the symbols that .config does not hold yet, with their defaults."""
    tree = open_tree(arguments)
    load_config(tree, config_path(arguments))
    for symbol in _new_symbols(tree, arguments):
        print(symbol.config_string.rstrip())
    return 0


def helpnewconfig(arguments: Arguments) -> int:
    """Print the help of the symbols that .config does not hold yet."""
    tree = open_tree(arguments)
    load_config(tree, config_path(arguments))
    for symbol in _new_symbols(tree, arguments):
        print(f"{symbol.config_string.rstrip()}\n  {symbol.nodes[0].prompt[0]}\n  {help_text(symbol)}\n")
    return 0


def diffconfig(arguments: Arguments) -> int:
    """Print the differences of two configurations: -gone, +new, and old -> new."""
    now = config_path(arguments)
    old = Path(arguments.get("OLD", str(now) + ".old"))
    new = Path(arguments.get("NEW", str(now)))
    sides = []
    for path in (old, new):
        if not path.is_file():
            raise ConfigError(f"there is no {shown(path)}", fix="pass OLD=<file> NEW=<file>")
        sides.append({item.name: item.value for item in read_assignments(open_tree(arguments), path)})
    before, after = sides
    for name in sorted(before.keys() - after.keys()):
        print(f"-{name} {before[name]}")
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            print(f" {name} {before[name]} -> {after[name]}")
    for name in sorted(after.keys() - before.keys()):
        print(f"+{name} {after[name]}")
    return 0


def list_defconfigs(_: Arguments) -> int:
    """Print the ready configurations and fragments with their first comment."""
    for name, path in sorted(_known(ROOT / "defconfigs").items()):
        print(f"  make defconfig-{name:28} {_first_comment(path)}")
    print("\nlaid over them with +, as in defconfig-<name>+quick:")
    for name, path in sorted(_known(ROOT / "defconfigs" / "fragments").items()):
        print(f"  +{name.removesuffix('.config'):38} {_first_comment(path)}")
    return 0


def menuconfig(arguments: Arguments) -> int:
    """Edit .config in the terminal. A line that is not in force is refused before the screen opens."""
    from kmatrix.kconfig.menu import edit

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            f"{arguments.target} needs a terminal",
            fix="run it without a pipe and without make -j, or use make defconfig-<name> NAME=value",
        )
    tree = open_tree(arguments)
    path = config_path(arguments)
    before = path.read_bytes() if path.exists() else None
    lines = load_config(tree, path) if before is not None else []
    tree.reset()
    put_in_force(tree, lines)  # what was asked for, so that defaults follow on the screen too
    edit(tree, path)
    if not path.exists() or path.read_bytes() == before:
        print(f"no change to {shown(path)}")
        return 0
    try:
        text = _judged(arguments, path, {symbol.name for symbol in tree.symbols if symbol.user_value is not None})
    except ConfigError as error:
        aside = path.with_name(path.name + ".refused")
        path.replace(aside)
        if before is not None:
            write_bytes(path, before)
        fix = f"{shown(path)} is as it was; what you saved is in {shown(aside)}"
        raise ConfigError(error.what, why=error.why, fix=fix) from None
    if before is not None:
        write_bytes(path.with_name(path.name + ".old"), before)
    write_out(path, text)
    print(f"configuration written to {shown(path)}")
    return 0


def _judged(arguments: Arguments, path: Path, names: set[str]) -> str:
    """Return the text of a saved configuration, with the names that were asked for in its head."""
    tree = open_tree(arguments)
    lines = read_assignments(tree, path)
    put_in_force(tree, lines)
    refuse(broken_rules(tree, lines))
    text = _text(tree, path, lines, names)
    for note in judge_matrix(tree, [item for item in lines if item.name in names]):
        print(f"  note: {note}")
    return text


def _text(tree: Tree, path: Path, lines: list[Assignment], names: set[str]) -> str:
    """Return the text of a .config of these lines, of which `names` were asked for."""
    lines = _with_project(tree, path, lines)
    put_in_force(tree, lines)
    if is_computed(tree.value(PROJECT) or ""):
        names = names - {PROJECT}
    return tree.config_text(header(settings(tree, lines, names)))


def _finish(tree: Tree, arguments: Arguments, base: list[Assignment], origin: str) -> int:
    """Judge a configuration as a whole, and write it."""
    put_in_force(tree, base)
    refuse(broken_rules(tree, base))
    for note in judge_matrix(tree, base):
        print(f"  note: {note}")
    tree.reset()
    path = config_path(arguments)
    said = write_config(path, _text(tree, path, base, {item.name for item in base}))
    words = " ".join([origin, *arguments.words])
    print(f"{said} ({words})")
    return 0


def _with_project(tree: Tree, path: Path, lines: list[Assignment]) -> list[Assignment]:
    """Name the trackers' project where nothing does: as .config did before, else for this host and folder."""
    symbol = tree.kconf.syms.get(PROJECT)
    if symbol is None or not symbol.nodes or any(item.name == PROJECT and item.value for item in lines):
        return lines
    name = former_project(path) or own_project()
    if not is_computed(name):
        print(f"  CONFIG_{PROJECT}: {name}, as in the former {shown(path)}")
    return [*(item for item in lines if item.name != PROJECT), Assignment(PROJECT, name, "this host and folder")]


def _asked_defconfig(arguments: Arguments) -> str:
    target = arguments.target
    if target.startswith("defconfig-"):
        return target.removeprefix("defconfig-")
    if target != "defconfig":
        return target.removesuffix("_defconfig")
    name = arguments.get("DEFCONFIG")
    if not name:
        raise ConfigError(
            "defconfig needs a name", fix="make defconfig-<name>, or make defconfig DEFCONFIG=<name or file>"
        )
    return name


def _layers(name: str) -> list[Path]:
    """Return the files of `name+fragment+fragment`."""
    first, *fragments = name.split("+")
    known = _known(ROOT / "defconfigs")
    own = Path(first)
    if first in known:
        layers = [known[first]]
    elif own.is_file():
        layers = [own]
    else:
        raise unknown(f"defconfig-{first}", first, known, kind="defconfig", else_see="make list-defconfigs")
    there = _known(ROOT / "defconfigs" / "fragments")
    for fragment in fragments:
        if f"{fragment}.config" not in there:
            names = [path.removesuffix(".config") for path in there]
            raise unknown(f"+{fragment}", fragment, names, kind="fragment", else_see="make list-defconfigs")
        layers.append(there[f"{fragment}.config"])
    return [Path(shown(path)) for path in layers]


def _known(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}


def _first_comment(path: Path) -> str:
    line = path.read_text(encoding="utf-8").partition("\n")[0]
    return line.lstrip("# ") if line.startswith("#") else ""


def _refuse_computed(tree: Tree, lines: Iterable[Assignment]) -> None:
    refuse(
        f"{item.where}: CONFIG_{item.name}={item.value}: it has no prompt: its value is computed"
        for item in lines
        if not any(node.prompt for node in tree.kconf.syms[item.name].nodes)
    )


def _new_symbols(tree: Tree, arguments: Arguments) -> list[Any]:
    """Return the visible symbols that .config does not mention."""
    text = config_path(arguments).read_text(encoding="utf-8")
    there = {word.split("=")[0].removeprefix("CONFIG_") for line in text.splitlines() for word in line.split()}
    return [
        symbol
        for symbol in tree.symbols
        if symbol.visibility and symbol.name not in there and symbol.config_string and not symbol.choice
    ]


def _ask(tree: Tree, symbol: Any) -> str | None:
    """Ask for one symbol until the answer is legal; an empty answer takes the default (None)."""
    while True:
        answer = input(f"{symbol.nodes[0].prompt[0]} ({symbol.name}) [{symbol.str_value}] (NEW) ").strip()
        if not answer:
            return None
        if answer == "?":
            print(help_text(symbol))
            continue
        try:
            check_text(tree, symbol, answer, "answer")
        except ConfigError as error:
            print(error)
            continue
        return answer


def _all_bools(arguments: Arguments, value: str) -> int:
    tree = open_tree(arguments)
    set_bools(tree, value)
    return _finish(tree, arguments, in_force(tree, arguments.target), arguments.target)
