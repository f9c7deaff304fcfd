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
from kmatrix.kconfig.assignments import SHOWN, NotInEffect, cause, unmet
from kmatrix.kconfig.tree import Assignment, Symbols, Tree, normalized
from kmatrix.matrix.axes import Axes, Axis, AxisValue, Exclusion, label

LONGEST_NAME = 120  # characters; with the id and suffixes such as .json below the 255 bytes of a file name
OPTIMIZER, GPUS, DEVICE, SEED = "GPT2_OPTIMIZER", "GPT2_NUM_GPUS", "GPT2_DEVICE", "GPT2_SEED"
NODES = "GPT2_NUM_NODES"
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
    texts: tuple[str | None, ...] = ()  # effective texts of the symbols in Matrix.varying, None: does not apply


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
    varying: tuple[str, ...] = ()  # symbols and choices whose value can differ between runs
    common: Symbols | None = None  # effective values of the first run; all runs share those that do not vary

    def values(self, tree: Tree, run: Run) -> Symbols:
        """Return the effective values of a run without evaluating the tree: those after `assign_run`."""
        if self.common is None:
            raise ValueError("this matrix has no runs")
        texts = dict(self.common.texts)
        typed = dict(self.common.typed)
        for name, text in zip(self.varying, run.texts, strict=True):
            if text is None:
                texts.pop(name, None)
            else:
                texts[name] = text
            typed[name] = tree.typed(name, text)
        return Symbols(texts, typed)


@dataclass(slots=True)
class _Cells:
    """Applies one cell after the other, and sets only the symbols that differ from the previous cell."""

    tree: Tree
    fixed: dict[str, Assignment]  # axis -> assignment of the base
    present: dict[str, Assignment] = field(default_factory=dict)

    def enter(self, points: Iterable[AxisValue]) -> frozenset[str]:
        """Apply a cell, and return the axes whose values differ from the previous cell."""
        # kconfiglib evaluates lazily: each set_value discards the values of dependent symbols only.
        wanted = {point.axis: point.assignment for point in points}
        changed = []
        if self.present.keys() != wanted.keys():  # a coupled value ends
            for axis in [axis for axis in self.present if axis not in wanted]:
                del self.present[axis]
                self._set(axis, self.fixed.get(axis))
                changed.append(axis)
        for axis, assignment in wanted.items():
            if self.present.get(axis) is not assignment:  # cells share the objects, so identity is enough
                self.present[axis] = assignment
                self._set(axis, assignment)
                changed.append(axis)
        return frozenset(changed)

    def _set(self, axis: str, assignment: Assignment | None) -> None:
        if assignment is not None:
            self.tree.kconf.syms[assignment.name].set_value(assignment.value)
        elif axis in self.tree.choices:
            self.tree.choices[axis].unset_value()
        else:
            self.tree.kconf.syms[axis].unset_value()


def assign_run(tree: Tree, base: Sequence[Assignment], run: Run) -> None:
    """Set the symbols of one run in the tree: those of the base, and the run's own values."""
    tree.reset()
    taken = {point.axis for point in run.points}
    lines = [item for item in base if tree.axis_of(tree.kconf.syms[item.name]) not in taken]
    tree.assign([*lines, *(point.assignment for point in run.points)])


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
    _refuse_dependent_conditions(tree, axes, expansion.dependent)
    cells = _Cells(tree, fixed)
    before = {name: tree.value(name) for name in _named_in_conditions(axes)}
    # An excluded value makes kconfiglib warn in each of its cells; `cause` reports it once.
    warned, tree.kconf.warn = tree.kconf.warn, False
    try:
        # Visit the cells in the order of the product, of which neighbors differ in few axes.
        for points in _cell_values(axes, before):
            expansion.visit(points, cells.enter(points))
        expansion.refuse_unused()
    finally:
        tree.kconf.warn = warned
    return expansion.matrix()


def _cell_values(axes: Axes, base: Mapping[str, str | None]) -> Iterator[tuple[AxisValue, ...]]:
    """Yield the values of each cell. base: effective values of the symbols in conditions that are not axes."""
    cells = itertools.product(*(axis.points for axis in axes.axes))
    if not axes.couplings:
        yield from cells
        return
    for points in cells:
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


@dataclass(frozen=True, slots=True)
class _Affected:
    """What the values of some axes can change. A cell evaluates again only what its changed axes affect."""

    names: frozenset[str]  # symbols and choices
    axes: frozenset[str]  # axes whose own value may take effect now, or no longer
    lines: frozenset[int]  # indices of `_Expansion.dependent_lines`
    texts: frozenset[int]  # indices of the varying symbols
    forbid: bool  # a FORBID_ symbol


