"""Lines of a configuration -> assignments, and whether each of them takes effect."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kconfiglib as kc

from kmatrix.errors import ConfigError
from kmatrix.kconfig.tree import HEADER, Assignment, Tree, check_text, forbidden, has_prompt, unknown
from kmatrix.text import shown

ASKED = "# asked for:"  # start of the header lines
LINE = re.compile(r"CONFIG_(\w+)=(.*)|# CONFIG_(\w+) is not set")
# Names on the command line, in the order in which they are listed everywhere.
TRACKERS = {"wandb": "TRACKER_WANDB", "trackio": "TRACKER_TRACKIO", "tensorboard": "TRACKER_TENSORBOARD"}
SHORT = {"both": ("wandb", "trackio"), "all": tuple(TRACKERS), "none": ()}
SETS = ("TRACKER",)  # names whose list of values is one setting, not an axis


def read_assignments(tree: Tree, path: Path) -> list[Assignment]:
    """Return the assignments of a defconfig, a fragment or a .config. Raises ConfigError with all invalid lines.

    Names and types are checked here; `apply_assignments` checks whether the values take effect.
    """
    text = _read(path)
    found: dict[str, Assignment] = {}
    mistakes: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            assignment = _read_line(tree, line, f"{path}:{number}")
            if assignment and assignment.name in found:
                first = found[assignment.name].where
                raise ConfigError(f"{assignment.where}: CONFIG_{assignment.name} is set twice", why=f"first at {first}")
            if assignment:
                found[assignment.name] = assignment
        except ConfigError as error:  # collected, so that the user sees all mistakes of a file at once
            mistakes.append(": ".join(part for part in (error.what, error.why, error.hint) if part))
    refuse(mistakes)
    return list(found.values())


def merge(tree: Tree, base: list[Assignment], over: list[Assignment]) -> tuple[list[Assignment], list[str]]:
    """Merge assignments into a base. Returns the merged lines, and a note for each replaced value."""
    names = {item.name: item for item in over}
    # Selecting a member of a choice replaces the selected member of the base, which is another symbol.
    picked = {tree.axis_of(item.name) for item in over if item.value == "y"}
    picked &= set(tree.choices)
    kept, notes = [], []
    for item in base:
        axis = tree.axis_of(item.name)
        new = names.get(item.name)
        if new is None and axis not in picked:
            kept.append(item)
        elif new and new.value != item.value:
            notes.append(f"CONFIG_{item.name}: {item.value} ({item.where}) -> {new.value} ({new.where})")
        elif new is None and item.value == "y":
            notes.append(f"CONFIG_{item.name} ({item.where}): replaced by another member of {axis}")
    return kept + over, notes


def explicit(tree: Tree, path: Path, assignments: list[Assignment]) -> list[Assignment]:
    """Return the explicit lines of a .config: those in its header, and those that differ from their defaults.

    The other lines are defaults. They follow the symbols that they depend on when a matrix or the command line changes
    those: the default learning rate of AdamW must not stay when SGD is selected. In a file without our header every
    line is explicit. The assignments must be applied to the tree.
    """
    names = explicit_names(path)
    if names is None:
        return assignments
    minimal = {match[1] or match[3] for match in map(LINE.fullmatch, tree.minimal_text().splitlines()) if match}
    return [item for item in assignments if item.name in names or item.name in minimal]


def explicit_names(path: Path) -> set[str] | None:
    """Return the explicit names in the header of a .config, None if it has no such header."""
    head = [line for line in _read(path).splitlines() if line.startswith(ASKED)]
    return {name for line in head for name in line.removeprefix(ASKED).split()} if head else None


def header(names: Iterable[str]) -> str:
    """Return the header of a .config, which lists the explicit symbols."""
    words = textwrap.wrap(" ".join(sorted(names)), 100) or [""]
    return HEADER + "".join(f"{ASKED} {line}".rstrip() + "\n" for line in words)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}", why=error.strerror or str(error)) from None
    try:
        # Editors of Windows write a byte order mark and CRLF; neither changes a value.
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text", why=f"byte {data[error.start]:#04x}") from None


def _read_line(tree: Tree, line: str, where: str) -> Assignment | None:
    # "# CONFIG_X is ..." is an assignment in this format. A misspelled one must not pass as a comment.
    if not line.strip() or (line.startswith("#") and not re.match(r"#\s*CONFIG_\w+\s+is\b", line)):
        return None
    match = LINE.fullmatch(line)
    if not match:
        why = 'expected CONFIG_NAME=value or "# CONFIG_NAME is not set"'
        raise ConfigError(f"{where}: cannot read {line!r}", why=why)
    name, text = (match[1], match[2]) if match[1] else (match[3], "n")
    symbol = tree.symbol(name, where)
    if match[3] and symbol.orig_type != kc.BOOL:
        raise ConfigError(f"{where}: CONFIG_{name} is not set", why="only a bool can be unset")
    if symbol.orig_type == kc.STRING:
        if not re.fullmatch(r'"(?:[^"\\]|\\.)*"', text):
            why = f'expected a string: CONFIG_{name}="{text.strip(chr(34))}"'
            raise ConfigError(f"{where}: CONFIG_{name}={text}", why=why)
        text = kc.unescape(text[1:-1])
    check_text(tree, symbol, text, where)
    return Assignment(name, text, where)


@dataclass(frozen=True, slots=True)
class NotInEffect:
    """The reason why an assignment has no effect."""

    text: str
    absent: bool  # the symbol does not apply in this configuration; otherwise its value is invalid


def cause(tree: Tree, assignment: Assignment) -> NotInEffect | None:
    """Return why an assignment has no effect in the current configuration, None if it has."""
    symbol = tree.kconf.syms[assignment.name]
    # "n" also holds for a hidden symbol: `# CONFIG_X is not set` asks for what it already is.
    if symbol.str_value == assignment.value and (
        symbol.visibility or not has_prompt(symbol) or assignment.value == "n"
    ):
        return None
    if not has_prompt(symbol):
        return NotInEffect(f"computed, cannot be set; its value is {symbol.str_value!r}", absent=False)
    if symbol.choice and not symbol.choice.visibility:
        return NotInEffect("its choice is hidden in this configuration", absent=True)
    if not symbol.visibility:
        required = symbol.choice or (symbol.orig_type == kc.BOOL and assignment.value == "y")
        return NotInEffect(_unmet(symbol), absent=not required)
    if symbol.choice:
        return NotInEffect(f"{symbol.choice.selection.name} is selected: only one member can be y", absent=False)
    # A symbol may have several ranges with conditions; the first one that holds applies.
    ranges = sorted(symbol.ranges, key=lambda entry: not kc.expr_value(entry[2]))
    limits = [
        f"[{low.str_value}, {high.str_value}]{'' if when is symbol.kconfig.y else f' when {kc.expr_str(when)}'}"
        for low, high, when, *_ in ranges
    ]
    text = f"out of range: {'; '.join(limits)}" if limits else f"the effective value is {symbol.str_value!r}"
    return NotInEffect(text, absent=False)


def _unmet(symbol: Any) -> str:
    """Return the unmet dependencies of a symbol, with their values: "depends on A=n, B || C (B=n, C=n)"."""
    unmet_terms = []
    for term in kc.split_expr(symbol.direct_dep, kc.AND):
        if kc.expr_value(term) or kc.expr_str(term) == "<choice>":  # met, or the choice around the symbol
            continue
        if isinstance(term, kc.Symbol) and term.nodes:
            unmet_terms.append(f"{term.name}={term.str_value}")
            continue
        items = {item for item in kc.expr_items(term) if isinstance(item, kc.Symbol) and item.nodes}
        values = sorted(f"{item.name}={item.str_value}" for item in items)
        unmet_terms.append(kc.expr_str(term) + (f" ({', '.join(values)})" if values else ""))
    return f"depends on {', '.join(unmet_terms)}" if unmet_terms else "hidden in this configuration"


def apply_assignments(tree: Tree, assignments: Sequence[Assignment]) -> None:
    """Apply all assignments to the tree. Raises ConfigError if one of them has no effect afterwards.

    The message has a line per mistake: file and line, symbol, cause.
    """
    # Set everything first: a line may depend on a later one.
    for assignment in assignments:
        tree.kconf.syms[assignment.name].set_value(assignment.value)
    wrong = [(item, why.text) for item in assignments if (why := cause(tree, item))]
    refuse(f"{item.where}: CONFIG_{item.name}={item.value}: {text}" for item, text in wrong)
    # Last, because a FORBID_ symbol may be y only as a consequence of one of the mistakes above.
    forbidding = {symbol: {item.name for item in symbol.referenced} for symbol in tree.forbidding()}
    refuse(forbidden(symbol) + lines_that_set(tree, assignments, names) for symbol, names in forbidding.items())


def lines_that_set(tree: Tree, assignments: Iterable[Assignment], names: set[str]) -> str:
    """Return the lines that set these symbols and choices, in parentheses; "" if they have their defaults."""
    lines = [item for item in assignments if item.value != "n" and {item.name, tree.axis_of(item.name)} & names]
    texts = "; ".join(f"{item.where}: CONFIG_{item.name}={item.value}" for item in lines)
    return f" ({texts})" if lines else ""


def refuse(mistakes: Iterable[str]) -> None:
    """Raise one ConfigError for all mistakes, if there are any."""
    if text := "\n  ".join(mistakes):
        raise ConfigError(text, hint="remove or change it; nothing was written")


def load_config(tree: Tree, path: Path, on_update: Callable[[str], object] | None = None) -> list[Assignment]:
    """Apply every line of a .config, and return the explicit lines.

    on_update: called with a note for each computed value that has changed, whose line is left out; None: it is refused.
    """
    if not path.exists():
        hint = "run `make defconfig-<name>` (see `make list-defconfigs`) or `make menuconfig`"
        raise ConfigError(f"{shown(path)} not found", hint=hint)
    lines = read_assignments(tree, Path(shown(path)))
    if on_update:
        computed = [item for item in lines if not has_prompt(tree.kconf.syms[item.name])]
        lines = [item for item in lines if item not in computed]
        tree.set_only(lines)
        for item in (item for item in computed if cause(tree, item)):
            on_update(f"{item.where}: CONFIG_{item.name}: computed, now {tree.kconf.syms[item.name].str_value}")
    apply_assignments(tree, lines)
    return explicit(tree, path, lines)


def parse_trackers(text: str) -> tuple[str, ...]:
    """Return the trackers of a comma-separated list, in a fixed order. Blanks are ignored."""
    words = [word.strip().lower() for word in text.split(",")]
    what, known = f"command line: TRACKER={text}", (*TRACKERS, *SHORT)
    for word in words:
        if word not in known:
            raise unknown(what, word, known, kind="tracker", else_see=f"docs/trackers.md: {', '.join(known)}")
    if "none" in words and len(words) > 1:
        raise ConfigError(what, why="none cannot be combined")
    chosen = {name for word in words for name in SHORT.get(word, (word,))}
    return tuple(name for name in TRACKERS if name in chosen)


def parse_set(name: str, text: str) -> dict[str, list[Assignment]]:
    """Return the assignments of NAME=text by symbol, for each member of the set."""
    chosen = parse_trackers(text)
    return {
        symbol: [Assignment(symbol, "y" if member in chosen else "n", f"command line: {name}={text}")]
        for member, symbol in TRACKERS.items()
    }
