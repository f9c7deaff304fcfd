"""A table of samples as CSV, written while they are taken: `gputop --csv FILE --hz 100`."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from kmatrix.errors import RecordError, reason_of
from kmatrix.gpu.formats.samples import LIVE_FIELDS, Snapshot, csv_header, csv_row
from kmatrix.gputop.loop import Ended, chosen, endings_caught
from kmatrix.gputop.monitor import GPUMonitor
from kmatrix.locks import is_locked_now
from kmatrix.text import plural

STANDARD_OUTPUT = "-"
FLUSH_S = 1.0  # a program that reads the file along sees samples after this time at the latest, at any rate
MOST_HZ = 1000.0
TAIL = 65536  # bytes at the end of a file in which its last line is looked for


class CsvFile:
    """A CSV that is continued if it is there. Every line in it is complete, also after a kill.

    simulated: the table has a column that says so.
    """

    def __init__(self, path: str, gpus: Sequence[int], *, simulated: bool = False) -> None:
        """Open a file, "-" for standard output. Raises RecordError for another file with this name."""
        self._name = path
        self._header = ",".join(csv_header(gpus, LIVE_FIELDS, simulated=simulated)) + "\n"
        self._lines: list[str] = [self._header] if path == STANDARD_OUTPUT else []
        self._file: IO[bytes] = sys.stdout.buffer if path == STANDARD_OUTPUT else self._opened(Path(path))
        self._end = 0 if path == STANDARD_OUTPUT else self._file.tell()  # of the last complete line, in bytes

    def append(self, row: Sequence[str]) -> None:
        """Add a line; it is in the file after the next `flush`."""
        self._lines.append(",".join(row) + "\n")

    def flush(self) -> None:
        """Write the lines that were added. Raises RecordError if that is not possible.

        If a signal interrupts it, the next call begins again: a file gets whole lines, and each of them once.
        """
        data = rest = "".join(self._lines).encode()
        try:
            if self._name == STANDARD_OUTPUT:
                self._lines = []  # what a pipe has taken cannot be taken back
            else:
                self._file.seek(self._end)
            while rest:  # an unbuffered file may take a part, as on a disk that is nearly full
                rest = rest[self._file.write(rest) or 0 :]
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._lines = []
            self._cut()
            if self._name == STANDARD_OUTPUT:
                raise RecordError("cannot write to standard output", why=reason_of(error), hint="make room") from None
            raise RecordError(
                f"cannot write {self._name}", why=reason_of(error), hint="make room; the same command continues"
            ) from None
        self._end, self._lines = self._end + len(data), []

    def close(self) -> None:
        if self._name != STANDARD_OUTPUT:
            self._file.close()

    def _opened(self, path: Path) -> IO[bytes]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not "a": a line that a kill cut off is removed, and the position has to be set for that.
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
            if not is_locked_now(file.fileno()):
                file.close()
                raise RecordError(
                    f"another gputop writes {path}",
                    why="the samples of two would replace each other",
                    hint="pass another file",
                )
            begin = file.read(len(self._header))
            if begin and begin != self._header.encode():
                file.close()
                raise RecordError(
                    f"{path} exists and is not a table of these GPUs",
                    why="only a file that gputop --csv wrote for the same GPUs can be continued",
                    hint="pass another file",
                )
            if begin:
                self._file = file
                self._cut()
            else:
                file.write(self._header.encode())
        except OSError as error:
            raise RecordError(f"cannot write {path}", why=reason_of(error), hint="pass another path") from None
        return file

    def _cut(self) -> None:
        """Remove an incomplete last line, and move to the end."""
        if self._name == STANDARD_OUTPUT:
            return
        end = self._file.seek(0, os.SEEK_END)
        begin = self._file.seek(max(0, end - TAIL))
        tail = self._file.read(end - begin)
        if complete := tail.rfind(b"\n") + 1:
            self._file.truncate(begin + complete)
        self._file.seek(0, os.SEEK_END)


def record_csv(path: str, *, hz: float, asked: str | None, seconds: float | None) -> int:
    """Sample the GPUs at a rate until a signal or the time limit, and return the exit status.

    asked: GPUs as a list of indices or UUIDs, None: all. Raises RecordError and LaunchError for user errors.
    """
    monitor = GPUMonitor()
    if not monitor.initialize():
        print("; ".join(monitor.notes) or "no GPU: the NVIDIA driver reports none")
        return 0
    try:
        gpus = chosen(asked, monitor.read().snapshot.samples)
        first = monitor.read().of(gpus).snapshot
        shown = [one.gpu_index for one in first.samples]
        table = CsvFile(path, shown, simulated=first.simulated)
        rows = partial(csv_row, fields=LIVE_FIELDS, simulated=first.simulated)
        try:
            taken, late = _sample(lambda: monitor.read().of(gpus).snapshot, rows, table, hz=hz, seconds=seconds)
        finally:
            table.close()
    finally:
        monitor.close()
    if path != STANDARD_OUTPUT:
        print(f"wrote {plural(taken, 'sample')} of {plural(len(shown), 'GPU')} to {path}, {late} skipped as late")
    return 0


def _sample(
    read: Callable[[], Snapshot],
    row: Callable[[Snapshot, float], list[str]],
    table: CsvFile,
    *,
    hz: float,
    seconds: float | None,
) -> tuple[int, int]:
    """Write samples, and return how many, and how many were skipped because the machine was late."""
    begin = flushed = time.monotonic()
    taken = late = tick = 0
    with endings_caught():
        try:
            while seconds is None or tick / hz < seconds:
                # From the start, not from the last sample: the rate does not drift.
                time.sleep(max(0.0, begin + tick / hz - time.monotonic()))
                snapshot = read()
                table.append(row(snapshot, time.monotonic() - begin))
                taken += 1
                now = time.monotonic()
                following = max(tick + 1, math.ceil((now - begin) * hz))
                late += following - tick - 1
                tick = following
                # Before a wait that would end too late: at a low rate after each sample.
                if begin + tick / hz - flushed >= FLUSH_S:
                    table.flush()
                    flushed = now
            table.flush()
        except Ended:
            table.flush()  # also the rest of one that was interrupted; a second signal is ignored
            raise
    return taken, late
