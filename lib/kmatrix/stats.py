"""Means and confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95  # default level of confidence intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float
    level: float = LEVEL  # 0 to 1


def complete_sum(values: Sequence[float | None]) -> float | None:
    """Return the sum, or None if a value is unknown or there is none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if values and len(known) == len(values) else None


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean. Raises ValueError if `values` is empty."""
    if not values:
        raise ValueError("no values: a mean needs at least one")
    return statistics.fmean(values)


def sample_deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n - 1), or None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


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


def critical_t(level: float, freedom: float) -> float:
    """Return the t with P(|T| <= t) = level, T following Student's t with `freedom` degrees of freedom."""
    if not 0 < level < 1 or freedom <= 0:
        raise ValueError(f"level {level} not in 0..1, or degrees of freedom {freedom} not above 0")
    from scipy.special import stdtrit

    return -float(stdtrit(freedom, (1 - level) / 2))
