"""Expansion: cells -> runs, with a reason for each cell that is cut."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.errors import ConfigError
from kmatrix.kconfig import Assignment, Tree, cause
from kmatrix.kconfig.strict import SHOWN
from kmatrix.matrix.axes import Axes, Axis, Point, label
from kmatrix.matrix.identity import Identity

LONGEST_NAME = 120
OPTIMIZER, GPUS, DEVICE, SEED = "GPT2_OPTIMIZER", "GPT2_NUM_GPUS", "GPT2_DEVICE", "GPT2_SEED"

Rule = Callable[[Callable[[str], str | None]], str | None]
"""A condition that Kconfig cannot say: given the values in force, the reason why they are illegal, or None."""


@dataclass(frozen=True, slots=True)
class Run:
    """One point of the matrix that is to be trained.

    axes: label -> value text; the optimizer and the GPUs are always there.  points: what to set, over the base.
    """

    run_id: str
    name: str
    axes: tuple[tuple[str, str], ...]
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Cells that are not run, and why."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """The expanded matrix. cells = runs + collapsed + the cuts' counts."""

    axes: tuple[Axis, ...]
    runs: tuple[Run, ...]
    cuts: tuple[Cut, ...]
    cells: int
    collapsed: int
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Cells:
    """Puts one cell after the other in force, and touches only what differs from the one before."""

    tree: Tree
    fixed: dict[str, Assignment]  # axis -> the base's assignment
    present: dict[str, Assignment] = field(default_factory=dict)

    def enter(self, points: Iterable[Point]) -> None:
        wanted = {point.axis: point.assignment for point in points}
        for axis in [axis for axis in self.present if axis not in wanted]:
            del self.present[axis]
            self._set(axis, self.fixed.get(axis))
        for axis, assignment in wanted.items():
            if self.present.get(axis) is not assignment:
                self.present[axis] = assignment
                self._set(axis, assignment)

    def _set(self, axis: str, assignment: Assignment | None) -> None:
        if assignment is not None:
            self.tree.kconf.syms[assignment.name].set_value(assignment.value)
        elif axis in self.tree.choices:
            self.tree.choices[axis].unset_value()
        else:
            self.tree.kconf.syms[axis].unset_value()


def settle(tree: Tree, base: Sequence[Assignment], run: Run) -> None:
    """Put one run's configuration in force: the base, no matrix, and the run's points."""
    tree.reset()
    taken = {point.axis for point in run.points}
    for item in base:
        symbol = tree.kconf.syms[item.name]
        if not item.name.startswith("MATRIX") and tree.axis_of(symbol) not in taken:
            symbol.set_value(item.value)
    for point in run.points:
        tree.kconf.syms[point.assignment.name].set_value(point.assignment.value)


def expand(tree: Tree, base: Sequence[Assignment], axes: Axes, rules: Sequence[Rule] = ()) -> Matrix:
    """Return the runs of a matrix. Raises ConfigError for a line or an axis value that no cell puts in force.

    base: assignments that hold in every cell (those of an axis give way to it).
    Narrowing from the command line may idle lines of the base: those become notes.
    """
    tree.reset()
    taken = {axis.name for axis in axes.axes}
    lines = [item for item in base if not item.name.startswith("MATRIX")]
    lines = [item for item in lines if tree.axis_of(tree.kconf.syms[item.name]) not in taken]
    for item in lines:
        tree.kconf.syms[item.name].set_value(item.value)
    fixed = {tree.axis_of(tree.kconf.syms[item.name]): item for item in lines if _decides(tree, item)}
    walk = _Walk(tree, axes, lines, rules)
    _refuse_moving_conditions(tree, axes, walk.identity.moving)
    cells = _Cells(tree, fixed)
    before = {name: tree.value(name) for name in axes.named_in_conditions()}
    for points in axes.cells(before):
        cells.enter(points)
        walk.visit(points)
    walk.refuse_idle()
    return walk.matrix()


