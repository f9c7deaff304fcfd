"""Any recording of GPUs as text, ours or another's, as snapshots: streamed, in bounded memory, a cut end tolerated."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.values import GpuSample, Snapshot

CHUNK = 1 << 18  # characters that are read at once
LONGEST = 1 << 23  # characters of one object; a longer one is damaged
_ENTRY = re.compile(r'\{\s*"timestamp"')  # where an object begins after a damaged one
_SAMPLES = re.compile(r'"samples"\s*:\s*\[')
_COLUMN = re.compile(r"gpu(\d+)_(\w+)")
_CSV_NAMES = {
    "power_w": "power",
    "temp_c": "temperature",
    "util_pct": "utilization",
    "mem_used_mb": "memory_used",
    "mem_total_mb": "memory_total",
}
_SPACE = " \t\r\n,"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What of a file could not be read. complete: entries that could.  damaged: entries that could not, at least."""

    path: Path
    complete: int
    damaged: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}; {self.complete} entries were read, {self.damaged} or more were lost"


class StatsReader(Iterator[Snapshot]):
    """Iterates over the snapshots of a file. `loss` says afterwards what could not be read; None: nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loss: Loss | None = None
        self._complete = 0
        self._entries = self._read()

    def __next__(self) -> Snapshot:
        snapshot = next(self._entries)
        self._complete += 1
        return snapshot

    def _read(self) -> Iterator[Snapshot]:
        try:
            with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
                begin = file.read(CHUNK)
                if begin.startswith("timestamp,"):
                    file.seek(0)
                    yield from self._csv(file)
                else:
                    yield from self._array(file, begin)
        except FileNotFoundError:
            raise RecordError(
                f"{self.path} is missing", fix="name a gpu_stats*.json or gpu_metrics*.csv file"
            ) from None

    def _array(self, file: IO[str], text: str) -> Iterator[Snapshot]:
        """Yield the entries of a JSON array, of `text` and what follows it in the file."""
        decoder, at = json.JSONDecoder(), self._opening(text)
        while True:
            while at < len(text) and text[at] in _SPACE:
                at += 1
            if at < len(text) and text[at] == "]":
                return
            try:
                value, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError:
                more = file.read(CHUNK) if len(text) - at < LONGEST else ""
                text, at = text[at:] + more, 0
                if more:
                    continue
                if not text.strip():
                    self._lost("the array has no end", 0)
                    return
                found = _ENTRY.search(text, 1)
                self._lost("an entry is damaged" if found else "the file is cut short", 1)
                text = text[found.start() :] if found else self._skip(file)
                if not text:
                    return
                continue
            snapshot = _snapshot(value)
            if snapshot is None:
                self._lost("an entry has no time or no GPU", 1)
            else:
                yield snapshot
            if at > CHUNK // 2:
                text, at = text[at:], 0

    def _skip(self, file: IO[str]) -> str:
        """Return what follows from the next entry on; nothing where there is none."""
        text = ""
        while more := file.read(CHUNK):
            text = text[-64:] + more
            if found := _ENTRY.search(text):
                return text[found.start() :]
        return ""

    def _opening(self, text: str) -> int:
        """Return where the entries begin: an array, or an object with an array named samples."""
        at = len(text) - len(text.lstrip("\ufeff \t\r\n"))
        if text[at : at + 1] == "[":
            return at + 1
        found = _SAMPLES.search(text) if text[at : at + 1] == "{" else None
        if found:
            return found.end()
        raise RecordError(
            f"{self.path} is no recording of GPUs",
            why="it is neither a JSON array nor an object with `samples`, nor a CSV with a timestamp column",
            fix="name a gpu_stats*.json or gpu_metrics*.csv file",
        )

    def _csv(self, file: IO[str]) -> Iterator[Snapshot]:
        rows = csv.reader(line.replace("\0", "") for line in file)
        header = next(rows)
        gpus: dict[int, list[tuple[int, str]]] = {}
        for at, name in enumerate(header):
            if (match := _COLUMN.fullmatch(name.strip())) and match[2] in _CSV_NAMES:
                gpus.setdefault(int(match[1]), []).append((at, _CSV_NAMES[match[2]]))
        for row in rows:
            time = _time(row[0]) if len(row) == len(header) else None
            if time is None:
                self._lost("a line is not whole", 1)
                continue
            samples = [_sample({"gpu_index": gpu, **_cells(row, columns)}, gpu) for gpu, columns in gpus.items()]
            yield Snapshot(time=time, samples=tuple(samples))

    def _lost(self, why: str, damaged: int) -> None:
        before = self.loss.damaged if self.loss else 0
        self.loss = Loss(path=self.path, complete=self._complete, damaged=before + damaged, why=why)


def read_stats(path: Path) -> StatsReader:
    """Return the snapshots of a gpu_stats*.json of ours or of the original project, or of a CSV; see StatsReader.

    Read from it before the end, an error is RecordError: the file is missing or of another kind.
    """
    return StatsReader(path)


def _snapshot(value: Any) -> Snapshot | None:
    """Return an entry of either layout as a value; None when it is no entry."""
    if not isinstance(value, dict):
        return None
    time = _time(value.get("timestamp"))
    entries = value.get("multi_gpu_data", [value])
    if time is None or not isinstance(entries, list):
        return None
    samples = tuple(_sample(entry, at) for at, entry in enumerate(entries) if isinstance(entry, dict))
    return Snapshot(time=time, samples=samples) if samples else None


def _sample(entry: Mapping[str, Any], position: int) -> GpuSample:
    index = _number(entry.get("gpu_index"))
    temperatures, clocks = entry.get("temperatures"), entry.get("clocks")
    return GpuSample(
        gpu_index=position if index is None else int(index),
        gpu_name=str(entry.get("gpu_name") or f"GPU {position if index is None else int(index)}"),
        uuid=str(entry.get("uuid") or ""),
        utilization=_number(entry.get("utilization")),
        memory_used=_first(entry, "memory_used", "memory_used_mb", "memory_mb"),
        memory_total=_first(entry, "memory_total", "memory_total_mb"),
        memory_percent=_number(entry.get("memory_percent")),
        power=_number(entry.get("power")),
        power_instant=_number(entry.get("power_instant")),
        power_limit=_number(entry.get("power_limit")),
        temperature=_first(entry, "temperature") if "temperature" in entry else _hottest(temperatures),
        sm_clock=_first(entry, "sm_clock") if "sm_clock" in entry else _clock(clocks),
        energy_j=_number(entry.get("energy_j")),
    )


def _cells(row: list[str], columns: list[tuple[int, str]]) -> dict[str, float | None]:
    return {name: _text(row[at]) for at, name in columns}


def _first(entry: Mapping[str, Any], *names: str) -> float | None:
    return next((_number(entry[name]) for name in names if name in entry), None)


def _hottest(temperatures: Any) -> float | None:
    """Return the GPU's own temperature, else the highest that is known."""
    if not isinstance(temperatures, dict):
        return None
    if (own := _number(temperatures.get("GPU"))) is not None:
        return own
    return max((number for value in temperatures.values() if (number := _number(value)) is not None), default=None)


def _clock(clocks: Any) -> float | None:
    return _first(clocks, "gpu", "sm", "graphics") if isinstance(clocks, dict) else None


def _time(value: Any) -> float | None:
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
    return value if math.isfinite(value) else None


def _text(value: str) -> float | None:
    try:
        return _number(float(value))
    except ValueError:
        return None
