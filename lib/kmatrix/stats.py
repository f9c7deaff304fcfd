"""Means, deviations, intervals and comparisons of a few numbers, in plain arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

BALANCE = ((5.0, "Excellent"), (10.0, "Good"), (20.0, "Fair"))  # upper bound in percent, exclusive
TINY = 1e-300  # stands in for a 0 that would be divided by
LEVEL = 0.95  # confidence of every interval, unless another is asked for


class Word(StrEnum):
    """What may be said of one configuration beside another. A lower loss is better."""

    BETTER = "better"
    WORSE = "worse"
    NOT_DISTINGUISHABLE = "not distinguishable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A confidence interval: `low` to `high` at `level` (0 to 1)."""

    low: float
    high: float
    level: float = LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the losses of a and b say: `word` speaks of a.

    difference: mean of a less mean of b, over the seeds that count; None without any.
    interval: of the difference.  p: two-sided.  Both are None where there is no evidence.
    method: "paired by seed", "Welch", or "" where nothing could be tested.
    seeds: those that a and b have in common.  reason: one sentence.
    """

    word: Word
    method: str
    seeds: tuple[int, ...]
    difference: float | None
    interval: Interval | None
    p: float | None
    reason: str


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean. Raises ValueError when `values` is empty."""
    if not values:
        raise ValueError("no values: a mean needs at least one")
    return statistics.fmean(values)


def sample_deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n - 1), or None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Return 100 * population deviation / mean, in percent.

    Zero for a single value or an all-zero list: nothing varies.
    Source: docs/gpu-monitoring.md, "Load Balance Metrics".
    Raises ValueError when `values` is empty.
    """
    if not values:
        raise ValueError("no values: pass at least one GPU's memory")
    centre = statistics.fmean(values)
    return 100.0 * statistics.pstdev(values) / centre if centre else 0.0


def cv_text(cv: float) -> str:
    """Return a CV in percent: "5.2%", and with more decimals where one would put it into another class: "4.96%"."""
    digits = next((d for d in (1, 2, 3) if balance_quality(float(f"{cv:.{d}f}")) == balance_quality(cv)), 6)
    return f"{cv:.{digits}f}%"


def balance_quality(cv: float) -> str:
    """Return the class of a coefficient of variation in percent: a bound belongs to the class above it."""
    for bound, quality in BALANCE:
        if cv < bound:
            return quality
    return "Poor"


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the confidence interval of a mean, or None for fewer than two values.

    mean +- t * s / sqrt(n), t of Student's distribution with n - 1 degrees of freedom.
    Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.2.
    """
    deviation = sample_deviation(values)
    if deviation is None:
        return None
    half = critical_t(level, len(values) - 1) * deviation / math.sqrt(len(values))
    centre = mean(values)
    return Interval(low=centre - half, high=centre + half, level=level)


def compare(a: Mapping[int, float], b: Mapping[int, float], level: float = LEVEL) -> Verdict:
    """Say whether the losses of a, one for each seed, are lower than those of b.

    With two seeds in common or more, Student's t test on the differences by seed: a seed
    gives both the same data in the same order, and what it does to both cancels out. With
    none or one in common and two or more on each side, Welch's test. Otherwise the order is
    not evidence. Losses that are not finite do not count.
    Sources: NIST/SEMATECH e-Handbook 1.3.5.3 (paired and unequal variances); B. L. Welch,
    Biometrika 34 (1947), for the degrees of freedom.
    """
    a = {seed: loss for seed, loss in a.items() if math.isfinite(loss)}
    b = {seed: loss for seed, loss in b.items() if math.isfinite(loss)}
    seeds = tuple(sorted(a.keys() & b.keys()))
    if len(seeds) > 1:
        return _paired([a[seed] for seed in seeds], [b[seed] for seed in seeds], seeds, level)
    if len(a) > 1 and len(b) > 1:
        return _welch(list(a.values()), list(b.values()), seeds, level)
    return _no_evidence(a, b, seeds)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for being several, in the order given.

    The i-th smallest of m is multiplied by m - i + 1; none falls below the one before it.
    Source: S. Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    corrected = [0.0] * len(p_values)
    floor = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = floor
    return corrected


def two_sided_p(t: float, freedom: float) -> float:
    """Return the probability that Student's t is at least |t| away from 0.

    I_x(freedom / 2, 1 / 2) with x = freedom / (freedom + t^2).
    Source: Abramowitz and Stegun, 26.7.1 and 26.5.27.
    """
    if math.isinf(t * t):
        return 0.0
    total = freedom + t * t
    return _incomplete_beta(freedom / 2, 0.5, freedom / total, t * t / total)


