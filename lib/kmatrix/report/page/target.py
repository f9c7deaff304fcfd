"""The section of the page on the target loss: what each configuration takes to reach it, in how many of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kmatrix.records.runs import Status
from kmatrix.report.metrics import MOST_POINTS, Evaluations, thinned
from kmatrix.report.numbers import MatrixNumbers
from kmatrix.report.page.curves import evaluations_of, is_simulated
from kmatrix.report.page.parts.figures import Scale, Tick, nice_ticks, tick_text
from kmatrix.report.page.parts.groups import MOST_ROWS, PageGroup
from kmatrix.report.page.parts.units import TIME, Unit, unit_of
from kmatrix.report.pair_text import margin_text, p_text
from kmatrix.report.target import QUANTITIES, TargetGroup, reached, target_numbers
from kmatrix.verdict.target import Reach, TargetTest

EDGE = 88.0  # percent of the strip: the last place of a run that reached the target
STEPS: tuple[Unit, ...] = ((1.0, "steps"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One configuration."""

    group: PageGroup
    runs: int  # that ended
    reached: int  # of these
    pending: int  # runs that may still reach it
    reach: tuple[Reach, ...]  # in the order of the quantities
    ratio: float | None  # of the median time to that of the fastest configuration
    marks: tuple[float, ...]  # percent of the strip: the time of each run that reached the target
    test: TargetTest | None  # is the mean below the target? None without TARGET_LOSS
    p: str  # of that test, corrected; "" without one

    @property
    def missed(self) -> int:
        """Runs that ended without reaching the target."""
        return self.runs - self.reached

    @property
    def is_too_few(self) -> bool:
        """True if half of the runs that ended or more did not reach the target: there is no median."""
        return self.runs > 0 and 2 * self.reached <= self.runs


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSection:
    """What the section shows."""

    value: float  # nats/token
    is_set: bool  # by TARGET_LOSS
    middle: PageGroup | None  # whose mean final loss is the default
    quantities: tuple[str, ...]  # of QUANTITIES: those that are known for any run
    rows: tuple[TargetRow, ...]  # fastest first
    strip: str  # of QUANTITIES: what the strips show
    strip_unit: str
    runs: int  # that ended
    missed: int  # of them, those that did not reach the target
    hidden: int  # configurations without a row
    text: str  # the target
    script: Mapping[str, object] = field(repr=False)
    ticks: tuple[Tick, ...] = field(default=(), repr=False)


def target(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> TargetSection | None:
    """Return the section, or None if nothing is known about a target: no loss is ranked, or no run has ended."""
    found = target_numbers(numbers)
    if found is None or not found.groups:
        return None
    by_name = {group.numbers.name: group for group in groups}
    known = tuple(quantity for quantity in QUANTITIES if any(_is_known(group, quantity) for group in found.groups))
    strip = "seconds" if "seconds" in known else "step"
    times = [time for group in found.groups for time in _values(group, strip)]
    scale = Scale(0.0, max(times, default=0.0) or 1.0, 0.0, EDGE)
    size, unit = unit_of(TIME if strip == "seconds" else STEPS, scale.high)
    medians = [median for group in found.groups if (median := group.reached(strip).median) is not None]
    alpha = 1 - numbers.confidence
    rows = [
        _row(group, by_name[group.name], known, scale, strip=strip, fastest=min(medians, default=None), alpha=alpha)
        for group in found.groups
    ]
    # Those that did not reach the target have the order of the ranking.
    rows.sort(key=lambda row: (row.ratio is None, row.ratio or 0.0))
    values, step = nice_ticks(0.0, scale.high / size, 4)
    return TargetSection(
        value=found.value,
        is_set=found.is_set,
        middle=None if found.middle is None else by_name[found.middle],
        quantities=known,
        rows=tuple(rows[:MOST_ROWS]),
        strip=strip,
        strip_unit=unit,
        runs=sum(row.runs for row in rows),
        missed=sum(row.missed for row in rows),
        hidden=len(rows[MOST_ROWS:]),
        text=margin_text(found.value),
        script=_script(numbers, found.value, known, strip) | {"groups": [row.group.index for row in rows]},
        ticks=tuple((scale.at(tick * size), tick_text(tick, step)) for tick in values) if times else (),
    )


def _script(numbers: MatrixNumbers, value: float, known: Sequence[str], strip: str) -> dict[str, object]:
    """Return what the script needs to count for another target; runs by their places.

    never: runs that more training would not have helped; stride: steps between the evaluations of a thinned curve.
    """
    runs = list(enumerate(numbers.runs))
    shown = evaluations_of(sum(len(run.val.step) for _, run in runs), len(runs))
    return {
        "value": float(margin_text(value)),
        "text": margin_text(value),
        "quantities": list(known),
        "strip": strip,
        "never": [at for at, run in runs if run.status is Status.FINISHED or run.diverged],
        "reused": [at for at, run in runs if run.reused_from],
        "simulated": [at for at, run in runs if is_simulated(run)],
        "stride": max((_stride(run.val, shown) for _, run in runs), default=0),
    }


def _stride(val: Evaluations, shown: int | None) -> int:
    """Return the most steps between two evaluations that the page has of a run; 0 if it has all of them."""
    kept = thinned(val.loss, min(shown or MOST_POINTS, MOST_POINTS - 1)).tolist()
    if len(kept) == len(val.step):
        return 0
    return max((after - before for before, after in pairwise(val.step[at] for at in kept)), default=0)


def _is_known(group: TargetGroup, quantity: str) -> bool:
    """Return whether a quantity is known at the target, or at an evaluation at all: a reader may choose a target."""
    firsts = [reached(one.run, math.inf) for one in group.runs]
    return bool(_values(group, quantity)) or any(getattr(first, quantity) is not None for first in firsts if first)


def _values(group: TargetGroup, quantity: str) -> list[float]:
    """Return what the runs that reached the target took, where it is known."""
    found = [getattr(one.reached, quantity) for one in group.runs if one.reached is not None]
    return [value for value in found if value is not None]


def _row(
    one: TargetGroup,
    group: PageGroup,
    known: Sequence[str],
    scale: Scale,
    *,
    strip: str,
    fastest: float | None,
    alpha: float,
) -> TargetRow:
    median = one.reached(strip).median
    return TargetRow(
        group=group,
        runs=len(one.runs),
        reached=sum(run.reached is not None for run in one.runs),
        pending=one.pending,
        reach=tuple(one.reached(quantity) for quantity in known),
        ratio=None if median is None or not fastest else median / fastest,
        marks=tuple(scale.at(time) for time in sorted(_values(one, strip))),
        test=one.test,
        p="" if one.test is None or one.test.p_holm is None else p_text(one.test.p_holm, alpha),
    )
