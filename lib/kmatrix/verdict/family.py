"""The question and the answer of a verdict: losses by seed, rules, and what they say about each pair of configurations.

A verdict is a pure function of the losses in seed order. Nothing of it is stored, so kills, `make continue`, reused
runs and budgets cannot change it. A lower loss is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from itertools import takewhile
from typing import Annotated

from msgspec import Meta

from kmatrix.records.decode import Record, replaced
from kmatrix.stats import Interval

# configuration -> seed -> loss (nats/token). Infinity or NaN: the run diverged. None: the seed is over without a loss
# for another reason (a crash, a time limit, skipped by the user). A seed without an entry is to come.
Losses = Mapping[str, Mapping[int, float | None]]


class Rules(Record, frozen=True, kw_only=True):
    """How losses are compared. All of it is known before the first run."""

    seeds: Annotated[tuple[int, ...], Meta(description="adaptive ones, in their order; empty: a fixed number")] = ()
    seeds_min: Annotated[int, Meta(description="seeds after which adaptive seeds are first looked at")] = 3
    confidence: Annotated[float, Meta(description='1 - the probability of a false "better" in a matrix')] = 0.95
    min_difference: Annotated[float | None, Meta(description="a smaller one does not matter, nats/token")] = None
    baseline: Annotated[str | None, Meta(description="compared with all others; null: all pairs are compared")] = None

    @property
    def alpha(self) -> float:
        return 1 - self.confidence


class PairOutcome(StrEnum):
    """What is known about a configuration, compared with another one."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    OPEN = "open"  # with a fixed number of seeds: not distinguishable


OPPOSITE = {PairOutcome.BETTER: PairOutcome.WORSE, PairOutcome.WORSE: PairOutcome.BETTER}


class Method(StrEnum):
    """The test of a pair."""

    PAIRED = "paired by seed"
    WELCH = "Welch"
    SEQUENTIAL = "paired by seed, sequential"  # looked at after each seed from the first look on
    NONE = ""


class NoMoreSeeds(StrEnum):
    """Why an open pair gets no further seed."""

    MAXIMUM = "maximum"  # it has all seeds
    FUTILE = "futile"  # the seeds that are left would decide it neither way
    DIVERGED = "diverged"  # the better one diverged more often, which seeds do not cure
    NO_LOSS = "no loss"  # one of the two has no loss after its first seeds: all diverged, failed or were skipped
    BEATEN = "beaten"  # one of the two is worse than a third one: it is out, whatever this pair would say
    BUDGET = "budget"  # of the matrix, which is spent


class Pair(Record, frozen=True, kw_only=True):
    """What the losses say about configuration a, compared with b. Losses and differences are in nats/token."""

    a: str
    b: str
    outcome: Annotated[PairOutcome, Meta(description="about a")]
    method: Annotated[Method, Meta(description='the test; "": none')] = Method.NONE
    reason: Annotated[str, Meta(description="why there was no test")] = ""
    seeds: Annotated[tuple[int, ...], Meta(description="with a finite loss on both sides")] = ()
    difference: Annotated[
        float | None, Meta(description="mean of a - mean of b, nats/token: paired by seed, or without a pair of all")
    ] = None
    interval: Annotated[
        Interval | None, Meta(description="of the difference, nats/token, of this pair alone; sequential: at any look")
    ] = None
    p: Annotated[float | None, Meta(description="two-sided, of this pair alone; sequential: valid at any look")] = None
    p_holm: Annotated[float | None, Meta(description="p corrected for the number of comparisons of the family")] = None
    deviation: Annotated[float | None, Meta(description="standard deviation of a difference, nats/token")] = None
    detectable: Annotated[
        float | None, Meta(description="smallest true difference that is found with a power of 80 %, nats/token")
    ] = None
    margin: Annotated[float | None, Meta(description="smallest one that shows them equivalent, nats/token")] = None
    more_seeds: Annotated[int | None, Meta(description="about so many would decide it; null: decided, or many")] = None
    diverged: Annotated[tuple[int, int], Meta(description="diverged seeds of a and of b")] = (0, 0)
    spread_ratio: Annotated[
        float | None, Meta(description="standard deviation of the losses, better one / worse one, if that is above 3")
    ] = None
    no_more: Annotated[NoMoreSeeds | None, Meta(description="why an open pair gets no further seed")] = None

    def mirrored(self) -> Pair:
        """Return the same verdict about b, compared with a."""

        def negative(value: float | None) -> float | None:
            return None if value is None else 0.0 - value  # 0.0, never -0.0

        one = self.interval
        return replaced(
            self,
            a=self.b,
            b=self.a,
            outcome=OPPOSITE.get(self.outcome, self.outcome),
            difference=negative(self.difference),
            interval=None if one is None else replaced(one, low=negative(one.high), high=negative(one.low)),
            diverged=self.diverged[::-1],
        )


