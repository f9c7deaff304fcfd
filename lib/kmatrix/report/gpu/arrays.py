"""Read the JSON arrays of this and of the original project: of one GPU, of several, or an object with `samples`."""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np

from kmatrix.errors import RecordError
from kmatrix.report.gpu.samples import IMPOSSIBLE, MEASURED, SELECTED, Array, Samples, facts_of, samples_of
from kmatrix.text import first_names, plural

CHUNK = 1 << 20  # bytes that are decoded at a time: their objects stay in the cache of a core
BEGIN = re.compile(rb'\[(\s*\{\s*"[^"\\]*")')  # of an array, up to the first key of its first entry
NOT_JSON = re.compile(rb"(?<=[\s:,\[])(?:-?Infinity|NaN)(?=[\s,}\]])")  # what Python writes although JSON has none
NUMBER = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(?:W|%|MB|MiB|MHz|C|°C|J)?\s*")
Value = float | str | None
Identity = tuple[str | None, int, str | None]  # UUID, index and name of a GPU


# gc=False: the objects contain no cycles, and tracking millions of them would slow down every collection.
class _Gpu(msgspec.Struct, gc=False):
    """One GPU of one entry, with the keys of all known formats."""

    gpu_index: int = 0
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
    clocks: dict[str, Value] | None = None
    energy_j: Value = None


class _Entry(_Gpu, kw_only=True, gc=False):
    """One entry: of several GPUs, or of a single one, whose fields are next to the timestamp."""

    timestamp: datetime | float
    multi_gpu_data: list[_Gpu] | None = None


class _Document(msgspec.Struct):
    samples: list[_Entry]


_PIECE = msgspec.json.Decoder(list[_Entry])
_WHOLE = msgspec.json.Decoder(list[_Entry] | _Document)


def _memory(gpu: _Gpu) -> Value:
    return gpu.memory_mb if gpu.memory_used_mb is None else gpu.memory_used_mb


def _temperature(gpu: _Gpu) -> Value:
    """Return the temperature of the sensor `GPU`, else the highest one."""
    known = gpu.temperatures or {}
    if (value := known.get("GPU")) is not None:
        return value
    return max((value for value in known.values() if isinstance(value, float)), default=None)


def _clock(gpu: _Gpu) -> Value:
    known = gpu.clocks or {}
    return next((known[name] for name in ("gpu", "sm", "graphics") if known.get(name) is not None), None)


# What stands for a quantity where its own key is missing.
OTHERS: Mapping[str, Callable[[_Gpu], Value]] = {
    "memory_used": _memory,
    "memory_total": attrgetter("memory_total_mb"),
    "temperature": _temperature,
    "sm_clock": _clock,
}


@dataclass(slots=True)
class _Content:
    """What the entries of a file say, in columns: a row for each GPU of each entry."""

    times: list[float] = field(default_factory=list)  # Unix s, of each entry
    counts: list[int] = field(default_factory=list)  # GPUs of each entry
    gpus: list[int] = field(default_factory=list)  # number in `identities`
    identities: dict[Identity, int] = field(default_factory=dict)
    columns: dict[str, list[Array]] = field(default_factory=dict)  # quantity -> values, NaN: unknown
    strange: Counter[str] = field(default_factory=Counter)  # quantity -> values that are no numbers
    is_single: bool = True  # each entry is of one GPU

    def add(self, entries: Sequence[_Entry]) -> None:
        """Add entries after those before."""
        lists = [(one,) if one.multi_gpu_data is None else one.multi_gpu_data for one in entries]
        gpus: list[_Gpu] = list(chain.from_iterable(lists))
        self.is_single = self.is_single and all(one.multi_gpu_data is None for one in entries)
        self.counts += map(len, lists)
        stamps = (one.timestamp for one in entries)
        self.times += [stamp.timestamp() if isinstance(stamp, datetime) else stamp for stamp in stamps]
        identities: list[Identity] = list(map(attrgetter("uuid", "gpu_index", "gpu_name"), gpus))
        for identity in dict.fromkeys(identities):
            self.identities.setdefault(identity, len(self.identities))
        self.gpus += map(self.identities.__getitem__, identities)
        for quantity in (*MEASURED, "memory_total"):
            values: list[Value] = list(map(attrgetter(quantity), gpus))
            if quantity in OTHERS and None in values:
                other = OTHERS[quantity]
                values = [other(gpu) if value is None else value for gpu, value in zip(gpus, values, strict=True)]
            numbers, strange = floats(values)
            self.columns.setdefault(quantity, []).append(numbers)
            self.strange[quantity] += strange