@dataclass(slots=True)
class _CachedRule:
    """A rule with its last result, and the symbols that it read for it."""

    rule: Rule
    read: set[str] = field(default_factory=set)
    why: str | None = None
    stale: bool = True

    def check(self, value: Callable[[str], str | None]) -> str | None:
        """Return why the rule excludes the current cell, or None."""
        if self.stale:
            self.read.clear()

            def read(name: str) -> str | None:
                self.read.add(name)
                return value(name)

            self.why = self.rule(read)
            self.stale = False
        return self.why


class _Expansion:
    """Classifies cells one by one and collects the results.

    Neighboring cells differ in few axes, and an axis changes few symbols. Everything that was computed from other
    symbols is kept from the cell before: one visit takes about twenty microseconds.
    """

    def __init__(self, tree: Tree, axes: Axes, lines: Sequence[Assignment], rules: Sequence[Rule]) -> None:
        self.tree, self.axes, self.lines = tree, axes, lines
        self.cells = self.duplicates = 0
        self.excluded: Counter[str] = Counter()
        self.found: dict[str, tuple[tuple[AxisValue, ...], tuple[str | None, ...]]] = {}
        self.shown: list[tuple[str, str, str, str]] = []
        self.same: dict[Any, Any] = {}  # equal tuples of different runs are stored once
        self.common: Symbols | None = None
        self.used: set[tuple[str, str]] = set()
        self.effective: set[Assignment] = set()
        self.notes: list[str] = []
        self.edges = tree.edges()
        self.dependent = self.edges.reached_from(self._swept_or_coupled())
        self.identity = RunIdentity(tree, self.dependent)
        # Lines that no axis can change are checked once, here; the others in every cell that can change them.
        self.base_cause = next(
            (why for item in lines if item.name not in self.dependent and (why := self._broken(item))), None
        )
        self.effective.update(item for item in lines if item.name not in self.dependent and self._has_effect(item))
        self.dependent_lines = [(item, tree.axis_of(tree.kconf.syms[item.name])) for item in lines]
        self.dependent_lines = [pair for pair in self.dependent_lines if pair[0].name in self.dependent]
        self.forbid = [symbol for symbol in tree.symbols if symbol.name.startswith("FORBID_")]
        self.rules = [_CachedRule(rule) for rule in (*rules, *map(_exclusion_rule, axes.exclusions))]
        # The state of the cell before, and the parts of it that are out of date.
        self.causes: dict[str, tuple[AxisValue, NotInEffect | None]] = {}  # axis -> its value and why it is invalid
        self.line_causes: list[str | None] = [None] * len(self.dependent_lines)
        self.forbidden = False
        self.stale_axes: set[str] = set()
        self.stale_lines = set(range(len(self.dependent_lines)))
        self.stale_texts: set[int] = set()  # the constructor of RunIdentity has read them
        self.stale_forbid = True
        self.affected: dict[frozenset[str], _Affected] = {}

    def _swept_or_coupled(self) -> set[str]:
        """Return the axes and coupled symbols, without the symbols that depend on them."""
        coupled = {group[0].axis for rule in self.axes.couplings for group in rule.points}
        return {axis.name for axis in self.axes.axes} | coupled

    def visit(self, points: tuple[AxisValue, ...], changed: frozenset[str]) -> None:
        """Classify a cell, which is applied to the tree. changed: the axes that differ from the cell before."""
        self.cells += 1
        self._mark_stale(changed)
        applied, why = self._check(points)
        if why is not None:
            self.excluded[why] += 1
            return
        self.used.update((point.axis, point.text) for point in applied)
        # The first cell of a run gives it its name; a later one with the same effective values is a duplicate.
        self.identity.read_again(self.stale_texts)
        self.stale_texts.clear()
        run_id = self.identity.of_cell()
        if run_id in self.found:
            self.duplicates += 1
            return
        self.found[run_id] = (applied, tuple(self.identity.texts))
        value = self.tree.value
        shown = (value(OPTIMIZER) or "", value(GPUS) or "", value(DEVICE) or "", value(NODES) or "")
        self.shown.append(self.same.setdefault(shown, shown))
        if self.common is None:
            self.common = self.tree.effective()

    def _mark_stale(self, changed: frozenset[str]) -> None:
        """Mark the values that the changed axes can change; a cell that needs one of them evaluates it."""
        if not changed:
            return
        affected = self.affected.get(changed) or self._find_affected(changed)
        self.stale_axes |= affected.axes
        self.stale_lines |= affected.lines
        self.stale_texts |= affected.texts
        self.stale_forbid |= affected.forbid
        for cached in self.rules:
            if not cached.stale and not cached.read.isdisjoint(affected.names):
                cached.stale = True

    def _find_affected(self, changed: frozenset[str]) -> _Affected:
        names = self.edges.reached_from(changed)
        members = {
            axis: {axis, *(member.name for member in self.tree.members.get(axis, {}).values())}
            for axis in self._swept_or_coupled()
        }
        found = self.affected[changed] = _Affected(
            names=frozenset(names),
            axes=frozenset(axis for axis, own in members.items() if own & names),
            lines=frozenset(i for i, (item, axis) in enumerate(self.dependent_lines) if {item.name, axis} & names),
            texts=frozenset(self.identity.places_of(names)),
            forbid=any(symbol.name in names for symbol in self.forbid),
        )
        return found

    def _check(self, points: tuple[AxisValue, ...]) -> tuple[tuple[AxisValue, ...], str | None]:
        """Return the values that apply in this cell, and why the cell is invalid, or None."""
        if self.base_cause:
            return (), self.base_cause
        applied = []
        invalid = None
        for point in points:
            before = self.causes.get(point.axis)
            if before is None or before[0] is not point or point.axis in self.stale_axes:
                before = self.causes[point.axis] = point, _axis_cause(self.tree, point.assignment)
            found = before[1]
            if found is None:
                applied.append(point)
            elif not found.absent and invalid is None:  # absent: the axis does not apply, such as momentum with AdamW
                invalid = f"{point.axis}={point.text}: {found.text}"
        self.stale_axes.clear()
        if invalid is not None:
            return (), invalid
        why = self._line_cause({point.axis for point in points}) if self.dependent_lines else None
        return tuple(applied), why or self._rule_cause()

    def _line_cause(self, taken: set[str]) -> str | None:
        """Return why a line of the base is invalid in this cell, or None. taken: axes with a value in this cell."""
        for index, (item, axis) in enumerate(self.dependent_lines):
            if axis in taken:
                continue
            if index in self.stale_lines:
                self.stale_lines.discard(index)
                self.line_causes[index] = self._broken(item)
                if self.line_causes[index] is None and self._has_effect(item):
                    self.effective.add(item)
            if why := self.line_causes[index]:
                return why
        return None

    def _rule_cause(self) -> str | None:
        """Return why a FORBID_ symbol, a rule or an exclusion excludes this cell, or None."""
        if self.stale_forbid:
            self.forbidden = any(symbol.str_value == "y" for symbol in self.forbid)
            self.stale_forbid = False
        if self.forbidden:
            return self.tree.forbidden()[0]
        value = self.tree.value
        return next((why for cached in self.rules if (why := cached.check(value))), None)

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
            if not self.found:
                raise ConfigError(
                    f"every cell of the matrix is excluded:\n  {lines}", hint="change what a reason names"
                )
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
        # In names: the axes with several values, and coupled symbols with several.
        named = varying | (self._swept_or_coupled() - {axis.name for axis in self.axes.axes})
        runs: list[Run] = []
        names: set[str] = set()
        labels = {name: label(self.tree, name) for name in self._swept_or_coupled() | {OPTIMIZER, GPUS, NODES, SEED}}
        one_count = len({nodes for *_, nodes in self.shown}) <= 1
        for (run_id, (points, texts)), (optimizer, gpus, device, count) in zip(
            self.found.items(), self.shown, strict=True
        ):
            # Nodes are named only if they vary, or are more than one: a run on one machine is the usual case.
            nodes = "" if one_count and count == "1" else count
            swept = [(labels[point.axis], point.text) for point in points if point.swept]
            in_name = [(labels[point.axis], point.text) for point in points if point.swept and point.axis in named]
            name = _name(optimizer, _ranks(nodes, gpus, device), in_name, labels)
            # Names can coincide, because characters are replaced and names shortened. The id tells them apart.
            name = name if name not in names and len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}_{run_id[:6]}"
            names.add(name)
            shown = {labels[OPTIMIZER]: optimizer} if optimizer else {}
            shown.update(swept)
            if nodes:
                shown[labels[NODES]] = nodes
            if gpus:
                shown[labels[GPUS]] = gpus
            runs.append(Run(run_id, name, tuple(shown.items()), points, texts))
        excluded = tuple(Excluded(count, why) for why, count in sorted(self.excluded.items()))
        notes = (*self.axes.notes, *self.notes)
        return Matrix(
            axes=self.axes.axes,
            runs=tuple(runs),
            excluded=excluded,
            cells=self.cells,
            duplicates=self.duplicates,
            notes=notes,
            varying=self.identity.varying,
            common=self.common,
        )


