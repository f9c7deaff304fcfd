"""Read a GPU recording of any format as arrays: nothing above this module knows a format.

Formats: gpu_samples.bin, the JSON arrays of this and of the original project (of one GPU, of several, or an object with
`samples`), and tables with a column per GPU and quantity.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import MAGIC, damage_note, read_samples
from kmatrix.gpu.formats.limits import EARLIEST, LATEST, limits_of
from kmatrix.gpu.formats.samples import CSV_FIELDS, CSV_SIMULATED, SIMULATED, csv_header
from kmatrix.gpu.formats.text import time_of
from kmatrix.text import first_names, plural

Array = npt.NDArray[np.float64]
QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")  # MiB, %, W, degrees C, MHz
MEASURED = (*QUANTITIES, "energy_j")  # J, a counter
CPU = "cpu"  # device type of ranks on the CPU
RANK_NAME = "CPU rank "  # prefix of the device name that the recorder gives a rank
IMPOSSIBLE, SELECTED = "impossible values", "one GPU at a time"  # reasons why devices cannot be compared
SHORTEST_GAP_S, LONGEST_GAP_S = 2.0, 60.0
REPLACED_S = 5.0  # both clocks of a machine differ by less over a pause
KEYS: Mapping[str, tuple[str, ...]] = {  # quantity -> keys in JSON, by precedence
    "memory_used": ("memory_used", "memory_used_mb", "memory_mb"),
    "memory_total": ("memory_total", "memory_total_mb"),
}
UNITS = re.compile(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(?:W|%|MB|MiB|MHz|C|°C|J)?\s*")
CSV_COLUMN = re.compile(r"gpu(\d+)_(\w+)")
CSV_NAMES = {
    **{"power_w": "power", "temp_c": "temperature", "util_pct": "utilization", "sm_clock_mhz": "sm_clock"},
    **{"mem_used_mb": "memory_used", "mem_total_mb": "memory_total"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One GPU of a recording, or one rank on the CPU."""

    index: int
    name: str
    uuid: str = ""
    rank: int | None = None
    memory_total: float | None = None  # MiB


class Columns(Mapping[str, Array]):
    """Quantity -> values (samples, devices), NaN: unknown. Values that cannot be true are unknown.

    Each access makes a new array: a recording of days does not fit in memory with all quantities at once.
    """

    def __init__(self, raw: Mapping[str, Sequence[Any]], devices: Sequence[DeviceFacts], *, ranks: bool) -> None:
        """Keep the values as they are in the file. raw: quantity -> values (samples,) per device."""
        self._raw, self._devices, self._ranks = raw, devices, ranks

    def __getitem__(self, quantity: str) -> Array:
        values = self._all(quantity)
        values[~self._possible(quantity, values)] = np.nan
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def impossible(self) -> dict[str, int]:
        """Return quantity -> number of values that cannot be true."""
        counts = {}
        for quantity in self:
            values = self._all(quantity)
            counts[quantity] = int(np.count_nonzero(~self._possible(quantity, values) & ~np.isnan(values)))
        return {quantity: count for quantity, count in counts.items() if count}

    def _all(self, quantity: str) -> Array:
        return np.stack([np.array(one, dtype=float) for one in self._raw[quantity]], axis=1)

    def _possible(self, quantity: str, values: Array) -> npt.NDArray[np.bool_]:
        limits = [limits_of(quantity, one.memory_total, is_rank=self._ranks) for one in self._devices]
        low, high = np.array(limits).T
        found: npt.NDArray[np.bool_] = (values >= low) & (values <= high)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def gap_s(self) -> float:
        """The longest time (s) between two samples in which everything went on as usual; a longer one is a gap.

        Twice the usual time between two samples, but from 2 to 60 s.
        """
        usual = float(np.median(np.diff(self.time))) if len(self) > 1 else 0.0
        return min(max(SHORTEST_GAP_S, 2 * usual), LONGEST_GAP_S)

    def at(self, wall: float, monotonic: float | None = None) -> float:
        """Return the time (s since the first sample) at which both clocks had these readings, also outside of it.

        The difference of the clocks identifies the boot: the monotonic time starts near 0 at each.
        """
        if monotonic is not None and self.monotonic is not None:
            offsets = self.wall - self.monotonic
            places = np.concatenate([[0], np.flatnonzero(np.abs(np.diff(offsets)) > 1) + 1])
            place = places[np.argmin(np.abs(offsets[places] - (wall - monotonic)))]
            return float(self.time[place] + monotonic - self.monotonic[place])
        before = np.flatnonzero(self.wall <= wall)
        place = before[-1] if len(before) else 0
        return float(self.time[place] + wall - self.wall[place])


