"""The samples of GPU recordings as a table, whatever their format: impossible values and times are unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.limits import EARLIEST, LATEST, limits_of
from kmatrix.gpu.formats.samples import SIMULATED
from kmatrix.records.decode import replaced
from kmatrix.report.gpu.results import DeviceFacts
from kmatrix.text import plural

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")  # MiB, %, W, degrees C, MHz
MEASURED = (*QUANTITIES, "energy_j")  # J, a counter
IMPOSSIBLE, SELECTED = "impossible values", "one GPU at a time"  # reasons why devices cannot be compared
SHORTEST_GAP_S, LONGEST_GAP_S = 2.0, 60.0
REPLACED_S = 5.0  # both clocks of a machine differ by less over a pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One recording in a table."""

    rows: slice
    places: range  # of its devices in the table
    raw: Mapping[str, Sequence[Any]] = field(repr=False)  # quantity -> values (samples,) per device, as in the file


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The recordings of one machine, oldest first: `samples["power"]` has the values (samples, devices), NaN: unknown.

    Each access makes a new array: a recording of days does not fit in memory with all quantities at once.
    """

    devices: tuple[DeviceFacts, ...]  # of each recording, those of the last one first
    wall: Array = field(repr=False)  # (samples,), Unix s
    monotonic: Array | None = field(default=None, repr=False)  # (samples,), s since the boot; None: not recorded
    parts: tuple[Part, ...]  # at least one, with at least one sample and one device
    doubt: str = ""  # why its devices cannot be compared, nor be said to be lost; empty: they can
    notes: tuple[str, ...] = ()  # what could not be read or cannot be true, one sentence each

    def __len__(self) -> int:
        return len(self.wall)

    def __getitem__(self, quantity: str) -> Array:
        return self.read(quantity)[0]

    def read(self, quantity: str) -> tuple[Array, int]:
        """Return the values of a quantity, and how many cannot be true, which are unknown."""
        found, impossible = np.full((len(self), len(self.devices)), np.nan), 0
        for part in self.parts:
            for place, raw in zip(part.places, part.raw[quantity], strict=True):
                device, values = self.devices[place], np.array(raw, dtype=float)
                low, high = limits_of(quantity, device.memory_total, is_rank=device.unit == "rank")
                wrong = (values < low) | (values > high)
                values[wrong] = np.nan
                found[part.rows, place] = values
                impossible += int(np.count_nonzero(wrong))
        return found, impossible

    @property
    def simulated(self) -> bool:
        return any(one.gpu_name.endswith(SIMULATED) for one in self.devices)

    @cached_property
    def time(self) -> Array:
        """(samples,), s since the first one: never goes back, whatever the clock of the machine does."""
        steps = passed = np.diff(self.wall)
        if self.monotonic is not None:
            steps = np.diff(self.monotonic)
            # The machine booted, or another one continued the file.
            replaced = (steps < 0) | ((steps > REPLACED_S) & (np.abs(passed - steps) > REPLACED_S))
            steps = np.where(replaced, passed, steps)
        return np.concatenate([[0.0], np.cumsum(np.maximum(steps, 0))])

    @cached_property
    def usual_s(self) -> float:
        """The usual time (s) between two samples; 0 for one sample."""
        steps = np.diff(self.time)
        return float(np.median(steps[steps > 0])) if self.time[-1] else 0.0

    @property
    def gap_s(self) -> float:
        """The longest time (s) between two samples in which everything went on as usual; a longer one is a gap.

        Twice the usual time between two samples, but from 2 to 60 s.
        """
        return min(max(SHORTEST_GAP_S, 2 * self.usual_s), LONGEST_GAP_S)

    @cached_property
    def gaps(self) -> Mask:
        """Whether nothing was recorded between two samples (samples - 1,)."""
        found = np.diff(self.time) > self.gap_s
        found[[part.rows.start - 1 for part in self.parts[1:]]] = True
        return found

    @property
    def seconds(self) -> float:
        """The sampled time (s)."""
        return float(np.diff(self.time)[~self.gaps].sum())

    def at(self, wall: float, monotonic: float | None = None) -> float:
        """Return the time (s since the first sample) at which both clocks had these readings, also outside of it."""
        if monotonic is not None and self.monotonic is not None:
            # The difference of the clocks identifies the boot: the monotonic time starts near 0 at each.
            places, offsets = self._boots
            far = np.abs(offsets - (wall - monotonic))
            if far.min() < REPLACED_S:
                place = places[far.argmin()]
                return float(self.time[place] + monotonic - self.monotonic[place])
        place = max(np.flatnonzero(self.wall <= wall), default=0)
        return float(self.time[place] + wall - self.wall[place])

    @cached_property
    def _boots(self) -> tuple[npt.NDArray[np.intp], Array]:
        """The first sample of each boot, or after the wall clock was set, and the difference of both clocks there."""
        offsets = self.wall - (0 if self.monotonic is None else self.monotonic)
        places = np.flatnonzero(np.abs(np.diff(offsets, prepend=np.inf)) > 1)
        return places, offsets[places]


def samples_of(
    path: Path,
    devices: Sequence[DeviceFacts],
    raw: Mapping[str, Sequence[Any]],
    wall: Sequence[float] | Array,
    monotonic: Sequence[float] | None = None,
    *,
    doubt: str = "",
    notes: Sequence[str] = (),
) -> Samples:
    """Return a recording without samples whose time cannot be true, and with notes about what cannot be true.

    raw: quantity -> values (samples,) per device; memory_total: of a text. Raises RecordError if there is no sample.
    """
    times, found = np.array(wall, dtype=float), list(notes)
    if "memory_total" in raw:
        sizes = [total[np.isfinite(total)][-1:].tolist() or [None] for total in raw["memory_total"]]
        devices = [replaced(one, memory_total=size[0]) for one, size in zip(devices, sizes, strict=True)]
    if monotonic is None:  # a text
        sound = (times >= EARLIEST) & (times <= LATEST)
        if strange := times[~sound].tolist():
            many = plural(len(strange), "time")
            found.append(f"{path.name}: {many} that cannot be true, such as {strange[0]:.10g} s: left out")
            times, raw = times[sound], {name: [one[sound] for one in columns] for name, columns in raw.items()}
        if back := int(np.count_nonzero(np.diff(times) <= 0)):
            found.append(f"{path.name}: the time does not go on {plural(back, 'time')}: counted as no time")
            doubt = doubt or IMPOSSIBLE
    if not len(times):
        raise RecordError(f"{path} contains no sample", why="; ".join(found))
    samples = Samples(
        devices=tuple(devices),
        wall=times,
        monotonic=None if monotonic is None else np.array(monotonic, dtype=float),
        parts=(Part(rows=slice(0, len(times)), places=range(len(devices)), raw=raw),),
    )
    if counts := {quantity: count for quantity in MEASURED if (count := samples.read(quantity)[1])}:
        listed = ", ".join(f"{count:,} of {quantity}" for quantity, count in counts.items())
        many = plural(sum(counts.values()), "value")
        found.append(f"{path.name}: {many} that cannot be true, unknown instead: {listed}")
        doubt = doubt or IMPOSSIBLE
    return replace(samples, doubt=doubt, notes=tuple(found))


def joined(recordings: Sequence[Samples]) -> Samples:
    """Return the recordings of one machine, oldest first, as one table with the devices of each."""
    parts, end, place = list[Part](), sum(map(len, recordings)), 0
    for one in reversed(recordings):
        begin, after = end - len(one), place + len(one.devices)
        parts.insert(0, Part(rows=slice(begin, end), places=range(place, after), raw=one.parts[0].raw))
        end, place = begin, after
    clocks = [one.monotonic for one in recordings if one.monotonic is not None]
    return replace(
        recordings[-1],
        devices=tuple(device for one in reversed(recordings) for device in one.devices),
        wall=np.concatenate([one.wall for one in recordings]),
        monotonic=np.concatenate(clocks) if clocks else None,
        parts=tuple(parts),
        notes=tuple(note for one in recordings for note in one.notes),
    )
