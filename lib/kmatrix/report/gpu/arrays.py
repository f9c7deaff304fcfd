"""Read the JSON arrays of this and of the original project: of one GPU, of several, or an object with `samples`."""

from __future__ import annotations

import json
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
from kmatrix.report.gpu.samples import IMPOSSIBLE, MEASURED, SELECTED, Array, Samples, facts_of, from_text
from kmatrix.text import first_names, plural

CHUNK = 1 << 20  # bytes that are decoded at a time: their objects stay in the cache of a core
BEGIN = re.compile(rb'\s*\[(\s*\{\s*"[^"\\]*")')  # of an array, up to the first key of its first entry
BETWEEN = re.compile(r"[\s,]*")  # two entries
NUMBER = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(?:W|%|MB|MiB|MHz|C|°C|J)?\s*")
Value = float | str | None
Identity = tuple[str | None, int, str | None]  # UUID, index and name of a GPU


# gc=False: the objects contain no cycles, and tracking millions of them would slow down every collection.
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
    clocks: dict[str, Value] | None = None
    energy_j: Value = None


class _Entry(_Gpu, kw_only=True, gc=False):
    """One entry: of several GPUs, or of a single one, whose fields are next to the timestamp."""

    timestamp: datetime | float
    multi_gpu_data: list[_Gpu] | None = None


_DECODER = msgspec.json.Decoder(list[_Entry])


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
    rows: list[int] = field(default_factory=list)  # number of the entry
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
        self.rows += [row for row, of in enumerate(lists, start=len(self.times)) for _ in of]
        stamps = (one.timestamp for one in entries)
        self.times += [stamp.timestamp() if isinstance(stamp, datetime) else stamp for stamp in stamps]
        places = chain.from_iterable(map(range, map(len, lists)))  # in the entry, for GPUs without an index
        for gpu, place in zip(gpus, places, strict=True):
            identity = (gpu.uuid, place if gpu.gpu_index is None else gpu.gpu_index, gpu.gpu_name)
            self.gpus.append(self.identities.setdefault(identity, len(self.identities)))
        for quantity in (*MEASURED, "memory_total"):
            values: list[Value] = list(map(attrgetter(quantity), gpus))
            if quantity in OTHERS and None in values:
                other = OTHERS[quantity]
                values = [other(gpu) if value is None else value for gpu, value in zip(gpus, values, strict=True)]
            numbers, strange = floats(values)
            self.columns.setdefault(quantity, []).append(numbers)
            self.strange[quantity] += strange


def read_array(path: Path, *, cpu: bool) -> Samples:
    """Return the samples of a JSON recording. cpu: devices without a name are ranks.

    Raises RecordError, OSError.
    """
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
    first: dict[str | int, int] = {}
    for uuid, index, _ in content.identities:
        first.setdefault(uuid or index, index)
    order = {key: at for at, key in enumerate(sorted(first, key=lambda key: (first[key], str(key))))}
    newest = {uuid or index: (index, name or f"GPU {index}", uuid or "") for uuid, index, name in content.identities}
    places = np.array([order[uuid or index] for uuid, index, _ in content.identities])[content.gpus]
    values = {}
    for quantity, column in columns.items():
        values[quantity] = np.full((len(content.times), len(order)), np.nan)
        values[quantity][content.rows, places] = np.where(failed, np.nan, column)  # values of a failed query are 0
    devices = tuple(facts_of(*newest[key], values["memory_total"][:, at]) for key, at in order.items())
    problems = []
    names = [(index, str(name)) for uuid, index, name in content.identities if not uuid]
    if changed := [index for index, count in Counter(index for index, _ in names).items() if count > 1]:
        listed = first_names(name for index, name in names if index == changed[0])
        problems.append(f"GPU {changed[0]} is {listed}: the order of the GPUs changed")
    if len({*zip(content.rows, places.tolist(), strict=True)}) < len(places):
        problems.append("an entry has the same GPU several times: only the last one is counted")
    selected = content.is_single and len(order) > 1
    if selected:
        counts = zip(devices, np.bincount(places), strict=True)
        listed = first_names(f"GPU {one.index} is in {count:,}" for one, count in counts)
        problems.append(f"{listed} of {len(content.times):,} entries: this file has the selected GPU only")
    return from_text(
        path,
        content.times,
        values,
        devices,
        cpu=cpu,
        notes=[f"{path.name}: {note}" for note in (*notes, *problems)],
        doubt=SELECTED if selected else IMPOSSIBLE if problems else "",
        shows_losses=not selected and not failed.any(),
    )


def _content(path: Path) -> tuple[_Content, list[str]]:
    """Return the content of a file, and a note if it ends before its array does. Raises RecordError, OSError."""
    try:
        content = _Content()
        for piece in _pieces(path):
            content.add(_DECODER.decode(piece))
        return content, []
    except (msgspec.MsgspecError, RecursionError, ValueError):  # not a plain array of entries, as most are
        entries, notes = _one_by_one(path)
    content = _Content()
    content.add(entries)
    return content, notes


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield an array in pieces, each an array itself. Raises ValueError if it does not begin as one."""
    with path.open("rb") as file:
        rest = file.read(CHUNK)
        begin = BEGIN.match(rest)
        if begin is None:
            raise ValueError("not an array of objects")
        mark, rest = begin[1], rest[begin.start(1) :]
        while more := file.read(CHUNK):
            rest += more
            if (end := rest.rfind(mark)) > 0:
                yield b"".join((b"[", memoryview(rest)[: rest.rfind(b"}", 0, end) + 1], b"]"))
                rest = rest[rest.find(b"{", end) :]
        yield b"[" + rest


def _one_by_one(path: Path) -> tuple[list[_Entry], list[str]]:
    """Return the entries of any file with an array, and a note if it is truncated. Raises RecordError, OSError.

    NaN and infinity, which Python writes although JSON has none, are unknown.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    at = text.find("[") + 1
    if not at or text.lstrip()[:1] not in ("[", "{"):
        raise unknown_kind(path, "it begins with neither a JSON array nor a table with a timestamp")
    decoder = json.JSONDecoder(parse_constant=lambda _: None)
    found, notes, why = [], [], ""
    try:
        while (at := _skipped(text, at)) == len(text) or text[at] != "]":
            entry, at = decoder.raw_decode(text, at)
            found.append(entry)
    except json.JSONDecodeError as error:
        if '"timestamp"' in text[error.pos :]:  # of a later entry
            why = str(error)
        notes = [f"truncated: {plural(len(found), 'complete sample')}"]
    except RecursionError:
        why = "nested too deeply"
    try:
        entries = msgspec.convert(found, list[_Entry])
    except (msgspec.MsgspecError, RecursionError) as error:
        why = why or str(error).replace("`", "")
    if why:
        raise RecordError(f"{path} is damaged", why=why, hint="restore it from a copy")
    return entries, notes


def _skipped(text: str, at: int) -> int:
    """Return the place of the next entry, or of the end."""
    found = BETWEEN.match(text, at)
    return found.end() if found else at


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