def read_array(path: Path) -> Samples:
    """Return the samples of a JSON recording. Raises RecordError, OSError."""
    content, notes = _content(path)
    if not content.identities:
        raise RecordError(f"{path} contains no sample")
    columns = {quantity: np.concatenate(parts) for quantity, parts in content.columns.items()}
    failed = columns["memory_total"] == 0
    if count := int(np.count_nonzero(failed)):
        entries = f"{count:,} {'entry' if count == 1 else 'entries'}"
        notes.append(f"{entries} of failed queries (memory_total is 0): unknown")
    notes += [
        f"{plural(n, 'value')} of {name} that are no numbers: unknown" for name, n in content.strange.items() if n
    ]
    # The UUID identifies a GPU: a driver may give it another index. They are in the order of their first indices.
    keys = {uuid or index: (index, name or f"GPU {index}", uuid or "") for uuid, index, name in content.identities}
    order = sorted(keys, key=lambda key: next(index for uuid, index, _ in content.identities if (uuid or index) == key))
    places = np.array([order.index(uuid or index) for uuid, index, _ in content.identities])[content.gpus]
    rows = np.repeat(np.arange(len(content.times)), content.counts)
    raw = {}
    for quantity, column in columns.items():
        values = np.full((len(order), len(content.times)), np.nan)
        values[places, rows] = np.where(failed, np.nan, column)  # values of a failed query are 0
        raw[quantity] = list(values)
    devices = [facts_of(*keys[key], raw["memory_total"][at]) for at, key in enumerate(order)]
    problems = []
    names = [(index, str(name)) for uuid, index, name in content.identities if not uuid]
    if changed := [index for index, count in Counter(index for index, _ in names).items() if count > 1]:
        listed = first_names(name for index, name in names if index == changed[0])
        problems.append(f"GPU {changed[0]} is {listed}: the order of the GPUs changed")
    if np.bincount(rows * len(order) + places).max() > 1:
        problems.append("an entry has the same GPU several times: only the last one is counted")
    selected = content.is_single and len(order) > 1
    if selected:
        counts = zip(devices, np.bincount(places), strict=True)
        listed = first_names(f"GPU {one.index} is in {count:,}" for one, count in counts)
        problems.append(f"{listed} of {len(content.times):,} entries: this file has the selected GPU only")
    return samples_of(
        path,
        devices,
        raw,
        content.times,
        notes=[f"{path.name}: {note}" for note in (*notes, *problems)],
        doubt=SELECTED if selected else IMPOSSIBLE if problems else "",
        shows_losses=not selected and not failed.any(),
    )


def _content(path: Path) -> tuple[_Content, list[str]]:
    """Return the content of a file, and a note if it ends before its array does. Raises RecordError, OSError."""
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8).strip(b"\0 \t\r\n")
    if data[:1] not in (b"[", b"{"):
        raise unknown_kind(path, "it begins with neither a JSON array nor a table with a timestamp")
    begin = BEGIN.search(data)
    mark = begin[1] if begin else b"["
    content = _Content()
    try:
        for piece in _pieces(data, mark):
            content.add(_PIECE.decode(piece))
        return content, []
    except (msgspec.MsgspecError, ValueError, RecursionError):  # not a plain array of entries, as most are
        content = _Content()
    try:
        entries, is_cut = _decoded(data, mark)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error).replace("`", "")
        raise RecordError(f"{path} is damaged", why=why, hint="restore it from a copy") from None
    content.add(entries)
    return content, [f"truncated: {plural(len(entries), 'complete sample')}"] if is_cut else []


def _pieces(data: bytes, mark: bytes) -> Iterator[bytes]:
    """Yield an array in pieces, each an array itself. mark: begin of an entry."""
    begin = 1
    while (end := data.rfind(mark, begin + 1, begin + CHUNK)) > 0 and len(data) > begin + CHUNK:
        yield b"[" + data[begin:end].rstrip(b", \t\r\n") + b"]"
        begin = end
    yield b"[" + data[begin:]


def _decoded(data: bytes, mark: bytes) -> tuple[list[_Entry], bool]:
    """Return the entries of a file, and whether it is truncated: without the last, incomplete one.

    NaN and infinity are unknown. mark: begin of an entry.
    """
    closing, is_cut = b"]}" if data.startswith(b"{") else b"]", False
    while True:
        try:
            found = _WHOLE.decode(data)
            return found.samples if isinstance(found, _Document) else found, is_cut
        except msgspec.DecodeError as error:
            if "truncated" in str(error) and (end := data.rfind(mark)) > 0:
                data, is_cut = data[:end].rstrip(b", \t\r\n") + closing, True
            elif NOT_JSON.search(data):
                data = NOT_JSON.sub(b"null", data)
            else:
                raise


def unknown_kind(path: Path, why: str) -> RecordError:
    """Return the error of a file that is not a recording."""
    hint = "pass a gpu_stats*.json or gpu_metrics*.csv file"
    return RecordError(f"{path} is not a GPU recording", why=why, hint=hint)


def floats(values: Sequence[Value]) -> tuple[Array, int]:
    """Return values as numbers, NaN for None; and how many are no numbers, not even as text with a unit."""
    try:
        return np.array(values, dtype=float), 0
    except ValueError:
        texts = [None if value is None else NUMBER.fullmatch(str(value)) for value in values]
    numbers = [float(match[1]) if match else math.nan for match in texts]
    return np.array(numbers), sum(
        match is None and value is not None for match, value in zip(texts, values, strict=True)
    )
