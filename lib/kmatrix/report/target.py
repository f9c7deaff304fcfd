"""What it took to reach a target loss: by run, and by configuration with those runs that never reached it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from kmatrix.records.runs import Status
from kmatrix.report.numbers import LOSS, GroupNumbers, MatrixNumbers, Ranking, RunNumbers
from kmatrix.verdict.family import Losses, Rules
from kmatrix.verdict.target import Reach, TargetTest, below_target, reach

DIGITS = 1e4  # a default target has four digits, like printed losses
ENDED = (Status.FINISHED, Status.FAILED)  # other runs may still reach a target


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a run took up to some point of its training. None: unknown."""

    step: float | None
    tokens: float | None
    seconds: float | None  # of training
    joules: float | None  # of all devices, measured
    dollars: float | None  # of the training time


QUANTITIES = tuple(field.name for field in fields(Effort))
NEVER = Effort(step=math.inf, tokens=math.inf, seconds=math.inf, joules=math.inf, dollars=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRun:
    """A run that has ended."""

    run: RunNumbers
    reached: Effort | None  # at its first evaluation at or below the target; None: it never was


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGroup:
    """A configuration."""

    name: str  # of the group
    runs: tuple[TargetRun, ...]  # that have ended
    pending: int  # runs that may still reach the target; without the reserve of adaptive seeds
    reach: tuple[Reach, ...]  # in the order of QUANTITIES
    test: TargetTest | None  # is the mean below the target? None without TARGET_LOSS

    def reached(self, quantity: str) -> Reach:
        """Return what it took to reach the target, in this quantity."""
        return self.reach[QUANTITIES.index(quantity)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetNumbers:
    """What it took the runs of a matrix to reach a target."""

    value: float  # nats/token
    is_set: bool  # by TARGET_LOSS
    middle: str | None  # name of the configuration whose mean final loss is the default
    groups: tuple[TargetGroup, ...]  # ranked ones first


def target_numbers(numbers: MatrixNumbers) -> TargetNumbers | None:
    """Return what it took to reach TARGET_LOSS, else the mean final loss of the middle configuration, rounded up.

    None without both. TARGET_LOSS holds for every ranking; the default is that of the first, and only for it.
    """
    rankings = [ranking for ranking in numbers.rankings if ranking.metric == LOSS]
    # A ranking has the runs of its family: those without data so far, which may still reach the target, are not there.
    by_name = {group.name: group for group in numbers.groups}
    value = numbers.target_loss
    is_set = value is not None
    families = [
        [by_name.get(group.name, group) for group in (*ranking.groups, *ranking.without_result)]
        for ranking in (rankings if is_set else rankings[:1])
    ]
    ranked = [group for family in families for group in family]
    first = [by_name.get(group.name, group) for group in rankings[0].groups] if rankings else []
    middle = None if is_set or not first else first[len(first) // 2]
    if middle is not None and middle.mean is not None:
        value = rounded_up(middle.mean)
    if value is None:
        return None
    # A configuration without a finished run is in no ranking: its runs did not reach the target.
    in_any = {group.name for one in numbers.rankings for group in (*one.groups, *one.without_result)}
    unranked = [group for group in numbers.groups if group.name not in in_any and any(map(_has_ended, group.runs))]
    groups = [*ranked, *unranked]
    tests: dict[str, TargetTest] = {}
    if is_set:
        # Each family is corrected by itself, as in its ranking.
        for family, ranking in zip([*families, unranked], [*rankings, None], strict=True):
            tests |= _tests(family, value, ranking)
    return TargetNumbers(
        value=value,
        is_set=is_set,
        middle=None if middle is None else middle.name,
        groups=tuple(_group(group, value, tests.get(group.name), numbers.reserve) for group in groups),
    )


def rounded_up(loss: float) -> float:
    """Return a loss with four digits, rounded up: a single run reaches its own final loss."""
    return math.ceil(round(loss * DIGITS, 6)) / DIGITS


def reached(run: RunNumbers, target: float) -> Effort | None:
    """Return what a run took until its first evaluation at or below a target; None if it never was."""
    at = next((at for at, loss in enumerate(run.val.loss) if loss <= target), None)
    return None if at is None else _effort(run, at)


def _has_ended(run: RunNumbers) -> bool:
    return run.status in ENDED


def _dollars(run: RunNumbers, seconds: float | None) -> float | None:
    """Return the price of so much training (s). A reused run was paid for in another matrix."""
    if run.dollars is None or not run.wall_s or seconds is None or run.reused_from:
        return None
    return run.dollars / run.wall_s * seconds


def _trained(run: RunNumbers) -> Effort:
    """Return how far a run was trained without reaching a target; NEVER if more training would not have helped."""
    # The schedule of a finished run is over, and a run that diverged would not have come back.
    if run.status is Status.FINISHED or run.diverged:
        return NEVER
    joules = _effort(run, -1).joules if run.val.step else None
    return Effort(
        step=run.steps, tokens=run.tokens, seconds=run.seconds, joules=joules, dollars=_dollars(run, run.seconds)
    )


def _effort(run: RunNumbers, at: int) -> Effort:
    """Return what a run took up to one of its evaluations. at: its index."""
    val, simulated = run.val, run.gpu is not None and run.gpu.simulated
    return Effort(
        step=float(val.step[at]),
        tokens=val.tokens[at],
        seconds=val.seconds[at],
        joules=None if simulated else val.joules[at],
        dollars=_dollars(run, val.seconds[at]),
    )


def _group(group: GroupNumbers, value: float, test: TargetTest | None, reserve: Collection[str]) -> TargetGroup:
    runs = tuple(TargetRun(run=run, reached=reached(run, value)) for run in group.runs if _has_ended(run))
    return TargetGroup(
        name=group.name,
        runs=runs,
        pending=sum(
            not _has_ended(run) and run.status is not Status.SKIPPED and run.name not in reserve for run in group.runs
        ),
        reach=tuple(_reach(runs, quantity) for quantity in QUANTITIES),
        test=test,
    )


def _reach(runs: Sequence[TargetRun], quantity: str) -> Reach:
    """Return what it took in one quantity. If that is unknown for a run that reached the target, so is the median."""
    values = [None if one.reached is None else getattr(one.reached, quantity) for one in runs]
    trained = [getattr(_trained(one.run), quantity) for one in runs]
    found = reach(values, trained)
    known = sum(one.reached is not None for one in runs)
    return found if found.reached == known else Reach(runs=len(runs), reached=known, median=None)


def _tests(groups: Sequence[GroupNumbers], value: float, ranking: Ranking | None) -> dict[str, TargetTest]:
    """Return the test of each group, corrected for the number of configurations in its family."""
    rules = ranking.verdict.rules if ranking else Rules()
    known: Losses = {group.name: dict(_outcomes(group)) for group in groups}
    return dict(below_target(known, value, rules))


def _outcomes(group: GroupNumbers) -> Sequence[tuple[int, float | None]]:
    """Return the seeds of a configuration that are over, as `kmatrix.verdict.family.Losses` has them."""
    return [
        (number if run.seed is None else run.seed, _outcome(run))
        for number, run in enumerate(group.runs)
        if run.counts or _has_ended(run)
    ]


def _outcome(run: RunNumbers) -> float | None:
    if run.diverged:
        return math.inf
    return run.final_val_loss if run.counts else None
