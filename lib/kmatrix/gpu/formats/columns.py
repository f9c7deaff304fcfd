"""A recording of GPUs as text -> blocks of columns: the same numbers as read_stats, many times as fast.

A file is cut where one entry ends and the next begins, and each piece is decoded at once into the few fields
that are needed. Where to cut is learned from the first two entries; that a cut was right is proven by the piece,
which is whole JSON only then. A piece that does not decode, for whatever reason, is read entry by entry.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from kmatrix.gpu.formats.reading import (
    CLOCKS,
    CSV_BEGIN,
    MEMORY,
    NO_ENTRY,
    TOTAL,
    LossyReader,
    array_at,
    hottest,
    opened,
    read_stats,
    snapshot_of,
)
from kmatrix.gpu.formats.scanning import Scanner
from kmatrix.gpu.formats.values import GpuSample, Snapshot

MEASURED = ("memory_used", "utilization", "power", "temperature", "sm_clock", "energy_j")
CHUNK = 1 << 20  # bytes that are read at once
PATIENCE = 4 * CHUNK  # bytes among which the end of an entry should be found
ROWS = 4096  # of a block that is made of single snapshots
OPEN, CLOSE = b"[]"
Floats = NDArray[np.float64]
_BETWEEN = re.compile(r'\s*,\s*\{\s*"[^"\\]*"')  # from behind an entry to the first key of the next
_SPACE = b" \t\r\n,"
_Number = float | None | UnsetType


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a block holds of one GPU; what it is called there, and its memory in MiB, are those of its last sample.

    rows: in which of the block's moments it is, ascending.
    columns: name in MEASURED -> (len(rows),) values, NaN: not known.
    """

    gpu_index: int
    gpu_name: str
    uuid: str
    memory_total: float | None
    rows: NDArray[np.intp]
    columns: Mapping[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Moments that follow one another. times: (N,) Unix seconds."""

    times: Floats
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return len(self.times)


class ColumnsReader(LossyReader, Iterator[Block]):
    """Iterates over the blocks of a file, in memory that does not grow with it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._blocks = self._read()

    def __next__(self) -> Block:
        return next(self._blocks)

    def _read(self) -> Iterator[Block]:
        with opened(self.path) as file:
            begin = file.read(CHUNK)
            if begin.startswith(CSV_BEGIN.encode()):
                yield from self._table()
                return
            text = begin.decode("utf-8", "replace")
            at, alone = array_at(text, self.path)
            yield from self._array(file, begin[len(text[:at].encode()) :], alone=alone)

    def _table(self) -> Iterator[Block]:
        """Yield the blocks of a CSV."""
        reader = read_stats(self.path)
        while snapshots := list(islice(reader, ROWS)):
            self._complete += len(snapshots)
            yield block_of(snapshots)
        if loss := reader.loss:
            self._lost(loss.why, loss.damaged)

    def _array(self, file: IO[bytes], begin: bytes, *, alone: bool) -> Iterator[Block]:
        """Yield the blocks of an array, of `begin` and what follows it in the file.

        `data` always begins with a bracket in the place of what stood before the entry: nothing is copied to decode.
        """
        data = bytearray(b"[" + begin)
        between: bytes | None = None
        while True:
            more = file.read(CHUNK)
            data += more
            between = between or _between(data)
            end = _cut(data, between) if more else len(data)
            if not end and len(data) < PATIENCE:
                continue
            if (block := _decoded(data, end, closed=not more)) is not None:
                self._complete += len(block)
                yield block
                if not more:
                    return
                del data[: data.index(b"{", end) - 1]
                data[0] = OPEN
                continue
            rest = yield from self._exactly(file, bytes(data), end, alone=alone)
            if rest is None:
                return
            data, between = bytearray(b"[" + rest.lstrip(_SPACE)), None

    def _exactly(self, file: IO[bytes], data: bytes, end: int, *, alone: bool) -> Generator[Block, None, bytes | None]:
        """Yield what `data` holds up to `end`, read entry by entry; return what was not read, None at the end.

        The first byte is passed over. end: 0 where nothing is known: all of it.
        """
        end = end or len(data)
        feed = _Feed(file, data[1:end], data[end:])
        scanner = Scanner(feed(), feed, self._lost, alone=alone)
        enough, snapshots = len(scanner.rest), []
        for value in scanner.values():
            if snapshot := snapshot_of(value):
                snapshots.append(snapshot)
            else:
                self._lost(NO_ENTRY, 1)
            if scanner.position >= enough:
                break
        self._complete += len(snapshots)
        if snapshots:
            yield block_of(snapshots)
        return None if scanner.ended else scanner.rest.encode() + feed.rest


def read_columns(path: Path) -> ColumnsReader:
    """Return the blocks of a gpu_stats*.json of ours or of the original project, or of a CSV.

    Read from it before the end, an error is RecordError: the file is missing or of another kind.
    """
    return ColumnsReader(path)


def block_of(snapshots: Sequence[Snapshot]) -> Block:
    """Return snapshots as columns."""
    rows: dict[int, list[int]] = {}
    samples: dict[int, list[GpuSample]] = {}
    for row, snapshot in enumerate(snapshots):
        for sample in snapshot.samples:
            rows.setdefault(sample.gpu_index, []).append(row)
            samples.setdefault(sample.gpu_index, []).append(sample)
    parts = tuple(
        Part(
            gpu_index=index,
            gpu_name=mine[-1].gpu_name,
            uuid=mine[-1].uuid,
            memory_total=mine[-1].memory_total,
            rows=np.array(rows[index]),
            columns={name: np.array([getattr(sample, name) for sample in mine], dtype=float) for name in MEASURED},
        )
        for index, mine in samples.items()
    )
    return Block(times=np.array([snapshot.time for snapshot in snapshots], dtype=float), parts=parts)


class _Feed:
    """Gives bytes as text, in two parts and then from a file. rest: bytes that were not given yet."""

    def __init__(self, file: IO[bytes], *parts: bytes) -> None:
        self._file, self._parts = file, [part for part in parts if part]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self) -> str:
        text, data = "", b"-"
        while data and not text:  # a part may hold nothing but the begin of a character
            data = self._parts.pop(0) if self._parts else self._file.read(CHUNK)
            text = self._decoder.decode(data, final=not data)
        return text

    @property
    def rest(self) -> bytes:
        return self._decoder.getstate()[0] + b"".join(self._parts)


