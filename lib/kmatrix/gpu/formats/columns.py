"""Read a GPU recording in text form (JSON or CSV) as blocks of columns.

Each chunk of a JSON array is decoded with msgspec in one call, about ten times faster than entry by entry. A chunk that
does not decode is read entry by entry with `text.Scanner`, which reports what is damaged; then the fast path resumes.
Columns are lists: importing numpy takes as long as reading the recording of an hour.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import UNSET, UnsetType

from kmatrix.gpu.formats.samples import SIMULATED, GpuSample, Snapshot
from kmatrix.gpu.formats.text import (
    BAD_ENTRY,
    BAD_LINE,
    CLOCKS,
    CSV_BEGIN,
    MEMORY,
    TOTAL,
    CsvColumns,
    Scanner,
    TolerantReader,
    array_at,
    hottest,
    number_in,
    opened,
    rows_of,
    snapshot_of,
    table_of,
    time_of,
)

CHUNK = 1 << 20  # bytes per read
MAX_PENDING = 4 * CHUNK  # without the end of an entry in this many bytes, the data are parsed entry by entry
ROWS = 4096  # CSV lines per block
OPEN = ord("[")  # written over bytes that are not needed any more
_SPACE = b" \t\r\n,"
CLOSE = ord("]")
PROBE = 1 << 20  # bytes that must contain the first two entries
_BETWEEN = re.compile(r'\s*,\s*\{\s*"[^"\\]*"')  # from the end of an entry to the first key of the next one
MEASURED = ("memory_used", "utilization", "power", "temperature", "sm_clock", "energy_j")
Floats = list[float]


def read_columns(path: Path) -> ColumnsReader:
    """Return the blocks of a gpu_stats*.json of this or of the original project, or of a CSV.

    Iterating raises RecordError if the file is missing or has another format.
    """
    return ColumnsReader(path)


class _TextSource:
    """Decodes bytes to text in chunks: first from `parts`, then from a file."""

    def __init__(self, file: IO[bytes], *parts: bytes) -> None:
        self._file, self._parts = file, [part for part in parts if part]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self) -> str:
        text, data = "", b"-"
        while data and not text:  # a part may end inside a character
            data = self._parts.pop(0) if self._parts else self._file.read(CHUNK)
            text = self._decoder.decode(data, final=not data)
        return text

    @property
    def rest(self) -> bytes:
        """The bytes that were not decoded yet."""
        return self._decoder.getstate()[0] + b"".join(self._parts)


_Number = float | None | UnsetType


def separator_of(data: bytearray) -> bytes | None:
    """Return the bytes between the first two entries: from the closing brace to the first key of the next entry.

    None if they cannot be parsed.
    """
    text = data[1:PROBE].decode("utf-8", "replace").lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    found = _BETWEEN.match(text, end)
    if found is None or text[end - 1] != "}":
        return None
    begin = len(text[: end - 1].rstrip(" \t\r\n"))
    return text[begin : found.end()].encode()


def end_of_last_entry(data: bytearray, separator: bytes | None) -> int:
    """Return the probable end of the last complete entry, 0 if none is found."""
    at = data.rfind(separator) if separator else -1
    return data.index(b"}", at) + 1 if at > 0 else 0


def decode_block(data: bytearray, end: int, *, closed: bool) -> SampleBlock | None:
    """Return the block of the entries up to `end`, or None if they must be parsed one by one.

    `closed`: `data` contains the closing bracket of the array. Otherwise, one is written temporarily at `end`.
    """
    if not end:
        return None
    try:
        if closed:
            entries = _DECODER.decode(data)
        else:
            # The bracket is written in place: copying each chunk would take a good part of the decoding time.
            saved, data[end] = data[end], CLOSE
            try:
                entries = _DECODER.decode(memoryview(data)[: end + 1])
            finally:
                data[end] = saved
        return _block(entries) if entries else None
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # the entry-by-entry parser reports the position


# gc=False: the objects contain no cycles, and tracking millions of them would slow down every collection.
class _Clocks(msgspec.Struct, gc=False):
    gpu: _Number = UNSET
    sm: _Number = UNSET
    graphics: _Number = UNSET


class _Gpu(msgspec.Struct, gc=False):
    """One GPU of one entry, with the keys of all known formats. UNSET: missing, None: null."""

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
    """One entry: of several GPUs, or of a single one, whose fields are next to the timestamp."""

    timestamp: datetime | float
    multi_gpu_data: list[_Gpu] | UnsetType = UNSET


_DECODER = msgspec.json.Decoder(list[_Entry])


def _block(entries: list[_Entry]) -> SampleBlock | None:
    """Return entries as columns, or None if an entry has no GPU or a GPU has no index."""
    # Every entry in one list of GPUs, in order. A block with both layouts is left to the slow path.
    several = [entry.multi_gpu_data for entry in entries]
    lists = [gpus for gpus in several if gpus is not UNSET]
    if lists and (len(lists) < len(several) or not all(lists)):
        return None
    gpus: list[_Gpu] = list(chain.from_iterable(lists)) if lists else list(entries)
    counts = list(map(len, lists)) if lists else [1] * len(entries)
    indices = list(map(attrgetter("gpu_index"), gpus))
    if None in indices:
        return None
    # One list per column for all GPUs together, then a slice for each GPU: few calls on long lists.
    columns = {name: column(gpus) for name, column in _COLUMNS.items()}
    parts, repeated = [], set()
    for index, (rows, places, is_repeated) in _places(indices, counts).items():
        last = gpus[places[-1]]
        if is_repeated:
            repeated.add(index)
        parts.append(
            DeviceColumns(
                gpu_index=index,
                gpu_name=last.gpu_name or f"GPU {index}",
                uuid=last.uuid or "",
                memory_total=_first(last, TOTAL),
                rows=rows,
                columns={name: _picked(values, places) for name, values in columns.items()},
            )
        )
    times = [_time(entry.timestamp) for entry in entries]
    return SampleBlock(times=times, parts=tuple(parts), repeated=frozenset(repeated))


def _places(indices: list[int], counts: list[int]) -> dict[int, tuple[Sequence[int], Sequence[int], bool]]:
    """Return GPU index -> its entries, its positions among all samples, and whether an entry lists it twice.

    `counts`: number of GPUs in each entry.
    """
    # Almost always every entry lists the same GPUs in the same order: a slice is much faster than a search.
    width, total = counts[0], len(indices)
    order = indices[:width]
    if len(set(order)) == width and counts.count(width) == len(counts) and indices == order * len(counts):
        rows = range(len(counts))
        return {index: (rows, range(at, total, width), False) for at, index in enumerate(order)}
    found: dict[int, tuple[list[int], list[int]]] = {}
    repeated, at = set(), 0
    for row, count in enumerate(counts):
        for place in range(at, at + count):
            rows_of_one, places = found.setdefault(indices[place], ([], []))
            if rows_of_one and rows_of_one[-1] == row:
                repeated.add(indices[place])  # two GPUs of one index: which values belong to it is unknown
                continue
            rows_of_one.append(row)
            places.append(place)
        at += count
    return {index: (*pair, index in repeated) for index, pair in found.items()}


def _picked(values: Floats, places: Sequence[int]) -> Floats:
    """Return the values at these positions."""
    if isinstance(places, range):
        return values[places.start : places.stop : places.step]
    return [values[place] for place in places]


def _plain(name: str) -> Callable[[list[_Gpu]], Floats]:
    """Return a function that extracts a field as a column. It raises TypeError if an entry lacks the field."""
    field = attrgetter(name)
    # map with attrgetter stays in C.
    return lambda gpus: _numbers(list(map(field, gpus)))


def _numbers(values: list[Any]) -> Floats:
    """Return floats with None replaced by NaN. Raises TypeError for UNSET."""
    try:
        sum(values)  # fails for None and UNSET, at a tenth of the cost of looking at each value here
    except TypeError:
        return [math.nan if value is None else float(value) for value in values]
    return values


def _memory(gpus: list[_Gpu]) -> Floats:
    # The common case first; a key that is missing in some entry raises TypeError.
    try:
        return _plain(MEMORY[0])(gpus)
    except TypeError:
        return _numbers([_first(gpu, MEMORY) for gpu in gpus])


def _temperature(gpus: list[_Gpu]) -> Floats:
    """Return temperatures: the field itself, the sensor `GPU`, or the maximum over all sensors."""
    if _missing_in_all("temperature", gpus):
        try:
            return _numbers(list(map(itemgetter("GPU"), map(attrgetter("temperatures"), gpus))))
        except (KeyError, TypeError):
            pass  # other sensor names, or a mix
    return _numbers([hottest(g.temperatures) if g.temperature is UNSET else g.temperature for g in gpus])


def _clock(gpus: list[_Gpu]) -> Floats:
    if _missing_in_all("sm_clock", gpus):
        try:
            return _plain("clocks.gpu")(gpus)
        except (AttributeError, TypeError):
            pass  # another clock, or entries without clocks
    return _numbers([_first(g.clocks, CLOCKS) if g.sm_clock is UNSET else g.sm_clock for g in gpus])


_COLUMNS = {
    "memory_used": _memory,
    "utilization": _plain("utilization"),
    "power": _plain("power"),
    "temperature": _temperature,
    "sm_clock": _clock,
    "energy_j": _plain("energy_j"),
}


def _missing_in_all(name: str, gpus: list[_Gpu]) -> bool:
    return list(map(attrgetter(name), gpus)).count(UNSET) == len(gpus)


def _first(record: Any, names: Sequence[str]) -> float | None:
    """Return the first of these fields that is set."""
    return next((value for name in names if (value := getattr(record, name, UNSET)) is not UNSET), None)


def _time(stamp: datetime | float) -> float:
    """Return Unix s. A time without an offset is local."""
    return stamp.timestamp() if isinstance(stamp, datetime) else stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceColumns:
    """The samples of one GPU in a block. Name and total memory come from its last sample."""

    gpu_index: int
    gpu_name: str
    uuid: str
    memory_total: float | None  # MiB
    rows: Sequence[int]  # indices into the times of the block, ascending
    columns: Mapping[str, Floats]  # name in MEASURED -> one value per row, NaN: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """Consecutive samples of all GPUs."""

    times: Floats  # Unix s
    parts: tuple[DeviceColumns, ...]
    repeated: frozenset[int] = frozenset()  # indices that several GPUs of one sample have; only the first one counts

    def __len__(self) -> int:
        return len(self.times)


class ColumnsReader(TolerantReader, Iterator[SampleBlock]):
    """Iterates over the blocks of a file, in constant memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._blocks = self._read()

    def __next__(self) -> SampleBlock:
        return next(self._blocks)

    def _read(self) -> Iterator[SampleBlock]:
        with opened(self.path) as file:
            begin = file.read(CHUNK)
            # By content, not by suffix: recordings get renamed and copied.
            if begin.startswith(CSV_BEGIN.encode()):
                file.seek(0)
                yield from self._table(file)
                return
            text = begin.decode("utf-8", "replace")
            at, alone = array_at(text, self.path)
            yield from self._array(file, begin[len(text[:at].encode()) :], alone=alone)

    def _table(self, file: IO[bytes]) -> Iterator[SampleBlock]:
        """Yield the blocks of a CSV."""
        lines = rows_of(io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline=""))
        table = table_of(next(lines), self.path)
        while rows := list(islice(lines, ROWS)):
            block = table_block(rows, table)
            if lost := len(rows) - (0 if block is None else len(block)):
                self._skipped(BAD_LINE, lost)
            if block is not None:
                self._complete += len(block)
                yield block

    def _array(self, file: IO[bytes], begin: bytes, *, alone: bool) -> Iterator[SampleBlock]:
        """Yield the blocks of an array, from `begin` and the rest of the file.

        `data` always starts with a bracket, written over the byte before the first entry, so that it can be decoded
        without a copy.
        """
        data = bytearray(b"[" + begin)
        separator: bytes | None = None
        while True:
            more = file.read(CHUNK)
            data += more
            # The separator of the first two entries is that of the whole file, because one program wrote it.
            separator = separator or separator_of(data)
            end = end_of_last_entry(data, separator) if more else len(data)
            if not end and len(data) < MAX_PENDING:
                continue
            if (block := decode_block(data, end, closed=not more)) is not None:
                self._complete += len(block)
                yield block
                if not more:
                    return
                # Keep one byte before the next entry, and turn it into the bracket that opens the next chunk.
                del data[: data.index(b"{", end) - 1]
                data[0] = OPEN
                continue
            rest = yield from self._entry_by_entry(file, bytes(data), end, alone=alone)
            if rest is None:
                return
            data, separator = bytearray(b"[" + rest.lstrip(_SPACE)), None

    def _entry_by_entry(
        self, file: IO[bytes], data: bytes, end: int, *, alone: bool
    ) -> Generator[SampleBlock, None, bytes | None]:
        """Parse `data` up to `end` entry by entry and yield the block. Return the rest, or None at the end of the file.

        The first byte is skipped. `end`: 0 to parse all of `data`.
        """
        # The scanner may read beyond `end`, but only to find the next good entry after damage.
        end = end or len(data)
        feed = _TextSource(file, data[1:end], data[end:])
        scanner = Scanner(feed(), feed, self._skipped, alone=alone)
        enough, snapshots = len(scanner.rest), []
        for value in scanner.values():
            if snapshot := snapshot_of(value):
                snapshots.append(snapshot)
            else:
                self._skipped(BAD_ENTRY, 1)
            if scanner.position >= enough:
                break
        self._complete += len(snapshots)
        if snapshots:
            yield block_of(snapshots)
        return None if scanner.ended else scanner.rest.encode() + feed.rest


