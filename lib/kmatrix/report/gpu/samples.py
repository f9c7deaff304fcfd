"""The samples of a GPU recording as arrays, whatever its format: impossible values and times are unknown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")  # MiB, %, W, degrees C, MHz
MEASURED = (*QUANTITIES, "energy_j")  # J, a counter
CPU = "cpu"  # device type of ranks on the CPU
RANK_NAME = "CPU rank "  # prefix of the device name that the recorder gives a rank
IMPOSSIBLE, SELECTED = "impossible values", "one GPU at a time"  # reasons why devices cannot be compared
SHORTEST_GAP_S, LONGEST_GAP_S = 2.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One GPU of a recording, or one rank on the CPU."""

    index: int
    name: str
    uuid: str = ""
    rank: int | None = None
    memory_total: float | None = None  # MiB


class Columns(Mapping[str, Array]):
    """Quantity -> values (samples, devices), NaN: unknown, as are values that cannot be true.

    Each access makes a new array: a recording of days does not fit in memory with all quantities at once.
    """

    def __init__(self, raw: Mapping[str, Sequence[Any]], devices: Sequence[DeviceFacts], *, ranks: bool) -> None:
        """Keep the values as they are in the file. raw: quantity -> values (samples,) per device."""
        self._raw, self._devices, self._ranks = raw, devices, ranks

    def __getitem__(self, quantity: str) -> Array:
        values = np.stack([np.array(one, dtype=float) for one in self._raw[quantity]], axis=1)
        limits = [limits_of(quantity, one.memory_total, is_rank=self._ranks) for one in self._devices]
        low, high = np.array(limits).T
        values[~((values >= low) & (values <= high))] = np.nan
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def impossible(self) -> dict[str, int]:
        """Return quantity -> number of values that cannot be true, of those that have some."""
        found = {}
        for quantity, raw in self._raw.items():
            unknown = sum(int(np.count_nonzero(np.isnan(one))) for one in raw)
            found[quantity] = int(np.count_nonzero(np.isnan(self[quantity]))) - unknown
        return {quantity: count for quantity, count in found.items() if count}


@dataclass(frozen=True, kw_only=True)
class Samples:
    """One recording: samples of all of its devices, at least one."""

    devices: tuple[DeviceFacts, ...]
    time: Array  # (samples,), s since the first one: never goes back, whatever the clock of the machine does
    wall: Array  # (samples,), Unix s
    monotonic: Array | None  # (samples,), s since the boot; None: not recorded
    values: Mapping[str, Array] = field(repr=False)  # quantity -> (samples, devices), NaN: unknown
    device_type: str  # nvidia, CPU or "" (unknown)
    simulated: bool
    energy_source: str | None  # counter or power; None: unknown
    doubt: str = ""  # why its devices cannot be compared; empty: they can
    shows_losses: bool = True  # a device without any value did not respond: it was neither unselected nor unread
    notes: tuple[str, ...] = ()  # what could not be read or cannot be true, one sentence each

    def __len__(self) -> int:
        return len(self.time)

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

    def at(self, wall: float, monotonic: float | None = None) -> float:
        """Return the time (s since the first sample) at which both clocks had these readings, also outside of it.

        The difference of the clocks identifies the boot: the monotonic time starts near 0 at each.
        """
        if monotonic is not None and self.monotonic is not None:
            places, offsets = self._boots
            place = places[np.argmin(np.abs(offsets - (wall - monotonic)))]
            return float(self.time[place] + monotonic - self.monotonic[place])
        before = np.flatnonzero(self.wall <= wall)
        place = before[-1] if len(before) else 0
        return float(self.time[place] + wall - self.wall[place])

    @cached_property
    def _boots(self) -> tuple[npt.NDArray[np.intp], Array]:
        """The first sample of each boot, or after the wall clock was set, and the difference of both clocks there."""
        offsets = self.wall - self.monotonic if self.monotonic is not None else self.wall
        places = np.concatenate([[0], np.flatnonzero(np.abs(np.diff(offsets)) > 1) + 1])
        return places, offsets[places]


def samples_of(
    path: Path,
    devices: tuple[DeviceFacts, ...],
    raw: Mapping[str, Sequence[Any]],
    *,
    device_type: str,
    doubt: str = "",
    notes: Sequence[str] = (),
    **known: Any,
) -> Samples:
    """Return a recording, with a note about the values that cannot be true.

    raw: quantity -> values (samples,) per device. known: further fields.
    """
    values = Columns(raw, devices, ranks=device_type == CPU)
    if counts := values.impossible():
        listed = ", ".join(f"{count:,} of {quantity}" for quantity, count in counts.items())
        many = plural(sum(counts.values()), "value")
        notes = [*notes, f"{path.name}: {many} that cannot be true, unknown instead: {listed}"]
    return Samples(
        devices=devices,
        values=values,
        device_type=device_type,
        doubt=doubt or (IMPOSSIBLE if counts else ""),
        notes=tuple(notes),
        **known,
    )


def from_text(
    path: Path,
    times: Sequence[float],
    values: Mapping[str, Array],
    devices: tuple[DeviceFacts, ...],
    *,
    cpu: bool,
    notes: Sequence[str],
    doubt: str = "",
    shows_losses: bool = True,
) -> Samples:
    """Return the samples of a text recording without those whose time cannot be true.

    values: quantity -> (samples, devices). cpu: devices without a name are ranks.
    """
    wall, found = np.array(times, dtype=float), list(notes)
    sound = (wall >= EARLIEST) & (wall <= LATEST)
    if strange := wall[~sound].tolist():
        many = plural(len(strange), "time")
        found.append(f"{path.name}: {many} that cannot be true, such as {strange[0]:.10g} s: left out")
    wall = wall[sound]
    if not len(wall):
        raise RecordError(f"{path} contains no sample", why="; ".join(found))
    steps = np.diff(wall)
    if back := int(np.count_nonzero(steps <= 0)):
        found.append(f"{path.name}: the time does not go on {plural(back, 'time')}: counted as no time")
    ranks = all(one.name.startswith(RANK_NAME) or (cpu and one.name == f"GPU {one.index}") for one in devices)
    return samples_of(
        path,
        devices,
        {quantity: list(values[quantity][sound].T) for quantity in MEASURED},
        time=np.concatenate([[0.0], np.cumsum(np.maximum(steps, 0))]),
        wall=wall,
        monotonic=None,
        device_type=CPU if ranks else "",
        simulated=any(one.name.endswith(SIMULATED) for one in devices),
        energy_source="counter" if np.isfinite(values["energy_j"][sound]).any(axis=0).all() else "power",
        doubt=doubt or (IMPOSSIBLE if back else ""),
        shows_losses=shows_losses,
        notes=found,
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
