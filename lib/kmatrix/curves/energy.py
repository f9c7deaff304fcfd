"""The energy of a run's devices over the wall clock, from its recordings."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from operator import le

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import Recording, read_samples
from kmatrix.gpu.formats.limits import HIGHEST
from kmatrix.records.paths import RunDir

SLACK_S = 2.0  # time before the first or after the last sample that still counts as recorded
MOST_COPIED = 32 << 20  # bytes of a recording that is copied to memory: an error of its disk must not end a report
MAX_GAP_S = 10.0  # between two samples of power that are integrated


@dataclass(frozen=True, slots=True)
class RecordedEnergy:
    """The energy counters of one recording."""

    times: Sequence[float]  # Unix s, ascending
    devices: tuple[Sequence[float], ...]  # J, per device or of the host; NaN: unknown
    simulated: bool

    def covers(self, begin: float, end: float) -> bool:
        """Return whether the recording holds the time between two readings of the wall clock."""
        return self.times[0] - SLACK_S <= begin and end <= self.times[-1] + SLACK_S

    def at(self, time: float) -> float:
        """Return the energy at a time in J, interpolated between two samples; NaN if it is unknown."""
        after = bisect_right(self.times, time)
        if after == 0 or after == len(self.times):
            at = 0 if after == 0 else -1
            return math.fsum(energy[at] for energy in self.devices)
        share = (time - self.times[after - 1]) / (self.times[after] - self.times[after - 1])
        return math.fsum(energy[after - 1] * (1 - share) + energy[after] * share for energy in self.devices)


def recordings_of(run_dir: RunDir) -> list[RecordedEnergy]:
    """Return the energy in the recordings of a run, of its last attempt first. Those without energy are left out."""
    found = []
    for path in (run_dir.gpu_samples, *reversed(run_dir.earlier_gpu_samples())):
        try:
            recording = read_samples(path, mapped=path.stat().st_size > MOST_COPIED)
        except (OSError, RecordError):
            continue
        if (energy := _energy(recording)) is not None:
            found.append(energy)
    return found


def joules_between(recordings: Sequence[RecordedEnergy], begin: float, end: float) -> float:
    """Return the energy (J) between two readings of the wall clock; NaN if no recording holds all of it."""
    for one in recordings:
        if one.covers(begin, end):
            joules = one.at(end) - one.at(begin)
            # A counter that decreased was reset by its driver.
            return joules if 0 <= joules <= HIGHEST["energy_j"] else math.nan
    return math.nan


def _energy(recording: Recording) -> RecordedEnergy | None:
    """Return the energy of all devices; None if it is unknown, or the clock was set back."""
    times = recording.times
    if len(times) < 2 or not all(map(le, times, islice(times, 1, None))):
        return None
    devices = [_of_device(times, columns.get("energy_j"), columns.get("power")) for columns in recording.columns]
    known = tuple(energy for energy in devices if energy is not None)
    is_complete = len(known) == len(devices)
    return RecordedEnergy(times, known, bool(recording.header.get("simulated"))) if is_complete else None


def _of_device(
    times: Sequence[float], energy: Sequence[float] | None, power: Sequence[float] | None
) -> Sequence[float] | None:
    """Return the energy counter of a device, else the integral of its power; None without both."""
    if energy is not None and not math.isnan(energy[0]):
        return energy
    if power is None or math.isnan(power[0]):
        return None
    areas = (
        (after - before) * (first + second) / 2 if after - before <= MAX_GAP_S else math.nan
        for (before, after), (first, second) in zip(pairwise(times), pairwise(power), strict=True)
    )
    return array("d", accumulate(areas, initial=0.0))
