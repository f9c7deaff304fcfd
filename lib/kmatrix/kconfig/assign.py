"""Text -> assignments: the lines of a configuration file, and NAME=value of the command line."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import kconfiglib as kc

from kmatrix.errors import ConfigError
from kmatrix.kconfig.sets import SETS
from kmatrix.kconfig.strict import Assignment, check_text, refuse, twice
from kmatrix.kconfig.tree import BOOLS, HEADER, Tree, unknown

ASKED = "# asked for:"
LINE = re.compile(r"CONFIG_(\w+)=(.*)|# CONFIG_(\w+) is not set")
PREFIX = "GPT2_"

# Other names for symbols on the command line. A symbol's own name, with or without GPT2_, needs no entry.
ALIASES = {
    "GLOBAL_BATCH": "PARALLEL_BATCH_SIZE",
    "TIMEOUT": "RUN_TIMEOUT",
    "ITERS": "GPT2_MAX_ITERS",
    "LR": "GPT2_LEARNING_RATE",
    "MICRO_BATCH": "GPT2_BATCH_SIZE",
    "TIME": "GPT2_MAX_TIME",
    "TRAINING_HOURS": "GPT2_MAX_TIME",
    "COST": "GPT2_MAX_COST",
    "TOKENS": "GPT2_MAX_TOKENS",
    "EPOCHS": "GPT2_MAX_EPOCHS",
    "PROJECT": "TRACKER_PROJECT",
}
UNITS = {"TRAINING_HOURS": "h"}  # what a name says of its values: TRAINING_HOURS=2.5 is MAX_TIME=2.5h


def read_assignments(tree: Tree, path: Path) -> list[Assignment]:
    """Read a defconfig, a fragment or a .config. Every line is understood, or the file is refused with all mistakes.

    Values are checked for their type here; whether they are in force is `put_in_force`'s question.
    """
    text = _read(path)
    found: dict[str, Assignment] = {}
    mistakes: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            assignment = _read_line(tree, line, f"{path}:{number}")
            if assignment is None:
                continue
            _refuse_second(tree, found, assignment)
            found[assignment.name] = assignment
        except ConfigError as error:
            mistakes.append(": ".join(part for part in (error.what, error.why, error.fix) if part))
    refuse(mistakes)
    return list(found.values())


def resolve_name(tree: Tree, name: str, arguments: tuple[str, ...] = ()) -> str:
    """Return the symbol or axis that a name of the command line means: itself, with GPT2_ before it, or an alias.

    arguments: the other names that the command knows, for the suggestion.
    """
    known = {symbol.name for symbol in tree.symbols} | set(tree.choices)
    fits = [
        candidate for candidate in dict.fromkeys((name, PREFIX + name, ALIASES.get(name, ""))) if candidate in known
    ]
    if len(fits) > 1:
        raise ConfigError(f"{name} can mean {' or '.join(fits)}", fix="write the whole name")
    if not fits:
        short = {candidate.removeprefix(PREFIX) for candidate in known if not candidate.startswith("FORBID_")}
        if not name.startswith("MATRIX"):
            short = {candidate for candidate in short if not candidate.startswith("MATRIX_")}
        raise unknown("command line", name, [*sorted(short), *ALIASES, *SETS, *arguments], kind="name")
    return fits[0]


def parse_override(tree: Tree, name: str, text: str) -> tuple[str, list[Assignment]]:
    """Return the axis that NAME=value[,value...] sets, and an assignment for each value.

    A choice is set by the lower-case end of its members' names: OPTIMIZER=adamw,muon.
    """
    axis, where = resolve_name(tree, name), f"command line: {name}={text}"
    choice = tree.axis_of(tree.kconf.syms[axis]) if axis not in tree.choices else axis
    if choice != axis:
        if text != "y":
            raise ConfigError(where, why=f"{axis} is a member of {choice}: only y can be said of one alone")
        return choice, [Assignment(axis, "y", where)]
    values = text.split(",") if _may_be_list(tree, axis) else [text]
    values = [value + UNITS.get(name, "") for value in values]
    return axis, points(tree, axis, values, where)


def points(tree: Tree, axis: str, values: Sequence[str], where: str) -> list[Assignment]:
    """Return an assignment for each value of an axis; none may stand twice, in whatever spelling."""
    found = [point(tree, axis, value, where) for value in values]
    again = twice(tree, axis, [item.name if axis in tree.choices else item.value for item in found])
    if again:
        raise ConfigError(where, why=f"{again} stands twice")
    return found


def point(tree: Tree, axis: str, value: str, where: str) -> Assignment:
    """Return the assignment that gives an axis (a choice or a symbol) one value."""
    members = tree.members(axis)
    if members:
        if value.lower() not in members:
            raise ConfigError(f"{where}: no {value!r} in {axis}", why=f"it is one of {', '.join(members)}")
        return Assignment(members[value.lower()].name, "y", where)
    symbol = tree.symbol(axis, where)
    check_text(tree, symbol, value, where)
    return Assignment(axis, value, where)


def merge(tree: Tree, base: list[Assignment], over: list[Assignment]) -> tuple[list[Assignment], list[str]]:
    """Lay assignments over others. Returns the union, and a note for each value that was replaced."""
    names = {item.name: item for item in over}
    picked = {tree.axis_of(tree.kconf.syms[item.name]) for item in over if item.value == "y"}
    picked &= set(tree.choices)
    kept, notes = [], []
    for item in base:
        axis = tree.axis_of(tree.kconf.syms[item.name])
        if item.name not in names and axis not in picked:
            kept.append(item)
        elif item.name in names and names[item.name].value != item.value:
            new = names[item.name]
            notes.append(f"CONFIG_{item.name}: {item.value} ({item.where}) -> {new.value} ({new.where})")
        elif item.name not in names and item.value == "y":
            notes.append(f"CONFIG_{item.name} ({item.where}): another member of {axis} is taken")
    return kept + over, notes


def asked(tree: Tree, path: Path, assignments: list[Assignment]) -> list[Assignment]:
    """Return the lines of a .config that were asked for: those that its header names, and those that are no default.

    The other lines are defaults, and follow them when a matrix or the command line changes what they hang on: the
    learning rate of AdamW is not pinned on SGD. In a file without our header every line counts as asked for.
    The assignments must be in force in the tree.
    """
    names = asked_names(path)
    if names is None:
        return assignments
    minimal = {match[1] or match[3] for match in map(LINE.fullmatch, tree.minimal_text().splitlines()) if match}
    return [item for item in assignments if item.name in names or item.name in minimal]


def asked_names(path: Path) -> set[str] | None:
    """Return the names that a .config's header lists as asked for; None where it has no such header."""
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(ASKED)]
    return {name for line in head for name in line.removeprefix(ASKED).split()} if head else None


