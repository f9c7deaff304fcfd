"""Cells -> runs: deduplicated, named and identified, with a reason for each excluded cell."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import SHOWN, cause
from kmatrix.kconfig.tree import Assignment, Symbols, Tree, normalized
from kmatrix.matrix.axes import Axes, Axis, AxisValue, label

LONGEST_NAME = 120  # characters; with the id and suffixes such as .json below the 255 bytes of a file name
OPTIMIZER, GPUS, DEVICE, SEED = "GPT2_OPTIMIZER", "GPT2_NUM_GPUS", "GPT2_DEVICE", "GPT2_SEED"
# A rule that Kconfig cannot express: effective values -> the reason why they are invalid, or None.
Rule = Callable[[Callable[[str], str | None]], str | None]
ID_DIGITS = 10  # 40 bits: two of 100,000 runs get the same id with a probability of 0.5 %


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the matrix."""

    run_id: str
    name: str
    axes: tuple[tuple[str, str], ...]  # label -> value text; the optimizer and the GPU count are always included
    points: tuple[AxisValue, ...]  # the values to set over the base


@dataclass(frozen=True, slots=True)
class Excluded:
    """Cells that are excluded for the same reason."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """The expanded matrix."""

    axes: tuple[Axis, ...]
    runs: tuple[Run, ...]
    excluded: tuple[Excluded, ...]
    cells: int  # runs + duplicates + excluded cells
    duplicates: int  # cells with the configuration of an earlier cell
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Cells:
    """Applies one cell after the other, and sets only the symbols that differ from the previous cell."""

    tree: Tree
    fixed: dict[str, Assignment]  # axis -> assignment of the base
    present: dict[str, Assignment] = field(default_factory=dict)

    def enter(self, points: Iterable[AxisValue]) -> None:
        # kconfiglib evaluates lazily: each set_value discards the values of dependent symbols only.
        wanted = {point.axis: point.assignment for point in points}
        for axis in [axis for axis in self.present if axis not in wanted]:
            del self.present[axis]
            self._set(axis, self.fixed.get(axis))
        for axis, assignment in wanted.items():
            if self.present.get(axis) is not assignment:  # cells share the objects, so identity is enough
                self.present[axis] = assignment
                self._set(axis, assignment)

    def _set(self, axis: str, assignment: Assignment | None) -> None:
        if assignment is not None:
            self.tree.kconf.syms[assignment.name].set_value(assignment.value)
        elif axis in self.tree.choices:
            self.tree.choices[axis].unset_value()
        else:
            self.tree.kconf.syms[axis].unset_value()


def apply_run(tree: Tree, base: Sequence[Assignment], run: Run) -> Symbols:
    """Apply the configuration of one run to the tree, the base and the run's values, and return the effective values.

    Expansion does not keep them: with 100,000 runs they would take most of its time and memory.
    """
    tree.reset()
    taken = {point.axis for point in run.points}
    lines = [item for item in base if tree.axis_of(tree.kconf.syms[item.name]) not in taken]
    return tree.apply([*lines, *(point.assignment for point in run.points)])


def expand(tree: Tree, base: Sequence[Assignment], axes: Axes, rules: Sequence[Rule] = ()) -> Matrix:
    """Return the runs of a matrix. Raises ConfigError for a line or an axis value that has no effect in any cell.

    base: assignments that hold in every cell, if their symbol is not an axis.  rules: see `Rule`.
    Lines that have no effect because the command line narrows the matrix become notes.
    """
    # Apply the base: its lines hold in every cell, except those whose symbol is an axis.
    tree.reset()
    taken = {axis.name for axis in axes.axes}
    lines = [item for item in base if not item.name.startswith("MATRIX")]
    lines = [item for item in lines if tree.axis_of(tree.kconf.syms[item.name]) not in taken]
    for item in lines:
        tree.kconf.syms[item.name].set_value(item.value)
    fixed = {tree.axis_of(tree.kconf.syms[item.name]): item for item in lines if _sets_axis(tree, item)}
    # Before the first cell: these look at the base alone.
    expansion = _Expansion(tree, axes, lines, rules)
    _refuse_dependent_conditions(tree, axes, expansion.identity.dependent)
    cells = _Cells(tree, fixed)
    before = {name: tree.value(name) for name in _named_in_conditions(axes)}
    # Visit the cells in the order of the product, of which neighbors differ in few axes.
    for points in _cell_values(axes, before):
        cells.enter(points)
        expansion.visit(points)
    expansion.refuse_unused()
    return expansion.matrix()


def _cell_values(axes: Axes, base: Mapping[str, str | None]) -> Iterator[tuple[AxisValue, ...]]:
    """Yield the values of each cell. base: effective values of the symbols in conditions that are not axes."""
    for points in itertools.product(*(axis.points for axis in axes.axes)):
        values = {**base, **{point.axis: point.text for point in points}}
        coupled = [group for rule in axes.couplings if rule.condition.holds(values) for group in rule.points]
        if not coupled:
            yield points
            continue
        last = {group[0].axis: group for group in coupled}  # the last of several rules for one symbol wins
        for more in itertools.product(*last.values()):
            yield (*points, *more)


def _named_in_conditions(axes: Axes) -> set[str]:
    """Return the axes and symbols that the conditions of couplings and exclusions name."""
    conditions = [rule.condition for rule in axes.couplings] + [rule.condition for rule in axes.exclusions]
    return {axis for condition in conditions for axis, _ in condition.terms}


def _refuse_dependent_conditions(tree: Tree, axes: Axes, dependent: set[str]) -> None:
    """Refuse a coupling whose left side depends on an axis: it is evaluated before the cell is applied."""
    swept = {axis.name for axis in axes.axes}
    for rule in axes.couplings:
        for name, _ in rule.condition.terms:
            own = {name, *(member.name for member in tree.members.get(name, {}).values())}
            if name not in swept and own & dependent:
                raise ConfigError(
                    f"CONFIG_MATRIX_COUPLED: {rule.condition.text!r}: {name} is not an axis, but depends on one",
                    hint="name the axes themselves on the left side",
                )


class _Expansion:
    """Classifies cells one by one and collects the results. One visit takes some tens of microseconds."""

    def __init__(self, tree: Tree, axes: Axes, lines: Sequence[Assignment], rules: Sequence[Rule]) -> None:
        self.tree, self.axes, self.lines, self.rules = tree, axes, lines, rules
        self.cells = self.duplicates = 0
        self.excluded: Counter[str] = Counter()
        self.conditions = _named_in_conditions(axes)
        self.found: dict[str, tuple[AxisValue, ...]] = {}
        self.shown: dict[str, tuple[str, str, str]] = {}
        self.used: set[tuple[str, str]] = set()
        self.effective: set[Assignment] = set()
        self.notes: list[str] = []
        self.identity = RunIdentity(tree, self._swept_or_coupled())
        # Lines that no axis can change are checked once, here; the others in every cell.
        dependent = self.identity.dependent
        self.base_cause = next(
            (why for item in lines if item.name not in dependent and (why := self._broken(item))), None
        )
        self.effective.update(item for item in lines if item.name not in dependent and self._has_effect(item))
        self.dependent_lines = [item for item in lines if item.name in dependent]
        self.forbid = [symbol for symbol in tree.symbols if symbol.name.startswith("FORBID_")]

    def _swept_or_coupled(self) -> set[str]:
        """Return the axes and coupled symbols, without the symbols that depend on them."""
        coupled = {group[0].axis for rule in self.axes.couplings for group in rule.points}
        return {axis.name for axis in self.axes.axes} | coupled

    def visit(self, points: tuple[AxisValue, ...]) -> None:
        self.cells += 1
        applied, why = self._check(points)
        if why is not None:
            self.excluded[why] += 1
            return
        self.used.update((point.axis, point.text) for point in applied)
        # The first cell of a run gives it its name; a later one with the same effective values is a duplicate.
        run_id = self.identity.of_cell()
        if run_id in self.found:
            self.duplicates += 1
            return
        self.found[run_id] = applied
        value = self.tree.value
        self.shown[run_id] = (value(OPTIMIZER) or "", value(GPUS) or "", value(DEVICE) or "")

    def _check(self, points: tuple[AxisValue, ...]) -> tuple[tuple[AxisValue, ...], str | None]:
        """Return the values that apply in this cell, and why the cell is invalid, or None."""
        if self.base_cause:
            return (), self.base_cause
        applied = []
        for point in points:
            found = cause(self.tree, point.assignment)
            if found is None:
                applied.append(point)
            elif not found.absent:  # absent: the axis does not apply here, such as momentum with AdamW
                return (), f"{point.axis}={point.text}: {found.text}"
        return tuple(applied), self._line_cause({point.axis for point in points}) or self._rule_cause()

    def _line_cause(self, taken: set[str]) -> str | None:
        """Return why a line of the base is invalid in this cell, or None. taken: axes with a value in this cell."""
        for item in self.dependent_lines:
            if self.tree.axis_of(self.tree.kconf.syms[item.name]) not in taken and (why := self._broken(item)):
                return why
            if self._has_effect(item):
                self.effective.add(item)
        return None

    def _rule_cause(self) -> str | None:
        """Return why a FORBID_ symbol, a rule or an exclusion excludes this cell, or None."""
        # The cheapest check first. `forbidding` walks over all symbols, so only for a cell that is excluded.
        if any(symbol.str_value == "y" for symbol in self.forbid):
            return self.tree.forbidden()[0]
        for rule in self.rules:
            if why := rule(self.tree.value):
                return why
        if not self.axes.exclusions:
            return None
        values = {name: self.tree.value(name) for name in self.conditions}
        return next((rule.reason for rule in self.axes.exclusions if rule.condition.holds(values)), None)

    def _broken(self, item: Assignment) -> str | None:
        """Return why a line of the base is invalid in this cell, None if it is valid or does not apply."""
        found = cause(self.tree, item)
        symbol = self.tree.kconf.syms[item.name]
        if found is None or found.absent or not (symbol.visibility or symbol.choice):
            return None
        return f"CONFIG_{item.name}={item.value}: {found.text} ({item.where})"

    def _has_effect(self, item: Assignment) -> bool:
        symbol = self.tree.kconf.syms[item.name]
        return symbol.str_value == item.value and (bool(symbol.visibility) or item.value == "n")

    def refuse_unused(self) -> None:
        """Refuse lines and values without effect in any cell. If the command line narrows the matrix, note them."""
        # Collect axis values, then lines of the base: (from the command line, message).
        unused: list[tuple[bool, str]] = []
        for axis in self.axes.axes:
            for point in axis.points:
                if (axis.name, point.text) not in self.used:
                    where = f"{point.assignment.where}: {axis.name}={point.text}"
                    unused.append((axis.from_command_line, f"{where}: {self._why_unused(point)}"))
        if self.found:
            for item in self.lines:
                if item not in self.effective:
                    found = cause(self.tree, item)
                    why = found.text if found else "no effect in any run"
                    unused.append(
                        (item.where.startswith("command line"), f"{item.where}: CONFIG_{item.name}={item.value}: {why}")
                    )
        # A line of the file may become unused because the command line narrows the matrix. Without that, and for what
        # the command line itself sets, it is a mistake.
        hard = [text for own, text in unused if own or not self.axes.overridden]
        if hard or not self.found:
            cut = [f"{count} excluded: {why}" for why, count in self.excluded.most_common(SHOWN)]
            lines = "\n  ".join([*hard[:SHOWN], *cut])
            raise ConfigError(f"no effect in any run of the matrix:\n  {lines}", hint="change or remove it")
        self.notes = [text for _, text in unused] + self._unused_rules()

    def _unused_rules(self) -> list[str]:
        excluding = [
            f"the exclusion of {rule.condition.text!r} matches no cell"
            for rule in self.axes.exclusions
            if rule.reason not in self.excluded
        ]
        coupled = []
        for rule in self.axes.couplings:
            points = [point for group in rule.points for point in group]
            unused = [point for point in points if (point.axis, point.text) not in self.used]
            if len(unused) == len(points):
                coupled.append(f"the rule {rule.condition.text!r} matches no run")
            else:
                coupled += [f"the rule {rule.condition.text!r} sets {p.axis}={p.text} in no run" for p in unused]
        return excluding + coupled

    def _why_unused(self, point: AxisValue) -> str:
        starts = f"{point.axis}={point.text}: "
        return next(
            (why.removeprefix(starts) for why in self.excluded if why.startswith(starts)), "invalid in every cell"
        )

    def matrix(self) -> Matrix:
        varying = {axis.name for axis in self.axes.axes if len(axis.points) > 1}
        runs: list[Run] = []
        names: set[str] = set()
        labels = {name: label(self.tree, name) for name in self._swept_or_coupled() | {OPTIMIZER, GPUS, SEED}}
        for run_id, points in self.found.items():
            optimizer, gpus, device = self.shown[run_id]
            swept = [
                point
                for point in points
                if point.swept and (point.axis in varying or point.axis not in self._axis_names())
            ]
            name = _name(optimizer, gpus, device, [(labels[point.axis], point.text) for point in swept], labels)
            # Names can coincide, because characters are replaced and names shortened. The id tells them apart.
            name = name if name not in names and len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}_{run_id[:6]}"
            names.add(name)
            shown = {labels[OPTIMIZER]: optimizer} if optimizer else {}
            shown.update((labels[point.axis], point.text) for point in points if point.swept)
            if gpus:
                shown[labels[GPUS]] = gpus
            runs.append(Run(run_id, name, tuple(shown.items()), points))
        excluded = tuple(Excluded(count, why) for why, count in sorted(self.excluded.items()))
        notes = (*self.axes.notes, *self.notes)
        return Matrix(self.axes.axes, tuple(runs), excluded, self.cells, self.duplicates, notes)

    def _axis_names(self) -> set[str]:
        return {axis.name for axis in self.axes.axes}


def _sets_axis(tree: Tree, item: Assignment) -> bool:
    """Return whether a line sets its axis: all but the `is not set` of a member of a choice."""
    return not (tree.kconf.syms[item.name].choice and item.value != "y")


def _name(optimizer: str, gpus: str, device: str, swept: Sequence[tuple[str, str]], labels: Mapping[str, str]) -> str:
    own = (labels[OPTIMIZER], labels[GPUS])
    parts = ["gpt2", optimizer, *(f"{label}{text}" for label, text in swept if label not in own)]
    if gpus:
        parts.append(f"{gpus}{'cpu' if device == 'cpu' else 'gpu'}")
    return "_".join(_plain(part) for part in parts if part)


@functools.lru_cache(4096)
def _plain(part: str) -> str:
    """Return a text with all characters replaced that are not allowed in the name of a run directory."""
    return re.sub(r"[^A-Za-z0-9.+-]", "-", part)


class RunIdentity:
    """Computes the id of the current configuration: a hash of all values that can change a result.

    The lines are sorted by name. Those that are the same in all cells are made once.
    dependent: names of symbols and choices whose value can differ between cells.
    """

    def __init__(self, tree: Tree, axes: set[str]) -> None:
        self.tree = tree
        self.dependent = _dependents(tree, axes)
        # Neutral symbols cannot change a result; MATRIX_ and FORBID_ symbols are not settings of a run.
        names = [
            symbol.name
            for symbol in tree.symbols
            if not symbol.choice
            and symbol.name not in tree.neutral
            and not symbol.name.startswith(("MATRIX", "FORBID_"))
        ]
        names = sorted([*names, *tree.choices])
        self.lines = [self._line(name) for name in names]
        self.places = [
            (place, name)
            for place, name in enumerate(names)
            if self.dependent
            & {name, tree.neutral_unless.get(name), *(m.name for m in tree.members.get(name, {}).values())}
        ]

    def of_cell(self) -> str:
        for place, name in self.places:
            self.lines[place] = self._line(name)
        return hashlib.sha256("".join(self.lines).encode()).hexdigest()[:ID_DIGITS]

    def _line(self, name: str) -> str:
        text, decides = self.tree.value(name), self.tree.neutral_unless.get(name)
        if text is None or (decides and not self.tree.value(decides)):
            return ""
        return f"{name}={normalized(self.tree, name, text)}\n"


def _dependents(tree: Tree, axes: Iterable[str]) -> set[str]:
    """Return the symbols whose value can change with the given axes, including those of the axes."""
    # Edges from each symbol or choice to those that mention it, in a default, a range or a condition.
    below: dict[Any, set[Any]] = {}
    for symbol in tree.symbols:
        for item in symbol.referenced:
            below.setdefault(item, set()).add(symbol)
        if symbol.choice:  # selecting one member deselects the others
            below.setdefault(symbol, set()).add(symbol.choice)
            below.setdefault(symbol.choice, set()).add(symbol)
    for choice in tree.choices.values():
        for item in choice.referenced:
            below.setdefault(item, set()).add(choice)
    # Everything that can be reached from the axes.
    todo: list[Any] = [member for axis in axes for member in tree.members.get(axis, {}).values()]
    todo += [tree.kconf.syms[axis] for axis in axes if axis not in tree.choices]
    seen: set[Any] = set()
    while todo:
        item = todo.pop()
        if item not in seen:
            seen.add(item)
            todo.extend(below.get(item, ()))
    return {item.name for item in seen if item.name}
