"""Report full disks while a matrix runs: runner and trainer hold their writes until there is space again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.disk import SpaceWait
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.runner.signals import StopRequest
from kmatrix.runner.status_writer import StatusWriter
from kmatrix.status.disk_space import how_full, is_full
from kmatrix.text import duration

CHECK_EVERY_S = 1.0  # between two checks for a full disk


class DiskHold:
    """The disks of a matrix, and since when one of them is full."""

    def __init__(
        self,
        matrix: MatrixDir,
        runs: Sequence[RunDir],
        writer: StatusWriter,
        on_note: Callable[[str], None],
        *,
        limit_s: float,
    ) -> None:
        """Create the hold. runs: whose checkpoints are written.  limit_s: time (s) to wait for space, 0: none."""
        self._writer, self._on_note, self._limit_s = writer, on_note, limit_s
        checkpoints = {checkpoint_dir(run).parent for run in runs}
        self._disks = (matrix.path, *sorted(checkpoints - {run.path for run in runs}))
        self._full_since: float | None = None  # monotonic seconds
        self._due = 0.0  # monotonic seconds

    def policy(self, request: StopRequest) -> SpaceWait:
        """Return how the runner writes on a full disk: it reports and waits, until a stop is requested."""
        return SpaceWait(
            self._limit_s,
            on_full=self._report_full,
            on_space=lambda _: self._report_space(),
            is_cancelled=lambda: request.since is not None,
        )

    def check(self) -> None:
        """Report full disks: the trainer holds its writes, but only the runner has a terminal."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + CHECK_EVERY_S
        full = next((path for path in self._disks if is_full(path)), None)
        if full is None:
            self._report_space()
        else:
            self._report_full(full)

    def _report_full(self, path: Path) -> None:
        """Report a full disk, once until it has space again."""
        if self._full_since is None:
            self._full_since = time.monotonic()
            limit = self._limit_s
            wait = f"waiting up to {duration(limit)} for space (DISK_WAIT)" if limit else "not waiting"
            self._on_note(f"the disk is full: {how_full(path)}; {wait}")

    def _report_space(self) -> None:
        if self._full_since is not None:
            seconds, self._full_since = time.monotonic() - self._full_since, None
            self._on_note(f"the disk has space again after {duration(seconds)}")
            self._writer.log("disk was full", seconds=seconds)