def _refuse_moving_conditions(tree: Tree, axes: Axes, moving: set[str]) -> None:
    """Refuse a coupled rule whose left side follows from an axis: it is read before the cell is in force."""
    swept = {axis.name for axis in axes.axes}
    for rule in axes.couplings:
        for name, _ in rule.condition.terms:
            own = {name, *(member.name for member in tree.members(name).values())}
            if name not in swept and own & moving:
                raise ConfigError(
                    f"CONFIG_MATRIX_COUPLED: {rule.condition.text!r}: {name} is no axis and changes with one",
                    fix="name the axes themselves on the left side",
                )


class _Walk:
    """Judges the cell in force, and keeps what was found. One visit costs some tens of microseconds."""

    def __init__(self, tree: Tree, axes: Axes, lines: Sequence[Assignment], rules: Sequence[Rule]) -> None:
        self.tree, self.axes, self.lines, self.rules = tree, axes, lines, rules
        self.cells = self.collapsed = 0
        self.cuts: Counter[str] = Counter()
        self.found: dict[str, tuple[Point, ...]] = {}
        self.shown: dict[str, tuple[str, str, str]] = {}
        self.used: set[tuple[str, str]] = set()
        self.live: set[Assignment] = set()
        self.notes: list[str] = []
        self.identity = Identity(tree, self._moving())
        moving = self.identity.moving
        self.steady_cause = next(
            (why for item in lines if item.name not in moving and (why := self._broken(item))), None
        )
        self.live.update(item for item in lines if item.name not in moving and self._in_force(item))
        self.moving_lines = [item for item in lines if item.name in moving]
        self.forbid = [symbol for symbol in tree.symbols if symbol.name.startswith("FORBID_")]

    def _moving(self) -> set[str]:
        """Every axis name whose value can differ between cells, before dependencies are followed."""
        coupled = {group[0].axis for rule in self.axes.couplings for group in rule.points}
        return {axis.name for axis in self.axes.axes} | coupled

    def visit(self, points: tuple[Point, ...]) -> None:
        self.cells += 1
        applied, why = self._judge(points)
        if why is not None:
            self.cuts[why] += 1
            return
        self.used.update((point.axis, point.text) for point in applied)
        run_id = self.identity.of_cell()
        if run_id in self.found:
            self.collapsed += 1
            return
        self.found[run_id] = applied
        value = self.tree.value
        self.shown[run_id] = (value(OPTIMIZER) or "", value(GPUS) or "", value(DEVICE) or "")

    def _judge(self, points: tuple[Point, ...]) -> tuple[tuple[Point, ...], str | None]:
        """Return the points that apply in the cell in force, and why the cell is illegal, or None."""
        if self.steady_cause:
            return (), self.steady_cause
        applied = []
        for point in points:
            found = cause(self.tree, point.assignment)
            if found is None:
                applied.append(point)
            elif not found.absent:
                return (), f"{point.axis}={point.text}: {found.text}"
        return tuple(applied), self._line_cause({point.axis for point in points}) or self._rule_cause()

    def _line_cause(self, taken: set[str]) -> str | None:
        """Why a line of the base is illegal here. taken: axes that a point stands for in this cell."""
        for item in self.moving_lines:
            if self.tree.axis_of(self.tree.kconf.syms[item.name]) not in taken and (why := self._broken(item)):
                return why
            if self._in_force(item):
                self.live.add(item)
        return None

    def _rule_cause(self) -> str | None:
        """Why a FORBID_ symbol, a rule or an exclusion cuts this cell."""
        if any(symbol.str_value == "y" for symbol in self.forbid):
            return self.tree.forbidden()[0]
        for rule in self.rules:
            if why := rule(self.tree.value):
                return why
        if not self.axes.exclusions:
            return None
        return self.axes.excluded({name: self.tree.value(name) for name in self.axes.named_in_conditions()})

    def _broken(self, item: Assignment) -> str | None:
        """Why a line of the base that applies in this cell does not hold. One that does not apply is no mistake."""
        found = cause(self.tree, item)
        symbol = self.tree.kconf.syms[item.name]
        if found is None or found.absent or not (symbol.visibility or symbol.choice):
            return None
        return f"CONFIG_{item.name}={item.value}: {found.text} ({item.where})"

    def _in_force(self, item: Assignment) -> bool:
        symbol = self.tree.kconf.syms[item.name]
        return symbol.str_value == item.value and (bool(symbol.visibility) or item.value == "n")

    def refuse_idle(self) -> None:
        """Refuse what was asked for and is in force in no cell; where the command line narrowed, note it."""
        idle: list[tuple[bool, str]] = []
        for axis in self.axes.axes:
            for point in axis.points:
                if (axis.name, point.text) not in self.used:
                    where = f"{point.assignment.where}: {axis.name}={point.text}"
                    idle.append((axis.from_command_line, f"{where}: {self._why_idle(point)}"))
        if self.found:
            for item in self.lines:
                if item not in self.live:
                    found = cause(self.tree, item)
                    why = found.text if found else "in force in no run"
                    idle.append(
                        (item.where.startswith("command line"), f"{item.where}: CONFIG_{item.name}={item.value}: {why}")
                    )
        hard = [text for own, text in idle if own or not self.axes.overridden]
        if hard or not self.found:
            cut = [f"{count} cut: {why}" for why, count in self.cuts.most_common(SHOWN)]
            lines = "\n  ".join([*hard[:SHOWN], *cut])
            raise ConfigError(f"in force in no run of the matrix:\n  {lines}", fix="change or remove it")
        self.notes = [text for _, text in idle] + self._idle_rules()

    def _idle_rules(self) -> list[str]:
        excluding = [
            f"the exclusion of {rule.condition.text!r} cuts nothing"
            for rule in self.axes.exclusions
            if rule.reason not in self.cuts
        ]
        coupled = []
        for rule in self.axes.couplings:
            points = [point for group in rule.points for point in group]
            idle = [point for point in points if (point.axis, point.text) not in self.used]
            if len(idle) == len(points):
                coupled.append(f"the rule {rule.condition.text!r} matches no run")
            else:
                coupled += [f"the rule {rule.condition.text!r} sets {p.axis}={p.text} in no run" for p in idle]
        return excluding + coupled

    def _why_idle(self, point: Point) -> str:
        starts = f"{point.axis}={point.text}: "
        return next((why.removeprefix(starts) for why in self.cuts if why.startswith(starts)), "legal in no cell")

    def matrix(self) -> Matrix:
        varying = {axis.name for axis in self.axes.axes if len(axis.points) > 1}
        runs: list[Run] = []
        names: set[str] = set()
        labels = {name: label(self.tree, name) for name in self._moving() | {OPTIMIZER, GPUS, SEED}}
        for run_id, points in self.found.items():
            optimizer, gpus, device = self.shown[run_id]
            swept = [
                point
                for point in points
                if point.swept and (point.axis in varying or point.axis not in self._axis_names())
            ]
            name = _name(optimizer, gpus, device, [(labels[point.axis], point.text) for point in swept], labels)
            name = name if name not in names and len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}_{run_id[:6]}"
            names.add(name)
            shown = {labels[OPTIMIZER]: optimizer} if optimizer else {}
            shown.update((labels[point.axis], point.text) for point in points if point.swept)
            if gpus:
                shown[labels[GPUS]] = gpus
            runs.append(Run(run_id, name, tuple(shown.items()), points))
        cuts = tuple(Cut(count, why) for why, count in sorted(self.cuts.items()))
        notes = (*self.axes.notes, *self.notes)
        return Matrix(self.axes.axes, tuple(runs), cuts, self.cells, self.collapsed, notes)

    def _axis_names(self) -> set[str]:
        return {axis.name for axis in self.axes.axes}


def _decides(tree: Tree, item: Assignment) -> bool:
    """A line that gives its axis a value: any but the `is not set` of a choice's member."""
    return not (tree.kconf.syms[item.name].choice and item.value != "y")


def _name(optimizer: str, gpus: str, device: str, swept: Sequence[tuple[str, str]], labels: Mapping[str, str]) -> str:
    own = (labels[OPTIMIZER], labels[GPUS])
    parts = ["gpt2", optimizer, *(f"{label}{text}" for label, text in swept if label not in own)]
    if gpus:
        parts.append(f"{gpus}{'cpu' if device == 'cpu' else 'gpu'}")
    return "_".join(_plain(part) for part in parts if part)


@functools.lru_cache(4096)
def _plain(part: str) -> str:
    """Return a text as it may stand in the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.+-]", "-", part)
