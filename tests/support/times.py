"""A clock that a test sets, for what reads `kmatrix.clock`."""

from __future__ import annotations

import os

import pytest

from kmatrix.clock import clock
from kmatrix.records.paths import MatrixDir


class Times:
    """Both clocks. A test sets `unix`, and `mono` with it unless it says otherwise."""

    def __init__(self, unix: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unix, self.mono = unix, 1000.0
        for name in ("now", "monotonic", "sleep"):
            monkeypatch.setattr(clock, name, getattr(self, name))

    def now(self) -> float:
        return self.unix

    def monotonic(self) -> float:
        return self.mono

    def sleep(self, seconds: float) -> None:
        self.unix, self.mono = self.unix + seconds, self.mono + seconds


def pulse(matrix: MatrixDir, at: float) -> None:
    """Let the programs of all attempts have written at this time: those without an end live."""
    for path in matrix.path.glob("*/attempts/*.json"):
        os.utime(path, (at, at))
