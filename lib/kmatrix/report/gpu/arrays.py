"""Read the JSON arrays of this and of the original project: of one GPU, of several, or an object with `samples`."""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from kmatrix.errors import RecordError
from kmatrix.report.gpu.results import DeviceFacts
from kmatrix.report.gpu.samples import IMPOSSIBLE, MEASURED, SELECTED, Array, Samples, samples_of
from kmatrix.text import first_names, plural

CHUNK = 1 << 19  # bytes that are decoded at a time: their objects stay in the cache of a core
BEGIN = re.compile(rb'\[(\s*\{\s*"[^"\\]*")')  # of an array, up to the first key of its first entry
NOT_JSON = re.compile(rb"(?<=[\s:,\[])(?:-?Infinity|NaN)(?=[\s,}\]])")  # what Python writes although JSON has none
NUMBER = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(?:W|%|MB|MiB|MHz|C|°C|J)?\s*")
HINT = "pass a gpu_stats*.json or gpu_metrics*.csv file"
T = TypeVar("T")
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


BETWEEN, AROUND = b", \t\r\n", b"\0 \t\r\n"  # two entries, the array
DAMAGE = (msgspec.MsgspecError, ValueError, RecursionError)  # what the decoders raise
_PIECE = msgspec.json.Decoder(list[_Entry])
_WHOLE = msgspec.json.Decoder(list[_Entry] | _Document)


def _first(known: Mapping[str, Value] | None, *names: str) -> Value:
    return next((value for name in names if known and (value := known.get(name)) is not None), None)


# What stands for a quantity where its own key is missing.
OTHERS: Mapping[str, Callable[[_Gpu], Value]] = {
    "memory_used": lambda gpu: gpu.memory_mb if gpu.memory_used_mb is None else gpu.memory_used_mb,
    "memory_total": attrgetter("memory_total_mb"),
    "temperature": lambda gpu: _first(gpu.temperatures, "GPU", "junction", *(gpu.temperatures or ())),
    "sm_clock": lambda gpu: _first(gpu.clocks, "gpu", "sm", "graphics"),
}


def read_array(path: Path) -> Samples:
    """Return the samples of a JSON recording. Raises RecordError, OSError."""
    notes, numbers = list[str](), defaultdict[Identity, int](count().__next__)
    pieces = [_columns(entries, numbers) for entries in _entries(path, notes)]
    if not numbers:
        raise RecordError(f"{path} contains no sample")
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    times, counts = columns.pop("time"), columns.pop("count")
    failed = columns["memory_total"] == 0
    if many := int(np.count_nonzero(failed)):
        entry = "entry" if many == 1 else "entries"
        notes.append(f"{many:,} {entry} of failed queries (memory_total is 0): unknown")
    # The UUID identifies a GPU: a driver may give it another index. They are in the order of their first indices.
    identities = list(numbers)
    keys = [uuid or index for uuid, index, _ in identities]
    newest = dict(zip(keys, identities, strict=True))
    order = sorted(newest, key=lambda key: identities[keys.index(key)][1])
    places = np.array([order.index(key) for key in keys])[columns.pop("gpu")]
    rows = np.repeat(np.arange(len(times)), counts)
    raw = {}
    for quantity, column in columns.items():
        values = np.full((len(order), len(times)), np.nan)
        values[places, rows] = np.where(failed, np.nan, column)  # values of a failed query are 0
        raw[quantity] = list(values)
    known = [newest[key] for key in order]
    devices = [DeviceFacts(gpu_index=at, gpu_name=name or f"GPU {at}", uuid=uuid) for uuid, at, name in known]
    problems = []
    names = [(index, str(name)) for uuid, index, name in identities if not uuid]
    if changed := [index for index, often in Counter(index for index, _ in names).items() if often > 1]:
        listed = first_names(name for index, name in names if index == changed[0])
        problems.append(f"GPU {changed[0]} is {listed}: the order of the GPUs changed")
    if np.bincount(rows * len(order) + places).max() > 1:
        problems.append("an entry has the same GPU several times: only the last one is counted")
    selected = len(order) > 1 and counts.max() == 1
    if selected:
        pairs = zip(devices, np.bincount(places), strict=True)
        listed = first_names(f"GPU {one.gpu_index} is in {often:,}" for one, often in pairs)
        problems.append(f"{listed} of {len(times):,} entries: this file has the selected GPU only")
    doubt = SELECTED if selected else IMPOSSIBLE if problems or failed.any() else ""
    notes = [f"{path.name}: {note}" for note in (*notes, *problems)]
    return samples_of(path, devices, raw, times, doubt=doubt, notes=notes)


