"""Read the JSON arrays of this and of the original project: of one GPU, of several, or an object with `samples`."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
from kmatrix.report.gpu.samples import IMPOSSIBLE, MEASURED, SELECTED, Array, Samples, facts_of, from_text
from kmatrix.text import first_names, plural

CHUNK = 1 << 20  # bytes that are decoded at a time: their objects stay in the cache of a core
FIRST_KEY = re.compile(rb'\s*\{\s*"[^"\\]*"')  # of an entry, with what is before it
UNITS = re.compile(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(?:W|%|MB|MiB|MHz|C|°C|J)?\s*")
KEYS: Mapping[str, tuple[str, ...]] = {  # quantity -> its keys, by precedence
    "memory_used": ("memory_used", "memory_used_mb", "memory_mb"),
    "memory_total": ("memory_total", "memory_total_mb"),
}
PROBE = 4096  # bytes
MOST_NESTED = 100  # GPUs of an entry
Value = float | str | None
Identity = tuple[str | None, int, str | None]  # UUID, index and name of a GPU
DAMAGE = (msgspec.MsgspecError, RecursionError, ValueError)


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


_DECODER = msgspec.json.Decoder(list[_Entry])


@dataclass(slots=True)
class _Content:
    """What the entries of a file say, in columns: a row for each GPU of each entry."""

    times: list[float] = field(default_factory=list)  # Unix s, of each entry
    rows: list[npt.NDArray[np.intp]] = field(default_factory=list)  # entry
    gpus: list[npt.NDArray[np.intp]] = field(default_factory=list)  # number in `identities`
    identities: dict[Identity, int] = field(default_factory=dict)
    columns: dict[str, list[Array]] = field(default_factory=dict)  # quantity -> values, NaN: unknown
    unreadable: dict[str, int] = field(default_factory=dict)  # quantity -> values that are no numbers
    is_single: bool = True  # each entry is of one GPU

    def add(self, entries: Sequence[_Entry]) -> None:
        """Add entries after those before."""
        several = [entry.multi_gpu_data for entry in entries]
        lists: list[Sequence[_Gpu]] = [
            (entry,) if gpus is None else gpus for entry, gpus in zip(entries, several, strict=True)
        ]
        gpus = list(chain.from_iterable(lists))
        lengths = list(map(len, lists))
        self.is_single = self.is_single and several.count(None) == len(several)
        self.rows.append(np.repeat(np.arange(len(lists)) + len(self.times), lengths))
        stamps = map(attrgetter("timestamp"), entries)
        self.times += [stamp.timestamp() if isinstance(stamp, datetime) else stamp for stamp in stamps]
        indices = list(map(attrgetter("gpu_index"), gpus))
        if None in indices:  # the position in the entry counts
            places = chain.from_iterable(map(range, lengths))
            indices = [place if index is None else index for index, place in zip(indices, places, strict=True)]
        uuids, names = (list(map(attrgetter(key), gpus)) for key in ("uuid", "gpu_name"))
        is_plain = len(set(uuids)) == len(set(names)) == 1  # then the index tells GPUs apart, several times as fast
        keys: list[Any] = indices if is_plain else list(zip(uuids, indices, names, strict=True))
        numbers = {}
        for key in dict.fromkeys(keys):
            identity = (uuids[0], key, names[0]) if is_plain else key
            numbers[key] = self.identities.setdefault(identity, len(self.identities))
        self.gpus.append(np.fromiter(map(numbers.__getitem__, keys), dtype=np.intp, count=len(keys)))
        for quantity in (*MEASURED, "memory_total"):
            self.columns.setdefault(quantity, []).append(self._column(gpus, quantity))

    def _column(self, gpus: Sequence[_Gpu], quantity: str) -> Array:
        """Return the value of each GPU, NaN: unknown."""
        found: Array | None = None
        for values in _candidates(gpus, quantity):
            if values.count(None) == len(values):
                continue
            numbers, strange = floats(values)
            found = numbers if found is None else np.where(np.isnan(found), numbers, found)
            if strange:
                self.unreadable[quantity] = self.unreadable.get(quantity, 0) + strange
            if not np.isnan(found).any():
                break
        return np.full(len(gpus), np.nan) if found is None else found


def read_array(path: Path, *, cpu: bool) -> Samples:
    """Return the samples of a JSON recording. cpu: devices without a name are ranks.

    Raises RecordError, OSError.
    """
    content, notes = _content(path)
    if not content.identities:
        raise RecordError(f"{path} contains no sample")
    rows, gpus = np.concatenate(content.rows), np.concatenate(content.gpus)
    columns = {quantity: np.concatenate(parts) for quantity, parts in content.columns.items()}
    failed = columns["memory_total"] == 0
    for column in columns.values():
        column[failed] = np.nan  # all values of a failed query are 0
    if count := int(np.count_nonzero(failed)):
        entries = f"{count:,} {'entry' if count == 1 else 'entries'}"
        notes.append(f"{entries} of failed queries (memory_total is 0): unknown")
    notes += [f"{plural(n, 'value')} of {name} that are no numbers: unknown" for name, n in content.unreadable.items()]
    # The UUID identifies a GPU: a driver may give it another index.
    keys = [uuid or index for uuid, index, _ in content.identities]
    order = {key: place for place, key in enumerate(sorted(set(keys), key=lambda key: _index(key, content)))}
    places = np.array([order[key] for key in keys])[gpus]
    shape = (len(content.times), len(order))
    values = {quantity: np.full(shape, np.nan) for quantity in columns}
    for quantity, column in columns.items():
        values[quantity][rows[::-1], places[::-1]] = column[::-1]  # of several with one index, the first one counts
    newest = dict(zip(keys, content.identities, strict=True))  # the last one stays
    devices = tuple(
        facts_of(index, name or f"GPU {index}", uuid or "", values["memory_total"][:, order[key]])
        for key in order
        for uuid, index, name in [newest[key]]
    )
    problems = list(_changes(content.identities))
    if np.bincount(np.ravel_multi_index((rows, places), shape)).max() > 1:
        problems.append("an entry has the same GPU several times: only the first one is counted")
    selected = content.is_single and len(order) > 1
    if selected:
        counts = zip(devices, np.bincount(places), strict=True)
        listed = first_names(f"GPU {one.index} is in {count:,}" for one, count in counts)
        problems.append(f"{listed} of {len(content.times):,} entries: this file has the selected GPU only")
    return from_text(
        path,
        content.times,
        {quantity: values[quantity] for quantity in MEASURED},
        devices,
        cpu=cpu,
        notes=[f"{path.name}: {note}" for note in (*notes, *problems)],
        doubt=SELECTED if selected else IMPOSSIBLE if problems else "",
        shows_losses=not selected and not failed.any(),
    )


def _index(key: str | int, content: _Content) -> tuple[int, str]:
    """Return what GPUs are sorted by: the first index that they have, then the UUID."""
    return next(index for uuid, index, _ in content.identities if (uuid or index) == key), str(key)


def _changes(identities: Mapping[Identity, int]) -> Iterator[str]:
    """Yield a problem per index that belongs to several GPUs without UUIDs, as their names say."""
    names: dict[int, list[str]] = {}
    for uuid, index, name in identities:
        if not uuid:
            names.setdefault(index, []).append(str(name))
    for index, found in names.items():
        if len(found) > 1:
            yield f"GPU {index} is {first_names(found)}: the order of the GPUs changed"


def _content(path: Path) -> tuple[_Content, list[str]]:
    """Return the content of a file, and a note if it ends before its array does. Raises RecordError, OSError."""
    try:
        content = _Content()
        for piece in _pieces(path):
            content.add(_DECODER.decode(piece))
        return content, []
    except DAMAGE:  # not a plain array of entries, as most are: all of it at a time
        entries, notes = _whole(path)
    content = _Content()
    content.add(entries)
    return content, notes


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield an array in pieces, each an array itself. Raises RecordError if it does not begin as one."""
    with path.open("rb") as file:
        rest = file.read(CHUNK)
        begin = _begin(path, rest)
        mark, rest = _mark(rest, begin), rest[begin:]
        while more := file.read(CHUNK):
            rest += more
            if (end := rest.rfind(mark)) > 0:
                yield b"".join((b"[", memoryview(rest)[: rest.rfind(b"}", 0, end) + 1], b"]"))
                rest = rest[rest.find(b"{", end) :]
        yield b"[" + rest


