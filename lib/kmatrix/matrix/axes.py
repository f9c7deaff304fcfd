"""The axes of a matrix: from MATRIX_ symbols and from the command line, with coupled and excluded points."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.errors import ConfigError
from kmatrix.kconfig import Assignment, Tree
from kmatrix.kconfig.assign import point as assignment_of
from kmatrix.kconfig.assign import points as assignments_of
from kmatrix.kconfig.assign import resolve_name
from kmatrix.kconfig.strict import same_number, split_list
from kmatrix.kconfig.tree import NOT_AN_AXIS

MATRIX = "MATRIX_"
COUPLED, EXCLUDE = "MATRIX_COUPLED", "MATRIX_EXCLUDE"


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one axis.

    text: as a user writes it.  swept: it stands for an axis, not for a single coupled value.
    """

    axis: str
    text: str
    assignment: Assignment
    swept: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """A symbol or choice and the values that it takes, in the order in which they were given."""

    name: str
    label: str
    points: tuple[Point, ...]
    from_command_line: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    """Points that must all hold: axis -> value text. numbers: axes whose texts are compared as numbers."""

    terms: tuple[tuple[str, str], ...]
    text: str
    numbers: frozenset[str] = frozenset()

    def holds(self, values: Mapping[str, str | None]) -> bool:
        return all(self._same(axis, values.get(axis), text) for axis, text in self.terms)

    def _same(self, axis: str, value: str | None, text: str) -> bool:
        return value == text or bool(axis in self.numbers and value and same_number(value) == same_number(text))


