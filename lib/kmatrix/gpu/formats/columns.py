"""A recording of GPUs as text -> blocks of columns: the same numbers as read_stats, many times as fast.

A JSON array is cut into pieces that are decoded at once; a piece that does not decode, for whatever reason, is read
entry by entry, and then the fast way goes on.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from kmatrix.gpu.formats.blocks import Block, block_of
from kmatrix.gpu.formats.entries import between, cut, decoded
from kmatrix.gpu.formats.reading import (
    CSV_BEGIN,
    NO_ENTRY,
    NO_LINE,
    LossyReader,
    array_at,
    opened,
    rows_of,
    snapshot_of,
    table_of,
)
from kmatrix.gpu.formats.scanning import Scanner
from kmatrix.gpu.formats.table import table_block

CHUNK = 1 << 20  # bytes that are read at once
PATIENCE = 4 * CHUNK  # bytes among which the end of an entry should be found
ROWS = 4096  # lines of a CSV that become a block
OPEN = ord("[")
_SPACE = b" \t\r\n,"


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
                file.seek(0)
                yield from self._table(file)
                return
            text = begin.decode("utf-8", "replace")
            at, alone = array_at(text, self.path)
            yield from self._array(file, begin[len(text[:at].encode()) :], alone=alone)

    def _table(self, file: IO[bytes]) -> Iterator[Block]:
        """Yield the blocks of a CSV."""
        lines = rows_of(io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline=""))
        table = table_of(next(lines), self.path)
        while rows := list(islice(lines, ROWS)):
            block = table_block(rows, table)
            if lost := len(rows) - (0 if block is None else len(block)):
                self._lost(NO_LINE, lost)
            if block is not None:
                self._complete += len(block)
                yield block

    def _array(self, file: IO[bytes], begin: bytes, *, alone: bool) -> Iterator[Block]:
        """Yield the blocks of an array, of `begin` and what follows it in the file.

        `data` always begins with a bracket in the place of what stood before the entry: nothing is copied to decode.
        """
        data = bytearray(b"[" + begin)
        separator: bytes | None = None
        while True:
            more = file.read(CHUNK)
            data += more
            separator = separator or between(data)
            end = cut(data, separator) if more else len(data)
            if not end and len(data) < PATIENCE:
                continue
            if (block := decoded(data, end, closed=not more)) is not None:
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
            data, separator = bytearray(b"[" + rest.lstrip(_SPACE)), None

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
