"""The section of the page on the target loss: what each configuration takes to reach it, in how many of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status, read_matrix_file_or_empty
from kmatrix.report.numbers import LOSS, MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.figures import Scale, Tick, nice_ticks, tick_text
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.units import TIME, Unit, unit_of

DIGITS = 1e4  # a default target has four digits, like the losses on the page
ENDED = (Status.FINISHED, Status.FAILED)  # other runs may still reach the target
EDGE = 88.0  # percent of the strip: the last place of a run that reached the target


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMedian:
    """The median over all runs of a configuration that ended, one that never reached the target being the slowest.

    A mean over the runs that reached it would leave the slowest ones out.
    """

    value: float | None  # None: not reached by half of the runs or more, or unknown
    is_known: bool = True  # False: not measured for a run that reached the target


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One configuration."""

    group: PageGroup
    runs: int  # that ended
    reached: int  # of these
    pending: int  # runs that may still reach it
    medians: tuple[TargetMedian, ...]  # in the order of the axes
    ratio: float | None  # of the median time to that of the fastest configuration
    marks: tuple[float, ...]  # percent of the strip: the time of each run that reached the target
    late: int  # runs that did not: drawn at the end of the strip

    @property
    def missed(self) -> int:
        """Runs that ended without reaching the target."""
        return self.runs - self.reached


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSection:
    """What the section shows."""

    value: float  # nats/token
    is_set: bool  # by TARGET_LOSS
    middle: PageGroup | None  # whose mean final loss is the default
    axes: tuple[str, ...]  # of AXES: those that are known for any run
    rows: tuple[TargetRow, ...]  # fastest first
    strip_axis: str  # of AXES: what the strips show
    strip_size: float  # amount of its unit
    strip_unit: str
    ticks: tuple[Tick, ...] = field(default=(), repr=False)

    @property
    def missed(self) -> int:
        """Runs that ended without reaching the target."""
        return sum(row.missed for row in self.rows)

    @property
    def runs(self) -> int:
        """Runs that ended."""
        return sum(row.runs for row in self.rows)


# What it takes to reach a target, in the order of the table
AXES = ("step", "tokens", "seconds", "joules", "dollars")
STEPS: tuple[Unit, ...] = ((1.0, "steps"),)


def target(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> TargetSection | None:
    """Return the section, or None if no configuration is ranked by its loss and no target is set."""
    ranked = [group for group in groups if group.rank is not None and group.ranking == 0]
    if ranked and numbers.rankings[0].metric != LOSS:
        ranked = []
    value = read_matrix_file_or_empty(MatrixDir(numbers.path)).verdict.target_loss
    is_set = value is not None
    middle = None if is_set or not ranked else ranked[len(ranked) // 2]
    if middle is not None and middle.numbers.mean is not None:
        value = rounded_up(middle.numbers.mean)
    if value is None:
        return None
    # A configuration without a finished run is in no ranking: its runs did not reach the target.
    shown = [*ranked, *(group for group in groups if group.rank is None and any(map(_has_ended, group.runs)))]
    each = {group.index: [_reached(run, value) for run in group.runs if _has_ended(run)] for group in shown}
    found = [one for reached in each.values() for one in reached if one is not None]
    axes = tuple(axis for axis in AXES if any(one[axis] is not None for one in found))
    strip_axis = "seconds" if "seconds" in axes else "step"
    times = [time for one in found if (time := one[strip_axis]) is not None]
    scale = Scale(0.0, max(times, default=0.0) or 1.0, 0.0, EDGE)
    size, unit = unit_of(TIME if strip_axis == "seconds" else STEPS, scale.high)
    rows = [_row(group, each[group.index], axes, scale, strip_axis) for group in shown]
    fastest = min((time for row in rows if (time := _main(row, axes, strip_axis)) is not None), default=None)
    rows = [_with_ratio(row, _main(row, axes, strip_axis), fastest) for row in rows]
    rows.sort(key=lambda row: (row.ratio is None, row.ratio or 0.0, row.group.index))
    values, step = nice_ticks(0.0, scale.high / size, 4)
    return TargetSection(
        value=value,
        is_set=is_set,
        middle=middle,
        axes=axes,
        rows=tuple(rows),
        strip_axis=strip_axis,
        strip_size=size,
        strip_unit=unit,
        ticks=tuple((scale.at(tick * size), tick_text(tick, step)) for tick in values) if times else (),
    )


def rounded_up(loss: float) -> float:
    """Return a loss with four digits, rounded up: a single run reaches its own final loss."""
    return math.ceil(round(loss * DIGITS, 6)) / DIGITS


def censored_median(reached: Sequence[float], runs: int) -> float | None:
    """Return the median over `runs` runs, of which those that are not in `reached` count as later than all others.

    None if half of the runs or more are not: the median is then not known.
    """
    ordered = sorted(reached) + [math.inf] * (runs - len(reached))
    if not ordered:
        return None
    middle = ordered[(runs - 1) // 2 : runs // 2 + 1]
    median = math.fsum(middle) / len(middle)
    return median if math.isfinite(median) else None


def _has_ended(run: RunNumbers) -> bool:
    return run.status in ENDED


def _reached(run: RunNumbers, value: float) -> Mapping[str, float | None] | None:
    """Return what a run took until its first evaluation at or below the target; None if it never got there."""
    point = run.val.first_within(value)
    if point is None:
        return None
    return {
        "step": float(point.step),
        "tokens": point.tokens,
        "seconds": point.seconds,
        "joules": None,
        "dollars": None,
    }


def _row(
    group: PageGroup,
    ended: Sequence[Mapping[str, float | None] | None],
    axes: Sequence[str],
    scale: Scale,
    strip_axis: str,
) -> TargetRow:
    found = [one for one in ended if one is not None]
    times = [time for one in found if (time := one[strip_axis]) is not None]
    return TargetRow(
        group=group,
        runs=len(ended),
        reached=len(found),
        pending=sum(not _has_ended(run) and run.status is not Status.SKIPPED for run in group.runs),
        medians=tuple(_median([one[axis] for one in found], len(ended)) for axis in axes),
        ratio=None,
        marks=tuple(scale.at(time) for time in sorted(times)),
        late=len(ended) - len(found),
    )


def _median(values: Sequence[float | None], runs: int) -> TargetMedian:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return TargetMedian(value=None, is_known=False)
    return TargetMedian(value=censored_median(known, runs))


def _main(row: TargetRow, axes: Sequence[str], axis: str) -> float | None:
    """Return the median that orders the rows."""
    return row.medians[axes.index(axis)].value if axis in axes else None


def _with_ratio(row: TargetRow, median: float | None, fastest: float | None) -> TargetRow:
    return row if median is None or not fastest else replace(row, ratio=median / fastest)
