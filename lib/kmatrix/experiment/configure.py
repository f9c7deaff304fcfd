"""Defconfigs, fragments and the command line -> the text of a .config: merged, validated, written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kmatrix.config import PREFIX, broken_rules, read_run
from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import (
    NotInEffect,
    apply_assignments,
    cause,
    header,
    lines_that_set,
    load_config,
    merge,
    read_assignments,
    refuse,
)
from kmatrix.kconfig.tree import Assignment, Tree, has_prompt, unknown
from kmatrix.matrix.axes import plan_axes
from kmatrix.matrix.expand import expand
from kmatrix.records.files import write_bytes, write_text
from kmatrix.records.paths import ROOT
from kmatrix.text import shown

NAMES = re.compile(r"[A-Z][A-Z0-9_]+")
OnMessage = Callable[[str], None]  # called with a line of text for the user


def ignore(_: str) -> None:
    """Discard a line of text."""


def merge_layers(tree: Tree, layers: Iterable[Path], on_message: OnMessage = ignore) -> list[Assignment]:
    """Return the lines of a defconfig and its fragments, merged in order."""
    base: list[Assignment] = []
    for path in layers:
        lines = read_assignments(tree, path)
        refuse_computed(tree, lines)
        # The value of a fragment removes an axis of a former layer, as on the command line.
        values = {axis: [item] for item in lines if (axis := tree.axis_of(item.name)) == item.name or item.value == "y"}
        removable = {item.name for item in base} - {item.name for item in lines}
        removed = [item for item in as_lines(tree, values) if item.name in removable]
        base = merge_lines(tree, base, [*lines, *removed], on_message)
    return base


def merge_lines(
    tree: Tree, base: list[Assignment], over: list[Assignment], on_message: OnMessage = ignore
) -> list[Assignment]:
    """Merge a fragment or the command line into a base, and report each line that it replaces.

    A line of the base that has no effect after the merge is removed, with a note. A line that had no effect before,
    or is illegal now, stays and is refused later.
    """
    # Only lines that the merge itself made idle are removed: the others are mistakes of the user.
    wrong = set(_without_effect(tree, base))
    lines, notes = merge(tree, base, over)
    found = {item: why for item, why in _without_effect(tree, lines).items() if item not in wrong and item not in over}
    gone = {item: why for item, why in found.items() if why.absent or not _matrix_on(tree, item)}
    notes += [f"CONFIG_{item.name} ({item.where}) has no effect: {why.text}" for item, why in gone.items()]
    for note in notes:
        on_message(f"  {note}")
    return [item for item in lines if item not in gone]


def _without_effect(tree: Tree, lines: Sequence[Assignment]) -> dict[Assignment, NotInEffect]:
    """Return the lines that have no effect if only these lines are set, with the reason."""
    tree.reset()
    for item in lines:
        tree.kconf.syms[item.name].set_value(item.value)
    return {item: why for item in lines if (why := cause(tree, item))}


def _matrix_on(tree: Tree, item: Assignment) -> bool:
    """Return whether a line is not a MATRIX_ line, or MATRIX is y."""
    return not item.name.startswith("MATRIX_") or tree.kconf.syms["MATRIX"].str_value == "y"


def refuse_broken(tree: Tree, base: Sequence[Assignment]) -> None:
    """Raise ConfigError with the rules that the configuration in the tree breaks, and the lines that break them."""
    values = tree.typed_values(tree.effective())
    # A reason names the symbols that it is about.
    refuse(
        why + lines_that_set(tree, base, {f"{prefix}{name}" for name in NAMES.findall(why) for prefix in ("", PREFIX)})
        for why in broken_rules(values, read_run(values))
    )


def as_lines(tree: Tree, asked: Mapping[str, Sequence[Assignment]]) -> list[Assignment]:
    """Return assignments by axis as lines of a .config: a list of values becomes the MATRIX_ lines of its axis."""
    lines: list[Assignment] = []
    for axis, values in asked.items():
        members = [member.name for member in tree.members.get(axis, {}).values()]
        names = [f"MATRIX_{name}" for name in members or [axis]]
        known = [name for name in names if name in tree.kconf.syms and tree.kconf.syms[name].nodes]
        where = values[0].where
        if len(values) == 1:
            lines.append(values[0])
            lines += [Assignment(name, "n" if members else "", where) for name in known if tree.value(name)]
            continue
        swept = {f"MATRIX_{item.name}" for item in values} if members else {f"MATRIX_{axis}"}
        if not swept <= set(known):
            raise ConfigError(
                where, why=".config has no MATRIX_ symbol for this axis", hint="pass it to make test-matrix"
            )
        lines.append(Assignment("MATRIX", "y", where))
        if members:
            lines += [Assignment(name, "y" if name in swept else "n", where) for name in known]
        else:
            lines.append(Assignment(f"MATRIX_{axis}", " ".join(item.value for item in values), where))
    unique = {item.name: item for item in lines}
    return list(unique.values())


def validated(
    tree: Tree, lines: Sequence[Assignment], names: set[str] | None = None, on_message: OnMessage = ignore
) -> str:
    """Return the text of a .config with these lines. names: those that were asked for, all lines by default.

    Raises ConfigError for a line or a value that has no effect in any run. on_message: called with harmless ones.
    """
    apply_assignments(tree, lines)
    refuse_broken(tree, lines)
    asked = [item for item in lines if names is None or item.name in names]
    axes = plan_axes(tree, asked, {})
    for note in expand(tree, asked, axes).notes if axes.axes or axes.rules else ():
        on_message(f"  note: {note}")
    return text_of_config(tree, lines, names)


def text_of_config(tree: Tree, lines: Sequence[Assignment], names: set[str] | None = None) -> str:
    """Return the text of a .config with these lines. names: those that were asked for, all lines by default."""
    tree.reset()
    apply_assignments(tree, lines)
    # Not the members of choices that are not selected.
    kept = {item.name for item in lines if item.value != "n" or not tree.kconf.syms[item.name].choice}
    return tree.config_text(header(kept if names is None else kept & names))


def on_this_machine(tree: Tree, run: Sequence[Assignment], config: Path) -> list[Assignment]:
    """Return the lines of a run with the settings of this machine: those of .config, else the defaults.

    run: its explicit lines.  config: the .config of this user, which may be missing.
    """
    tree.reset()
    own = load_config(tree, config) if config.is_file() else []
    own = [item for item in own if item.name in tree.machine]
    of_trainer = [item for item in run if item.name not in tree.machine and not item.name.startswith("MATRIX")]
    merged, _ = merge(tree, of_trainer, own)
    tree.reset()
    for item in merged:
        tree.kconf.syms[item.name].set_value(item.value)
    # Settings of this user that only other runs have, such as a limit for GPUs.
    return [item for item in merged if item not in own or not cause(tree, item)]


def config_layers(name: str) -> list[Path]:
    """Return the files of `name+fragment+fragment`. Raises ConfigError for an unknown name."""
    first, *fragments = name.split("+")
    known = known_configurations(ROOT / "defconfigs")
    own = Path(first)
    if first in known:
        layers = [known[first]]
    elif own.is_file():
        layers = [own]
    else:
        raise unknown("", first, known, kind="defconfig", else_see="make list-defconfigs")
    there = known_configurations(ROOT / "defconfigs" / "fragments")
    for fragment in fragments:
        if f"{fragment}.config" not in there:
            names = [path.removesuffix(".config") for path in there]
            raise unknown("", fragment, names, kind="fragment", else_see="make list-defconfigs")
        layers.append(there[f"{fragment}.config"])
    return [Path(shown(path)) for path in layers]


def known_configurations(folder: Path) -> dict[str, Path]:
    """Return the files of a folder of defconfigs or fragments by name."""
    return {path.name: path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}


def refuse_computed(tree: Tree, lines: Iterable[Assignment]) -> None:
    """Raise ConfigError for assignments to symbols without a prompt, whose values are computed."""
    refuse(
        f"{item.where}: CONFIG_{item.name}={item.value}: computed, cannot be set"
        for item in lines
        if not has_prompt(tree.kconf.syms[item.name])
    )


def write_config(path: Path, text: str) -> str:
    """Write a .config, keep the former one as .config.old, and return a message. Equal content is not written."""
    former = path.read_bytes() if path.exists() else None
    if former == text.encode():
        return f"no change to {shown(path)}"
    if former is not None:
        write_bytes(path.with_name(path.name + ".old"), former)
    write_text(path, text)
    return f"configuration written to {shown(path)}"
