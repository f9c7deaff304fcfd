"""The axes of a matrix, from MATRIX_ symbols and from the command line, with coupled values and exclusions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import SETS, parse_set
from kmatrix.kconfig.tree import (
    FORBID,
    MATRIX,
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
        return all(self._normal(axis, value(axis)) == self._normal(axis, text) for axis, text in self.terms)

    def _normal(self, axis: str, text: str | None) -> str | None:
        return normalized_number(text) if text and axis in self.numbers else text


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
    declared = {item.name: item for item in base if item.name.startswith("MATRIX")}
    if "MATRIX" not in declared or declared["MATRIX"].value != "y":
        declared = {}
    swept = _declared_axes(tree, declared)
    for name, items in overrides.items():
        swept.pop(name, None)  # a value on the command line replaces the axis of the configuration
        if len(items) > 1:
            if name in tree.neutral:
                raise ConfigError(f"{items[0].where}: {name} cannot be an axis", why="it cannot change a result")
            swept[name] = _axis(tree, name, items, from_command_line=True)
    couplings, notes = _couplings(tree, declared, swept, overrides)
    exclusions = [
        Exclusion(parse_condition(tree, left, where), f"{EXCLUDE}: {reason.strip()}")
        for left, reason, where in _rules(declared.get(EXCLUDE), ":", "NAME=value [NAME=value ...]: reason")
    ]
    return Axes(in_order(tree, swept.values()), tuple(couplings), tuple(exclusions), tuple(notes), frozenset(overrides))


def label(tree: Tree, axis: str) -> str:
    """Return the name of an axis in run names and tables: its $(label), or its name in lower case without GPT2_."""
    return tree.labels.get(axis) or axis.removeprefix(PREFIX).lower().replace("_", "")


def _axis(tree: Tree, name: str, items: Iterable[Assignment], *, from_command_line: bool = False) -> Axis:
    values = tuple(AxisValue(name, _text(tree, name, item), item) for item in items)
    return Axis(name, label(tree, name), values, from_command_line)


def _declared_axes(tree: Tree, declared: Mapping[str, Assignment]) -> dict[str, Axis]:
    found: dict[str, list[Assignment]] = {}
    for symbol in tree.symbols:
        item = declared.get(symbol.name)
        if item is None or symbol.name in ("MATRIX", *NOT_AN_AXIS):
            continue
        swept = symbol.name[len(MATRIX) :]
        axis = tree.axis_of(swept)
        values = list_values(tree, axis, split_list(item.value), item.where) if axis == swept else [item.value]
        found.setdefault(axis, []).extend(Assignment(swept, value, item.where) for value in values if value != "n")
    return {axis: _axis(tree, axis, items) for axis, items in found.items() if items}


def in_order(tree: Tree, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return axes in the order of the Kconfig files, not of the command line: those with MATRIX_ symbols first."""
    places = {symbol.name: place for place, symbol in enumerate(tree.symbols)}

    def place(axis: Axis) -> tuple[bool, int]:
        names = [member.name for member in tree.members.get(axis.name, {}).values()] or [axis.name]
        declared = [places[MATRIX + name] for name in names if MATRIX + name in places]
        return not declared, min(declared or [places[name] for name in names])

    return tuple(sorted(axes, key=place))


def _couplings(
    tree: Tree, declared: Mapping[str, Assignment], swept: Collection[str], overrides: Collection[str]
) -> tuple[list[Coupling], list[str]]:
    """Return the rules for values that depend on others, and notes about those that the command line overrides."""
    rules, notes = [], []
    expected = "NAME=value [NAME=value ...] => NAME=value[,value...]"
    for left, right, where in _rules(declared.get(COUPLED), "=>", expected):
        condition, groups = parse_condition(tree, left, where), []
        pairs = _pairs(tree, right, where)
        for name, values in pairs:
            # The command line wins over a rule; an axis and a rule for one symbol contradict each other.
            if [other for other, _ in pairs].count(name) > 1:
                raise ConfigError(where, why=f"{name} is set twice")
            if name in overrides:
                rule = where.partition(f"{COUPLED}: ")[2]
                notes.append(f"{name} is set on the command line: the rule {rule} does not apply to it")
                continue
            if name in swept:
                hint = f"empty CONFIG_{MATRIX}{name}, or remove the rule"
                raise ConfigError(where, why=f"{name} is also an axis", hint=hint)
            items = points(tree, name, values.split(","), where)
            groups.append(tuple(AxisValue(name, _text(tree, name, item), item, len(items) > 1) for item in items))
        rules += [Coupling(condition, tuple(groups))] if groups else []
    return rules, notes