def load(path: Path, *, cpu: bool = False) -> Samples:
    """Return the samples of a recording; an incomplete last one is left out. cpu: devices without a name are ranks.

    Raises RecordError if it is missing, damaged, of another kind, or has no sample.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC))
        if begin == MAGIC or path.suffix == ".bin":
            return _binary(path)
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", hint="pass a gpu_stats*.json or gpu_metrics*.csv file") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    return _table(path, data, cpu=cpu) if data.startswith(b"timestamp") else _array(path, data, cpu=cpu)


def _binary(path: Path) -> Samples:
    recording = read_samples(path)
    if not len(recording):
        raise RecordError(f"{path} contains no sample", why="; ".join(damage_note(path, recording.damaged)))
    header = recording.header
    devices = tuple(
        DeviceFacts(
            index=int(gpu["gpu_index"]),
            name=str(gpu["gpu_name"]),
            uuid=str(gpu.get("uuid") or ""),
            rank=gpu.get("rank"),
            memory_total=gpu.get("memory_total"),
        )
        for gpu in header["gpus"]
    )
    wall, monotonic = np.array(recording.times, dtype=float), np.array(recording.monotonic, dtype=float)
    steps, passed = np.diff(monotonic), np.diff(wall)
    # The machine booted, or another one continued the file.
    replaced = (steps < 0) | ((steps > REPLACED_S) & (np.abs(passed - steps) > REPLACED_S))
    ranks = header.get("device_type") == CPU
    raw = {name: [columns[name] for columns in recording.columns] for name in MEASURED if name in header["columns"]}
    values = Columns(raw, devices, ranks=ranks)
    impossible = values.impossible()
    return Samples(
        devices=devices,
        time=np.concatenate([[0.0], np.cumsum(np.where(replaced, np.maximum(passed, 0), steps))]),
        wall=wall,
        monotonic=monotonic,
        values=values,
        device_type=str(header.get("device_type") or ""),
        simulated=bool(header.get("simulated")) or any(one.name.endswith(SIMULATED) for one in devices),
        energy_source=header.get("energy_source"),
        doubt=IMPOSSIBLE if impossible else "",
        notes=(*damage_note(path, recording.damaged), *_impossible_note(path, impossible)),
    )


def _impossible_note(path: Path, counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return []
    listed = ", ".join(f"{count:,} of {quantity}" for quantity, count in counts.items())
    return [f"{path.name}: {plural(sum(counts.values()), 'value')} that cannot be true, unknown instead: {listed}"]


def _from_text(
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
    """Return the samples of a text recording without those whose time cannot be true, or is that of the one before.

    values: quantity -> (samples, devices). cpu: devices without a name are ranks.
    """
    wall = np.array(times, dtype=float)
    found = list(notes)
    sound = (wall >= EARLIEST) & (wall <= LATEST)
    if lost := int(np.count_nonzero(~sound)):
        example = f"{wall[~sound][0]:.10g}"
        found.append(f"{path.name}: {plural(lost, 'time')} that cannot be true, such as {example} s: left out")
    same = np.zeros(len(wall), dtype=bool)
    same[1:] = wall[1:] == wall[:-1]
    if repeated := int(np.count_nonzero(same & sound)):
        found.append(f"{path.name}: {plural(repeated, 'sample')} with the time of the one before: left out")
    keep = sound & ~same
    wall = wall[keep]
    if not len(wall):
        raise RecordError(f"{path} contains no sample", why="; ".join(found))
    steps = np.diff(wall)
    if back := int(np.count_nonzero(steps < 0)):
        found.append(f"{path.name}: the time goes back {plural(back, 'time')}: counted as no time")
    ranks = all(one.name.startswith(RANK_NAME) or (cpu and one.name == f"GPU {one.index}") for one in devices)
    raw = {name: list(np.ascontiguousarray(column[keep].T)) for name, column in values.items()}
    columns = Columns(raw, devices, ranks=ranks)
    impossible = columns.impossible()
    known = np.isfinite(raw["energy_j"]).any(axis=1) if "energy_j" in raw else np.zeros(1, dtype=bool)
    return Samples(
        devices=devices,
        time=np.concatenate([[0.0], np.cumsum(np.maximum(steps, 0))]),
        wall=wall,
        monotonic=None,
        values=columns,
        device_type=CPU if ranks else "",
        simulated=any(one.name.endswith(SIMULATED) for one in devices),
        energy_source="counter" if known.all() else "power",
        doubt=doubt or (IMPOSSIBLE if impossible or repeated or back else ""),
        shows_losses=shows_losses,
        notes=(*found, *_impossible_note(path, impossible)),
    )


# ---- JSON --------------------------------------------------------------------------------------------------------

Value = float | str | None


# gc=False: the objects contain no cycles, and tracking millions of them would slow down every collection.
class _Clocks(msgspec.Struct, gc=False):
    gpu: Value = None
    sm: Value = None
    graphics: Value = None


class _Gpu(msgspec.Struct, gc=False):
    """One GPU of one entry, with the keys of all known formats."""

    gpu_index: int | None = None
    gpu_name: str | None = None
    uuid: str | None = None
    utilization: Value = None
    memory_used: Value = None
    memory_used_mb: Value = None
    memory_mb: Value = None
    memory_total: Value = None
    memory_total_mb: Value = None
    power: Value = None
    temperature: Value = None
    temperatures: dict[str, Value] | None = None
    sm_clock: Value = None
    clocks: _Clocks | None = None
    energy_j: Value = None


class _Entry(_Gpu, kw_only=True, gc=False):
    """One entry: of several GPUs, or of a single one, whose fields are next to the timestamp."""

    timestamp: datetime | float
    multi_gpu_data: list[_Gpu] | None = None


class _Document(msgspec.Struct, gc=False):
    samples: list[_Entry]


def _array(path: Path, data: bytes, *, cpu: bool) -> Samples:
    entries, notes = _entries(path, data)
    is_single = all(entry.multi_gpu_data is None for entry in entries)
    lists: list[Sequence[_Gpu]] = [(e,) if e.multi_gpu_data is None else e.multi_gpu_data for e in entries]
    gpus: list[_Gpu] = list(chain.from_iterable(lists))
    if not gpus:
        raise RecordError(f"{path} contains no sample")
    lengths = list(map(len, lists))
    rows = np.repeat(np.arange(len(lists)), lengths)
    # Without an index, the position in the entry counts.
    indices: list[Any] = list(map(attrgetter("gpu_index"), gpus))
    if None in indices:
        positions = chain.from_iterable(map(range, lengths))
        indices = [place if index is None else index for index, place in zip(indices, positions, strict=True)]
    # The UUID identifies a GPU: a driver may give it another index.
    keys = [uuid or index for uuid, index in zip(map(attrgetter("uuid"), gpus), indices, strict=True)]
    order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    places = np.fromiter(map(order.__getitem__, keys), dtype=np.intp, count=len(keys))
    columns, unreadable = _columns(gpus)
    failed = columns["memory_total"] == 0  # all values of a failed query are 0
    for column in columns.values():
        column[failed] = np.nan
    if unread := int(np.count_nonzero(failed)):
        entries_text = f"{unread:,} {'entry' if unread == 1 else 'entries'}"
        notes.append(f"{path.name}: {entries_text} of failed queries (memory_total is 0): unknown")
    for quantity, count in unreadable.items():
        notes.append(f"{path.name}: {plural(count, 'value')} of {quantity} that are no numbers: unknown")
    shape = (len(lists), len(order))
    values = {name: np.full(shape, np.nan) for name in columns}
    for name, column in columns.items():
        values[name][rows[::-1], places[::-1]] = column[::-1]  # of several GPUs with one index, the first one counts
    last = np.zeros(len(order), dtype=np.intp)
    last[places] = np.arange(len(gpus))
    devices = [_facts(gpus[at], indices[at], values["memory_total"][:, place]) for place, at in enumerate(last)]
    problems = [*_repeated(rows, places, shape), *_renamed(gpus, places, devices)]
    doubt = IMPOSSIBLE if problems else ""
    if is_single and len(order) > 1:
        doubt = SELECTED
        counts = np.bincount(places)
        listed = first_names(f"GPU {one.index} is in {n:,}" for one, n in zip(devices, counts, strict=True))
        problems.append(f"{listed} of {len(lists):,} entries: this file has the selected GPU only")
    by_index = sorted(range(len(devices)), key=lambda at: devices[at].index)
    return _from_text(
        path,
        [
            entry.timestamp.timestamp() if isinstance(entry.timestamp, datetime) else entry.timestamp
            for entry in entries
        ],
        {name: values[name][:, by_index] for name in MEASURED},
        tuple(devices[at] for at in by_index),
        cpu=cpu,
        notes=[*notes, *(f"{path.name}: {problem}" for problem in problems)],
        doubt=doubt,
        shows_losses=doubt != SELECTED and not failed.any(),
    )


def _facts(gpu: _Gpu, index: int | None, total: Array) -> DeviceFacts:
    """Return a device from its last sample. total: its memory in all samples."""
    known = total[~np.isnan(total)]
    return DeviceFacts(
        index=index or 0,
        name=gpu.gpu_name or f"GPU {index}",
        uuid=gpu.uuid or "",
        memory_total=float(known[-1]) if len(known) else None,
    )


def _entries(path: Path, data: bytes) -> tuple[list[_Entry], list[str]]:
    """Return the entries of an array, and a note if the file ends before it does. Raises RecordError."""
    begin = data.find(b"[") + 1
    if not begin or data.lstrip()[:1] not in (b"[", b"{"):
        raise _unknown(path, "it begins with neither a JSON array nor a table with a timestamp")
    kind: Any = list[_Entry] if data.lstrip().startswith(b"[") else _Document
    try:
        found = msgspec.json.decode(data, type=kind)
        return (found.samples if isinstance(found, _Document) else found), []
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        why = str(error)
    if "truncated" in why:
        complete = data[begin : data.rfind(b"{", 0, data.rfind(b'"timestamp"'))].rstrip(b", \t\r\n")
        try:
            found = msgspec.json.decode(b"[" + complete + b"]", type=list[_Entry])
            return found, [f"{path.name} is truncated: {plural(len(found), 'complete sample')}"]
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            why = str(error)
    elif "invalid character" in why:  # NaN and infinity, which Python writes although JSON has none
        try:
            return msgspec.convert(json.loads(data, parse_constant=lambda _: None), list[_Entry]), []
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            why = str(error)
    raise RecordError(f"{path} is damaged", why=why.replace("`", ""), hint="restore it from a copy")


def _unknown(path: Path, why: str) -> RecordError:
    hint = "pass a gpu_stats*.json or gpu_metrics*.csv file"
    return RecordError(f"{path} is not a GPU recording", why=why, hint=hint)


def _columns(gpus: Sequence[_Gpu]) -> tuple[dict[str, Array], dict[str, int]]:
    """Return quantity -> value of each GPU of each entry, NaN: unknown; and quantity -> values that are no numbers."""
    columns: dict[str, Array] = {}
    unreadable: dict[str, int] = {}
    for quantity in (*MEASURED, "memory_total"):
        found = np.full(len(gpus), np.nan)
        for values in _candidates(gpus, quantity):
            numbers, strange = _floats(values)
            found = np.where(np.isnan(found), numbers, found)
            if strange:
                unreadable[quantity] = strange
            if not np.isnan(found).any():
                break
        columns[quantity] = found
    return columns, unreadable


def _candidates(gpus: Sequence[_Gpu], quantity: str) -> Iterator[list[Any]]:
    """Yield the values that a quantity may have in each GPU, the best first."""
    for key in KEYS.get(quantity, (quantity,)):
        yield list(map(attrgetter(key), gpus))
    if quantity == "temperature":
        try:
            yield list(map(itemgetter("GPU"), map(attrgetter("temperatures"), gpus)))  # in C, for the usual file
        except (KeyError, TypeError):
            yield [max(_sensors(one), default=None) for one in gpus]
    if quantity == "sm_clock":
        for key in _Clocks.__struct_fields__:
            yield [getattr(one.clocks, key, None) for one in gpus]


def _sensors(gpu: _Gpu) -> list[float]:
    """Return the temperatures of a GPU: that of the sensor `GPU`, else those of all."""
    known = gpu.temperatures or {}
    values = [known["GPU"]] if known.get("GPU") is not None else known.values()
    return [value for value in values if isinstance(value, float)]


def _floats(values: Sequence[Any]) -> tuple[Array, int]:
    """Return values as numbers, NaN for None; and how many are no numbers, not even as text with a unit."""
    try:
        return np.array(values, dtype=float), 0
    except ValueError:
        texts = [str(value) if value is not None else "nan" for value in values]
    found = [match[1] if (match := UNITS.fullmatch(text)) else text for text in texts]
    numbers = np.array(list(map(_number, found)))
    return numbers, int(np.count_nonzero(np.isnan(numbers) & np.array([text != "nan" for text in texts])))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def _repeated(rows: Any, places: Any, shape: tuple[int, int]) -> Iterator[str]:
    """Yield a problem if an entry has the same GPU several times. shape: samples, devices."""
    if np.bincount(np.ravel_multi_index((rows, places), shape)).max() > 1:
        yield "an entry has the same GPU several times: only the first one is counted"


def _renamed(gpus: Sequence[_Gpu], places: Any, devices: Sequence[DeviceFacts]) -> Iterator[str]:
    """Yield a problem per index that belongs to several GPUs, as their names say."""
    names = np.array(list(map(attrgetter("gpu_name"), gpus)), dtype=object)
    if len(set(names.tolist())) == 1:
        return
    for place, device in enumerate(devices):
        found = dict.fromkeys(names[places == place].tolist())
        if len(found) > 1 and not device.uuid:
            yield f"GPU {device.index} is {first_names(map(str, found))}: the order of the GPUs changed"


# ---- tables ------------------------------------------------------------------------------------------------------


def _table(path: Path, data: bytes, *, cpu: bool) -> Samples:
    """Return the samples of a table with a column per GPU and quantity."""
    lines = data.decode("utf-8", "replace").replace("\0", "").splitlines()
    header = [name.strip() for name in lines[0].split(",")]
    matches = [CSV_COLUMN.fullmatch(name) for name in header]
    named = {at: (int(m[1]), CSV_NAMES[m[2]]) for at, m in enumerate(matches) if m and m[2] in CSV_NAMES}
    if not named:
        listed, expected = first_names(header, 12), ", ".join(csv_header([0], CSV_FIELDS))
        raise _unknown(path, f"its columns are {listed}; expected {expected}, gpu1_power_w ...")
    rows = [cells for line in lines[1:] if len(cells := line.split(",")) == len(header)]
    timed = [(time, cells) for cells in rows if not math.isnan(time := _stamp(cells[0]))]
    lost = len(lines) - 1 - len(timed)
    notes = [f"{path.name}: {plural(lost, 'incomplete line')} left out"] if lost else []
    if not timed:
        raise RecordError(f"{path} contains no sample", why="; ".join(notes))
    columns = list(zip(*(cells for _, cells in timed), strict=True))
    indices = sorted({index for index, _ in named.values()})
    values = {name: np.full((len(timed), len(indices)), np.nan) for name in (*MEASURED, "memory_total")}
    for at, (index, quantity) in named.items():
        numbers, _ = _floats([cell if cell.strip() else None for cell in columns[at]])
        values[quantity][:, indices.index(index)] = numbers
    mark = f" {SIMULATED}" if CSV_SIMULATED in header else ""
    devices = tuple(
        _facts(_Gpu(gpu_name=f"GPU {index}{mark}"), index, values["memory_total"][:, place])
        for place, index in enumerate(indices)
    )
    kept = {name: values[name] for name in MEASURED}
    return _from_text(path, [time for time, _ in timed], kept, devices, cpu=cpu, notes=notes)


def _stamp(text: str) -> float:
    """Return Unix s from ISO 8601 or from a number, NaN if it is neither."""
    time = time_of(text)
    return _number(text) if time is None else time
