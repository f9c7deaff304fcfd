"""Cells -> runs: deduplicated, named and identified, with a reason for each excluded cell."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kmatrix.config import RunConfig, broken_rules, read_run
from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import cause
from kmatrix.kconfig.tree import Assignment, Tree, forbidden, normalized, stale
from kmatrix.matrix.axes import Axes, Axis, AxisValue, label
from kmatrix.records.runs import ExcludedCells

MOST_CELLS = 20_000
SHOWN = 20  # lines of a kind in an error
LONGEST_NAME = 120  # characters; with the id and suffixes such as .json below the 255 bytes of a file name
OPTIMIZER, GPUS, DEVICE, SEED = "GPT2_OPTIMIZER", "GPT2_NUM_GPUS", "GPT2_DEVICE", "GPT2_SEED"
NODES = "GPT2_NUM_NODES"
ID_DIGITS = 10  # 40 bits: two of 20,000 runs get the same id with a probability of 0.02 %
# A symbol of a later version -> the value with which a run is what it was without the symbol: such a line is not part
# of the id. Without an entry, a new symbol would change the id of every run, and finished runs would train again.
AS_BEFORE: dict[str, str] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run of the matrix."""

    run_id: str
    name: str
    axes: tuple[tuple[str, str], ...]  # label -> value text; the optimizer and the GPU count are always included
    points: tuple[AxisValue, ...]  # the values to set over the base
    values: Mapping[str, str]  # effective texts by symbol, or by axis name for a choice
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Matrix:
    """The expanded matrix."""

    axes: tuple[Axis, ...]
    runs: tuple[Run, ...]
    excluded: tuple[ExcludedCells, ...]
    cells: int  # runs + duplicates + excluded cells
    duplicates: int  # cells with the configuration of an earlier cell
    notes: tuple[str, ...] = ()


class _Cells:
    """The tree with the values of one cell after the other."""

    def __init__(self, tree: Tree, base: Iterable[Assignment]) -> None:
        self.tree = tree
        self.lines = [(item, tree.axis_of(item.name)) for item in base if not item.name.startswith("MATRIX")]
        # The `is not set` of a member of a choice does not set the choice.
        self.fixed = {axis: item for item, axis in self.lines if item.value == "y" or axis not in tree.choices}
        self.present: dict[str, Assignment] = {}
        tree.set_only(item for item, _ in self.lines)

    def enter(self, points: Iterable[AxisValue]) -> bool:
        """Set the values of a cell that differ from the cell before, and return whether any does."""
        wanted = {point.axis: point.assignment for point in points}
        if wanted == self.present:
            return False
        ended = {axis: self.fixed.get(axis) for axis in self.present if axis not in wanted}  # coupled values
        changed = {axis: item for axis, item in wanted.items() if self.present.get(axis) is not item}
        for axis, item in {**ended, **changed}.items():
            if item:
                self.tree.kconf.syms[item.name].set_value(item.value)
            else:
                (self.tree.choices.get(axis) or self.tree.kconf.syms[axis]).unset_value()
        self.present = wanted
        return True


def visit(tree: Tree, base: Sequence[Assignment], runs: Iterable[Run]) -> Iterator[Run]:
    """Yield each run while the tree has its values: those of the base, and its own."""
    cells = _Cells(tree, base)
    for run in runs:
        cells.enter(run.points)
        yield run


def _id_line(tree: Tree, name: str, text: str | None) -> str:
    """Return what a value adds to the hashed text of a run; nothing if it cannot change a result."""
    if text is None or name in tree.neutral or AS_BEFORE.get(name) == text:
        return ""
    return f"{name}={normalized(tree, name, text)}\n"


def expand(tree: Tree, base: Sequence[Assignment], axes: Axes) -> Matrix:
    """Return the runs of a matrix. Raises ConfigError for a line or an axis value that has no effect in any cell.

    base: assignments that hold in every cell, if their symbol is not an axis.
    Lines that have no effect because the command line narrows the matrix become notes.
    """
    _refuse_many(math.prod(len(axis.points) for axis in axes.axes))
    taken = {axis.name for axis in axes.axes}
    expansion = _Expansion(tree, [item for item in base if tree.axis_of(item.name) not in taken], axes)
    for points in itertools.product(*(axis.points for axis in axes.axes)):
        for cell in expansion.enter(points):
            expansion.add(cell)
    notes = (*axes.notes, *expansion.refuse_unused())
    excluded = tuple(ExcludedCells(count, why) for why, count in sorted(expansion.excluded.items()))
    runs = tuple(expansion.runs.values())
    return Matrix(axes.axes, runs, excluded, expansion.cells, expansion.duplicates, notes)


