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
from kmatrix.text import plural

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")  # MiB, %, W, degrees C, MHz
MEASURED = (*QUANTITIES, "energy_j")  # J, a counter
CPU = "cpu"  # device type of ranks on the CPU
RANK_NAME = "CPU rank "  # prefix of the device name that the recorder gives a rank
IMPOSSIBLE, SELECTED = "impossible values", "one GPU at a time"  # reasons why devices cannot be compared
SHORTEST_GAP_S, LONGEST_GAP_S = 2.0, 60.0
REPLACED_S = 5.0  # both clocks of a machine differ by less over a pause


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One GPU of a recording, or one rank on the CPU."""

    index: int
    name: str
    uuid: str = ""
    rank: int | None = None
    memory_total: float | None = None  # MiB

    @property
    def identity(self) -> tuple[int, str, str]:
        return self.index, self.uuid, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One recording in a table."""

    rows: slice
    places: Sequence[int]  # of its devices in the table
    raw: Mapping[str, Sequence[Any]] = field(repr=False)  # quantity -> values (samples,) per device, as in the file


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The recordings of one machine, oldest first: `samples["power"]` has the values (samples, devices), NaN: unknown.

    Each access makes a new array: a recording of days does not fit in memory with all quantities at once.
    """

    devices: tuple[DeviceFacts, ...]  # those of the last recording first
    wall: Array = field(repr=False)  # (samples,), Unix s
    monotonic: Array | None = field(default=None, repr=False)  # (samples,), s since the boot; None: not recorded
    parts: tuple[Part, ...]  # at least one, with at least one sample and one device
    device_type: str  # nvidia, CPU or "" (unknown)
    simulated: bool
    doubt: str = ""  # why its devices cannot be compared; empty: they can
    shows_losses: bool = True  # a device without any value did not respond: it was neither unselected nor unread
    notes: tuple[str, ...] = ()  # what could not be read or cannot be true, one sentence each

    def __len__(self) -> int:
        return len(self.wall)

    def __getitem__(self, quantity: str) -> Array:
        found = np.full((len(self), len(self.devices)), np.nan)
        for part in self.parts:
            for place, raw in zip(part.places, part.raw[quantity], strict=True):
                low, high = self._limits(quantity, place)
                values = np.asarray(raw, dtype=float)
                found[part.rows, place] = np.where((values >= low) & (values <= high), values, np.nan)
        return found

    def _limits(self, quantity: str, place: int) -> tuple[float, float]:
        return limits_of(quantity, self.devices[place].memory_total, is_rank=self.device_type == CPU)

    def impossible(self) -> dict[str, int]:
        """Return quantity -> number of values that cannot be true, of those that have some."""
        counts = dict.fromkeys(MEASURED, 0)
        for part in self.parts:
            for quantity in MEASURED:
                for place, raw in zip(part.places, part.raw[quantity], strict=True):
                    low, high = self._limits(quantity, place)
                    values = np.asarray(raw, dtype=float)
                    counts[quantity] += int(np.count_nonzero((values < low) | (values > high)))
        return {quantity: count for quantity, count in counts.items() if count}

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

    @property
    def joints(self) -> list[int]:
        """The last sample of each recording but the last one."""
        return [part.rows.start - 1 for part in self.parts[1:]]

    @cached_property
    def gaps(self) -> Mask:
        """Whether nothing was recorded between two samples (samples - 1,)."""
        found = np.diff(self.time) > self.gap_s
        found[self.joints] = True
        return found

    @property
    def seconds(self) -> float:
        """The sampled time (s)."""
        return float(np.diff(self.time)[~self.gaps].sum())

    @cached_property
    def newest(self) -> Mask:
        """Which samples are of exactly the devices of the last recording (samples,)."""
        found, last = np.zeros(len(self), dtype=bool), sorted(self.parts[-1].places)
        for part in self.parts:
            found[part.rows] = sorted(part.places) == last
        return found

    def at(self, wall: float, monotonic: float | None = None) -> float:
        """Return the time (s since the first sample) at which both clocks had these readings, also outside of it."""
        if monotonic is not None and self.monotonic is not None:
            # The difference of the clocks identifies the boot: the monotonic time starts near 0 at each.
            places, offsets = self._boots
            nearest = np.argmin(np.abs(offsets - (wall - monotonic)))
            if abs(offsets[nearest] - (wall - monotonic)) < REPLACED_S:
                place = places[nearest]
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
    wall: Sequence[float],
    monotonic: Sequence[float] | None = None,
    *,
    device_type: str | None = None,
    doubt: str = "",
    notes: Sequence[str] = (),
    **known: Any,
) -> Samples:
    """Return a recording without samples whose time cannot be true, and with a note about what cannot be true.

    raw: quantity -> values (samples,) per device. device_type: None if the names of the devices tell. known: further
    fields. Raises RecordError if there is no sample.
    """
    times, found = np.array(wall, dtype=float), list(notes)
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
    part = Part(rows=slice(0, len(times)), places=range(len(devices)), raw=raw)
    are_ranks = all(one.name.startswith(RANK_NAME) for one in devices)
    samples = Samples(
        devices=tuple(devices),
        wall=times,
        monotonic=None if monotonic is None else np.array(monotonic, dtype=float),
        parts=(part,),
        device_type=(CPU if are_ranks else "") if device_type is None else device_type,
        **{"simulated": any(one.name.endswith(SIMULATED) for one in devices), **known},
    )
    if counts := samples.impossible():
        listed = ", ".join(f"{count:,} of {quantity}" for quantity, count in counts.items())
        many = plural(sum(counts.values()), "value")
        found.append(f"{path.name}: {many} that cannot be true, unknown instead: {listed}")
        doubt = doubt or IMPOSSIBLE
    return replace(samples, doubt=doubt, notes=tuple(found))


def joined(recordings: Sequence[Samples]) -> Samples:
    """Return the recordings of one machine, oldest first, as one table with the devices of all."""
    devices: dict[tuple[int, str, str], DeviceFacts] = {}
    for one in reversed(recordings):
        for device in one.devices:
            devices.setdefault(device.identity, device)
    places, parts, begin = {identity: place for place, identity in enumerate(devices)}, [], 0
    for one in recordings:
        of_each = [places[device.identity] for device in one.devices]
        parts.append(Part(rows=slice(begin, begin + len(one)), places=of_each, raw=one.parts[0].raw))
        begin += len(one)
    clocks = [one.monotonic for one in recordings if one.monotonic is not None]
    return replace(
        recordings[-1],
        devices=tuple(devices.values()),
        wall=np.concatenate([one.wall for one in recordings]),
        monotonic=np.concatenate(clocks) if len(clocks) == len(recordings) else None,
        parts=tuple(parts),
        notes=tuple(note for one in recordings for note in one.notes),
    )


def facts_of(index: int, name: str, uuid: str, total: Array) -> DeviceFacts:
    """Return a device of a text recording. total: its memory in all samples (samples,), MiB."""
    known = total[~np.isnan(total)]
    return DeviceFacts(index=index, name=name, uuid=uuid, memory_total=float(known[-1]) if len(known) else None)


def label_of(facts: DeviceFacts, host: str, *, is_cpu: bool) -> str:
    """Return the name of a device for a reader: "GPU 2", or "rank 0" on the CPU; with its host "GPU 2 on n1"."""
    number = facts.index if facts.rank is None or not is_cpu else facts.rank
    return f"{unit_of(is_cpu)} {number}{f' on {host}' if host else ''}"


def unit_of(is_cpu: bool) -> str:
    """Return the word for a device."""
    return "rank" if is_cpu else "GPU"