class State(StrEnum):
    """How much a ranking has decided."""

    DECIDED = "decided"
    PARTLY = "partly open"
    OPEN = "open"
    NOT_EVIDENCE = "not evidence"  # no comparison could be tested
    NO_COMPARISON = "no comparison"  # one configuration
    NO_RESULT = "no result"  # runs are over, and none has a loss


class FamilyVerdict(Record, frozen=True, kw_only=True):
    """The verdicts on the pairs of one family: of the configurations whose losses are comparable."""

    rules: Rules
    reference: str  # the baseline, or the leader: the lowest mean of those that are not worse than any other
    means: dict[str, float | None]  # of the finite losses that count, by configuration, nats/token
    pairs: tuple[Pair, ...]  # those of the reference first; none of the others without two that have two losses

    @property
    def size(self) -> int:
        """The number of comparisons of the family, which p values are corrected for."""
        configurations = len(self.means)
        return math.comb(configurations, 2) if self.rules.baseline is None else configurations - 1

    @property
    def against_reference(self) -> tuple[Pair, ...]:
        """The pairs that the reference is part of, it first."""
        return tuple(takewhile(lambda pair: pair.a == self.reference, self.pairs))

    @property
    def has_baseline(self) -> bool:
        return self.rules.baseline is not None

    @property
    def still_open(self) -> tuple[Pair, ...]:
        """The open comparisons of the reference, without those of configurations that are worse than a third one."""
        beaten = set()
        if not self.has_baseline:
            beaten = {pair.b for pair in self.pairs if pair.outcome is PairOutcome.BETTER}
            beaten |= {pair.a for pair in self.pairs if pair.outcome is PairOutcome.WORSE}
        mine = [pair for pair in self.against_reference if pair.difference is not None]
        return tuple(pair for pair in mine if pair.outcome is PairOutcome.OPEN and pair.b not in beaten)

    @property
    def main(self) -> Pair | None:
        """The comparison that a headline is about; None without two configurations with a loss.

        With a leader it is the closest that it beats, with a baseline the one that beats it by most; else one that is
        equivalent, else the closest.
        """
        known = [pair for pair in self.against_reference if pair.difference is not None]
        first, last = (PairOutcome.WORSE, PairOutcome.BETTER) if self.has_baseline else (PairOutcome.BETTER,) * 2
        for outcome in (first, PairOutcome.EQUIVALENT, PairOutcome.OPEN, last):
            if found := [pair for pair in known if pair.outcome is outcome]:
                ordered = sorted(found, key=lambda pair: abs(pair.difference or 0.0))
                return ordered[-1 if outcome is PairOutcome.WORSE else 0]
        return None

    @property
    def state(self) -> State:
        """How much of it is decided."""
        ranked = [name for name, mean in self.means.items() if mean is not None]
        if len(ranked) < 2:
            return State.NO_COMPARISON if ranked else State.NO_RESULT
        if all(pair.p_holm is None for pair in self.pairs):
            return State.NOT_EVIDENCE
        if not self.still_open:
            return State.DECIDED
        is_all = len(self.still_open) == sum(pair.difference is not None for pair in self.against_reference)
        return State.OPEN if is_all else State.PARTLY

    def without_budget(self) -> FamilyVerdict:
        """Return this verdict of a matrix whose budget is spent: an open comparison gets no further seed."""
        spent = [
            replaced(pair, no_more=NoMoreSeeds.BUDGET)
            if pair.outcome is PairOutcome.OPEN and pair.no_more is None
            else pair
            for pair in self.pairs
        ]
        return replaced(self, pairs=tuple(spent))


class Replay(Record, frozen=True, kw_only=True):
    """A verdict with adaptive seeds: what a process that looks after each round has decided by now."""

    verdict: FamilyVerdict
    wanted: tuple[tuple[str, int], ...]  # configuration and seed to run now; none: the verdict is final
    rounds: tuple[int, ...]  # seeds per configuration after which the process looked, such as 3, 4, 5
    asked: dict[str, tuple[int, ...]]  # seeds that a round asked for, by configuration
    unused: int = 0  # losses that exist and were not needed, such as those of reused runs
