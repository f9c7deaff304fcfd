"""Parse GPU recordings in text form (JSON or CSV), of this or of the original project, including damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.samples import CSV_SIMULATED, GpuSample, Snapshot
from kmatrix.records.files import finite

CSV_BEGIN = "timestamp,"
MAX_LINE = 1 << 16  # characters of a CSV line; a longer line is damaged
BAD_LINE = "a line is incomplete"
BAD_ENTRY = "an entry has no time or no GPU"
# Names in known formats, by precedence.
MEMORY = ("memory_used", "memory_used_mb", "memory_mb")
TOTAL = ("memory_total", "memory_total_mb")
CLOCKS = ("gpu", "sm", "graphics")  # within `clocks`
# An entry of a single GPU has one of these keys, also if their values are unknown.
OF_ONE_GPU = {"gpu_index", "utilization", "power", "temperature", "temperatures", "sm_clock", "clocks", "energy_j"}
OF_ONE_GPU.update(MEMORY)
_COLUMN = re.compile(r"gpu(\d+)_(\w+)")
_CSV_NAMES = {
    "power_w": "power",
    "temp_c": "temperature",
    "util_pct": "utilization",
    "mem_used_mb": "memory_used",
    "mem_total_mb": "memory_total",
    "sm_clock_mhz": "sm_clock",
}
MAX_VALUE = 1 << 23  # characters of one value; a longer value is damaged
NO_END = "the array has no end"
TRUNCATED = "the file is truncated"
DAMAGED = "an entry is damaged"
TRAILING = "data after the end of the array"
_ENTRY = re.compile(r'\{\s*"timestamp"')  # start of an entry, to resume after a damaged one
_BEGIN = 64  # characters that contain the start of an entry
_SAMPLES = re.compile(r'"samples"\s*:\s*\[')
_SPACE = " \t\r\n,"
_WORD = 16  # length of the longest literal or escape that the end of a chunk can split
_DONE = 1 << 18  # parsed characters to keep before the buffer is trimmed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadErrors:
    """The damaged entries of a file."""

    path: Path
    complete: int  # number of entries read
    damaged: int  # number of entries lost, at least
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}; {self.complete} entries read, at least {self.damaged} lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvColumns:
    """The meaning of the columns of a CSV."""

    width: int  # number of columns
    gpus: Mapping[int, list[tuple[int, str]]]  # GPU index -> (column, field)
    simulated: bool = False


class TolerantReader:
    """Base of readers that skip damaged entries. `errors` describes them afterwards, None if there are none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._complete, self._damaged = 0, 0
        self._whys: list[str] = []  # distinct reasons

    @property
    def errors(self) -> ReadErrors | None:
        if not self._whys:
            return None
        return ReadErrors(path=self.path, complete=self._complete, damaged=self._damaged, why=", and ".join(self._whys))

    def _skipped(self, why: str, damaged: int) -> None:
        if why not in self._whys:
            self._whys.append(why)
        self._damaged += damaged


def opened(path: Path) -> IO[bytes]:
    """Open a recording. Raises RecordError if it is missing."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", hint="pass a gpu_stats*.json or gpu_metrics*.csv file") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read", why=error.strerror or str(error)) from None


def array_at(text: str, path: Path) -> tuple[int, bool]:
    """Return the offset of the first entry, and whether the array is the whole document. Raises RecordError."""
    found = opening(text)
    if found is None:
        raise _no_recording(path)
    return found


def rows_of(file: IO[str]) -> Iterator[list[str]]:
    """Yield the cells of each line of a CSV. The relevant cells are never quoted."""
    # A damaged file may be one line of gigabytes. A machine that crashes may leave NUL bytes at the end of a file.
    for line in iter(partial(file.readline, MAX_LINE), ""):
        yield line.rstrip("\r\n").replace("\0", "").split(",")


def table_of(header: list[str], path: Path) -> CsvColumns:
    """Return the meaning of the columns of a CSV. Raises RecordError if no column belongs to a GPU."""
    gpus: dict[int, list[tuple[int, str]]] = {}
    for at, name in enumerate(header):
        if (match := _COLUMN.fullmatch(name.strip())) and match[2] in _CSV_NAMES:
            gpus.setdefault(int(match[1]), []).append((at, _CSV_NAMES[match[2]]))
    if not gpus:
        raise _no_recording(path)
    return CsvColumns(width=len(header), gpus=gpus, simulated=CSV_SIMULATED in map(str.strip, header))


def snapshot_of(value: Any) -> Snapshot | None:
    """Return an entry of either JSON layout as a snapshot, or None if it is not an entry."""
    if not isinstance(value, dict):
        return None
    time = time_of(value.get("timestamp"))
    entries = value.get("multi_gpu_data", [value])
    if time is None or not isinstance(entries, list):
        return None
    if "multi_gpu_data" not in value and OF_ONE_GPU.isdisjoint(value):
        return None  # of another program, in a layout that is not known: it is not a GPU without values
    samples = tuple(_sample(entry, at) for at, entry in enumerate(entries) if isinstance(entry, dict))
    return Snapshot(time=time, samples=samples) if samples else None


def _no_recording(path: Path) -> RecordError:
    return RecordError(
        f"{path} is not a GPU recording",
        why="expected a JSON array, an object with `samples`, or a CSV with a timestamp and GPU columns",
        hint="pass a gpu_stats*.json or gpu_metrics*.csv file",
    )


def _sample(entry: Mapping[str, Any], position: int) -> GpuSample:
    # Without an index, the position in the list counts.
    index = finite(entry.get("gpu_index"))
    temperatures, clocks = entry.get("temperatures"), entry.get("clocks")
    return GpuSample(
        gpu_index=position if index is None else int(index),
        gpu_name=str(entry.get("gpu_name") or f"GPU {position if index is None else int(index)}"),
        uuid=str(entry.get("uuid") or ""),
        utilization=finite(entry.get("utilization")),
        memory_used=_first(entry, *MEMORY),
        memory_total=_first(entry, *TOTAL),
        memory_percent=finite(entry.get("memory_percent")),
        power=finite(entry.get("power")),
        power_instant=finite(entry.get("power_instant")),
        power_limit=finite(entry.get("power_limit")),
        temperature=_first(entry, "temperature") if "temperature" in entry else hottest(temperatures),
        sm_clock=_first(entry, "sm_clock") if "sm_clock" in entry else _clock(clocks),
        energy_j=finite(entry.get("energy_j")),
    )


def _first(entry: Mapping[str, Any], *names: str) -> float | None:
    return next((finite(entry[name]) for name in names if name in entry), None)


def hottest(temperatures: Any) -> float | None:
    """Return the temperature of the sensor `GPU`, or the maximum over all sensors."""
    if not isinstance(temperatures, dict):
        return None
    if (own := finite(temperatures.get("GPU"))) is not None:
        return own
    return max((number for value in temperatures.values() if (number := finite(value)) is not None), default=None)


def _clock(clocks: Any) -> float | None:
    return _first(clocks, *CLOCKS) if isinstance(clocks, dict) else None


def time_of(value: Any) -> float | None:
    """Return Unix s from ISO 8601 (local time without an offset) or from a number."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.strip()).timestamp()
        except (ValueError, OverflowError, OSError):  # OverflowError, OSError: a year outside the system's range
            return None
    return finite(value)