def block_of(snapshots: Sequence[Snapshot]) -> SampleBlock:
    """Return snapshots as a block of columns."""
    rows: dict[int, list[int]] = {}
    samples: dict[int, list[GpuSample]] = {}
    repeated = set()
    for row, snapshot in enumerate(snapshots):
        for sample in snapshot.samples:
            index = sample.gpu_index
            if rows.get(index, [-1])[-1] == row:
                repeated.add(index)
                continue
            rows.setdefault(index, []).append(row)
            samples.setdefault(index, []).append(sample)
    parts = tuple(
        DeviceColumns(
            gpu_index=index,
            gpu_name=mine[-1].gpu_name,
            uuid=mine[-1].uuid,
            memory_total=mine[-1].memory_total,
            rows=rows[index],
            columns={name: _numbers([getattr(sample, name) for sample in mine]) for name in MEASURED},
        )
        for index, mine in samples.items()
    )
    return SampleBlock(times=[snapshot.time for snapshot in snapshots], parts=parts, repeated=frozenset(repeated))


def table_block(rows: Sequence[list[str]], table: CsvColumns) -> SampleBlock | None:
    """Return the block of the complete lines with a time, or None if there are none."""
    timed = [(time, row) for row in rows if len(row) == table.width and (time := time_of(row[0])) is not None]
    if not timed:
        return None
    columns = list(zip(*(row for _, row in timed), strict=True))
    parts = []
    for index, places in table.gpus.items():
        values = {name: _floats(columns[at]) for at, name in places}
        total = values.get("memory_total")
        parts.append(
            DeviceColumns(
                gpu_index=index,
                gpu_name=f"GPU {index} {SIMULATED}" if table.simulated else f"GPU {index}",
                uuid="",
                memory_total=None if total is None or math.isnan(total[-1]) else total[-1],
                rows=range(len(timed)),
                columns={name: values[name] if name in values else [math.nan] * len(timed) for name in MEASURED},
            )
        )
    return SampleBlock(times=[time for time, _ in timed], parts=tuple(parts))


def _floats(cells: Sequence[str]) -> Floats:
    """Return the numbers of a column, NaN for cells that are not numbers."""
    try:
        values = list(map(float, cells))
        if math.isfinite(sum(values)):  # otherwise some are not finite
            return values
    except ValueError:
        pass
    return _numbers([number_in(cell) for cell in cells])