def critical_t(level: float, freedom: float) -> float:
    """Return the t between whose two signs a share `level` of Student's distribution lies, by bisection."""
    if not 0 < level < 1 or freedom <= 0:
        raise ValueError(f"level {level} not in 0..1, or degrees of freedom {freedom} not above 0")
    low, high = 0.0, 1.0
    while two_sided_p(high, freedom) > 1 - level:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if two_sided_p(middle, freedom) > 1 - level else (low, middle)
    return high


def _paired(a: list[float], b: list[float], seeds: tuple[int, ...], level: float) -> Verdict:
    differences = [x - y for x, y in zip(a, b, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if len(set(a)) == len(set(b)) == 1:
        return _seeds_do_nothing(mean(differences), "paired by seed", seeds)
    return _judge(mean(differences), error, len(differences) - 1, method="paired by seed", seeds=seeds, level=level)


def _welch(a: list[float], b: list[float], seeds: tuple[int, ...], level: float) -> Verdict:
    difference = mean(a) - mean(b)
    if len(set(a)) == len(set(b)) == 1:
        return _seeds_do_nothing(difference, "Welch", seeds)
    shares = [statistics.variance(values) / len(values) for values in (a, b)]
    below = sum(share**2 / (len(values) - 1) for share, values in zip(shares, (a, b), strict=True))
    freedom = sum(shares) ** 2 / below if below else float(min(len(a), len(b)) - 1)
    return _judge(difference, math.sqrt(sum(shares)), freedom, method="Welch", seeds=seeds, level=level)


def _judge(
    difference: float, error: float, freedom: float, *, method: str, seeds: tuple[int, ...], level: float
) -> Verdict:
    """Turn a difference and its standard error into a verdict: a word needs an interval without 0."""
    half = critical_t(level, freedom) * error
    interval = Interval(low=difference - half, high=difference + half, level=level)
    ratio = abs(difference) / error if error else (math.inf if difference else 0.0)
    p = two_sided_p(ratio, freedom)
    if interval.high < 0:
        word, reason = Word.BETTER, "the whole interval of the difference is below 0"
    elif interval.low > 0:
        word, reason = Word.WORSE, "the whole interval of the difference is above 0"
    else:
        word, reason = Word.NOT_DISTINGUISHABLE, "the interval of the difference holds 0"
    return Verdict(word=word, method=method, seeds=seeds, difference=difference, interval=interval, p=p, reason=reason)


def _seeds_do_nothing(difference: float, method: str, seeds: tuple[int, ...]) -> Verdict:
    """Equal losses for every seed on both sides are one measurement, written down several times."""
    return Verdict(
        word=Word.NOT_DISTINGUISHABLE,
        method=method,
        seeds=seeds,
        difference=difference,
        interval=None,
        p=None,
        reason="every seed gave the same loss: they count as one, and the order is not evidence",
    )


def _no_evidence(a: Mapping[int, float], b: Mapping[int, float], seeds: tuple[int, ...]) -> Verdict:
    difference = mean(list(a.values())) - mean(list(b.values())) if a and b else None
    counted = "one seed" if len(a) == len(b) == 1 else f"{len(a)} and {len(b)} seeds, {len(seeds)} in common"
    return Verdict(
        word=Word.NOT_DISTINGUISHABLE,
        method="",
        seeds=seeds,
        difference=difference,
        interval=None,
        p=None,
        reason=f"{counted}: the order is not evidence",
    )


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b); y is 1 - x, given for its last digits.

    Source: DLMF 8.17.22 (continued fraction) and 8.17.4 (symmetry).
    """
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, y) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Sum the continued fraction of DLMF 8.17.22 by Lentz's method.

    Source: I. J. Thompson and A. R. Barnett, Journal of Computational Physics 64 (1986).
    """
    value, upper, lower = 1.0, 1.0, 0.0
    for j in range(1, 10_000):
        m = j // 2
        if j % 2:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1.0 / (1.0 + numerator * lower or TINY)
        upper = 1.0 + numerator / upper or TINY
        value *= upper * lower
        if abs(upper * lower - 1.0) < 1e-15:
            break
    return 1.0 / value


def bits_per_byte(loss: float | None, bytes_per_token: float | None) -> float | None:
    """Return a loss in nats a token as bits for each byte of text: loss / ln 2 / bytes a token."""
    if loss is None or bytes_per_token is None:
        return None
    return loss / math.log(2) / bytes_per_token
