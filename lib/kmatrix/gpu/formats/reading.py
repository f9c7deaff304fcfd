"""Any recording of GPUs as text, ours or another's, as snapshots: streamed, in bounded memory, a cut end tolerated."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.scanning import Scanner, opening
from kmatrix.gpu.formats.values import GpuSample, Snapshot

CHUNK = 1 << 18  # characters that are read at once
CSV_BEGIN = "timestamp,"
LINE = 1 << 16  # characters of a line of a CSV; a longer one is damaged
NO_LINE = "a line is not whole"
NO_ENTRY = "an entry has no time or no GPU"
MEMORY = ("memory_used", "memory_used_mb", "memory_mb")  # the names that used memory goes by; the first there counts
TOTAL = ("memory_total", "memory_total_mb")
CLOCKS = ("gpu", "sm", "graphics")  # likewise, within `clocks`
_COLUMN = re.compile(r"gpu(\d+)_(\w+)")
_CSV_NAMES = {
    "power_w": "power",
    "temp_c": "temperature",
    "util_pct": "utilization",
    "mem_used_mb": "memory_used",
    "mem_total_mb": "memory_total",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What of a file could not be read. complete: entries that could.  damaged: entries that could not, at least."""

    path: Path
    complete: int
    damaged: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}; {self.complete} entries were read, {self.damaged} or more were lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What the columns of a CSV mean. width: how many there are.  gpus: index -> the places of what is known of it."""

    width: int
    gpus: Mapping[int, list[tuple[int, str]]]


class LossyReader:
    """What readers of recordings share. `loss` says at the end what could not be read; None: nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._complete, self._damaged = 0, 0
        self._whys: list[str] = []  # each once

    @property
    def loss(self) -> Loss | None:
        if not self._whys:
            return None
        return Loss(path=self.path, complete=self._complete, damaged=self._damaged, why=", and ".join(self._whys))

    def _lost(self, why: str, damaged: int) -> None:
        if why not in self._whys:
            self._whys.append(why)
        self._damaged += damaged


class StatsReader(LossyReader, Iterator[Snapshot]):
    """Iterates over the snapshots of a file, one value at a time."""

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
            for value in Scanner(begin[at:], partial(file.read, CHUNK), self._lost, alone=alone).values():
                snapshot = snapshot_of(value)
                if snapshot is None:
                    self._lost(NO_ENTRY, 1)
                else:
                    yield snapshot

    def _csv(self, file: IO[str]) -> Iterator[Snapshot]:
        rows = rows_of(file)
        table = table_of(next(rows), self.path)
        for row in rows:
            time = time_of(row[0]) if len(row) == table.width else None
            if time is None:
                self._lost(NO_LINE, 1)
                continue
            samples = [_sample({"gpu_index": gpu, **_cells(row, columns)}, gpu) for gpu, columns in table.gpus.items()]
            yield Snapshot(time=time, samples=tuple(samples))


def read_stats(path: Path) -> StatsReader:
    """Return the snapshots of a gpu_stats*.json of ours or of the original project, or of a CSV; see StatsReader.

    Read from it before the end, an error is RecordError: the file is missing or of another kind.
    """
    return StatsReader(path)


def opened(path: Path) -> IO[bytes]:
    """Open a recording. Raises RecordError where there is none."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", fix="name a gpu_stats*.json or gpu_metrics*.csv file") from None


def array_at(text: str, path: Path) -> tuple[int, bool]:
    """Return where the entries of a recording begin, and whether its array stands alone. Raises RecordError."""
    found = opening(text)
    if found is None:
        raise _no_recording(path)
    return found


def rows_of(file: IO[str]) -> Iterator[list[str]]:
    """Yield the cells of each line of a CSV. No cell that counts is ever quoted."""
    for line in iter(partial(file.readline, LINE), ""):
        yield line.rstrip("\r\n").replace("\0", "").split(",")


def table_of(header: list[str], path: Path) -> Table:
    """Return what the columns of a CSV mean. Raises RecordError where none is of a GPU."""
    gpus: dict[int, list[tuple[int, str]]] = {}
    for at, name in enumerate(header):
        if (match := _COLUMN.fullmatch(name.strip())) and match[2] in _CSV_NAMES:
            gpus.setdefault(int(match[1]), []).append((at, _CSV_NAMES[match[2]]))
    if not gpus:
        raise _no_recording(path)
    return Table(width=len(header), gpus=gpus)


def snapshot_of(value: Any) -> Snapshot | None:
    """Return an entry of either layout as a value; None when it is no entry."""
    if not isinstance(value, dict):
        return None
    time = time_of(value.get("timestamp"))
    entries = value.get("multi_gpu_data", [value])
    if time is None or not isinstance(entries, list):
        return None
    samples = tuple(_sample(entry, at) for at, entry in enumerate(entries) if isinstance(entry, dict))
    return Snapshot(time=time, samples=samples) if samples else None


def _no_recording(path: Path) -> RecordError:
    return RecordError(
        f"{path} is no recording of GPUs",
        why="it is neither a JSON array nor an object with `samples`, nor a CSV with a timestamp and columns of GPUs",
        fix="name a gpu_stats*.json or gpu_metrics*.csv file",
    )


def _sample(entry: Mapping[str, Any], position: int) -> GpuSample:
    index = _number(entry.get("gpu_index"))
    temperatures, clocks = entry.get("temperatures"), entry.get("clocks")
    return GpuSample(
        gpu_index=position if index is None else int(index),
        gpu_name=str(entry.get("gpu_name") or f"GPU {position if index is None else int(index)}"),
        uuid=str(entry.get("uuid") or ""),
        utilization=_number(entry.get("utilization")),
        memory_used=_first(entry, *MEMORY),
        memory_total=_first(entry, *TOTAL),
        memory_percent=_number(entry.get("memory_percent")),
        power=_number(entry.get("power")),
        power_instant=_number(entry.get("power_instant")),
        power_limit=_number(entry.get("power_limit")),
        temperature=_first(entry, "temperature") if "temperature" in entry else hottest(temperatures),
        sm_clock=_first(entry, "sm_clock") if "sm_clock" in entry else _clock(clocks),
        energy_j=_number(entry.get("energy_j")),
    )


def _cells(row: list[str], columns: list[tuple[int, str]]) -> dict[str, float | None]:
    return {name: number_in(row[at]) for at, name in columns}


def _first(entry: Mapping[str, Any], *names: str) -> float | None:
    return next((_number(entry[name]) for name in names if name in entry), None)


def hottest(temperatures: Any) -> float | None:
    """Return the GPU's own temperature, else the highest that is known."""
    if not isinstance(temperatures, dict):
        return None
    if (own := _number(temperatures.get("GPU"))) is not None:
        return own
    return max((number for value in temperatures.values() if (number := _number(value)) is not None), default=None)


def _clock(clocks: Any) -> float | None:
    return _first(clocks, *CLOCKS) if isinstance(clocks, dict) else None


def time_of(value: Any) -> float | None:
    """Return Unix seconds of ISO 8601 (local time where no offset is given) or of a number."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.strip()).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    return _number(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


def number_in(value: str) -> float | None:
    try:
        return _number(float(value))
    except ValueError:
        return None
