"""The axes of a matrix, from MATRIX_ symbols and from the command line, with coupled values and exclusions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import SETS, parse_set
from kmatrix.kconfig.tree import (
    NOT_AN_AXIS,
    Assignment,
    Tree,
    check_text,
    list_values,
    member_text,
    normalized_number,
    repeated,
    split_list,
    unknown,
)

MATRIX = "MATRIX_"
COUPLED, EXCLUDE = "MATRIX_COUPLED", "MATRIX_EXCLUDE"
PREFIX = "GPT2_"  # of the trainer's symbols; optional on the command line
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
    "PROJECT": "TRACKER_PROJECT",
}
# Names of other trainers (nanochat, nanoGPT, Hugging Face) -> ours, for suggestions only: some have other units.
ELSEWHERE = {
    "DEVICE_BATCH_SIZE": "BATCH_SIZE",
    "PER_DEVICE_TRAIN_BATCH_SIZE": "BATCH_SIZE",
    "MICRO_BATCH_SIZE": "BATCH_SIZE",
    "TOTAL_BATCH_SIZE": "PARALLEL_BATCH_SIZE (in sequences)",
    "GLOBAL_BATCH_SIZE": "PARALLEL_BATCH_SIZE (in sequences)",
    "GRADIENT_ACCUMULATION_STEPS": "GRADIENT_ACCUMULATION",
    "MAX_SEQ_LEN": "BLOCK_SIZE",
    "SEQUENCE_LENGTH": "BLOCK_SIZE",
    "CONTEXT_LENGTH": "BLOCK_SIZE",
    "NUM_ITERATIONS": "MAX_ITERS",
    "MAX_STEPS": "MAX_ITERS",
    "WARMUP_ITERS": "WARMUP_STEPS",
    "EVAL_ITERS": "EVAL_SAMPLES (in sequences)",
    "MATRIX_LR": "LEARNING_RATE",
}
UNITS = {"TRAINING_HOURS": "h"}  # the unit of the values of a name: TRAINING_HOURS=2.5 is MAX_TIME=2.5h


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
    from_command_line: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    """A conjunction of NAME=value terms."""

    terms: tuple[tuple[str, str], ...]  # axis or symbol, value text
    text: str
    numbers: frozenset[str] = frozenset()  # symbols whose texts are compared as numbers

    def holds(self, value: Callable[[str], str | None]) -> bool:
        """Return whether the condition is true. value: returns the effective text of an axis or symbol."""
        return all(self._same(axis, value(axis), text) for axis, text in self.terms)

    def _same(self, axis: str, value: str | None, text: str) -> bool:
        return value == text or bool(
            axis in self.numbers and value and normalized_number(value) == normalized_number(text)
        )


@dataclass(frozen=True, slots=True)
class Coupling:
    """If the condition holds, these symbols take these values."""

    condition: Condition
    points: tuple[tuple[AxisValue, ...], ...]


@dataclass(frozen=True, slots=True)
class Exclusion:
    """If the condition holds, the cell is excluded with this reason."""

    condition: Condition
    reason: str


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a matrix with their couplings and exclusions."""

    axes: tuple[Axis, ...]
    couplings: tuple[Coupling, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    notes: tuple[str, ...] = ()  # rules that the command line overrides
    overridden: frozenset[str] = field(default=frozenset())  # names that the command line sets


def plan_axes(tree: Tree, base: Sequence[Assignment], overrides: Mapping[str, Sequence[Assignment]]) -> Axes:
    """Return the axes that the base configuration and the command line span.

    overrides: assignments by axis. One value removes the axis of that name, several values make or replace it.
    """
    declared = {item.name: item for item in base if item.name.startswith(MATRIX)}
    swept = _declared_axes(tree, declared) if _is_on(base) else {}
    for name, assignments in overrides.items():
        swept.pop(name, None)  # a value on the command line replaces the axis of the configuration
        if len(assignments) > 1:
            if name in tree.neutral:
                raise ConfigError(f"{assignments[0].where}: {name} cannot be an axis", why="it cannot change a result")
            points = tuple(AxisValue(name, _text(tree, name, item), item) for item in assignments)
            swept[name] = Axis(name, label(tree, name), points, from_command_line=True)
    couplings, notes = _couplings(tree, declared, swept, overrides) if _is_on(base) else ((), ())
    return Axes(
        axes=in_order(tree, swept.values()),
        couplings=couplings,
        exclusions=_exclusions(tree, declared) if _is_on(base) else (),
        notes=notes,
        overridden=frozenset(overrides),
    )


def label(tree: Tree, axis: str) -> str:
    """Return the name of an axis in run names and tables: its $(label), or its name in lower case without GPT2_."""
    return tree.labels.get(axis) or axis.removeprefix("GPT2_").lower().replace("_", "")


def _is_on(base: Sequence[Assignment]) -> bool:
    return any(item.name == "MATRIX" and item.value == "y" for item in base)


def _declared_axes(tree: Tree, declared: Mapping[str, Assignment]) -> dict[str, Axis]:
    points: dict[str, list[AxisValue]] = {}
    for symbol in tree.symbols:
        item = declared.get(symbol.name)
        if item is None or symbol.name in NOT_AN_AXIS:
            continue
        swept = tree.symbol(symbol.name[len(MATRIX) :], item.where)
        axis = tree.axis_of(swept.name)
        if swept.choice:
            if item.value == "y":
                text = member_text(axis, swept.name)
                points.setdefault(axis, []).append(AxisValue(axis, text, Assignment(swept.name, "y", item.where)))
        else:
            for text in list_values(tree, axis, split_list(item.value), item.where):
                points.setdefault(axis, []).append(AxisValue(axis, text, Assignment(axis, text, item.where)))
    return {axis: Axis(axis, label(tree, axis), tuple(found)) for axis, found in points.items()}


def in_order(tree: Tree, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return axes in the order of a matrix: that of the Kconfig files, not of the command line."""
    return tuple(sorted(axes, key=lambda axis: _order(tree, axis.name)))


def _order(tree: Tree, axis: str) -> int:
    """Return the sort key of an axis: axes with MATRIX_ symbols first, then the others, in the order of the files."""
    names = [symbol.name for symbol in tree.symbols]
    members = tree.members.get(axis, {})
    swept = [member.name for member in members.values()] if members else [axis]
    # The order of the files decides, not that of the command line: the same matrix has the same order of runs.
    declared = [names.index(MATRIX + name) for name in swept if MATRIX + name in names]
    return min(declared) if declared else len(names) + min(names.index(name) for name in swept)


def _couplings(
    tree: Tree, declared: Mapping[str, Assignment], swept: Mapping[str, Axis], overrides: Mapping[str, object]
) -> tuple[tuple[Coupling, ...], tuple[str, ...]]:
    item = declared.get(COUPLED)
    rules, notes = [], []
    for text in _rules(item.value if item else ""):
        assert item is not None  # there are no rules without the symbol
        left, arrow, right = text.partition("=>")
        where = f"{item.where}: CONFIG_{COUPLED}: {text!r}"
        if not arrow:
            raise ConfigError(where, why="expected NAME=value [NAME=value ...] => NAME=value[,value...]")
        condition, groups = parse_condition(tree, left, where), []
        pairs = _pairs(tree, right, where)
        if not pairs:
            raise ConfigError(where, why="the right side is empty")
        for name, values in pairs:
            # The command line wins over a rule; an axis and a rule for one symbol contradict each other.
            if [other for other, _ in pairs].count(name) > 1:
                raise ConfigError(where, why=f"{name} is set twice")
            if name in overrides:
                notes.append(f"{name} is set on the command line: the rule {text!r} does not apply to it")
            elif name in swept:
                raise ConfigError(
                    where, why=f"{name} is also an axis", hint=f"empty CONFIG_{MATRIX}{name}, or remove the rule"
                )
            else:
                groups.append(_coupled_points(tree, name, values, where))
        if groups:
            rules.append(Coupling(condition, tuple(groups)))
    return tuple(rules), tuple(notes)


def _coupled_points(tree: Tree, name: str, values: str, where: str) -> tuple[AxisValue, ...]:
    found = points(tree, name, values.split(","), where)
    return tuple(AxisValue(name, _text(tree, name, item), item, swept=len(found) > 1) for item in found)


def _exclusions(tree: Tree, declared: Mapping[str, Assignment]) -> tuple[Exclusion, ...]:
    item = declared.get(EXCLUDE)
    rules = []
    for text in _rules(item.value if item else ""):
        assert item is not None  # as above
        left, colon, reason = text.partition(":")
        where = f"{item.where}: CONFIG_{EXCLUDE}: {text!r}"
        if not colon or not reason.strip():
            raise ConfigError(where, why="expected NAME=value [NAME=value ...]: reason")
        rules.append(Exclusion(parse_condition(tree, left, where), f"{EXCLUDE}: {reason.strip()}"))
    return tuple(rules)


def _rules(text: str) -> list[str]:
    return [rule.strip() for rule in text.split(";") if rule.strip()]


def parse_condition(tree: Tree, text: str, where: str) -> Condition:
    """Return the condition NAME=value [NAME=value ...]. where: of the text, for errors."""
    terms = []
    for name, value in _pairs(tree, text, where):
        item = point(tree, name, value, where)
        terms.append((name, _text(tree, name, item)))
    if not terms:
        raise ConfigError(where, why="the left side is empty")
    return Condition(tuple(terms), text.strip(), frozenset(tree.floats))


def _pairs(tree: Tree, text: str, where: str) -> list[tuple[str, str]]:
    pairs = []
    for word in text.split():
        match = re.fullmatch(r"(\w+)=(\S+)", word)
        if not match:
            raise ConfigError(where, why=f"{word!r} is not NAME=value", hint="for example: OPTIMIZER=adamw")
        try:
            pairs.append((resolve_name(tree, match[1]), match[2]))
        except ConfigError as error:
            raise ConfigError(where, why=error.what.removeprefix("command line: "), hint=error.hint) from None
    return pairs


def _text(tree: Tree, axis: str, item: Assignment) -> str:
    """Return a value as a user writes it: the lower-case suffix of a member, the text of another symbol."""
    return member_text(axis, item.name) if axis in tree.choices else item.value


def resolve_name(tree: Tree, name: str, arguments: tuple[str, ...] = ()) -> str:
    """Return the symbol or axis of a name on the command line: the name itself, with GPT2_ before it, or its alias.

    arguments: other names that the command takes, for suggestions.
    """
    known = {symbol.name for symbol in tree.symbols} | set(tree.choices)
    fits = [
        candidate for candidate in dict.fromkeys((name, PREFIX + name, ALIASES.get(name, ""))) if candidate in known
    ]
    if len(fits) > 1:
        raise ConfigError(f"{name} is ambiguous: {' or '.join(fits)}", hint="use the full name")
    if not fits:
        # Suggestions as a user would type them: without GPT2_, and no MATRIX_ symbols unless one was meant.
        short = {candidate.removeprefix(PREFIX) for candidate in known if not candidate.startswith("FORBID_")}
        if not name.startswith("MATRIX"):
            short = {candidate for candidate in short if not candidate.startswith("MATRIX_")}
        bare = name.removeprefix("CONFIG_")  # as in .config
        if bare != name and (bare in known or PREFIX + bare in known):
            raise ConfigError(f"unknown symbol {name}", hint=f"did you mean {bare.removeprefix(PREFIX)}?")
        if name in ELSEWHERE:
            raise ConfigError(f"unknown symbol {name}", hint=f"did you mean {ELSEWHERE[name]}?")
        raise unknown("", name, [*sorted(short), *ALIASES, *SETS, *arguments])
    return fits[0]


def parse_override(tree: Tree, name: str, text: str) -> tuple[str, list[Assignment]]:
    """Return the axis that NAME=value[,value...] sets, and an assignment per value.

    A choice takes the lower-case suffixes of its members: OPTIMIZER=adamw,muon. A number takes ranges.
    """
    axis, where = resolve_name(tree, name), f"command line: {name}={text}"
    choice = axis if axis in tree.choices else tree.axis_of(axis)
    if choice != axis:
        if text != "y":
            raise ConfigError(where, why=f"{axis} is a member of {choice}: a single member can only be set to y")
        return choice, [Assignment(axis, "y", where)]
    values = [text] if tree.is_text(axis) else text.split(",")
    values = [value + UNITS.get(name, "") for value in values]
    return axis, points(tree, axis, values, where)


def points(tree: Tree, axis: str, values: Sequence[str], where: str) -> list[Assignment]:
    """Return an assignment per value of an axis, of a range one for each of its values.

    Raises ConfigError if a value is repeated, in any spelling.
    """
    found = [point(tree, axis, value, where) for value in list_values(tree, axis, values, where)]
    again = repeated(tree, axis, [item.name if axis in tree.choices else item.value for item in found])
    if again:
        raise ConfigError(where, why=f"repeated: {again}")
    return found


def point(tree: Tree, axis: str, value: str, where: str) -> Assignment:
    """Return the assignment that sets an axis (a choice or a symbol) to a value."""
    members = tree.members.get(axis, {})
    if members:
        member = members.get(value.lower().replace("-", "_"))  # muon-nanochat, as people write it
        if member is None:
            raise ConfigError(
                f"{where}: unknown value {value!r} of {axis}", why=f"expected one of {', '.join(members)}"
            )
        return Assignment(member.name, "y", where)
    symbol = tree.symbol(axis, where)
    check_text(tree, symbol, value, where)
    return Assignment(axis, value, where)


def overrides(tree: Tree, assignments: Mapping[str, str], options: Collection[str] = ()) -> dict[str, list[Assignment]]:
    """Return the assignments of the command line by axis, one for each value.

    assignments: NAME -> text.  options: other names that the command takes, for suggestions.
    """
    found: dict[str, list[Assignment]] = {}
    for name, text in assignments.items():
        for axis, values in _parsed(tree, name, text, options).items():
            if axis in found:
                raise ConfigError(f"command line: {name}={text}", why=f"{axis} is set twice")
            found[axis] = values
    return found


def _parsed(tree: Tree, name: str, text: str, options: Collection[str]) -> dict[str, list[Assignment]]:
    """Return the assignments of one NAME=value by axis: several axes only for a set such as TRACKER."""
    if name in SETS:
        return parse_set(tree, name, text)
    resolve_name(tree, name, tuple(options))
    axis, values = parse_override(tree, name, text)
    return {axis: values}


def single(found: Mapping[str, Sequence[Assignment]]) -> list[Assignment]:
    """Return the overrides with a single value, which hold in every run."""
    return [values[0] for values in found.values() if len(values) == 1]