def header(names: Iterable[str]) -> str:
    """Return the head of a .config that lists what was asked for."""
    words = textwrap.wrap(" ".join(sorted(names)), 100) or [""]
    return HEADER + "".join(f"{ASKED} {line}".rstrip() + "\n" for line in words)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}", why=error.strerror or str(error)) from None
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text", why=f"byte {data[error.start]:#04x}") from None


def _may_be_list(tree: Tree, axis: str) -> bool:
    """A comma separates values, but in a string that is no number and no word of a set: there it is a letter."""
    symbol = tree.kconf.syms.get(axis)
    if axis in tree.choices or symbol is None:
        return True
    if axis.startswith("MATRIX"):  # its own lists are strings; the rest cannot be swept
        return False
    return symbol.orig_type != kc.STRING or axis in tree.floats or axis in tree.oneofs or axis in tree.durations


def _read_line(tree: Tree, line: str, where: str) -> Assignment | None:
    if not line.strip() or (line.startswith("#") and not re.match(r"#\s*CONFIG_\w+\s+is\b", line)):
        return None
    match = LINE.fullmatch(line)
    if not match:
        raise ConfigError(
            f"{where}: cannot read {line!r}", why='lines are CONFIG_NAME=value or "# CONFIG_NAME is not set"'
        )
    name, text = (match[1], match[2]) if match[1] else (match[3], "n")
    symbol = tree.symbol(name, where)
    if match[3] and symbol.orig_type not in BOOLS:
        raise ConfigError(f"{where}: CONFIG_{name} is not set", why="only a bool can be not set")
    if symbol.orig_type == kc.STRING:
        if not re.fullmatch(r'"(?:[^"\\]|\\.)*"', text):
            raise ConfigError(
                f"{where}: CONFIG_{name}={text}", why=f'it is a string: CONFIG_{name}="{text.strip(chr(34))}"'
            )
        text = kc.unescape(text[1:-1])
    check_text(tree, symbol, text, where)
    return Assignment(name, text, where)


def _refuse_second(tree: Tree, found: Mapping[str, Assignment], new: Assignment) -> None:
    if new.name in found:
        raise ConfigError(f"{new.where}: CONFIG_{new.name} is set twice", why=f"first at {found[new.name].where}")
    symbol = tree.kconf.syms[new.name]
    if symbol.choice and new.value == "y":
        for member in symbol.choice.syms:
            first = found.get(member.name)
            if first and first.value == "y":
                raise ConfigError(
                    f"{new.where}: CONFIG_{new.name}=y and CONFIG_{member.name}=y ({first.where})",
                    why=f"they are members of one choice, {tree.axis_of(symbol)}: one can be y",
                )