def _columns(entries: Sequence[_Entry], numbers: Mapping[Identity, int]) -> dict[str, Array]:
    """Return columns: time and number of GPUs of each entry, the others of each of its GPUs. numbers: of identities."""
    lists = [(one,) if one.multi_gpu_data is None else one.multi_gpu_data for one in entries]
    gpus: list[_Gpu] = list(chain.from_iterable(lists))
    stamps = [one.timestamp for one in entries]
    columns: dict[str, Array] = {
        "time": np.array([stamp.timestamp() if isinstance(stamp, datetime) else stamp for stamp in stamps], float),
        "count": np.array([len(each) for each in lists], int),
        "gpu": np.array([numbers[one.uuid, one.gpu_index, one.gpu_name] for one in gpus], int),
    }
    for quantity in (*MEASURED, "memory_total"):
        values = columns[quantity] = floats(attrgetter(quantity), gpus)
        if quantity in OTHERS and np.isnan(values).any():
            columns[quantity] = np.where(np.isnan(values), floats(OTHERS[quantity], gpus), values)
    return columns


def _entries(path: Path, notes: list[str]) -> Iterator[Sequence[_Entry]]:
    """Yield the entries of a file in pieces, and add a note if it ends before its array does.

    Raises RecordError, OSError.
    """
    with path.open("rb") as file:
        data = file.read(CHUNK).removeprefix(codecs.BOM_UTF8).lstrip(AROUND)
        if data[:1] not in (b"[", b"{"):
            why = "it does not begin with a JSON array, and its name does not end with .csv"
            raise RecordError(f"{path} is not a GPU recording", why=why, hint=HINT)
        opening = BEGIN.search(data)
        mark, data, done = opening[1] if opening else b"[", data[1:], 0
        try:
            while more := file.read(CHUNK):
                data += more
                end = data.rindex(mark, 1)
                piece = _PIECE.decode(b"[" + data[:end].rstrip(BETWEEN) + b"]")
                yield piece
                data, done = data[end:], done + len(piece)
            yield _PIECE.decode(b"[" + data.rstrip(AROUND))
        except DAMAGE:  # of another style than most, or truncated
            yield _repaired(path, mark, notes)[done:]


def _repaired(path: Path, mark: bytes, notes: list[str]) -> list[_Entry]:
    """Return the entries of a file without an incomplete last one; NaN and infinity are unknown.

    mark: begin of an entry.
    """
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8).strip(AROUND)
    closing, is_cut = b"]}" if data.startswith(b"{") else b"]", False
    while True:
        try:
            found = _WHOLE.decode(data)
            break
        except DAMAGE as error:
            why = str(error).replace("`", "")
            if "truncated" in why and (end := data.rfind(mark)) > 0:
                data, is_cut = data[:end].rstrip(BETWEEN) + closing, True
            elif NOT_JSON.search(data):
                data = NOT_JSON.sub(b"null", data)
            else:
                raise RecordError(f"{path} is damaged", why=why, hint="restore it from a copy") from None
    entries = found.samples if isinstance(found, _Document) else found
    notes += [f"truncated: {plural(len(entries), 'complete sample')}"] if is_cut else []
    return entries


def floats(get: Callable[[T], Value], items: Sequence[T]) -> Array:
    """Return a value of each item as numbers: NaN for None, infinity for what is no number, not even with a unit."""
    try:
        return np.fromiter(map(get, items), float, len(items))
    except ValueError:
        values = [*map(get, items)]
    texts = [None if value is None else NUMBER.fullmatch(str(value)) for value in values]
    pairs = zip(texts, values, strict=True)
    return np.array([float(text[1]) if text else math.nan if value is None else math.inf for text, value in pairs])