def _refuse_many(cells: int) -> None:
    if cells > MOST_CELLS:
        raise ConfigError(
            f"the matrix has {cells:,} cells", why=f"at most {MOST_CELLS:,} are possible", hint="pass fewer values"
        )


class _Expansion:
    """Judges one cell after the other, and collects the runs."""

    def __init__(self, tree: Tree, base: Sequence[Assignment], axes: Axes) -> None:
        self.tree, self.axes = tree, axes
        self.state = _Cells(tree, base)
        self.settings = {name: tree.choices.get(name) or tree.kconf.syms[name] for name in sorted(tree.names())}
        # Of the cell that is set now
        self.coupled: tuple[AxisValue, ...] = ()
        self.texts: dict[str, str | None] = dict.fromkeys(self.settings)
        self.typed: dict[str, Any] = {}
        self.id_lines = dict.fromkeys(self.settings, "")
        # Of all cells
        self.cells = self.duplicates = 0
        self.excluded: Counter[str] = Counter()
        self.runs: dict[str, Run] = {}  # by id
        self.names: set[str] = set()
        self.used: set[tuple[str, str]] = set()
        self.effective: set[Assignment] = set()
        self.single = {axis.name for axis in axes.axes if len(axis.points) == 1}
        self._read(self.settings)

    def enter(self, points: tuple[AxisValue, ...]) -> Iterator[tuple[AxisValue, ...]]:
        """Set the values of a cell, and yield all of them: also those that rules add, in each combination."""
        self._set((*points, *self.coupled))
        coupling = [rule for rule in self.axes.rules if rule.points]
        holding = [rule for rule in coupling if rule.holds(self.tree)]
        # The last of several rules for one symbol wins.
        last = {group[0].axis: group for rule in holding for group in rule.points}
        for self.coupled in itertools.product(*last.values()):
            self._set((*points, *self.coupled))
            for rule in coupling:
                if rule.holds(self.tree) != (rule in holding):
                    hint = "name the axes themselves on the left side"
                    raise ConfigError(rule.where, why="the left side depends on a value that a rule sets", hint=hint)
            yield (*points, *self.coupled)

    def _set(self, points: tuple[AxisValue, ...]) -> None:
        if self.state.enter(points):
            self._read(stale(self.settings))

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            text = self.texts[name] = self.tree.value(name)
            self.typed[name] = self.tree.typed(name, text)
            self.id_lines[name] = _id_line(self.tree, name, text)

    def add(self, points: tuple[AxisValue, ...]) -> None:
        """Judge the cell that is set, and keep its run."""
        self.cells += 1
        _refuse_many(self.cells)
        applied, why = self._judge(points)
        if not why:
            config = read_run(self.typed)
            excluded = (rule.reason for rule in self.axes.rules if rule.reason and rule.holds(self.tree))
            why = next(itertools.chain(broken_rules(self.typed, config), excluded), None)
        if why:
            self.excluded[why] += 1
            return
        self.used.update((point.axis, point.text) for point in applied)
        # The first cell of a run gives it its name; a later one with the same effective values is a duplicate.
        found = hashlib.sha256("".join(self.id_lines.values()).encode()).hexdigest()[:ID_DIGITS]
        if found in self.runs:
            self.duplicates += 1
        else:
            values = {name: text for name, text in self.texts.items() if text is not None}
            self.runs[found] = self._run(found, tuple(applied), values, config)

    def _run(self, run_id: str, points: tuple[AxisValue, ...], values: Mapping[str, str], config: RunConfig) -> Run:
        """Return a run with its name. points: those that apply.  values: effective texts."""
        nodes, gpus, optimizer = (values.get(axis, "") for axis in (NODES, GPUS, OPTIMIZER))
        swept = {point.axis: point.text for point in points if point.swept}
        # Nodes are named only if they vary, or are more than one: a run on one machine is the usual case.
        nodes = nodes if nodes != "1" or NODES in swept.keys() - self.single else ""
        shown = {OPTIMIZER: optimizer, **swept, **({NODES: nodes} if nodes else {}), GPUS: gpus}
        parts, unnamed = ["gpt2", optimizer], {*self.single, OPTIMIZER, NODES, GPUS}
        parts += [f"{label(self.tree, axis)}{text}" for axis, text in swept.items() if axis not in unnamed]
        parts += [f"{nodes}node{'' if nodes == '1' else 's'}"] if nodes else []
        parts += [f"{gpus}{'cpu' if values.get(DEVICE) == 'cpu' else 'gpu'}"] if gpus else []
        name = "_".join(re.sub(r"[^A-Za-z0-9.+-]", "-", part) for part in parts if part)
        # Names can coincide, because characters are replaced and names shortened. The id tells them apart.
        if name in self.names or len(name) > LONGEST_NAME:
            name = f"{name[:LONGEST_NAME]}_{run_id[:6]}"
        self.names.add(name)
        axes = tuple((label(self.tree, axis), text) for axis, text in shown.items() if text)
        return Run(run_id, name, axes, points, values, config)

    def _judge(self, points: tuple[AxisValue, ...]) -> tuple[list[AxisValue], str | None]:
        """Return the values that apply in this cell, and why Kconfig makes the cell invalid, or None."""
        applied = []
        for point in points:
            found = cause(self.tree, point.assignment)
            if found and not found.absent:
                return [], f"{point.axis}={point.text}: {found.text}"
            # An axis may not apply, such as momentum with AdamW. Other than in a .config, this holds for "n", too:
            # a hidden symbol must not name a run.
            if not found and self.tree.kconf.syms[point.assignment.name].visibility:
                applied.append(point)
        taken = {point.axis for point in points}
        for item, axis in self.state.lines:
            if axis in taken:
                continue
            symbol, found = self.tree.kconf.syms[item.name], cause(self.tree, item)
            if not found:
                self.effective.add(item)
            elif not found.absent and (symbol.visibility or symbol.choice):
                return applied, f"CONFIG_{item.name}={item.value}: {found.text} ({item.where})"
        return applied, next(map(forbidden, self.tree.forbidding()), None)

    def refuse_unused(self) -> list[str]:
        """Refuse lines and values without effect in any cell; return notes if the command line narrows the matrix."""
        points = (point for axis in self.axes.axes for point in axis.points)
        idle_points = [point for point in points if (point.axis, point.text) not in self.used]
        idle_lines = [item for item, _ in self.state.lines if item not in self.effective] if self.runs else []
        unused = [self._with_cause(point.assignment, f"{point.axis}={point.text}") for point in idle_points]
        unused += [self._with_cause(item, f"CONFIG_{item.name}={item.value}") for item in idle_lines]
        # A line of the file may become unused because the command line narrows the matrix. Without that, and for what
        # the command line itself sets, it is a mistake.
        mistakes = [text for text in unused if text.startswith("command line") or not self.axes.narrowed]
        if mistakes or not self.runs:
            cut = [f"{count} excluded: {why}" for why, count in self.excluded.most_common(SHOWN)]
            what = "no effect in any run of the matrix" if self.runs else "every cell of the matrix is excluded"
            lines_of_text = "\n  ".join([*mistakes[:SHOWN], *cut])
            raise ConfigError(f"{what}:\n  {lines_of_text}", hint="change what a reason names, or remove it")
        for rule in self.axes.rules:
            idle = [f"{p.axis}={p.text}" for group in rule.points for p in group if (p.axis, p.text) not in self.used]
            idle += [rule.reason] if rule.reason and rule.reason not in self.excluded else []
            unused += [f"{rule.where}: no effect in any run: {', '.join(idle)}"] if idle else []
        return unused

    def _with_cause(self, item: Assignment, text: str) -> str:
        starts, found = f"{text}: ", cause(self.tree, item)
        reasons = [why.removeprefix(starts) for why in self.excluded if why.startswith(starts)]
        coupled = [(rule, group) for rule in self.axes.rules for group in rule.points]
        reasons += [f"set by {rule.where}" for rule, group in coupled if group[0].axis == self.tree.axis_of(item.name)]
        if found and self.tree.kconf.syms[item.name].visibility:
            found = None  # only of the last cell
        return f"{item.where}: {text}: {next(iter(reasons), found.text if found else 'no effect in any run')}"