class _Clocks(msgspec.Struct, gc=False):
    gpu: _Number = UNSET
    sm: _Number = UNSET
    graphics: _Number = UNSET


class _Gpu(msgspec.Struct, gc=False):
    """One GPU at one moment, as it stands in a file: UNSET is not there, None is null."""

    gpu_index: int | None = None
    gpu_name: str | None = None
    uuid: str | None = None
    utilization: float | None = None
    memory_used: _Number = UNSET
    memory_used_mb: _Number = UNSET
    memory_mb: _Number = UNSET
    memory_total: _Number = UNSET
    memory_total_mb: _Number = UNSET
    power: float | None = None
    temperature: _Number = UNSET
    temperatures: dict[str, float | None] | None = None
    sm_clock: _Number = UNSET
    clocks: _Clocks | None = None
    energy_j: float | None = None


class _Entry(_Gpu, kw_only=True, gc=False):
    """One moment: of all GPUs, or of one, whose fields then stand beside the time."""

    timestamp: datetime | float
    multi_gpu_data: list[_Gpu] | UnsetType = UNSET


_DECODER = msgspec.json.Decoder(list[_Entry])


def _between(data: bytearray) -> bytes | None:
    """Return what stands between the first two entries, from the space before a brace to the next one's first key."""
    text = data[1:CHUNK].decode("utf-8", "replace").lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    found = _BETWEEN.match(text, end)
    if found is None or text[end - 1] != "}":
        return None
    begin = len(text[: end - 1].rstrip(" \t\r\n"))
    return text[begin : found.end()].encode()


def _cut(data: bytearray, between: bytes | None) -> int:
    """Return where the last entry that is whole seems to end; 0 where none does."""
    at = data.rfind(between) if between else -1
    return data.index(b"}", at) + 1 if at > 0 else 0


