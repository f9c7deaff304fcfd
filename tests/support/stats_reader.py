"""Read recordings one snapshot at a time and without numpy, to check the vectorized reader.

Reports read recordings in columns (kmatrix.gpu.formats.columns); tests compare the columns with this reader.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from kmatrix.gpu.formats.samples import Snapshot
from kmatrix.gpu.formats.text import (
    BAD_ENTRY,
    BAD_LINE,
    CSV_BEGIN,
    Scanner,
    TolerantReader,
    array_at,
    number_in,
    opened,
    rows_of,
    snapshot_of,
    table_of,
)

CHUNK = 1 << 18  # characters per read


class StatsReader(TolerantReader, Iterator[Snapshot]):
    """Iterate over the snapshots of a gpu_stats*.json or a CSV file of kmatrix or of the original project."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._entries = self._read()

    def __next__(self) -> Snapshot:
        snapshot = next(self._entries)
        self._complete += 1
        return snapshot

    def _read(self) -> Iterator[Snapshot]:
        with opened(self.path) as binary:
            file = io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="")
            begin = file.read(CHUNK)
            if begin.startswith(CSV_BEGIN):
                file.seek(0)
                yield from self._csv(file)
                return
            at, alone = array_at(begin, self.path)
            for value in Scanner(begin[at:], partial(file.read, CHUNK), self._skipped, alone=alone).values():
                snapshot = snapshot_of(value)
                if snapshot is None:
                    self._skipped(BAD_ENTRY, 1)
                else:
                    yield snapshot

    def _csv(self, file: IO[str]) -> Iterator[Snapshot]:
        rows = rows_of(file)
        table = table_of(next(rows), self.path)
        for row in rows:
            entries = [
                {"gpu_index": gpu, **{name: number_in(row[at]) for at, name in columns}}
                for gpu, columns in (table.gpus.items() if len(row) == table.width else ())
            ]
            snapshot = snapshot_of({"timestamp": row[0], "multi_gpu_data": entries}) if entries else None
            if snapshot is None:
                self._skipped(BAD_LINE, 1)
            else:
                yield snapshot


def read_stats(path: Path) -> StatsReader:
    """Return the snapshots of a recording. Iterating raises RecordError if the file is missing or of another kind."""
    return StatsReader(path)
