"""Running statistics of a recording."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

PLACES = 6  # decimals of running statistics in files


class RunningStats:
    """Mean, population standard deviation, minimum and maximum of values added in batches.

    Source: Chan, Golub and LeVeque, The American Statistician 37 (1983).
    """

    __slots__ = ("_mean", "_squares", "count", "maximum", "minimum")  # one object per GPU and column

    def __init__(self) -> None:
        self.count, self._mean, self._squares = 0, 0.0, 0.0
        self.minimum, self.maximum = math.inf, -math.inf

    def add(self, values: Sequence[float]) -> None:
        """Add values, ignoring NaN."""
        total = sum(values)
        if math.isnan(total):
            values = [value for value in values if not math.isnan(value)]
            total = sum(values)
        count = len(values)
        if not count:
            return
        mean = total / count
        delta, both = mean - self._mean, self.count + count
        # math.dist sums the squares in C, without a list of differences.
        self._squares += math.dist(values, [mean] * count) ** 2 + delta * delta * self.count * count / both
        self._mean += delta * count / both
        self.count = both
        low, high = min(values), max(values)
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)

    @property
    def mean(self) -> float | None:
        return self._mean if self.count else None

    @property
    def deviation(self) -> float | None:
        """The population standard deviation; None without any value."""
        return math.sqrt(max(0.0, self._squares) / self.count) if self.count else None

    def without(self, part: RunningStats) -> RunningStats:
        """Return the statistics of the values that are not in `part`, a subset; minimum and maximum are not changed.

        The inverse of `add`, from the same source.
        """
        rest = RunningStats()
        rest.count = self.count - part.count
        if rest.count > 0:
            rest._mean = (self._mean * self.count - part._mean * part.count) / rest.count
            shift = part._mean - rest._mean
            rest._squares = self._squares - part._squares - shift * shift * rest.count * part.count / self.count
            rest.minimum, rest.maximum = self.minimum, self.maximum
        return rest

    def summary(self) -> dict[str, Any] | None:
        """Return the entry for gpu_summary.json, or None without any value."""
        if self.deviation is None:
            return None
        return {
            "mean": round(self._mean, PLACES),
            "deviation": round(self.deviation, PLACES),
            "min": round(self.minimum, PLACES),
            "max": round(self.maximum, PLACES),
            "count": self.count,
        }

    def restore(self, mean: float, deviation: float, minimum: float, maximum: float, count: int) -> None:
        """Continue from the statistics of `count` values."""
        if count:
            self.count, self._mean, self._squares = count, mean, deviation**2 * count
            self.minimum, self.maximum = minimum, maximum
