"""A target loss: how surely each configuration is below it on average, and what it took to reach it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from kmatrix.records.decode import Record, replaced
from kmatrix.verdict.family import Losses, Method, Rules
from kmatrix.verdict.pairs import described, holm, side_of, tested


class TargetTest(Record, frozen=True, kw_only=True):
    """How surely the mean loss of a configuration is below a target."""

    mean: Annotated[float | None, Meta(description="of the finite losses that count, nats/token")]
    seeds: Annotated[int, Meta(description="losses that count")]
    diverged: Annotated[int, Meta(description="seeds")]
    p: Annotated[
        float | None, Meta(description='one-sided, of "the mean is below the target"; sequential: valid at any look')
    ] = None
    p_holm: Annotated[
        float | None, Meta(description="p corrected for the number of configurations, a family of its own")
    ] = None
    is_below: Annotated[bool, Meta(description="after the correction")] = False
    reason: Annotated[str, Meta(description="why there is no p")] = ""


class Reach(Record, frozen=True, kw_only=True):
    """What it took the runs of a configuration to reach a target, in one unit: steps, tokens, seconds, joules, dollars.

    A run that did not reach it takes longer than it was trained: it is never left out of the median.
    """

    runs: Annotated[int, Meta(description="that ended")]
    reached: Annotated[int, Meta(description="runs that reached the target")]
    median: Annotated[
        float | None, Meta(description="over all runs; null if half of them or more did not reach it, or unknown")
    ]

    @property
    def missed(self) -> int:
        """The number of runs that did not reach the target."""
        return self.runs - self.reached


def below_target(losses: Losses, target: float, rules: Rules) -> dict[str, TargetTest]:
    """Return the test of each configuration against a target (nats/token), Holm-corrected over the configurations.

    With adaptive seeds p is sequential. There is no p if a run diverged: it is not below the target, and the mean of
    the others is another question.
    """
    found = {name: _tested(known, target, rules) for name, known in losses.items()}
    p_values, _ = holm([1.0 if test.p is None else test.p for test in found.values()], rules.alpha)
    return {
        name: test if test.p is None else replaced(test, p_holm=p, is_below=p <= rules.alpha)
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


def _tested(known: Mapping[int, float | None], target: float, rules: Rules) -> TargetTest:
    """Return the test of one configuration, before the correction: as one of a pair whose other loss is the target."""
    side = side_of(known, rules)
    finite = list(side.finite.values())
    mean = math.fsum(finite) / len(finite) if finite else None
    test = TargetTest(mean=mean, seeds=len(finite), diverged=side.diverged)
    if side.diverged:
        return replaced(test, reason=f"diverged in {side.diverged} of {len(finite) + side.diverged} runs")
    if not finite:
        return replaced(test, reason="no loss")
    targets = {seed: None if loss is None else target for seed, loss in known.items()}
    found = tested(("", ""), known, targets, rules)
    if found.method is Method.NONE:
        return replaced(test, reason=described(found, rules).reason)
    return replaced(test, p=found.low)
