"""Write the status files and the journal of a matrix; on a full disk later, so that the runner goes on polling."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kmatrix.engines.local.pool import Pool
from kmatrix.errors import LaunchError, is_full
from kmatrix.records.disk import POLL_S
from kmatrix.records.files import append_jsonl, end_torn_line, write_bytes, write_json
from kmatrix.records.lock import this_process
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.status.alerts import Alert
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.state import Event, JobState, RunState, after
from kmatrix.status.status_file import recover_status, write_state, writing

RESERVE = 256 * 1024  # bytes: the final status of a matrix and of the runs that were running


class StatusWriter:
    """Write the status files and the journal of a matrix.

    A write that finds a full disk is kept, and tried again by `flush`. Its newest content counts, because status files
    are replaced; lines of the journal stay in their order. A small file of the matrix reserves the space of the last
    status: a runner that is stopped while the disk is full still records how its runs ended.
    Raises LaunchError if a file cannot be written, on a full disk after `limit_s`.
    """

    def __init__(self, matrix: MatrixDir, pool: Pool | None, on_full: Callable[[Path], object]) -> None:
        """Create the writer. pool: the GPUs of the matrix, None if no run needs one.  on_full: reports a full disk."""
        self._matrix, self._pool, self._on_full = matrix, pool, on_full
        self._started = time.time()
        self.states: dict[str, RunState] = {}  # of all runs
        self.missing = 0  # runs of matrix.json without a directory: they count as planned
        self.unselected: tuple[str, ...] = ()  # unfinished runs that this execution leaves alone
        self.budget: MatrixBudget | None = None  # of this execution
        self.limit_s = 0.0  # time (s) to wait for space on a full disk, 0: fail at once
        self._files: dict[Path, Callable[[], None]] = {}  # pending, oldest first
        self._lines: deque[dict[str, Any]] = deque()  # pending, of the journal
        self._full_since: float | None = None  # monotonic seconds
        self._retry_at = 0.0  # monotonic seconds

    def open(self) -> None:
        """Write that a runner holds the matrix, and complete a journal line that a crash cut short."""
        self.write_matrix(Status.RUNNING)
        with writing(self._matrix.journal):
            end_torn_line(self._matrix.journal)
        with suppress(OSError):  # random bytes: zeros would be compressed by some disks
            write_bytes(self._matrix.reserve, os.urandom(RESERVE), durable=False)

    @property
    def is_pending(self) -> bool:
        """Return whether a write waits for space."""
        return bool(self._files or self._lines)

    def flush(self) -> None:
        """Try the pending writes again, twice per second."""
        if self.is_pending and time.monotonic() >= self._retry_at:
            self._write_pending()

    def close(self) -> None:
        """Write what is pending with the reserved space, as far as possible."""
        with suppress(OSError):
            self._matrix.reserve.unlink(missing_ok=True)
        with suppress(LaunchError):
            self._write_pending()

    def apply(self, name: str, event: Event) -> None:
        """Apply an event to the state of a run."""
        self.states[name] = after(self.states.get(name, RunState()), event)

    def counts(self) -> dict[str, int]:
        """Return status -> number of runs."""
        found = Counter(state.status for state in self.states.values())
        found[Status.PLANNED] += self.missing
        return {status.value: found[status] for status in Status if found[status]}

    def is_current(self, name: str) -> bool:
        """Return whether status.json of a run has its current status."""
        run = self._matrix.run(name)
        return run.status.exists() and recover_status(run, has_runner=True).status is self.states[name].status

    def write_run(
        self, name: str, alerts: Sequence[Alert], *, job: JobState | None = None, log_tail: Sequence[str] = ()
    ) -> None:
        """Write status.json of a run."""
        run, state = self._matrix.run(name), self.states[name]
        self._put(run.status, lambda: write_state(run, state, job=job, log_tail=log_tail, alerts=alerts))

    def write_matrix(self, status: Status) -> None:
        """Write status.json of the matrix."""
        # The wall clock may have been set meanwhile: an end is never before its start.
        ended = None if status is Status.RUNNING else max(time.time(), self._started)
        record = {"status": status, "started": self._started, "ended": ended, **asdict(this_process())}
        record |= {"counts": self.counts(), "gpus": self._pool.report() if self._pool else []}
        record |= {"unselected": list(self.unselected)} if self.unselected else {}
        record |= {"budget": asdict(self.budget)} if self.budget is not None else {}

        def write() -> None:
            with writing(self._matrix.status):
                write_json(self._matrix.status, record)

        self._put(self._matrix.status, write)

    def log(self, event: str, **known: object) -> None:
        """Append a line to the journal."""
        waiting = self.is_pending
        self._lines.append({"time": time.time(), "event": event, **known})
        if not waiting:
            self._write_pending()

    def _put(self, path: Path, write: Callable[[], None]) -> None:
        """Write a status file, or keep it for later, after older ones."""
        waiting = self.is_pending
        self._files[path] = write
        if not waiting:
            self._write_pending()

    def _write_pending(self) -> None:
        path = self._matrix.journal
        try:
            self._refuse_if_gone()
            for path, write in list(self._files.items()):
                write()
                del self._files[path]
            path = self._matrix.journal
            while self._lines:
                with writing(path):
                    append_jsonl(path, self._lines[0])
                self._lines.popleft()
        except LaunchError as error:
            now = time.monotonic()
            self._full_since = now if self._full_since is None else self._full_since
            if not is_full(error) or now - self._full_since >= self.limit_s:
                raise
            self._retry_at = now + POLL_S
            self._on_full(path)
        else:
            self._full_since = None

    def _refuse_if_gone(self) -> None:
        """Raise LaunchError if the matrix is no longer at its path: its status must not begin again there."""
        if not self._matrix.path.is_dir():
            raise LaunchError(
                f"{self._matrix.path} is gone",
                why="it was moved or deleted while its runs trained",
                hint="continue it at its new path (TARGET=): the runs resume from their last checkpoints",
            )
