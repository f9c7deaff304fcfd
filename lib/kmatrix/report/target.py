"""A target loss: what it took each run to reach it, and how surely each configuration is below it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kmatrix.records.runs import Status
from kmatrix.report.ranking import LOSS
from kmatrix.report.results import Configuration, Effort, Ranking, Run, Target, TargetConfiguration
from kmatrix.status.wanted import Family, SeedEnd
from kmatrix.verdict.target import TargetTest, below_target, reach

DIGITS = 1e4  # a default target has four digits, like printed losses
ENDED = (Status.FINISHED, Status.FAILED)  # other runs may still reach a target
QUANTITIES = Effort.__struct_fields__


def target_loss(
    asked: float | None, rankings: Sequence[Ranking], configurations: Mapping[str, Configuration]
) -> tuple[float | None, str | None]:
    """Return TARGET_LOSS, else the mean loss of the reference of the first ranking, rounded up, and its name."""
    if asked is not None or not rankings or rankings[0].measure != LOSS:
        return asked, None
    name = rankings[0].reference
    mean = configurations[name].mean
    # A single run reaches its own final loss.
    return (None, None) if mean is None else (math.ceil(round(mean * DIGITS, 6)) / DIGITS, name)


def reached(run: Run, target: float) -> Effort | None:
    """Return what a run took until its first evaluation at or below a target; None if it never was."""
    at = next((at for at, loss in enumerate(run.val.loss) if loss <= target), None)
    return None if at is None else _effort(run, at)


def _effort(run: Run, at: int) -> Effort:
    """Return what a run had taken at an evaluation (its index), without simulated energy."""
    val = run.val
    joules = None if not val.joules or (run.gpu and run.gpu.simulated) else val.joules[at]
    return Effort(step=val.step[at], tokens=val.tokens[at], seconds=val.seconds[at], joules=joules)


def target_of(
    loss: float,
    families: Sequence[Family],
    known: Mapping[str, Configuration],
    runs: Mapping[str, Run],
    ends: Mapping[str, SeedEnd],
    *,
    of: str | None,
) -> Target:
    """Return what it took to reach a loss.

    of: the configuration whose mean it is, whose family alone it is for. known, runs: of the matrix, by name.
    """
    found = {}
    for family in families:
        if of is None or of in family.configurations:
            tests = below_target(family.losses(ends), loss, family.rules) if of is None else {}
            for name in family.configurations:
                found[name] = _configuration(name, [runs[run] for run in known[name].runs], tests.get(name))
    return Target(loss=loss, of=of, configurations=tuple(found[name] for name in known if name in found))


def _configuration(name: str, runs: Sequence[Run], test: TargetTest | None) -> TargetConfiguration:
    over = [run for run in runs if run.status in ENDED]
    return TargetConfiguration(
        name=name,
        runs=len(over),
        reached=sum(run.reached is not None for run in over),
        pending=sum(run.status not in (*ENDED, Status.SKIPPED) and not run.reserve for run in runs),
        median=Effort(**{quantity: _median(over, quantity) for quantity in QUANTITIES}),
        test=test,
    )


def _median(runs: Sequence[Run], quantity: str) -> float | None:
    """Return the median over runs, those that missed the target last. None: unknown for a run that reached it."""
    values: list[float | None] = [getattr(run.reached, quantity, None) for run in runs]
    if any(value is None and run.reached for value, run in zip(values, runs, strict=True)):
        return None
    # The schedule of a finished run is over, and a run that diverged would not have come back.
    never = [run.status is Status.FINISHED or run.diverged for run in runs]
    known = [getattr(_effort(run, -1), quantity) if run.val.step else None for run in runs]
    return reach(values, [math.inf if lost else end for lost, end in zip(never, known, strict=True)]).median
