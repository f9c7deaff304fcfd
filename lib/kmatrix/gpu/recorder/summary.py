"""The totals of a recording: means, deviations, energy and throttled time, in constant memory.

Energy is counted at each sample. The other columns are buffered and added once per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import add, sub
from typing import Any

from kmatrix.gpu.balance import balance_of
from kmatrix.gpu.devices import COLUMN_INDEX, EXTRA_METRICS, UNKNOWN, WIDTH, Device, ExtraMetrics
from kmatrix.gpu.formats.binary import Recording
from kmatrix.gpu.formats.summary import DeviceEntry, StatisticsEntry, SummaryFile
from kmatrix.gpu.processes import OtherProcess
from kmatrix.gpu.running import PLACES, RunningStats
from kmatrix.gpu.throttled import ThrottledTime
from kmatrix.stats import complete_sum

ENERGY, POWER = COLUMN_INDEX["energy_j"], COLUMN_INDEX["power"]
MEASURED = ("memory_used", "utilization", "power", "temperature", "sm_clock")
MAX_BUFFERED = 1000  # samples
GAP_S = 2.0  # power is not integrated over longer gaps between samples
SILENT_S = 1.0  # without any value for this long, a GPU did not respond
# In warnings about a device, which each summary rewrites.
NO_RESPONSE, NO_POWER = "did not respond for", "has no power for more than"
EXCLUDED_ATTEMPT = "these numbers exclude an earlier attempt"  # start of a warning; the report replaces it


@dataclass(slots=True)
class DeviceTotals:
    """The totals of one device."""

    device: Device
    gap_s: float = GAP_S  # longest time between two samples over which power is integrated
    running: dict[str, RunningStats] = field(default_factory=lambda: {name: RunningStats() for name in MEASURED})
    samples: int = 0  # samples with any known value
    joules: float | None = None  # J since the recording began, None until energy is known
    lost_at: float | None = None  # Unix s, None while the device answers
    lost_s: float = 0.0  # s without any value
    unmeasured_for: float = 0.0  # s without power until now, for devices without an energy counter
    silent_for: float = 0.0  # s without any value until now, 0 while the device answers
    energy_gap: bool = False  # an unknown amount of energy is missing in `joules`
    throttled: ThrottledTime = field(default_factory=ThrottledTime)
    other_processes: dict[int, OtherProcess] = field(default_factory=dict)  # by pid
    extras: dict[str, RunningStats] = field(default_factory=dict)  # name in EXTRA_METRICS
    ecc: int | None = None  # uncorrected memory errors since the recording began
    last_ecc: int | None = None  # the driver's counter at the last read
    last_counter: float | None = None  # J, the driver's counter at the last sample
    last_power: tuple[float, float] | None = None  # monotonic s, W

    def count(self, now: float, step: float, values: list[float], base: int) -> bool:
        """Add the energy of one sample, and replace its counter in `values` by the total. Return if it was reset.

        `now`: monotonic s. `step`: s since the previous sample.
        """
        place = base + ENERGY
        counter, was_reset = values[place], False
        if counter == counter:  # noqa: PLR0124 (false for NaN, and faster than a call)
            was_reset = self._count(counter)
        else:
            self._integrate(now, step, values[base + POWER])
            if all(map(math.isnan, values[base : base + WIDTH])):
                self.silent_for += step
                self.lost_s += step
                return False
        self.silent_for = 0.0
        values[place] = UNKNOWN if self.joules is None or self.energy_gap else self.joules
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
        now = extra.ecc_uncorrected
        if now is None:
            return 0
        # The driver's counter includes errors from before the recording, and restarts when it is reloaded.
        new = 0 if self.last_ecc is None else max(0, now - self.last_ecc)
        self.ecc, self.last_ecc = (self.ecc or 0) + new, now
        return new

    def _count(self, counter: float) -> bool:
        """Add the increase of the counter. A lower value means that the driver was reloaded: return True."""
        before, self.last_counter = self.last_counter, counter
        if self.joules is None:
            self.joules = 0.0
        if before is None or counter < before:
            # Between two samples little is missing; while the device did not answer, nobody knows how much.
            self.energy_gap = self.energy_gap or self.silent_for > self.gap_s
            return before is not None
        self.joules += counter - before
        return False

    def _integrate(self, now: float, step: float, power: float) -> None:
        """Add the integral of power (trapezoidal rule), for devices without a counter."""
        # A device with a counter that did not answer this time: the next value of the counter covers the gap.
        if self.last_counter is not None:
            return
        if math.isnan(power):
            self.unmeasured_for += step
            return
        self.energy_gap = self.energy_gap or self.unmeasured_for > self.gap_s
        before, self.last_power, self.unmeasured_for = self.last_power, (now, power), 0.0
        if self.joules is None:
            self.joules = 0.0
        # Without any sample for long, the machine was suspended: it used no energy that belongs to the run.
        if before is not None and now - before[0] <= self.gap_s:
            self.joules += (now - before[0]) * (power + before[1]) / 2

    @property
    def is_silent_or_gapped(self) -> bool:
        """True if the next sample may need more than the increase of the counter."""
        return self.silent_for > 0 or self.energy_gap

    @property
    def known_joules(self) -> float | None:
        """J since the recording began, None if a part of it is unknown."""
        return None if self.energy_gap else self.joules

    @property
    def _counter_start(self) -> float | None:
        """The driver's counter, in J, at which `joules` was 0. Constant until the counter is reset."""
        if self.last_counter is None or self.known_joules is None:
            return None
        return self.last_counter - self.known_joules

    def summary(self) -> dict[str, Any]:
        """Return the entry of the device in gpu_summary.json."""
        return {
            "gpu_index": self.device.gpu_index,
            "gpu_name": self.device.gpu_name,
            "uuid": self.device.uuid,
            "rank": self.device.rank,
            "samples": self.samples,
            "lost_at": self.lost_at,
            "energy_gap": self.energy_gap,
            "memory_total": self.device.memory_total,
            **{name: running.summary() for name, running in self.running.items()},
            "joules": None if self.known_joules is None else round(self.known_joules, 3),
            "counter_start": _rounded(self._counter_start),
            "throttled_s": {reason: round(seconds, 1) for reason, seconds in sorted(self.throttled.seconds.items())},
            "foreign": [asdict(self.other_processes[pid]) for pid in sorted(self.other_processes)],
            "ecc_uncorrected": self.ecc,
            **{name: running.summary() for name in EXTRA_METRICS if (running := self.extras.get(name))},
        }

    def restore(self, entry: DeviceEntry) -> None:
        """Continue from the entry of an earlier attempt."""
        for name in self.running:
            self.running[name] = _restored(getattr(entry, name))
        self.samples, self.joules = entry.samples, entry.joules
        self.lost_s, self.energy_gap = entry.lost_s, entry.energy_gap
        self.throttled = ThrottledTime(entry.throttled_s)
        self.other_processes = {
            one.pid: OtherProcess(pid=one.pid, name=one.name, memory_mib=one.memory_mib) for one in entry.foreign
        }
        self.ecc = entry.ecc_uncorrected
        for name in EXTRA_METRICS:
            if known := getattr(entry, name):
                self.extras[name] = _restored(known)