def _begin(path: Path, data: bytes) -> int:
    """Return the offset of the first entry. Raises RecordError if there is no array."""
    begin = data.find(b"[") + 1
    if not begin or data[:PROBE].removeprefix(codecs.BOM_UTF8).lstrip()[:1] not in (b"[", b"{"):
        raise unknown_kind(path, "it begins with neither a JSON array nor a table with a timestamp")
    return begin


def _whole(path: Path) -> tuple[list[_Entry], list[str]]:
    """Return all entries of a file, and a note if it is truncated. Raises RecordError if it is damaged."""
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8).lstrip()
    begin = _begin(path, data)
    kind: Any = list[_Entry] if data.startswith(b"[") else _Document
    try:
        found = msgspec.json.decode(data, type=kind)
        return (found.samples if isinstance(found, _Document) else found), []
    except DAMAGE as error:
        why = str(error)
    try:
        if "truncated" in why:
            entries = _complete(data, begin)
            return entries, [f"truncated: {plural(len(entries), 'complete sample')}"]
        if "invalid character" in why:  # NaN and infinity, which Python writes although JSON has none
            return msgspec.convert(json.loads(data, parse_constant=lambda _: None), list[_Entry]), []
    except DAMAGE as error:
        why = str(error)
    raise RecordError(f"{path} is damaged", why=why.replace("`", ""), hint="restore it from a copy")


