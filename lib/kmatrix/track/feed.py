"""What a run's files say, in the order in which it was written: points, devices and alerts, each handed over once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.records import RunDir
from kmatrix.track.alerting import AlertTail, Told
from kmatrix.track.devices import MOST as DEVICES
from kmatrix.track.devices import DevicesTail
from kmatrix.track.tail import LineTail, is_number
from kmatrix.track.values import Devices, Point

MOST = 500  # points that are handed over at a time
BESIDE = frozenset({"schema", "step", "time"})  # of a line, what is no value of its point


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is new. devices: up to the time of the last point; up to now where there is no further point."""

    points: Sequence[Point] = ()
    devices: Sequence[Devices] = ()
    alerts: Sequence[Told] = ()

    def __bool__(self) -> bool:
        return bool(self.points or self.devices or self.alerts)


class Feed:
    """A cursor over the files of one run. Each tracker has its own, so that a slow one holds up no other."""

    def __init__(self, run: RunDir) -> None:
        self._points = PointTail(run.metrics)
        self._devices = DevicesTail(run.gpu_stats_multi)
        self._alerts = AlertTail(run)
        self._waiting: list[Point] = []

    def read(self, *, ended: bool = False) -> Batch:
        """Return what is new, in parts of bounded size; nothing where all was handed over.

        ended: nothing is written any more, so that the newest step is complete.
        """
        if not self._waiting:
            self._waiting = self._points.read(ended=ended)
        points = self._waiting[:MOST]
        devices = self._devices.read(until=points[-1].time if points else math.inf)
        if len(devices) >= DEVICES:  # there may be more before the first point
            points = []
        self._waiting = self._waiting[len(points) :]
        return Batch(points=points, devices=devices, alerts=self._alerts.read())


class PointTail:
    """The points of metrics.jsonl: the lines of one step are one point, handed over when a later step begins.

    Lines that a resumed attempt made void when they are met are left out. What was handed over before stays so: a
    tracker cannot take it back.
    """

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self._void = _resumes(path)
        self._open: dict[str, Any] | None = None  # the lines of the newest step, merged

    def read(self, *, ended: bool = False) -> list[Point]:
        """Return the points that are complete. ended: the newest step is complete, too."""
        found: list[Point] = []
        while not found and (lines := self._tail.read()):
            for offset, line in lines:
                if isinstance(line.get("step"), int) and not self._is_void(offset, int(line["step"])):
                    found += self._take(line)
        if ended and not found and self._open is not None:
            found, self._open = _point(self._open), None
        return found

    def _is_void(self, offset: int, step: int) -> bool:
        return any(offset < later and step > resumed for later, resumed in self._void)

    def _take(self, line: dict[str, Any]) -> list[Point]:
        """Take in a line; return the point that it completes."""
        before = self._open
        if line.get("resumed"):
            if before is not None and before["step"] > line["step"]:
                self._open = None
            return []
        if before is not None and before["step"] == line["step"]:
            self._open = {**before, **line}
            return []
        self._open = line
        return [] if before is None else _point(before)


def _resumes(path: Path) -> list[tuple[int, int]]:
    """Return the offset and the step of each line with which an attempt goes on from an earlier one's step."""
    tail, found = LineTail(path), []
    while lines := tail.read():
        found += [(at, line["step"]) for at, line in lines if line.get("resumed") and isinstance(line.get("step"), int)]
    return found


def _point(line: Mapping[str, Any]) -> list[Point]:
    """Return the point of a merged line; nothing where it has no time or no number."""
    time, values = line.get("time"), dict(_numbers(line))
    if not values or not is_number(time):
        return []
    return [Point(step=int(line["step"]), time=float(time), values=values)]  # type: ignore[arg-type]


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if key not in BESIDE and is_number(value):
            yield key, value
