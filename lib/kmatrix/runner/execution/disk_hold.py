"""Report full disks while a matrix runs: runner and trainer hold their writes until there is space again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.status.disk_space import disks, how_full, is_full
from kmatrix.text import duration

CHECK_EVERY_S = 1.0  # between two checks for a full disk


class DiskHold:
    """The disks of a matrix, and since when one of them is full."""

    def __init__(
        self, matrix: MatrixDir, runs: Sequence[RunDir], on_note: Callable[[str], None], *, limit_s: float
    ) -> None:
        """Create the hold. runs: whose checkpoints are written.  limit_s: time (s) to wait for space, 0: none."""
        self._on_note, self.limit_s = on_note, limit_s
        self._disks = disks(matrix, runs)
        self._full_since: float | None = None  # monotonic seconds
        self._due = 0.0  # monotonic seconds

    def report(self, path: Path) -> None:
        """Report a full disk, once until it has space again."""
        if self._full_since is None:
            self._full_since = time.monotonic()
            limit = self.limit_s
            wait = f"waiting up to {duration(limit)} for space (DISK_WAIT)" if limit else "not waiting"
            # A write may also fail for want of inodes, or because of a quota, which `how_full` does not show.
            what = "the disk is full" if is_full(path) else "no space for this user or for more files"
            self._on_note(f"{what}: {how_full(path)}; {wait}")

    def check(self, *, pending: bool, now: bool = False) -> float | None:
        """Report full disks once per second, and return how long one was full (s) after it has space again.

        The trainer holds its writes, too, but only the runner has a terminal.
        pending: the runner has not written everything.  now: even if the last check was less than a second ago.
        """
        if time.monotonic() < self._due and not now:
            return None
        self._due = time.monotonic() + CHECK_EVERY_S
        full = next((path for path in self._disks if is_full(path)), None)
        if full is not None:
            self.report(full)
        if full is not None or pending or self._full_since is None:
            return None
        seconds, self._full_since = time.monotonic() - self._full_since, None
        self._on_note(f"the disk has space again after {duration(seconds)}")
        return seconds