def _complete(data: bytes, begin: int) -> list[_Entry]:
    """Return the complete entries of a truncated array. begin: offset of the first one. Raises what a decoder does."""
    mark = _mark(data, begin)
    end = len(data)
    # The GPUs of an entry may begin as it does: the last place before which all is complete is its begin.
    for _ in range(MOST_NESTED):
        if (end := data.rfind(mark, begin, end)) <= begin:
            return []
        with suppress(msgspec.DecodeError):
            return _DECODER.decode(b"[" + data[begin:end].rstrip(b", \t\r\n") + b"]")
    return []


def _mark(data: bytes, begin: int) -> bytes:
    """Return the text between two entries, up to the first key."""
    first = FIRST_KEY.match(data, begin)
    return first[0] if first else b"{"


def unknown_kind(path: Path, why: str) -> RecordError:
    """Return the error of a file that is not a recording."""
    hint = "pass a gpu_stats*.json or gpu_metrics*.csv file"
    return RecordError(f"{path} is not a GPU recording", why=why, hint=hint)


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
        clocks = [one.clocks or _Clocks() for one in gpus]
        for key in _Clocks.__struct_fields__:
            yield list(map(attrgetter(key), clocks))


def _sensors(gpu: _Gpu) -> list[float]:
    """Return the temperatures of a GPU: that of the sensor `GPU`, else those of all."""
    known = gpu.temperatures or {}
    values = [known["GPU"]] if known.get("GPU") is not None else known.values()
    return [value for value in values if isinstance(value, float)]


def floats(values: Sequence[Any]) -> tuple[Array, int]:
    """Return values as numbers, NaN for None; and how many are no numbers, not even as text with a unit."""
    try:
        return np.array(values, dtype=float), 0
    except ValueError:
        texts = [str(value) if value is not None else "nan" for value in values]
    numbers = np.array([number_in(match[1] if (match := UNITS.fullmatch(text)) else text) for text in texts])
    return numbers, int(np.count_nonzero(np.isnan(numbers) & np.array([text != "nan" for text in texts])))


def number_in(text: str) -> float:
    """Return the number in a text, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return np.nan
