"""The axes of a matrix, from MATRIX_ symbols and from the command line, with coupled values and exclusions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import SETS, parse_set
from kmatrix.kconfig.tree import (
    FORBID,
    MATRIX,
    NOT_AN_AXIS,
    Assignment,
    Tree,
    member_text,
    normalized,
    point,
    points,
    split_list,
    unknown,
)

COUPLED, EXCLUDE = "MATRIX_COUPLED", "MATRIX_EXCLUDE"
PREFIX = "GPT2_"  # of the trainer's symbols; optional on the command line
# Other names for symbols on the command line. A symbol's own name, with or without GPT2_, needs no entry.
ALIASES = {
    "GLOBAL_BATCH": "PARALLEL_BATCH_SIZE",
    "ITERS": "GPT2_MAX_ITERS",
    "LR": "GPT2_LEARNING_RATE",
    "MICRO_BATCH": "GPT2_BATCH_SIZE",
}


@dataclass(frozen=True, slots=True)
class AxisValue:
    """One value of one axis."""

    axis: str
    text: str  # as a user writes it
    assignment: Assignment
    swept: bool = True  # one of several values, not a single coupled value


@dataclass(frozen=True, slots=True)
class Axis:
    """A symbol or choice and its values, in the given order."""

    name: str
    label: str
    points: tuple[AxisValue, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """If all terms hold in a cell, these symbols take these values, or the cell is excluded with this reason."""

    terms: tuple[tuple[str, str], ...]  # axis or symbol, value text
    where: str  # of the rule, for messages
    points: tuple[tuple[AxisValue, ...], ...] = ()  # the values of each symbol
    reason: str = ""

    def holds(self, tree: Tree) -> bool:
        """Return whether the terms are true of the effective values of the tree."""
        return all(
            normalized(tree, axis, tree.value(axis) or "") == normalized(tree, axis, text) for axis, text in self.terms
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a matrix with their rules."""

    axes: tuple[Axis, ...]
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()  # rules that the command line overrides
    narrowed: bool = False  # lines of the configuration may have no effect: the command line or `train` chose runs

    @property
    def assignments(self) -> list[Assignment]:
        """All values, of axes and of rules."""
        coupled = (group for rule in self.rules for group in rule.points)
        return [point.assignment for points in (*(axis.points for axis in self.axes), *coupled) for point in points]


def plan_axes(
    tree: Tree, base: Sequence[Assignment], overrides: Mapping[str, Sequence[Assignment]], *, one: bool = False
) -> Axes:
    """Return the axes that the base configuration and the command line span. one: they are narrowed to one run.

    overrides: assignments by axis. One value removes the axis of that name, several values make or replace it.
    """
    declared = {item.name: item for item in base if item.name.startswith("MATRIX")}
    if "MATRIX" not in declared or declared["MATRIX"].value != "y":
        declared = {}
    swept = _declared_axes(tree, declared)
    for name, items in overrides.items():
        swept.pop(name, None)  # a value on the command line replaces the axis of the configuration
        if len(items) > 1:
            if name in tree.neutral:
                raise ConfigError(f"{items[0].where}: {name} cannot be an axis", why="it cannot change a result")
            swept[name] = make_axis(tree, name, items)
    rules, notes = _rules(tree, declared, swept, overrides)
    return Axes(in_order(tree, swept.values()), tuple(rules), tuple(notes), one or bool(overrides))


def label(tree: Tree, axis: str) -> str:
    """Return the name of an axis in run names and tables: its $(label), or its name in lower case without GPT2_."""
    return tree.labels.get(axis) or axis.removeprefix(PREFIX).lower().replace("_", "")


def make_axis(tree: Tree, name: str, items: Iterable[Assignment]) -> Axis:
    """Return an axis with these values."""
    return Axis(name, label(tree, name), _axis_values(tree, name, items))


def _axis_values(tree: Tree, name: str, items: Iterable[Assignment], *, swept: bool = True) -> tuple[AxisValue, ...]:
    return tuple(AxisValue(name, _text(tree, name, item), item, swept) for item in items)


def _declared_axes(tree: Tree, declared: Mapping[str, Assignment]) -> dict[str, Axis]:
    found: dict[str, list[Assignment]] = {}
    for symbol in tree.symbols:
        item = declared.get(symbol.name)
        if item is None or symbol.name in ("MATRIX", *NOT_AN_AXIS):
            continue
        swept = symbol.name[len(MATRIX) :]
        axis = tree.axis_of(swept)
        member = [Assignment(swept, "y", item.where)] if item.value == "y" else []
        values = points(tree, axis, split_list(item.value), item.where) if axis == swept else member
        found.setdefault(axis, []).extend(values)
    return {axis: make_axis(tree, axis, items) for axis, items in found.items() if items}


