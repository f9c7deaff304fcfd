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
    at = next((at for at, loss in enumerate(run.val.loss) if loss is not None and loss <= target), None)
    if at is None:
        return None
    return Effort(**{quantity: _at(run, quantity, at) for quantity in QUANTITIES})


def _at(run: Run, quantity: str, at: int) -> float | None:
    """Return what a run had taken at an evaluation (its index). Simulated energy is none."""
    if quantity == "dollars":
        return _dollars(run, run.val.seconds[at])
    if quantity == "joules" and (not run.val.joules or (run.gpu is not None and run.gpu.simulated)):
        return None
    value: float | None = getattr(run.val, quantity)[at]
    return value


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
    chosen = [family for family in families if of is None or of in family.configurations]
    tests: dict[str, TargetTest] = {}
    for family in chosen if of is None else ():
        tests |= below_target(family.losses(ends), loss, family.rules)
    found = []
    for name, one in known.items():
        if not any(name in family.configurations for family in chosen):
            continue
        mine = [runs[run] for run in one.runs]
        over = [run for run in mine if run.status in ENDED]
        found.append(
            TargetConfiguration(
                name=name,
                runs=len(over),
                reached=sum(run.reached is not None for run in over),
                pending=sum(run.status not in (*ENDED, Status.SKIPPED) and not run.reserve for run in mine),
                median=Effort(**{quantity: _median(over, quantity) for quantity in QUANTITIES}),
                test=tests.get(name),
            )
        )
    return Target(loss=loss, of=of, configurations=tuple(found))


def _median(runs: Sequence[Run], quantity: str) -> float | None:
    """Return the median over runs, those that missed the target last. None: unknown for a run that reached it."""
    values = [None if run.reached is None else getattr(run.reached, quantity) for run in runs]
    if any(value is None and run.reached is not None for value, run in zip(values, runs, strict=True)):
        return None
    return reach(values, [_trained(run, quantity) for run in runs]).median


def _trained(run: Run, quantity: str) -> float | None:
    """Return how far a run was trained without reaching a target; infinity if more training would not have helped."""
    # The schedule of a finished run is over, and a run that diverged would not have come back.
    if run.status is Status.FINISHED or run.diverged:
        return math.inf
    if quantity == "joules":
        return _at(run, quantity, -1)
    value: float | None = _dollars(run, run.seconds) if quantity == "dollars" else getattr(run, quantity)
    return value


def _dollars(run: Run, seconds: float | None) -> float | None:
    """Return the price of so much training (s). A reused run was paid for in another matrix."""
    if run.dollars is None or not run.wall_s or seconds is None or run.reused_from:
        return None
    return run.dollars / run.wall_s * seconds