def _exclusion_rule(exclusion: Exclusion) -> Rule:
    """Return an exclusion as a rule."""
    names = [name for name, _ in exclusion.condition.terms]

    def excluded(value: Callable[[str], str | None]) -> str | None:
        return exclusion.reason if exclusion.condition.holds({name: value(name) for name in names}) else None

    return excluded


def _axis_cause(tree: Tree, assignment: Assignment) -> NotInEffect | None:
    """Return why an axis value has no effect in the current cell, None if it has.

    Other than in a .config, "n" of a symbol that is hidden does not apply: it must not name a run.
    """
    symbol = tree.kconf.syms[assignment.name]
    found = cause(tree, assignment)
    prompted = any(node.prompt for node in symbol.nodes)
    if found is None and assignment.value == "n" and prompted and not symbol.visibility:
        return NotInEffect(unmet(symbol), absent=True)
    return found


def _sets_axis(tree: Tree, item: Assignment) -> bool:
    """Return whether a line sets its axis: all but the `is not set` of a member of a choice."""
    return not (tree.kconf.syms[item.name].choice and item.value != "y")


def _name(optimizer: str, ranks: Sequence[str], swept: Sequence[tuple[str, str]], labels: Mapping[str, str]) -> str:
    own = (labels[OPTIMIZER], labels[GPUS], labels[NODES])
    parts = ["gpt2", optimizer, *(f"{label}{text}" for label, text in swept if label not in own), *ranks]
    return "_".join(_plain(part) for part in parts if part)


