"""A target loss: how surely each configuration is below it on average, and what it took to reach it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kmatrix.verdict.family import Losses, Rules
from kmatrix.verdict.pairs import (
    FEWEST_LOOK,
    has_diverged,
    holm,
    is_finite,
    leading,
    running_variances,
)
from kmatrix.verdict.sequential import crossing_table, weight
from kmatrix.verdict.student import lower_tail


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTest:
    """How surely the mean loss of a configuration is below a target."""

    mean: float | None  # of the finite losses that count
    seeds: int  # losses that count
    diverged: int  # seeds
    p: float | None = None  # one-sided, of "the mean is below the target"; sequential: valid at any look
    p_holm: float | None = None  # corrected for the number of configurations, a family of its own
    is_below: bool = False  # after the correction
    reason: str = ""  # why there is no p: one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What it took the runs of a configuration to reach a target, in one unit: steps, tokens, seconds, joules, dollars.

    A run that did not reach it takes longer than it was trained: it is never left out of the median.
    """

    runs: int
    reached: int
    median: float | None  # over all runs; None if half of them or more did not reach it, or it is not known

    @property
    def missed(self) -> int:
        """The number of runs that did not reach the target."""
        return self.runs - self.reached


def below_target(losses: Losses, target: float, rules: Rules, *, adaptive: bool) -> dict[str, TargetTest]:
    """Return the test of each configuration against a target (nats/token), Holm-corrected over the configurations.

    adaptive: the seeds were looked at one by one, so p is sequential over rules.seeds; otherwise Student's t over all
    losses. There is no p if a run diverged: it is not below the target, and the mean of the others is another question.
    """
    found = {name: _tested(known, target, rules, adaptive=adaptive) for name, known in losses.items()}
    p_values = holm([1.0 if test.p is None else test.p for test in found.values()])
    return {
        name: test if test.p is None else replace(test, p_holm=p, is_below=p <= rules.alpha)
        for (name, test), p in zip(found.items(), p_values, strict=True)
    }


def reach(values: Sequence[float | None], trained: Sequence[float | None]) -> Reach:
    """Return what it took to reach a target, with censoring.

    values: per run, where it reached the target, or None.  trained: per run, how far it was trained, in the same unit;
    infinity for a run that diverged, which would never reach it; None if it is not known.
    The median is known only if each run that did not reach the target was trained at least that far.
    """
    reached = sorted(value for value in values if value is not None)
    missed = [end for value, end in zip(values, trained, strict=True) if value is None]
    runs, median = len(values), None
    if 2 * len(reached) > runs:
        middle = [*reached, *[math.inf] * len(missed)][(runs - 1) // 2 : runs // 2 + 1]
        if math.isfinite(middle[-1]) and all(end is not None and end >= middle[-1] for end in missed):
            median = math.fsum(middle) / len(middle)
    return Reach(runs=runs, reached=len(reached), median=median)


def _tested(known: Mapping[int, float | None], target: float, rules: Rules, *, adaptive: bool) -> TargetTest:
    """Return the test of one configuration, before the correction."""
    counted = leading(known, rules.seeds) if adaptive else list(known.values())
    finite = [loss for loss in counted if loss is not None and is_finite(loss)]
    test = TargetTest(
        mean=math.fsum(finite) / len(finite) if finite else None,
        seeds=len(finite),
        diverged=sum(map(has_diverged, counted)),
    )
    if test.diverged:
        return replace(test, reason=f"diverged in {test.diverged} of {len(finite) + test.diverged} runs")
    if len(finite) < FEWEST_LOOK:
        return replace(test, reason="one seed: not significant" if finite else "no loss")
    excess = [loss - target for loss in finite]
    variances = running_variances(excess, max(map(abs, finite)))
    if variances[-1] == 0:
        return replace(test, reason="all seeds have the same loss: they count as one seed")
    if not adaptive:
        return replace(test, p=_one_sided(excess, variances[-1]))
    first, most = max(rules.seeds_min, FEWEST_LOOK), len(rules.seeds)
    looks = [n for n in range(first, len(excess) + 1) if variances[n - FEWEST_LOOK] > 0]
    if not looks:
        return replace(test, reason=f"{len(excess)} seeds: the first look is after {first}")
    smallest = min(_one_sided(excess[:n], variances[n - FEWEST_LOOK]) / weight(n, most) for n in looks)
    return replace(test, p=crossing_table(first, most).p(smallest))


def _one_sided(excess: Sequence[float], variance: float) -> float:
    """Return the one-sided p of "the mean is below 0". variance: of one value."""
    n = len(excess)
    return lower_tail(math.fsum(excess) / n / math.sqrt(variance / n), n - 1)