def number_in(value: str) -> float | None:
    """Return the finite number in a cell, or None."""
    try:
        return finite(float(value))
    except ValueError:
        return None


class Scanner:
    """Parses the values of a JSON array incrementally, and resumes after damage. `text` starts inside the array.

    `more`: returns the next chunk of text, empty at the end. `lost`: receives a reason and the number of lost entries.
    `alone`: the array is the whole document, so nothing may follow it. `ended`: the end of the array was reached.
    """

    def __init__(self, text: str, more: Callable[[], str], lost: Callable[[str, int], None], *, alone: bool) -> None:
        self._text, self._more, self._lost, self._alone = text, more, lost, alone
        self._at, self._dropped = 0, 0
        self.ended = False

    @property
    def position(self) -> int:
        """The number of characters parsed."""
        return self._dropped + self._at

    @property
    def rest(self) -> str:
        """The text that was not parsed yet."""
        return self._text[self._at :]

    def values(self) -> Iterator[Any]:
        """Yield each complete value. The caller may stop after any value and continue with `rest`."""
        decoder = json.JSONDecoder()
        while not self._closed():
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:  # malformed, a huge number, or nested too deeply
                self._grow_or_skip(damaged=self._is_damage(error))
                continue
            # Only a number can end at the end of the buffer and still be incomplete: 12 of 123.
            if end == len(self._text) and isinstance(value, int | float) and (more := self._more()):
                self._text += more  # the number may continue in the next chunk
                continue
            self._at = end
            # Trim in large steps: each one copies the rest of the buffer.
            if self._at > _DONE:
                self._drop(self._at)
            yield value

    def _closed(self) -> bool:
        """Skip separators. Return whether the array ends here."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self.ended or self._text[self._at : self._at + 1] != "]":
                return self.ended
            self._at += 1
            self.ended = not (self._alone and self._has_more_entries())

    def _has_more_entries(self) -> bool:
        """Return whether entries follow the end of the array, and move to the first of them."""
        while not self.rest.strip():
            self._drop(len(self._text))
            self._text = self._more()
            if not self._text:
                return False
        self._lost(TRAILING, 0)
        return self._skip()

    def _is_damage(self, error: Exception) -> bool:
        """Return whether the value stays malformed whatever text follows."""
        if not isinstance(error, json.JSONDecodeError):
            return True
        # Near the end, a chunk may have split a literal or an escape. An unterminated string may always go on.
        return error.pos + _WORD < len(self._text.rstrip()) and not error.msg.startswith("Unterminated string")

    def _grow_or_skip(self, *, damaged: bool) -> None:
        """Read more text for an incomplete value. If that cannot help, report damage and move to the next entry."""
        more = "" if damaged or len(self._text) - self._at >= MAX_VALUE else self._more()
        self._drop(self._at)
        if more:
            self._text += more
            return
        if not self._text.strip():
            self._lost(NO_END, 0)
            self.ended = True
            return
        self._at = 1
        self._lost(DAMAGED if self._skip() else TRUNCATED, 1)

    def _skip(self) -> bool:
        """Drop the text up to the next entry. Return whether there is one."""
        while not (found := _ENTRY.search(self._text, self._at)):
            more = self._more()
            if not more:
                self._drop(len(self._text))
                self.ended = True
                return False
            # Keep the end: the start of the next entry may be split between two chunks.
            self._drop(max(self._at, len(self._text) - _BEGIN))
            self._text += more
        self._drop(found.start())
        return True

    def _drop(self, characters: int) -> None:
        self._text, self._at = self._text[characters:], 0
        self._dropped += characters


def opening(text: str) -> tuple[int, bool] | None:
    """Return the offset of the first entry and whether the array is the whole document, or None if there is no array.

    The document is an array, or an object with an array named `samples`.
    """
    at = len(text) - len(text.lstrip("\ufeff \t\r\n"))  # \ufeff: the byte order mark of some editors
    if text[at : at + 1] == "[":
        return at + 1, True
    found = _SAMPLES.search(text) if text[at : at + 1] == "{" else None
    return (found.end(), False) if found else None
