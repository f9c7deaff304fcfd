"""A stream of values -> mean, deviation, lowest and highest; a stream of moments -> a timeline. Memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kmatrix.report.gpu_values import MOMENTS, Moment, Spread

Floats = NDArray[np.float64]
MOST = 2 * MOMENTS  # stretches of a timeline


class SpreadOf:
    """Takes values in, and gives their spread without keeping them.

    Parts are merged after Chan, Golub and LeVeque, The American Statistician 37 (1983).
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        self._low, self._high = math.inf, -math.inf

    def add(self, values: Floats) -> None:
        """Take in finite values. NaN are passed over."""
        if math.isnan(values.sum()):
            values = values[~np.isnan(values)]
        count = len(values)
        if not count:
            return
        mean = float(values.mean())
        off = values - mean
        total, apart = self._count + count, mean - self._mean
        self._squares += float(off @ off) + apart * apart * self._count * count / total
        self._mean += apart * count / total
        self._count = total
        self._low, self._high = min(self._low, float(values.min())), max(self._high, float(values.max()))

    def spread(self) -> Spread | None:
        """Return the spread so far; None without a value."""
        if not self._count:
            return None
        deviation = math.sqrt(self._squares / self._count)
        return Spread(mean=self._mean, deviation=deviation, low=self._low, high=self._high)


class TimelineOf:
    """Takes moments in, and gives a timeline of at most MOST stretches, each the mean over its samples.

    Once there were more samples than that, it has at least half as many stretches.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._width = 1  # samples of a stretch
        self._seconds = np.zeros(MOST)  # sums
        self._memory: dict[int, tuple[Floats, Floats]] = {}  # of each device: sums, and how many values are in them

    def add(self, seconds: Floats, memory: Mapping[int, Floats]) -> None:
        """Take in moments: their times, and at each the memory of each device; NaN: not known."""
        while self._samples + len(seconds) > MOST * self._width:
            self._halve()
        stretch = np.arange(self._samples, self._samples + len(seconds)) // self._width
        self._samples += len(seconds)
        self._seconds += np.bincount(stretch, seconds, minlength=MOST)
        for device, values in memory.items():
            sums, counts = self._memory.setdefault(device, (np.zeros(MOST), np.zeros(MOST)))
            known = ~np.isnan(values)
            sums += np.bincount(stretch[known], values[known], minlength=MOST)
            counts += np.bincount(stretch[known], minlength=MOST)

    def moments(self, devices: Sequence[int]) -> tuple[Moment, ...]:
        """Return the timeline, with the devices in this order."""
        length = -(-self._samples // self._width)
        samples = np.minimum(self._width, self._samples - self._width * np.arange(length))
        seconds = self._seconds[:length] / samples
        columns = [self._means(device, length) for device in devices]
        return tuple(
            Moment(second, tuple(column[at] for column in columns)) for at, second in enumerate(seconds.tolist())
        )

    def _means(self, device: int, length: int) -> list[float | None]:
        """Return the mean of each stretch; None where it has no value."""
        if device not in self._memory:
            return [None] * length
        sums, counts = (column[:length].tolist() for column in self._memory[device])
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    def _halve(self) -> None:
        """Make one stretch of two."""
        self._seconds = _paired(self._seconds)
        self._memory = {device: (_paired(sums), _paired(counts)) for device, (sums, counts) in self._memory.items()}
        self._width *= 2


def _paired(values: Floats) -> Floats:
    return np.concatenate([values[::2] + values[1::2], np.zeros(len(values) // 2)])
