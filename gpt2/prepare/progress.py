"""Progress of a preparation on stderr: one updating line on a terminal, else one line per minute."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path

from kmatrix.errors import DataError, reason_of
from kmatrix.text import count, disk_size

ON_TERMINAL_S, ELSEWHERE_S = 0.5, 60.0  # between two lines; a log file keeps each of them


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def explain(error: BaseException, data_dir: Path) -> int:
    """Print what ended a preparation (an error of the user's, or Ctrl+C), and return the exit status."""
    if isinstance(error, KeyboardInterrupt):
        say("stopped: partial downloads and finished files are kept and continue")
        return 130
    if isinstance(error, OSError):  # of DATA_DIR, such as a full or read-only disk: the user's, so no traceback
        error = DataError(f"cannot use {error.filename or data_dir}", why=reason_of(error), hint="check DATA_DIR")
    say(f"error: {error}")
    return 2


class StoppedError(Exception):
    """Raised in the threads of a cancelled download."""


class PreparationProgress:
    """Reports the rate: `with PreparationProgress("tinystories", "tokens") as progress: progress.add(1000)`."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit, self.count, self.started = name, unit, 0, time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.stopped = False  # `add` then raises StoppedError
        self._lock = threading.Lock()  # downloads report from several threads
        self._next = self.started + (ON_TERMINAL_S if self.terminal else ELSEWHERE_S)

    def __enter__(self) -> PreparationProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminal and self.count:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # start of the line, clear to its end

    def add(self, number: int, place: str = "") -> None:
        """Add completed work, and print a line if it is time."""
        if self.stopped:
            raise StoppedError
        with self._lock:
            self.count += number
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + (ON_TERMINAL_S if self.terminal else ELSEWHERE_S)
        # Outside the lock: a slow terminal must not hold up the other threads.
        done, rate = count(self.count), count(self.count / (now - self.started))
        line = f"{self.name}: {done} {self.unit}, {rate} {self.unit}/s{', ' if place else ''}{place}"
        end = "" if self.terminal else "\n"
        print(f"\r\x1b[K{line}" if self.terminal else line, end=end, file=sys.stderr, flush=True)


def check_space(folder: Path, needed: int) -> None:
    """Raise DataError if the disk has less than `needed` bytes free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())  # the folder itself is created later
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DataError(
            f"{folder} needs {disk_size(needed)}, but only {disk_size(free)} are free",
            why="shards take 2 bytes/token, and downloads need temporary space",
            hint="free some disk space, move DATA_DIR to another disk, or pass a smaller DATA_TOKENS=",
        )
