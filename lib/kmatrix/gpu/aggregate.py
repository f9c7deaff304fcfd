"""What a recording comes to: means, deviations, joules and throttled seconds, in constant memory.

Joules are counted at each sample; the rest waits, and is folded in once a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kmatrix.gpu.formats import Recording
from kmatrix.gpu.source import AT, EXTRAS, UNKNOWN, WIDTH, Device, Extra
from kmatrix.stats import balance_quality, coefficient_of_variation

MEASURED = ("memory_used", "utilization", "power", "temperature", "sm_clock")
MOST_WAITING = 1000  # moments
GAP_S = 2.0  # power is not summed up over a longer time in which nothing was read
PLACES = 6  # decimals of what is written


class Running:
    """Mean, population deviation, least and greatest of values that come some at a time.

    Source: Chan, Golub and LeVeque, The American Statistician 37 (1983).
    """

    __slots__ = ("_mean", "_squares", "count", "maximum", "minimum")

    def __init__(self) -> None:
        self.count, self._mean, self._squares = 0, 0.0, 0.0
        self.minimum, self.maximum = math.inf, -math.inf

    def add(self, values: Sequence[float]) -> None:
        """Take in values. NaN are passed over."""
        total = sum(values)
        if math.isnan(total):
            values = [value for value in values if not math.isnan(value)]
            total = sum(values)
        count = len(values)
        if not count:
            return
        mean = total / count
        off, both = mean - self._mean, self.count + count
        self._squares += math.dist(values, [mean] * count) ** 2 + off * off * self.count * count / both
        self._mean += off * count / both
        self.count = both
        self.minimum, self.maximum = min(self.minimum, *values), max(self.maximum, *values)

    @property
    def mean(self) -> float | None:
        return self._mean if self.count else None

    def summary(self) -> dict[str, Any] | None:
        """Return what is written; None when there was no value."""
        if not self.count:
            return None
        deviation = math.sqrt(max(0.0, self._squares) / self.count)
        return {
            "mean": round(self._mean, PLACES),
            "deviation": round(deviation, PLACES),
            "min": round(self.minimum, PLACES),
            "max": round(self.maximum, PLACES),
            "count": self.count,
        }

    def restore(self, summary: Mapping[str, Any] | None) -> None:
        """Go on from a summary that was written."""
        if summary:
            self.count, self._mean = int(summary["count"]), float(summary["mean"])
            self._squares = float(summary["deviation"]) ** 2 * self.count
            self.minimum, self.maximum = float(summary["min"]), float(summary["max"])


@dataclass(slots=True)
class Totals:
    """What one device comes to. joules: None until its energy is known.  lost_at: Unix seconds."""

    device: Device
    running: dict[str, Running] = field(default_factory=lambda: {name: Running() for name in MEASURED})
    samples: int = 0
    joules: float | None = None
    lost_at: float | None = None
    throttled_s: dict[str, float] = field(default_factory=dict)
    foreign: dict[int, dict[str, Any]] = field(default_factory=dict)
    extras: dict[str, Running] = field(default_factory=dict)
    ecc: dict[str, int] = field(default_factory=dict)  # errors since the recording began
    last_ecc: dict[str, int] = field(default_factory=dict)
    last_counter: float | None = None
    last_power: tuple[float, float] | None = None  # time (s), watts

    def count(self, now: float, values: list[float], base: int) -> bool:
        """Take in the energy of one moment; put the joules so far in its place. Return whether the counter fell."""
        place = base + AT["energy_j"]
        counter, fell = values[place], False
        if counter == counter:  # noqa: PLR0124 (false for NaN, and faster than a call)
            fell = self._count(counter)
        else:
            self._integrate(now, values[base + AT["power"]])
            if all(map(math.isnan, values[base : base + WIDTH])):
                return False
        values[place] = UNKNOWN if self.joules is None else self.joules
        return fell

    def add(self, columns: Sequence[Sequence[float]]) -> None:
        """Take in moments: the values of each column."""
        for name, running in self.running.items():
            running.add(columns[AT[name]])
        if any(not math.isnan(sum(column)) for column in columns):
            self.samples += len(columns[0])
        else:
            self.samples += sum(not all(map(math.isnan, moment)) for moment in zip(*columns, strict=True))

    def look(self, extra: Extra) -> int:
        """Take in what is asked once a second; return how many uncorrected errors of memory are new."""
        for name, value in extra.known():
            if name in EXTRAS:
                self.extras.setdefault(name, Running()).add([value])
        new = 0
        for kind, now in (("corrected", extra.ecc_corrected), ("uncorrected", extra.ecc_uncorrected)):
            if now is not None:
                more = max(0, now - self.last_ecc.get(kind, now))
                self.ecc[kind] = self.ecc.get(kind, 0) + more
                self.last_ecc[kind] = now
                new = more
        return new

    def _count(self, counter: float) -> bool:
        """Add what the counter grew by. A lower value is a new base: the driver was loaded again."""
        before, self.last_counter = self.last_counter, counter
        if self.joules is None:
            self.joules = 0.0
        if before is None or counter < before:
            return before is not None
        self.joules += counter - before
        return False

    def _integrate(self, now: float, power: float) -> None:
        """Without a counter: sum up power by the trapezoid rule."""
        if math.isnan(power) or self.last_counter is not None:
            self.last_power = None
            return
        before, self.last_power = self.last_power, (now, power)
        if self.joules is None:
            self.joules = 0.0
        if before is not None and now - before[0] <= GAP_S:
            self.joules += (now - before[0]) * (power + before[1]) / 2

    def summary(self) -> dict[str, Any]:
        """Return the device's part of gpu_summary.json."""
        return {
            "gpu_index": self.device.gpu_index,
            "gpu_name": self.device.gpu_name,
            "uuid": self.device.uuid,
            "rank": self.device.rank,
            "samples": self.samples,
            "lost_at": self.lost_at,
            "memory_total": self.device.memory_total,
            **{name: running.summary() for name, running in self.running.items()},
            "joules": None if self.joules is None else round(self.joules, 3),
            "throttled_s": {reason: round(seconds, 1) for reason, seconds in sorted(self.throttled_s.items())},
            "foreign": [self.foreign[pid] for pid in sorted(self.foreign)],
            "ecc": dict(self.ecc) or None,
            **{name: running.summary() for name in EXTRAS if (running := self.extras.get(name))},
        }

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Go on from what an earlier attempt came to."""
        for name, running in self.running.items():
            running.restore(summary.get(name))
        self.samples, self.joules = int(summary["samples"]), summary["joules"]
        self.throttled_s = dict(summary["throttled_s"])
        self.foreign = {int(entry["pid"]): dict(entry) for entry in summary["foreign"]}
        self.ecc = dict(summary.get("ecc") or {})
        for name in EXTRAS:
            if known := summary.get(name):
                self.extras[name] = Running()
                self.extras[name].restore(known)


class Aggregate:
    """All devices of a recording, over all attempts of its run."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.totals = [Totals(device) for device in devices]
        self._waiting: list[tuple[float, ...]] = []  # moments that are not in the totals yet
        self.samples, self.late = 0, 0
        self.seconds = 0.0  # in which samples were taken
        self.memory = Running()  # of all devices together, MiB
        self.started: float | None = None  # Unix seconds
        self.ended: float | None = None
        self.warnings: list[str] = []
        self.host_joules: float | None = None  # of the whole machine, where devices have no counter

    def add(self, now: float, wall: float, values: list[float]) -> list[int]:
        """Take in one moment; energy counters in it become joules since the start. Return whose counter fell.

        now: monotonic seconds.  wall: Unix seconds.
        """
        self.samples += 1
        self.started = wall if self.started is None else self.started
        self.ended = wall
        fell = [at for at, totals in enumerate(self.totals) if totals.count(now, values, at * WIDTH)]
        self._waiting.append(tuple(values))
        if len(self._waiting) >= MOST_WAITING:
            self.fold()
        return fell

    def fold(self) -> None:
        """Take what waits into the totals: a column at a time costs a quarter of a value at a time."""
        if not self._waiting:
            return
        columns = list(zip(*self._waiting, strict=True))
        self._waiting.clear()
        for at, totals in enumerate(self.totals):
            totals.add(columns[at * WIDTH : (at + 1) * WIDTH])
        memory = columns[AT["memory_used"] :: WIDTH]
        used = list(map(sum, zip(*memory, strict=True)))
        if math.isnan(sum(used)):
            moments = ([value for value in moment if not math.isnan(value)] for moment in zip(*memory, strict=True))
            used = [sum(known) for known in moments if known]
        self.memory.add(used)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def summary(self, about: Mapping[str, Any], *, final: bool) -> dict[str, Any]:
        """Return gpu_summary.json. about: what it says beside numbers, in front of them."""
        self.fold()
        gpus = [totals.summary() for totals in self.totals]
        joules = [totals.joules for totals in self.totals if totals.joules is not None]
        everything = sum(joules) if joules else self.host_joules
        return {
            **about,
            "final": final,
            "started": self.started,
            "ended": self.ended,
            "seconds": round(self.seconds, 3),
            "hz_reached": round(self.samples / self.seconds, 3) if self.seconds else None,
            "samples": self.samples,
            "late": self.late,
            "warnings": list(self.warnings),
            "gpus": gpus,
            "totals": {
                "joules": None if everything is None else round(everything, 3),
                "mean_power": _rounded(_sum(self.totals, "power")),
                "memory_used_mean": _rounded(self.memory.mean),
                "memory_used_max": _rounded(self.memory.maximum if self.memory.count else None),
                "memory_used": self.memory.summary(),
                "host_joules": self.host_joules,
            },
            "balance": {
                "memory": _balance(self.totals, "memory_used"),
                "utilization": _balance(self.totals, "utilization"),
                "power": _balance(self.totals, "power"),
            },
        }

    def restore(self, summary: Mapping[str, Any] | None, recording: Recording | None) -> None:
        """Go on from an earlier attempt's summary and, where its recorder was killed, the samples after it.

        Raises ValueError for a summary of other devices.
        """
        if summary is not None:
            self._restore(summary)
        if recording is not None:
            self._replay(recording)

    def _restore(self, summary: Mapping[str, Any]) -> None:
        if [gpu["uuid"] for gpu in summary["gpus"]] != [totals.device.uuid for totals in self.totals]:
            raise ValueError("other devices")
        for totals, known in zip(self.totals, summary["gpus"], strict=True):
            totals.restore(known)
        self.samples, self.late = int(summary["samples"]), int(summary["late"])
        self.seconds, self.started, self.ended = float(summary["seconds"]), summary["started"], summary["ended"]
        self.memory.restore(summary["totals"].get("memory_used"))
        self.host_joules = summary["totals"].get("host_joules")
        self.warnings = list(summary["warnings"])

    def _replay(self, recording: Recording) -> None:
        """Take in the samples that are newer than the summary."""
        first = len(recording)
        while first and (self.ended is None or recording.times[first - 1] > self.ended):
            first -= 1
        for index in range(first, len(recording)):
            values = [columns[name][index] for columns in recording.columns for name in AT]
            joules = values[AT["energy_j"] :: WIDTH]
            before = self.ended
            self.add(recording.times[index], recording.times[index], values)
            if before is not None:
                self.seconds += max(0.0, min(GAP_S, recording.times[index] - before))
            for totals, value in zip(self.totals, joules, strict=True):
                if not math.isnan(value):
                    totals.joules = value  # the file keeps joules since the start, not the counter
        self.fold()
        for totals in self.totals:
            totals.last_counter = totals.last_power = None


def _sum(all_totals: Sequence[Totals], name: str) -> float | None:
    means = [mean for totals in all_totals if (mean := totals.running[name].mean) is not None]
    return sum(means) if means else None


def _balance(all_totals: Sequence[Totals], name: str) -> dict[str, Any] | None:
    """Return how evenly devices are used, by their means; None with fewer than two."""
    means = [mean for totals in all_totals if (mean := totals.running[name].mean) is not None]
    if len(means) < 2:
        return None
    cv = coefficient_of_variation(means)
    return {"cv": round(cv, PLACES), "quality": balance_quality(cv)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, PLACES)