def in_order(tree: Tree, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return axes in the order of the Kconfig files, not of the command line: those with MATRIX_ symbols first."""
    places = {symbol.name: place for place, symbol in enumerate(tree.symbols)}

    def place(axis: Axis) -> int:
        names = [member.name for member in tree.members.get(axis.name, {}).values()] or [axis.name]
        return min(places.get(MATRIX + name, len(places) + places[name]) for name in names)

    return tuple(sorted(axes, key=place))


def _rules(
    tree: Tree, declared: Mapping[str, Assignment], swept: Collection[str], overrides: Collection[str]
) -> tuple[list[Rule], list[str]]:
    """Return the rules of the configuration, and notes about values that the command line overrides."""
    rules, notes = [], []
    expected = "NAME=value [NAME=value ...] => NAME=value[,value...]"
    for left, right, where in _sides(declared.get(COUPLED), "=>", expected):
        pairs = _pairs(tree, right, where)
        if len(dict(pairs)) < len(pairs):
            raise ConfigError(where, why="a symbol is set twice")
        groups = []
        for name, values in pairs:
            if name in overrides:  # the command line wins over a rule
                notes.append(f"{where}: {name} is set on the command line")
                continue
            if name in swept:  # an axis and a rule for one symbol contradict each other
                hint = f"empty CONFIG_{MATRIX}{name}, or remove the rule"
                raise ConfigError(where, why=f"{name} is also an axis", hint=hint)
            items = points(tree, name, values.split(","), where)
            groups.append(_axis_values(tree, name, items, swept=len(items) > 1))
        rules.append(Rule(parse_terms(tree, left, where), where, tuple(groups)))
    for left, reason, where in _sides(declared.get(EXCLUDE), ":", "NAME=value [NAME=value ...]: reason"):
        rules.append(Rule(parse_terms(tree, left, where), where, reason=f"{EXCLUDE}: {reason.strip()}"))
    return rules, notes


def _sides(item: Assignment | None, sign: str, expected: str) -> Iterator[tuple[str, str, str]]:
    """Yield the left and right side of each rule of a symbol, and its place for errors. expected: their form."""
    for text in (item.value if item else "").split(";"):
        left, found, right = text.partition(sign)
        if item and text.strip():
            where = f"{item.where}: CONFIG_{item.name}: {text.strip()!r}"
            if not found or not left.strip() or not right.strip():
                raise ConfigError(where, why=f"expected {expected}")
            yield left, right, where


def parse_terms(tree: Tree, text: str, where: str) -> tuple[tuple[str, str], ...]:
    """Return the terms of NAME=value [NAME=value ...]. where: of the text, for errors."""
    return tuple(
        (name, _text(tree, name, point(tree, name, value, where))) for name, value in _pairs(tree, text, where)
    )


def _pairs(tree: Tree, text: str, where: str) -> list[tuple[str, str]]:
    pairs = []
    for word in text.split():
        name, _, value = word.partition("=")
        if not name or not value:
            raise ConfigError(where, why=f"{word!r} is not NAME=value", hint="for example: OPTIMIZER=adamw")
        pairs.append((resolve_name(tree, name, where=where), value))
    return pairs


def _text(tree: Tree, axis: str, item: Assignment) -> str:
    """Return a value as a user writes it: the lower-case suffix of a member, the text of another symbol."""
    return member_text(axis, item.name) if axis in tree.choices else item.value


def resolve_name(tree: Tree, name: str, arguments: Iterable[str] = (), where: str = "") -> str:
    """Return the symbol or axis of a name on the command line: the name itself, with GPT2_ before it, or its alias.

    arguments: other names that the command takes, for suggestions.  where: of the name, for the error.
    """
    known = {*(symbol.name for symbol in tree.symbols), *tree.choices}
    for candidate in (name, PREFIX + name, ALIASES.get(name, name)):
        if candidate in known:
            return candidate
    # Suggestions as a user would type them: without GPT2_, and no MATRIX_ symbols unless one was meant.
    hidden = (FORBID,) if name.startswith("MATRIX") else (FORBID, MATRIX)
    short = sorted({candidate.removeprefix(PREFIX) for candidate in known if not candidate.startswith(hidden)})
    if (bare := name.removeprefix("CONFIG_").removeprefix(PREFIX)) in short:  # as in .config
        raise ConfigError(f"{where}: unknown symbol {name}".removeprefix(": "), hint=f"did you mean {bare}?")
    raise unknown(where, name, [*short, *ALIASES, *SETS, *arguments])


def parse_override(tree: Tree, name: str, text: str, arguments: Iterable[str] = ()) -> tuple[str, list[Assignment]]:
    """Return the axis that NAME=value[,value...] sets, and an assignment per value.

    A choice takes the lower-case suffixes of its members: OPTIMIZER=adamw,muon. A number takes ranges.
    arguments: as of `resolve_name`.
    """
    axis, where = resolve_name(tree, name, arguments), f"command line: {name}={text}"
    choice = axis if axis in tree.choices else tree.axis_of(axis)
    if choice != axis:
        if text != "y":
            raise ConfigError(where, why=f"{axis} is a member of {choice}: a single member can only be set to y")
        return choice, [Assignment(axis, "y", where)]
    values = [text] if tree.is_text(axis) else text.split(",")
    return axis, points(tree, axis, values, where)


def overrides(tree: Tree, assignments: Mapping[str, str], options: Collection[str] = ()) -> dict[str, list[Assignment]]:
    """Return the assignments of the command line by axis, one for each value.

    assignments: NAME -> text.  options: other names that the command takes, for suggestions.
    """
    found: dict[str, list[Assignment]] = {}
    for name, text in assignments.items():
        # A set such as TRACKER sets several symbols.
        parsed = parse_set(name, text) if name in SETS else dict([parse_override(tree, name, text, options)])
        for axis, values in parsed.items():
            if axis in found:
                raise ConfigError(f"command line: {name}={text}", why=f"{axis} is set twice")
            found[axis] = values
    return found


def single(found: Mapping[str, Sequence[Assignment]]) -> list[Assignment]:
    """Return the overrides with a single value, which hold in every run."""
    return [values[0] for values in found.values() if len(values) == 1]
