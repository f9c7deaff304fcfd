"""The question and the answer of a verdict: losses by seed, rules, and what they say about each pair of configurations.

A verdict is a pure function of the losses in seed order. Nothing of it is stored, so kills, `make continue`, reused
runs and budgets cannot change it. A lower loss is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from kmatrix.stats import Interval

# configuration -> seed -> loss (nats/token). Infinity or NaN: the run diverged. None: the seed is over without a loss
# for another reason (a crash, a time limit, skipped by the user). A seed without an entry is to come.
Losses = Mapping[str, Mapping[int, float | None]]

MOST_LISTED = 5_000  # pairs of a family in results.json: all pairs of 100 configurations


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How losses are compared. All of it is known before the first run."""

    seeds: tuple[int, ...]  # in the order in which they run; with adaptive seeds, MATRIX_SEEDS_MAX of them
    seeds_min: int = 3  # the first look of adaptive seeds: MATRIX_SEEDS_MIN
    confidence: float = 0.95  # MATRIX_CONFIDENCE: 1 - the probability of a false "better" in a matrix
    min_difference: float | None = None  # MATRIX_MIN_DIFFERENCE (nats/token); None: nothing is called equivalent
    baseline: str | None = None  # the configuration that all others are compared with; None: all pairs

    @property
    def alpha(self) -> float:
        return 1 - self.confidence


class PairOutcome(StrEnum):
    """What is known about a configuration, compared with another one. results.json holds these values."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    OPEN = "open"  # with a fixed number of seeds: not distinguishable


class Method(StrEnum):
    """The test of a pair. results.json holds these values."""

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
    OTHER_RANKING = "other ranking"  # it compares tokenizers by bits per byte: rankings by loss decide about seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """What the losses say about configuration a, compared with b. Losses and differences in nats/token."""

    a: str
    b: str
    outcome: PairOutcome  # about a
    method: Method
    seeds: tuple[int, ...] = ()  # that count: finite losses on both sides; of Welch's test, those in common
    difference: float | None = None  # mean of a - mean of b over the seeds that count; None if either has no loss
    # Of the difference. Sequential: a repeated confidence interval, which holds at all looks. Not corrected for the
    # number of comparisons. None without a test.
    interval: Interval | None = None
    p: float | None = None  # two-sided, of this pair alone; sequential: valid at any look; None without a test
    p_holm: float | None = None  # corrected for the number of comparisons in the family
    deviation: float | None = None  # sample standard deviation of the differences by seed; None unless paired
    sign_flip_p: float | None = None  # exact, two-sided; None below 6 seeds
    level: float | None = None  # two-sided level that Holm's procedure asks of this pair
    detectable: float | None = None  # smallest true difference found with a power of 80 % at that level; None: unknown
    share_removed: float | None = None  # share of the variance that pairing removed: 1 - s_d^2 / (s_a^2 + s_b^2)
    margin: float | None = None  # the smallest margin within which the two are equivalent
    more_seeds: int | None = None  # about so many would decide it; None: it is decided, or too many
    diverged: tuple[int, int] = (0, 0)  # diverged seeds of a and of b
    # Why an open pair gets no further seed. None: it is decided, gets one, or the reference is not part of it.
    no_more: NoMoreSeeds | None = None
    looks: tuple[int, ...] = ()  # numbers of seeds after which it was looked at
    reason: str = ""  # why there was no test: one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyVerdict:
    """The verdicts on all pairs of one family."""

    rules: Rules
    reference: str  # the baseline, or the leader: the lowest mean among those that are not worse than any other
    means: Mapping[str, float | None]  # of the finite losses that count for the family; None without one
    # Of the reference with each other configuration first, then the others; those of the reference alone if the family
    # has more than MOST_LISTED pairs and none of them has a test.
    pairs: tuple[PairVerdict, ...]
    diverged: Mapping[str, int] = field(default_factory=dict)  # configuration -> diverged seeds

    @property
    def size(self) -> int:
        """The number of comparisons of the family, which p values are corrected for."""
        configurations = len(self.means)
        return math.comb(configurations, 2) if self.rules.baseline is None else configurations - 1

    @property
    def against_reference(self) -> tuple[PairVerdict, ...]:
        """The pairs that the reference is part of, it first."""
        # They come first; a thousand configurations have half a million pairs.
        return tuple(takewhile(lambda pair: pair.a == self.reference, self.pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A verdict with adaptive seeds: what a process that looks after each round has decided by now."""

    verdict: FamilyVerdict
    wanted: frozenset[tuple[str, int]]  # (configuration, seed) to run now; empty: the verdict is final
    rounds: tuple[int, ...]  # seeds per configuration after which the process looked, such as 3, 4, 5
    asked: Mapping[str, tuple[int, ...]]  # configuration -> the seeds that a round asked for
    unused: int = 0  # losses that exist and were not needed, e.g. of reused runs