class RunTotals:
    """All devices of a recording, over all attempts of its run."""

    def __init__(self, devices: Sequence[Device], *, ranks: bool = False, hz: float | None = None) -> None:
        """Start with nothing recorded. `hz`: the sampling rate.

        `ranks`: the devices are ranks on the CPU, which have no values before their start and after their end.
        """
        self._ranks = ranks
        self._hz = hz
        self._gap_s = max(GAP_S, 2 / hz) if hz else GAP_S  # at low rates, samples are further apart than GAP_S
        self.totals = [DeviceTotals(device, self._gap_s) for device in devices]
        self._buffer: list[tuple[float, ...]] = []  # samples that are not in the totals yet
        self._counters: list[float] = []  # J, the driver's counters at the last sample; empty: see _count_each
        self._counted: list[float] = []  # J of each device, newer than those in `totals`
        self.samples, self.late = 0, 0  # number of samples, of skipped ticks
        self.seconds = 0.0  # s, sampled time
        self.memory = RunningStats()  # MiB, sum over devices
        self.started: float | None = None  # Unix s
        self.ended: float | None = None
        self.ended_at: float | None = None  # s, monotonic: time of the last sample, like `ended`
        self.warnings: list[str] = []

    def add(self, now: float, wall: float, values: list[float]) -> list[int]:
        """Add one sample, and replace energy counters in `values` by totals. Return the devices with a reset counter.

        `now`: monotonic s. `wall`: Unix s.
        """
        self.samples += 1
        self.started = wall if self.started is None else self.started
        step = 0.0 if self.ended_at is None else min(self._gap_s, max(0.0, now - self.ended_at))
        self.ended, self.ended_at = wall, now
        reset = [] if self._add_energy(values) else self._count_each(now, step, values)
        self._buffer.append(tuple(values))
        if len(self._buffer) >= MAX_BUFFERED:
            self.fold()
        return reset

    def _add_energy(self, values: list[float]) -> bool:
        """Add the energy of a sample in which every counter increased, as almost always. Return False otherwise.

        Device by device, as below, takes four times as long, a quarter of the time of a tick with 8 GPUs.
        """
        if not self._counters:
            return False
        counters = values[ENERGY::WIDTH]
        more = list(map(sub, counters, self._counters))
        # The sum is NaN, and fails the comparison, if a counter is unknown.
        if not (sum(more) >= 0 and min(more) >= 0):
            return False
        self._counters, self._counted = counters, list(map(add, self._counted, more))
        values[ENERGY::WIDTH] = self._counted
        return True

    def _count_each(self, now: float, step: float, values: list[float]) -> list[int]:
        """Add the energy of a sample device by device. Return the devices with a reset counter."""
        self._store_energy()
        reset = [at for at, totals in enumerate(self.totals) if totals.count(now, step, values, at * WIDTH)]
        known = [(totals.last_counter, totals.joules) for totals in self.totals if not totals.is_silent_or_gapped]
        both = [(counter, joules) for counter, joules in known if counter is not None and joules is not None]
        if len(both) == len(self.totals):
            self._counters, self._counted = [counter for counter, _ in both], [joules for _, joules in both]
        return reset

    def _store_energy(self) -> None:
        """Write the energy that `_add_energy` added to the devices. The next sample is counted device by device."""
        for totals, counter, joules in zip(self.totals, self._counters, self._counted, strict=False):
            totals.last_counter, totals.joules = counter, joules
        self._counters, self._counted = [], []

    def fold(self) -> None:
        """Add the buffered samples to the totals, column by column: four times faster than value by value."""
        self._store_energy()
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
        gpus = [{**totals.summary(), "lost_s": round(self._lost_s(totals), 3)} for totals in self.totals]
        return {
            **about,
            "final": final,
            "started": self.started,
            "ended": self.ended,
            "ended_monotonic": self.ended_at,
            "seconds": round(self.seconds, 3),
            "hz_reached": round(self.samples / self.seconds, 3) if self.seconds else None,
            "samples": self.samples,
            "late": self.late,
            "warnings": [*self.warnings, *self._losses()],
            "gpus": gpus,
            "totals": {
                "joules": _rounded(self._joules()),
                "mean_power": None if any(map(self._lost_s, self.totals)) else self._sum_of_means("power"),
                "memory_used_mean": self._sum_of_means("memory_used"),
                "memory_used_max": _rounded(self.memory.maximum if self.memory.count else None),
                "memory_used": self.memory.summary(),
            },
            "balance": {
                "memory": _balance(self.totals, "memory_used"),
                "utilization": _balance(self.totals, "utilization"),
                "power": _balance(self.totals, "power"),
            },
        }

    def restore(self, summary: SummaryFile | None, recording: Recording | None, *, attempt: int | None = None) -> None:
        """Continue from the summary of an earlier recorder, and from newer samples if it was killed.

        attempt: the one to record; None: unknown. Raises ValueError if the summary belongs to other devices.
        """
        if summary is not None:
            self._restore(summary)
        if recording is not None:
            self._replay(recording)
            if summary is not None and attempt is not None and summary.attempt == attempt:
                self._continue_energy(summary, recording)

    def _restore(self, summary: SummaryFile) -> None:
        if [gpu.uuid for gpu in summary.gpus] != [totals.device.uuid for totals in self.totals]:
            raise ValueError("other devices")
        if summary.samples is None or summary.seconds is None:
            raise ValueError("the summary has no samples")
        for totals, known in zip(self.totals, summary.gpus, strict=True):
            totals.restore(known)
        self.samples, self.late = summary.samples, summary.late
        self.seconds, self.started, self.ended = summary.seconds, summary.started, summary.ended
        self.memory = _restored(summary.totals.memory_used)
        self.ended_at = summary.ended_monotonic
        self.warnings = [text for text in summary.warnings if NO_RESPONSE not in text and NO_POWER not in text]

    def _replay(self, recording: Recording) -> None:
        """Add the samples that are newer than the summary."""
        monotonic = recording.monotonic
        for index in range(self._first_newer(recording), len(recording)):
            values = [columns[name][index] for columns in recording.columns for name in COLUMN_INDEX]
            joules = values[ENERGY::WIDTH]
            before = self.ended_at
            self.add(monotonic[index], recording.times[index], values)
            if before is not None:
                self.seconds += max(0.0, min(self._gap_s, monotonic[index] - before))
            # `add` has counted the differences between totals; the recorded total itself is exact.
            self._store_energy()
            for totals, value in zip(self.totals, joules, strict=True):
                if not math.isnan(value):
                    totals.joules = value  # the file contains totals, not the counter
        self.fold()
        for totals, columns in zip(self.totals, recording.columns, strict=True):
            # No total although the device answers: a part of its energy became unknown after the summary.
            answers = any(not math.isnan(values[-1]) for values in columns.values()) if len(recording) else False
            if answers and totals.joules is not None and math.isnan(columns["energy_j"][-1]):
                totals.energy_gap = True
        # The next sample has the driver's counter again: its difference to a recorded total means nothing.
        self._store_energy()
        for totals in self.totals:
            totals.last_counter = totals.last_power = None
            totals.silent_for = totals.unmeasured_for = 0.0
        self.ended_at = None  # the machine may have booted since

    def _continue_energy(self, summary: SummaryFile, recording: Recording) -> None:
        """Add the time and energy since the last sample with the next one: both recorders are of the same attempt."""
        if not len(recording):
            return
        last = self.ended_at = recording.monotonic[-1]
        for totals, known, columns in zip(self.totals, summary.gpus, recording.columns, strict=True):
            if known.counter_start is not None and totals.joules is not None:
                totals.last_counter = known.counter_start + totals.joules
            elif not math.isnan(power := columns["power"][-1]):
                totals.last_power = (last, power)

    def seconds_since_last(self, now: float) -> float:
        """Return the time in s between the end of the last sample and now, 0 if the next attempt has begun since."""
        if self.ended_at is None:
            return 0.0
        return max(0.0, now - self.ended_at - (1.0 / self._hz if self._hz else 0.0))

    def _first_newer(self, recording: Recording) -> int:
        """Return the index of the first sample that the summary does not contain."""
        count = len(recording)
        if self.ended is None:
            return 0
        # By equality: the clock of the machine may have been set back since the summary.
        found = next((at for at in reversed(range(count)) if recording.times[at] == self.ended), None)
        if found is not None:
            return found + 1
        # The last sample of the summary could not be written, on a full disk.
        return next((at + 1 for at in reversed(range(count)) if recording.times[at] <= self.ended), 0)

    def _joules(self) -> float | None:
        """Return the energy of all devices in J, None if a part of it is unknown."""
        return complete_sum([totals.known_joules for totals in self.totals])

    def _sum_of_means(self, name: str) -> float | None:
        """Return the sum of the means of all devices, None if one of them has no value."""
        return _rounded(complete_sum([totals.running[name].mean for totals in self.totals]))

    def _lost_s(self, totals: DeviceTotals) -> float:
        """Return the time in s in which a GPU did not respond, 0 if that was a few failed queries."""
        return 0.0 if self._ranks or totals.lost_s < SILENT_S else totals.lost_s

    def _losses(self) -> Iterator[str]:
        """Yield a warning per GPU that did not respond for some time, or whose energy has a gap."""
        for totals in self.totals:
            name, lost_s = f"GPU {totals.device.gpu_index}", self._lost_s(totals)
            if lost_s:
                unknown = "its energy and mean power are" if totals.energy_gap else "its mean power is"
                yield f"{name} {NO_RESPONSE} {lost_s:.1f} s: {unknown} unknown, its other means are of the rest"
            elif totals.energy_gap and not self._ranks:
                yield f"{name} {NO_POWER} {self._gap_s:g} s: its energy is unknown"


def _restored(entry: StatisticsEntry | None) -> RunningStats:
    """Return the running statistics that an entry of gpu_summary.json continues."""
    running = RunningStats()
    if entry is not None and entry.mean is not None:
        low, high = (entry.mean if bound is None else bound for bound in (entry.min, entry.max))
        running.restore(entry.mean, entry.deviation or 0.0, low, high, entry.count)
    return running


def _balance(all_totals: Sequence[DeviceTotals], name: str) -> dict[str, Any] | None:
    """Return the balance of the devices' means, or None for fewer than two devices."""
    means = [mean for totals in all_totals if (mean := totals.running[name].mean) is not None]
    found = balance_of(means)
    return None if found is None else {"cv": round(found.cv, PLACES), "quality": found.quality}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, PLACES)