def _decoded(data: bytearray, end: int, *, closed: bool) -> Block | None:
    """Return the block of the entries up to `end`; None where they must be read one by one.

    closed: the array's own bracket is among them. Else the byte at `end` is lent to one.
    """
    if not end:
        return None
    try:
        if closed:
            moments = _DECODER.decode(data)
        else:
            lent, data[end] = data[end], CLOSE
            try:
                moments = _DECODER.decode(memoryview(data)[: end + 1])
            finally:
                data[end] = lent
        return _block(moments) if moments else None
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # whatever it is, the exact reader says so, with its place


def _block(moments: list[_Entry]) -> Block | None:
    """Return the columns of these moments; None where not each has the same GPUs in the same order."""
    several = [moment.multi_gpu_data for moment in moments]
    alone = several.count(UNSET)
    lists = [gpus for gpus in several if gpus is not UNSET]
    width = len(lists[0]) if lists else 1
    if alone not in (0, len(moments)) or not width or any(len(gpus) != width for gpus in lists):
        return None
    gpus: list[_Gpu] = list(chain.from_iterable(lists)) if lists else list(moments)
    indices = list(map(attrgetter("gpu_index"), gpus))
    order = indices[:width]
    if indices != order * len(moments) or len(set(order)) != width or None in order:
        return None
    rows = np.arange(len(moments))
    columns = {name: np.ascontiguousarray(column(gpus).reshape(-1, width).T) for name, column in _COLUMNS.items()}
    parts = tuple(
        Part(
            gpu_index=order[at],
            gpu_name=last.gpu_name or f"GPU {order[at]}",
            uuid=last.uuid or "",
            memory_total=_first(last, TOTAL),
            rows=rows,
            columns={name: values[at] for name, values in columns.items()},
        )
        for at, last in enumerate(gpus[-width:])
    )
    return Block(times=np.array([_time(moment.timestamp) for moment in moments]), parts=parts)


def _plain(name: str) -> Callable[[list[_Gpu]], Floats]:
    """Return how a field becomes a column. Raises TypeError where it is missing from an entry."""
    field = attrgetter(name)
    return lambda gpus: np.array(list(map(field, gpus)), dtype=float)


def _memory(gpus: list[_Gpu]) -> Floats:
    try:
        return _plain(MEMORY[0])(gpus)
    except TypeError:
        return np.array([_first(gpu, MEMORY) for gpu in gpus], dtype=float)


def _temperature(gpus: list[_Gpu]) -> Floats:
    """Return temperatures as read_stats finds them: the GPU's own, else the hottest of its places."""
    if _nowhere("temperature", gpus):
        try:
            return np.array(list(map(itemgetter("GPU"), map(attrgetter("temperatures"), gpus))), dtype=float)
        except (KeyError, TypeError):
            pass  # of another make, or of several
    return np.array([hottest(g.temperatures) if g.temperature is UNSET else g.temperature for g in gpus], dtype=float)


def _clock(gpus: list[_Gpu]) -> Floats:
    if _nowhere("sm_clock", gpus):
        try:
            return _plain("clocks.gpu")(gpus)
        except (AttributeError, TypeError):
            pass
    return np.array([_first(g.clocks, CLOCKS) if g.sm_clock is UNSET else g.sm_clock for g in gpus], dtype=float)


_COLUMNS = {
    "memory_used": _memory,
    "utilization": _plain("utilization"),
    "power": _plain("power"),
    "temperature": _temperature,
    "sm_clock": _clock,
    "energy_j": _plain("energy_j"),
}


def _nowhere(name: str, gpus: list[_Gpu]) -> bool:
    return list(map(attrgetter(name), gpus)).count(UNSET) == len(gpus)


def _first(record: Any, names: Sequence[str]) -> float | None:
    """Return the first of these fields that is there."""
    return next((value for name in names if (value := getattr(record, name, UNSET)) is not UNSET), None)


def _time(stamp: datetime | float) -> float:
    """Return Unix seconds. A time without an offset is local."""
    return stamp.timestamp() if isinstance(stamp, datetime) else stamp