def _ranks(nodes: str, gpus: str, device: str) -> list[str]:
    """Return the last parts of a run's name, such as 2nodes and 8gpu. nodes: "" if they are not named."""
    parts = [f"{nodes}node{'' if nodes == '1' else 's'}"] if nodes else []
    return [*parts, f"{gpus}{'cpu' if device == 'cpu' else 'gpu'}"] if gpus else parts


@functools.lru_cache(4096)
def _plain(part: str) -> str:
    """Return a text with all characters replaced that are not allowed in the name of a run directory."""
    return re.sub(r"[^A-Za-z0-9.+-]", "-", part)


class RunIdentity:
    """Computes the id of the current configuration: a hash of all values that can change a result.

    The lines are sorted by name. Those that are the same in all cells are made once.
    dependent: names of symbols and choices whose value can differ between cells.
    """

    def __init__(self, tree: Tree, dependent: set[str]) -> None:
        self.tree = tree
        self.varying = tuple(name for name in tree.names() if name in dependent)
        self.texts = [tree.value(name) for name in self.varying]
        # Neutral symbols cannot change a result. tree.names() has no MATRIX_ and FORBID_ symbols: they are not settings
        # of a run.
        names = sorted(name for name in tree.names() if name not in tree.neutral)
        # Runs of constant lines are joined: [constant, varying, constant, varying, ..., constant].
        self.parts: list[str] = [""]
        self.part_of: dict[str, int] = {}
        for name in names:
            if name in dependent:
                self.part_of[name] = len(self.parts)
                self.parts += [self._line(name, tree.value(name)), ""]
            else:
                self.parts[-1] += self._line(name, tree.value(name))

    def places_of(self, names: set[str]) -> list[int]:
        """Return the indices of the varying symbols among these."""
        return [i for i, name in enumerate(self.varying) if name in names]

    def read_again(self, places: Iterable[int]) -> None:
        """Read the varying symbols with these indices."""
        for place in places:
            name = self.varying[place]
            text = self.texts[place] = self.tree.value(name)
            part = self.part_of.get(name)
            if part is not None:
                self.parts[part] = self._line(name, text)

    def of_cell(self) -> str:
        """Return the id of the values that were read last."""
        return hashlib.sha256("".join(self.parts).encode()).hexdigest()[:ID_DIGITS]

    def _line(self, name: str, text: str | None) -> str:
        return "" if text is None else f"{name}={normalized(self.tree, name, text)}\n"
