"""The configuration targets. They need no torch, no GPU and no network, and change nothing if they fail."""

from __future__ import annotations

import sys
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.errors import ConfigError
from kmatrix.experiment.configure import (
    as_lines,
    config_layers,
    known_configurations,
    merge_layers,
    merge_lines,
    validated,
    write_config,
)
from kmatrix.kconfig.assignments import apply_assignments, load_config, read_assignments
from kmatrix.kconfig.edit import edit
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import overrides
from kmatrix.records.files import write_bytes, write_text
from kmatrix.records.paths import ROOT
from kmatrix.text import make_command, shown


def defconfig(arguments: Arguments) -> int:
    """Write .config from a defconfig, else from the defaults, merged with fragments and assignments."""
    name = _asked_defconfig(arguments)
    tree = Tree.parse()
    base = merge_layers(tree, config_layers(name), print) if name else []
    return _finish(tree, arguments, _merged(tree, base, arguments), f"from {name or 'the defaults'}")


def olddefconfig(arguments: Arguments) -> int:
    """Update .config: new symbols get their defaults, assignments are merged."""
    tree = Tree.parse()
    path = arguments.config
    base = load_config(tree, path, print) if path.exists() else []
    return _finish(tree, arguments, _merged(tree, base, arguments), "olddefconfig")


def savedefconfig(arguments: Arguments) -> int:
    """Write the lines of .config that differ from the defaults to DEFCONFIG= or ./defconfig."""
    tree = Tree.parse()
    base = load_config(tree, arguments.config)
    out = Path(arguments.get("DEFCONFIG", "defconfig"))
    text = tree.minimal_text()
    # Values that equal their default only now: with another optimizer, say, the default would be another one.
    dependent = [
        item for item in base if len(tree.kconf.syms[item.name].defaults) > 1 and f"CONFIG_{item.name}" not in text
    ]
    text += "".join(tree.kconf.syms[item.name].config_string for item in dependent)
    write_text(out, text)
    print(f"{shown(out)}: {text.count(chr(10))} lines")
    return 0


def diffconfig(arguments: Arguments) -> int:
    """Print the differences of .config.old and .config: -removed, +added, old -> new."""
    now = arguments.config
    # Read, not applied: lines are compared, whether or not they take effect.
    sides = []
    for path in (Path(f"{now}.old"), now):
        if not path.is_file():
            raise ConfigError(f"{shown(path)} not found", hint="each change of .config keeps the former one")
        sides.append({item.name: item.value for item in read_assignments(Tree.parse(), path)})
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
    """Print the defconfigs and fragments with their first comment."""
    found = sorted(known_configurations(ROOT / "defconfigs").items())
    rows = [(make_command(f"defconfig-{name}"), path) for name, path in found]
    width = max(len(command) for command, _path in rows)
    for command, path in rows:
        print(f"  {command:{width}} {_first_comment(path)}")
    print("\nFragments, merged with +, as in defconfig-<name>+quick:")
    for name, path in sorted(known_configurations(ROOT / "defconfigs" / "fragments").items()):
        print(f"  +{name.removesuffix('.config'):38} {_first_comment(path)}")
    return 0


def menuconfig(arguments: Arguments) -> int:
    """Edit .config in the terminal. Raises ConfigError before the screen opens if a line has no effect."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):  # with make -j, stdin is not the terminal
        raise ConfigError(
            f"{arguments.target} needs a terminal",
            hint="run it without a pipe and without make -j, or use make defconfig-<name> NAME=value",
        )
    tree = Tree.parse()
    path = arguments.config
    before = path.read_bytes() if path.exists() else None
    lines = load_config(tree, path) if before is not None else []
    tree.reset()
    apply_assignments(tree, lines)  # only what was asked for, so that defaults follow their dependencies
    edit(tree, path)
    if not path.exists() or path.read_bytes() == before:
        print(f"no change to {shown(path)}")
        return 0
    # The editor has written to .config. Until that is valid, it is in another file, and the former text is back.
    edited = path.with_name(path.name + ".refused")
    write_bytes(edited, path.read_bytes())
    if before is None:
        path.unlink()
    else:
        write_bytes(path, before)
    names = {symbol.name for symbol in tree.symbols if symbol.user_value is not None}
    tree = Tree.parse()
    try:
        text = validated(tree, read_assignments(tree, edited), names, print)
    except ConfigError as error:
        hint = f"{shown(path)} is unchanged; your version is in {shown(edited)}"
        raise ConfigError(error.what, why=error.why, hint=hint) from None
    print(write_config(path, text))
    edited.unlink()
    return 0


def _finish(tree: Tree, arguments: Arguments, base: list[Assignment], origin: str) -> int:
    """Validate a configuration, write it, and print the result."""
    result = write_config(arguments.config, validated(tree, base, on_message=print))
    print(f"{result} ({' '.join([origin, *arguments.words])})")
    return 0


def _merged(tree: Tree, base: list[Assignment], arguments: Arguments) -> list[Assignment]:
    """Return the lines with the assignments of the command line merged into them, and print what they replace."""
    asked = overrides(tree, arguments.assignments, arguments.takes)
    return merge_lines(tree, base, as_lines(tree, asked), print)


def _asked_defconfig(arguments: Arguments) -> str:
    """Return the name or file of a defconfig, "" for the defaults."""
    target = arguments.target
    if target.startswith("defconfig-"):
        return target.removeprefix("defconfig-")
    if target != "defconfig":
        return target.removesuffix("_defconfig")
    return arguments.get("DEFCONFIG")


def _first_comment(path: Path) -> str:
    """Return the first line of a file without #, "" if it is not a comment."""
    line = path.read_text(encoding="utf-8").partition("\n")[0]
    return line.lstrip("# ") if line.startswith("#") else ""
