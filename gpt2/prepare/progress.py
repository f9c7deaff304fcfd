"""Progress of a preparation on stderr."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kmatrix.errors import DataError, KmatrixError, reason_of
from kmatrix.text import count

EVERY_S = 10.0  # between two lines


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def explain(error: KmatrixError | OSError, data_dir: Path) -> int:
    """Print an error of the user's as JSON to stdout, for the command that asked, and return the exit status."""
    if isinstance(error, OSError):  # of DATA_DIR, such as a full or read-only disk
        error = DataError(
            f"cannot use {error.filename or data_dir}", why=reason_of(error), hint="check its permissions, and the disk"
        )
    print(json.dumps({"what": error.what, "why": error.why, "hint": error.hint}), flush=True)
    return 2


class PreparationProgress:
    """Reports the rate: `progress = PreparationProgress("tinystories", "tokens"); progress.add(1000)`."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit, self.count, self.started = name, unit, 0, time.monotonic()
        self._said = self.started

    def add(self, number: int, place: str = "") -> None:
        """Add completed work, and print a line if it is time."""
        self.count += number
        now = time.monotonic()
        if now - self._said >= EVERY_S:
            self._said = now
            done, rate = count(self.count), count(self.count / (now - self.started))
            say(f"{self.name}: {done} {self.unit}, {rate} {self.unit}/s{', ' if place else ''}{place}")
