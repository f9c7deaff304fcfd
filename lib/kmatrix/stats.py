"""Means, confidence intervals, and Student's t distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from kmatrix.records.decode import Record

LEVEL = 0.95  # default level of confidence intervals


class Interval(Record, frozen=True, kw_only=True):
    """A confidence interval."""

    low: Annotated[float, Meta(description="lower end, in the unit of the value")]
    high: Annotated[float, Meta(description="upper end, in the unit of the value")]
    level: Annotated[float, Meta(description="confidence, 0 to 1")] = LEVEL


def complete_sum(values: Sequence[float | None]) -> float | None:
    """Return the sum, or None if a value is unknown or there is none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if values and len(known) == len(values) else None


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean. Raises ValueError if `values` is empty."""
    if not values:
        raise ValueError("no values: a mean needs at least one")
    return statistics.fmean(values)


def sample_variance(values: Sequence[float]) -> float:
    """Return the sample variance (n - 1) of at least two values."""
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def sample_deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n - 1), or None for fewer than two values."""
    return math.sqrt(sample_variance(values)) if len(values) > 1 else None


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return the confidence interval of a mean, or None for fewer than two values.

    mean +- t * s / sqrt(n), t of Student's distribution with n - 1 degrees of freedom.
    Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.5.2.
    """
    deviation = sample_deviation(values)
    if deviation is None:
        return None
    half = critical((1 - level) / 2, len(values) - 1) * deviation / math.sqrt(len(values))
    centre = mean(values)
    return Interval(low=centre - half, high=centre + half, level=level)


def lower_tail(t: float, freedom: float) -> float:
    """Return P(T <= t), T following Student's t with `freedom` degrees of freedom."""
    from scipy.special import stdtr

    return float(stdtr(freedom, t))


@lru_cache(maxsize=65536)
def critical(p: float, freedom: float) -> float:
    """Return the t with P(T > t) = p, T following Student's t with `freedom` degrees of freedom."""
    from scipy.special import stdtrit

    return -float(stdtrit(freedom, p))