def _rules(item: Assignment | None, sign: str, expected: str) -> Iterator[tuple[str, str, str]]:
    """Yield the left and right side of each rule of a symbol, and its place for errors. expected: their form."""
    for text in (item.value if item else "").split(";"):
        left, found, right = text.partition(sign)
        if item and text.strip():
            where = f"{item.where}: CONFIG_{item.name}: {text.strip()!r}"
            if not found or not right.strip():
                raise ConfigError(where, why=f"expected {expected}")
            yield left, right, where


def parse_condition(tree: Tree, text: str, where: str) -> Condition:
    """Return the condition NAME=value [NAME=value ...]. where: of the text, for errors."""
    terms = [(name, _text(tree, name, point(tree, name, value, where))) for name, value in _pairs(tree, text, where)]
    if not terms:
        raise ConfigError(where, why="the left side is empty")
    return Condition(tuple(terms), text.strip(), frozenset(tree.floats))


def _pairs(tree: Tree, text: str, where: str) -> list[tuple[str, str]]:
    pairs = []
    for word in text.split():
        name, found, value = word.partition("=")
        if not found or not name or not value:
            raise ConfigError(where, why=f"{word!r} is not NAME=value", hint="for example: OPTIMIZER=adamw")
        try:
            pairs.append((resolve_name(tree, name), value))
        except ConfigError as error:
            raise ConfigError(where, why=error.what, hint=error.hint) from None
    return pairs


def _text(tree: Tree, axis: str, item: Assignment) -> str:
    """Return a value as a user writes it: the lower-case suffix of a member, the text of another symbol."""
    return member_text(axis, item.name) if axis in tree.choices else item.value


def resolve_name(tree: Tree, name: str, arguments: Iterable[str] = ()) -> str:
    """Return the symbol or axis of a name on the command line: the name itself, with GPT2_ before it, or its alias.

    arguments: other names that the command takes, for suggestions.
    """
    known = {*(symbol.name for symbol in tree.symbols), *tree.choices}
    for candidate in (name, PREFIX + name, ALIASES.get(name, name)):
        if candidate in known:
            return candidate
    # Suggestions as a user would type them: without GPT2_, and no MATRIX_ symbols unless one was meant.
    bare = name.removeprefix("CONFIG_")  # as in .config
    meant = ELSEWHERE.get(name) or (bare.removeprefix(PREFIX) if {bare, PREFIX + bare} & known else "")
    if meant:
        raise ConfigError(f"unknown symbol {name}", hint=f"did you mean {meant}?")
    hidden = (FORBID,) if name.startswith("MATRIX") else (FORBID, MATRIX)
    short = sorted({candidate.removeprefix(PREFIX) for candidate in known if not candidate.startswith(hidden)})
    raise unknown("", name, [*short, *ALIASES, *SETS, *arguments])


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
    return axis, points(tree, axis, [value + UNITS.get(name, "") for value in values], where)


def points(tree: Tree, axis: str, values: Iterable[str], where: str) -> list[Assignment]:
    """Return an assignment per value of an axis, of a range one for each of its values.

    Raises ConfigError if a value is repeated, in any spelling.
    """
    found = [point(tree, axis, value, where) for value in list_values(tree, axis, values, where)]
    if again := repeated(tree, axis, [item.name if axis in tree.choices else item.value for item in found]):
        raise ConfigError(where, why=f"repeated: {again}")
    return found


def point(tree: Tree, axis: str, value: str, where: str) -> Assignment:
    """Return the assignment that sets an axis (a choice or a symbol) to a value."""
    if members := tree.members.get(axis):
        member = members.get(value.lower().replace("-", "_"))  # muon-nanochat, as people write it
        if member is None:
            what = f"{where}: unknown value {value!r} of {axis}"
            raise ConfigError(what, why=f"expected one of {', '.join(members)}")
        return Assignment(member.name, "y", where)
    check_text(tree, tree.symbol(axis, where), value, where)
    return Assignment(axis, value, where)


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
