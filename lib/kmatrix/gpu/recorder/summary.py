"""The totals of a recording: means, deviations, energy and throttled time, in constant memory.

Energy is counted at each sample. The other columns are buffered and added once per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kmatrix.gpu.devices import COLUMN_INDEX, EXTRA_METRICS, UNKNOWN, WIDTH, Device, ExtraMetrics
from kmatrix.gpu.formats.binary import Recording
from kmatrix.gpu.processes import OtherProcess
from kmatrix.stats import balance_of

MEASURED = ("memory_used", "utilization", "power", "temperature", "sm_clock")
MAX_BUFFERED = 1000  # samples
GAP_S = 2.0  # power is not integrated over longer gaps between samples
PLACES = 6  # decimals in gpu_summary.json
EXCLUDED_ATTEMPT = "these numbers exclude an earlier attempt"  # start of a warning; the report replaces it


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
        self.minimum, self.maximum = min(self.minimum, *values), max(self.maximum, *values)

    @property
    def mean(self) -> float | None:
        return self._mean if self.count else None

    def summary(self) -> dict[str, Any] | None:
        """Return the entry for gpu_summary.json, or None without any value."""
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
        """Continue from the entry of gpu_summary.json."""
        if summary:
            self.count, self._mean = int(summary["count"]), float(summary["mean"])
            self._squares = float(summary["deviation"]) ** 2 * self.count
            self.minimum, self.maximum = float(summary["min"]), float(summary["max"])


@dataclass(slots=True)
class DeviceTotals:
    """The totals of one device."""

    device: Device
    running: dict[str, RunningStats] = field(default_factory=lambda: {name: RunningStats() for name in MEASURED})
    samples: int = 0  # samples with any known value
    joules: float | None = None  # J since the recording began, None until energy is known
    lost_at: float | None = None  # Unix s, None while the device answers
    throttled_s: dict[str, float] = field(default_factory=dict)  # reason -> s
    other_processes: dict[int, OtherProcess] = field(default_factory=dict)  # by pid
    extras: dict[str, RunningStats] = field(default_factory=dict)  # name in EXTRA_METRICS
    ecc: dict[str, int] = field(default_factory=dict)  # memory errors since the recording began, by kind
    last_ecc: dict[str, int] = field(default_factory=dict)  # the driver's counters at the last read
    last_counter: float | None = None  # J, the driver's counter at the last sample
    last_power: tuple[float, float] | None = None  # monotonic s, W

    def count(self, now: float, values: list[float], base: int) -> bool:
        """Add the energy of one sample, and replace its counter in `values` by the total. Return if it was reset."""
        place = base + COLUMN_INDEX["energy_j"]
        counter, was_reset = values[place], False
        if counter == counter:  # noqa: PLR0124 (false for NaN, and faster than a call)
            was_reset = self._count(counter)
        else:
            self._integrate(now, values[base + COLUMN_INDEX["power"]])
            if all(map(math.isnan, values[base : base + WIDTH])):
                return False
        values[place] = UNKNOWN if self.joules is None else self.joules
        return was_reset

    def add(self, columns: Sequence[Sequence[float]]) -> None:
        """Add samples, given as one sequence per column."""
        for name, running in self.running.items():
            running.add(columns[COLUMN_INDEX[name]])
        # A column without any NaN proves that every sample has a value; otherwise each one is checked.
        if any(not math.isnan(sum(column)) for column in columns):
            self.samples += len(columns[0])
        else:
            self.samples += sum(not all(map(math.isnan, sample)) for sample in zip(*columns, strict=True))

    def ingest(self, extra: ExtraMetrics) -> int:
        """Add expensive metrics. Return the number of new uncorrected memory errors."""
        for name, value in extra.known():
            if name in EXTRA_METRICS:
                self.extras.setdefault(name, RunningStats()).add([value])
        new = 0
        for kind, now in (("corrected", extra.ecc_corrected), ("uncorrected", extra.ecc_uncorrected)):
            if now is not None:
                # The driver's counters include errors from before the recording, and restart when it is reloaded.
                more = max(0, now - self.last_ecc.get(kind, now))
                self.ecc[kind] = self.ecc.get(kind, 0) + more
                self.last_ecc[kind] = now
                new = more
        return new

    def _count(self, counter: float) -> bool:
        """Add the increase of the counter. A lower value means that the driver was reloaded: return True."""
        before, self.last_counter = self.last_counter, counter
        if self.joules is None:
            self.joules = 0.0
        if before is None or counter < before:
            return before is not None
        self.joules += counter - before
        return False

    def _integrate(self, now: float, power: float) -> None:
        """Add the integral of power (trapezoidal rule), for devices without a counter."""
        # A device with a counter that did not answer this time: the next value of the counter covers the gap.
        if math.isnan(power) or self.last_counter is not None:
            self.last_power = None
            return
        before, self.last_power = self.last_power, (now, power)
        if self.joules is None:
            self.joules = 0.0
        if before is not None and now - before[0] <= GAP_S:
            self.joules += (now - before[0]) * (power + before[1]) / 2

    def summary(self) -> dict[str, Any]:
        """Return the entry of the device in gpu_summary.json."""
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
            "foreign": [asdict(self.other_processes[pid]) for pid in sorted(self.other_processes)],
            "ecc": dict(self.ecc) or None,
            **{name: running.summary() for name in EXTRA_METRICS if (running := self.extras.get(name))},
        }

    def restore(self, summary: Mapping[str, Any]) -> None:
        """Continue from the entry of an earlier attempt."""
        for name, running in self.running.items():
            running.restore(summary.get(name))
        self.samples, self.joules = int(summary["samples"]), summary["joules"]
        self.throttled_s = dict(summary["throttled_s"])
        self.other_processes = {
            int(entry["pid"]): OtherProcess(
                pid=int(entry["pid"]), name=entry.get("name"), memory_mib=entry.get("memory_mib")
            )
            for entry in summary["foreign"]
        }
        self.ecc = dict(summary.get("ecc") or {})
        for name in EXTRA_METRICS:
            if known := summary.get(name):
                self.extras[name] = RunningStats()
                self.extras[name].restore(known)


class RunTotals:
    """All devices of a recording, over all attempts of its run."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.totals = [DeviceTotals(device) for device in devices]
        self._buffer: list[tuple[float, ...]] = []  # samples that are not in the totals yet
        self.samples, self.late = 0, 0  # number of samples, of skipped ticks
        self.seconds = 0.0  # s, sampled time
        self.memory = RunningStats()  # MiB, sum over devices
        self.started: float | None = None  # Unix s
        self.ended: float | None = None
        self.warnings: list[str] = []
        self.host_joules: float | None = None  # J of the whole machine, if devices have no counter

    def add(self, now: float, wall: float, values: list[float]) -> list[int]:
        """Add one sample, and replace energy counters in `values` by totals. Return the devices with a reset counter.

        `now`: monotonic s. `wall`: Unix s.
        """
        self.samples += 1
        self.started = wall if self.started is None else self.started
        self.ended = wall
        reset = [at for at, totals in enumerate(self.totals) if totals.count(now, values, at * WIDTH)]
        self._buffer.append(tuple(values))
        if len(self._buffer) >= MAX_BUFFERED:
            self.fold()
        return reset

    def fold(self) -> None:
        """Add the buffered samples to the totals, column by column: four times faster than value by value."""
        if not self._buffer:
            return
        columns = list(zip(*self._buffer, strict=True))
        self._buffer.clear()
        for at, totals in enumerate(self.totals):
            totals.add(columns[at * WIDTH : (at + 1) * WIDTH])
        memory = columns[COLUMN_INDEX["memory_used"] :: WIDTH]
        used = list(map(sum, zip(*memory, strict=True)))
        if math.isnan(sum(used)):  # a device is unknown in some samples: sum the others
            samples = ([value for value in sample if not math.isnan(value)] for sample in zip(*memory, strict=True))
            used = [sum(known) for known in samples if known]
        self.memory.add(used)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def summary(self, about: Mapping[str, Any], *, final: bool) -> dict[str, Any]:
        """Return the content of gpu_summary.json. `about`: its first keys, which describe the recording."""
        self.fold()
        gpus = [totals.summary() for totals in self.totals]
        joules = [totals.joules for totals in self.totals if totals.joules is not None]
        everything = sum(joules) if joules else self.host_joules  # the host's counter is for ranks, which have none
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
                "mean_power": _rounded(_sum_of_means(self.totals, "power")),
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
        """Continue from the summary of an earlier attempt, and from newer samples if its recorder was killed.

        Raises ValueError if the summary belongs to other devices.
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
        """Add the samples that are newer than the summary."""
        first = len(recording)
        while first and (self.ended is None or recording.times[first - 1] > self.ended):
            first -= 1
        for index in range(first, len(recording)):
            values = [columns[name][index] for columns in recording.columns for name in COLUMN_INDEX]
            joules = values[COLUMN_INDEX["energy_j"] :: WIDTH]
            before = self.ended
            self.add(recording.times[index], recording.times[index], values)
            if before is not None:
                self.seconds += max(0.0, min(GAP_S, recording.times[index] - before))
            # `add` has counted the differences between totals; the recorded total itself is exact.
            for totals, value in zip(self.totals, joules, strict=True):
                if not math.isnan(value):
                    totals.joules = value  # the file contains totals, not the counter
        self.fold()
        # The next sample has the driver's counter again: its difference to a recorded total means nothing.
        for totals in self.totals:
            totals.last_counter = totals.last_power = None


def _sum_of_means(all_totals: Sequence[DeviceTotals], name: str) -> float | None:
    means = [mean for totals in all_totals if (mean := totals.running[name].mean) is not None]
    return sum(means) if means else None


def _balance(all_totals: Sequence[DeviceTotals], name: str) -> dict[str, Any] | None:
    """Return the balance of the devices' means, or None for fewer than two devices."""
    means = [mean for totals in all_totals if (mean := totals.running[name].mean) is not None]
    found = balance_of(means)
    return None if found is None else {"cv": round(found.cv, PLACES), "quality": found.quality}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, PLACES)
