"""A stream of values -> mean, deviation, lowest and highest; a stream of moments -> a timeline. Memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kmatrix.report.gpu_values import Moment, Spread

CHUNK = 4096  # values that wait for being folded in
MOMENTS = 512  # of a timeline, at least, once there were so many samples


class SpreadOf:
    """Takes values in, and gives their spread without keeping them. waiting: values not yet folded in, finite.

    Chunks are merged after Chan, Golub and LeVeque, The American Statistician 37 (1983).
    """

    def __init__(self) -> None:
        self.waiting: list[float] = []
        self._count, self._mean, self._squares = 0, 0.0, 0.0
        self._low, self._high = math.inf, -math.inf

    def add(self, value: float) -> None:
        """Take in one finite value."""
        self.waiting.append(value)
        if len(self.waiting) >= CHUNK:
            self.fold()

    def spread(self) -> Spread | None:
        """Return the spread so far; None without a value."""
        self.fold()
        if not self._count:
            return None
        deviation = math.sqrt(self._squares / self._count)
        return Spread(mean=self._mean, deviation=deviation, low=self._low, high=self._high)

    def fold(self) -> None:
        """Fold in what waits."""
        values, count = self.waiting, len(self.waiting)
        if not count:
            return
        mean = math.fsum(values) / count
        squares = math.fsum([(value - mean) ** 2 for value in values])
        total, apart = self._count + count, mean - self._mean
        self._squares += squares + apart * apart * self._count * count / total
        self._mean += apart * count / total
        self._count = total
        lowest, highest = min(values), max(values)
        self._low, self._high = min(self._low, lowest), max(self._high, highest)
        self.waiting.clear()


class TimelineOf:
    """Takes moments in, and gives a timeline of MOMENTS to twice as many stretches, each the mean over its samples."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._width = 1  # samples of a stretch

    def add(self, seconds: float, memory: Mapping[int, float | None]) -> None:
        """Take in the memory of each device at one moment."""
        if not self._stretches or self._stretches[-1].count >= self._width:
            if len(self._stretches) == 2 * MOMENTS:
                self._halve()
            self._stretches.append(_Stretch())
        self._stretches[-1].add(seconds, memory)

    def moments(self, devices: list[int]) -> tuple[Moment, ...]:
        """Return the timeline, with the devices in this order."""
        return tuple(stretch.moment(devices) for stretch in self._stretches)

    def _halve(self) -> None:
        """Make one stretch of two."""
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [first.joined(second) for first, second in pairs]
        self._width *= 2


class _Stretch:
    """Sums over some samples."""

    __slots__ = ("count", "memory", "seconds")

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.memory: dict[int, tuple[float, int]] = {}

    def add(self, seconds: float, memory: Mapping[int, float | None]) -> None:
        self.count += 1
        self.seconds += seconds
        for device, value in memory.items():
            if value is not None:
                total, count = self.memory.get(device, (0.0, 0))
                self.memory[device] = (total + value, count + 1)

    def joined(self, other: _Stretch) -> _Stretch:
        self.count += other.count
        self.seconds += other.seconds
        for device, (total, count) in other.memory.items():
            mine = self.memory.get(device, (0.0, 0))
            self.memory[device] = (mine[0] + total, mine[1] + count)
        return self

    def moment(self, devices: list[int]) -> Moment:
        sums = [self.memory.get(device) for device in devices]
        return Moment(
            self.seconds / self.count, tuple(None if known is None else known[0] / known[1] for known in sums)
        )