@dataclass(frozen=True, slots=True)
class Coupling:
    """Where the condition holds, these axes take these values."""

    condition: Condition
    points: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Where the condition holds, the cell is cut with this reason."""

    condition: Condition
    reason: str


@dataclass(frozen=True, slots=True)
class Axes:
    """All that spans a matrix. notes: what the command line made idle."""

    axes: tuple[Axis, ...]
    couplings: tuple[Coupling, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    notes: tuple[str, ...] = ()
    overridden: frozenset[str] = field(default=frozenset())

    def cells(self, base: Mapping[str, str | None]) -> Iterator[tuple[Point, ...]]:
        """Yield the points of each cell. base: the values in force of what is no axis, for conditions."""
        fixed = {name: base.get(name) for name in self.named_in_conditions()}
        for points in itertools.product(*(axis.points for axis in self.axes)):
            values = {**fixed, **{point.axis: point.text for point in points}}
            coupled = [group for rule in self.couplings if rule.condition.holds(values) for group in rule.points]
            if not coupled:
                yield points
                continue
            last = {group[0].axis: group for group in coupled}  # of two rules for one symbol the later counts
            for more in itertools.product(*last.values()):
                yield (*points, *more)

    def excluded(self, values: Mapping[str, str | None]) -> str | None:
        """Return why a cell is excluded, or None."""
        return next((rule.reason for rule in self.exclusions if rule.condition.holds(values)), None)

    def named_in_conditions(self) -> set[str]:
        conditions = [rule.condition for rule in self.couplings] + [rule.condition for rule in self.exclusions]
        return {axis for condition in conditions for axis, _ in condition.terms}


def plan_axes(tree: Tree, base: Sequence[Assignment], overrides: Mapping[str, Sequence[Assignment]]) -> Axes:
    """Return the axes that the base configuration and the command line span.

    overrides: axis -> assignments. One value removes the axis of that name, several make or replace it.
    """
    declared = {item.name: item for item in base if item.name.startswith(MATRIX)}
    swept = _declared_axes(tree, declared) if _is_on(base) else {}
    for name, assignments in overrides.items():
        swept.pop(name, None)
        if len(assignments) > 1:
            if name in tree.neutral:
                raise ConfigError(f"{assignments[0].where}: {name} is no axis", why="it cannot change a result")
            points = tuple(Point(name, _text(tree, name, item), item) for item in assignments)
            swept[name] = Axis(name, label(tree, name), points, from_command_line=True)
    couplings, notes = _couplings(tree, declared, swept, overrides) if _is_on(base) else ((), ())
    return Axes(
        axes=tuple(sorted(swept.values(), key=lambda axis: _order(tree, axis.name))),
        couplings=couplings,
        exclusions=_exclusions(tree, declared) if _is_on(base) else (),
        notes=notes,
        overridden=frozenset(overrides),
    )


def label(tree: Tree, axis: str) -> str:
    """Return what an axis is called in names and tables: its $(label), or its name without GPT2_ in lower case."""
    return tree.labels.get(axis) or axis.removeprefix("GPT2_").lower().replace("_", "")


def _is_on(base: Sequence[Assignment]) -> bool:
    return any(item.name == "MATRIX" and item.value == "y" for item in base)


def _declared_axes(tree: Tree, declared: Mapping[str, Assignment]) -> dict[str, Axis]:
    points: dict[str, list[Point]] = {}
    for symbol in tree.symbols:
        item = declared.get(symbol.name)
        if item is None or symbol.name in NOT_AN_AXIS:
            continue
        swept = tree.symbol(symbol.name[len(MATRIX) :], item.where)
        axis = tree.axis_of(swept)
        if swept.choice:
            if item.value == "y":
                text = swept.name[len(axis) + 1 :].lower()
                points.setdefault(axis, []).append(Point(axis, text, Assignment(swept.name, "y", item.where)))
        else:
            for text in split_list(item.value):
                points.setdefault(axis, []).append(Point(axis, text, Assignment(axis, text, item.where)))
    return {axis: Axis(axis, label(tree, axis), tuple(found)) for axis, found in points.items()}


def _order(tree: Tree, axis: str) -> int:
    """Axes stand in the order of their MATRIX_ symbols; those without one behind, in the order of the files."""
    names = [symbol.name for symbol in tree.symbols]
    members = tree.members(axis)
    swept = [member.name for member in members.values()] if members else [axis]
    declared = [names.index(MATRIX + name) for name in swept if MATRIX + name in names]
    return min(declared) if declared else len(names) + min(names.index(name) for name in swept)


def _couplings(
    tree: Tree, declared: Mapping[str, Assignment], swept: Mapping[str, Axis], overrides: Mapping[str, object]
) -> tuple[tuple[Coupling, ...], tuple[str, ...]]:
    item = declared.get(COUPLED)
    rules, notes = [], []
    for text in _rules(item.value if item else ""):
        assert item is not None
        left, arrow, right = text.partition("=>")
        where = f"{item.where}: CONFIG_{COUPLED}: {text!r}"
        if not arrow:
            raise ConfigError(where, why="a rule is NAME=value [NAME=value ...] => NAME=value[,value...]")
        condition, groups = _condition(tree, left, where), []
        pairs = _pairs(tree, right, where)
        if not pairs:
            raise ConfigError(where, why="the right side sets nothing")
        for name, values in pairs:
            if [other for other, _ in pairs].count(name) > 1:
                raise ConfigError(where, why=f"it sets {name} twice")
            if name in overrides:
                notes.append(f"{name} is set on the command line: the rule {text!r} leaves it alone")
            elif name in swept:
                raise ConfigError(
                    where, why=f"{name} is an axis too", fix=f"empty CONFIG_{MATRIX}{name}, or drop the rule"
                )
            else:
                groups.append(_coupled_points(tree, name, values, where))
        if groups:
            rules.append(Coupling(condition, tuple(groups)))
    return tuple(rules), tuple(notes)


def _coupled_points(tree: Tree, name: str, values: str, where: str) -> tuple[Point, ...]:
    found = assignments_of(tree, name, values.split(","), where)
    return tuple(Point(name, _text(tree, name, item), item, swept=len(found) > 1) for item in found)


def _exclusions(tree: Tree, declared: Mapping[str, Assignment]) -> tuple[Exclusion, ...]:
    item = declared.get(EXCLUDE)
    rules = []
    for text in _rules(item.value if item else ""):
        assert item is not None
        left, colon, reason = text.partition(":")
        where = f"{item.where}: CONFIG_{EXCLUDE}: {text!r}"
        if not colon or not reason.strip():
            raise ConfigError(where, why="an exclusion is NAME=value [NAME=value ...]: its reason")
        rules.append(Exclusion(_condition(tree, left, where), f"excluded: {reason.strip()}"))
    return tuple(rules)


def _rules(text: str) -> list[str]:
    return [rule.strip() for rule in text.split(";") if rule.strip()]


def _condition(tree: Tree, text: str, where: str) -> Condition:
    terms = []
    for name, value in _pairs(tree, text, where):
        item = assignment_of(tree, name, value, where)
        terms.append((name, _text(tree, name, item)))
    if not terms:
        raise ConfigError(where, why="the left side names nothing")
    return Condition(tuple(terms), text.strip(), frozenset(tree.floats))


def _pairs(tree: Tree, text: str, where: str) -> list[tuple[str, str]]:
    pairs = []
    for word in text.split():
        match = re.fullmatch(r"(\w+)=(\S+)", word)
        if not match:
            raise ConfigError(where, why=f"{word!r} is not NAME=value")
        try:
            pairs.append((resolve_name(tree, match[1]), match[2]))
        except ConfigError as error:
            raise ConfigError(where, why=error.what.removeprefix("command line: "), fix=error.fix) from None
    return pairs


def _text(tree: Tree, axis: str, item: Assignment) -> str:
    """The text of a value as a user writes it: a choice's members by the end of their names."""
    return item.name[len(axis) + 1 :].lower() if axis in tree.choices else item.value
