"""Write the status files and the journal of a matrix."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from kmatrix.engines.local.pool import Pool
from kmatrix.errors import LaunchError
from kmatrix.records.files import append_jsonl, end_torn_line, write_json
from kmatrix.records.lock import this_process
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.status.alerts import Alert
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.state import Event, JobState, RunState, after
from kmatrix.status.status_file import recover_status, write_state, writing


class StatusWriter:
    """Write the status files and the journal of a matrix. Raises LaunchError if a file cannot be written."""

    def __init__(self, matrix: MatrixDir, pool: Pool | None) -> None:
        """Create the writer. pool: the GPUs of the matrix, None if no run needs one."""
        self._matrix, self._pool = matrix, pool
        self._started = time.time()
        self.states: dict[str, RunState] = {}  # of all runs
        self.missing = 0  # runs of matrix.json without a directory: they count as planned
        self.unselected: tuple[str, ...] = ()  # unfinished runs that this execution leaves alone
        self.budget: MatrixBudget | None = None  # of this execution

    def open(self) -> None:
        """Write that a runner holds the matrix, and complete a journal line that a crash cut short."""
        self.write_matrix(Status.RUNNING)
        with writing(self._matrix.journal):
            end_torn_line(self._matrix.journal)

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
        self._refuse_if_gone()
        write_state(run, state, job=job, log_tail=log_tail, alerts=alerts)

    def write_matrix(self, status: Status) -> None:
        """Write status.json of the matrix."""
        # The wall clock may have been set meanwhile: an end is never before its start.
        ended = None if status is Status.RUNNING else max(time.time(), self._started)
        record = {"status": status, "started": self._started, "ended": ended, **asdict(this_process())}
        record |= {"counts": self.counts(), "gpus": self._pool.report() if self._pool else []}
        record |= {"unselected": list(self.unselected)} if self.unselected else {}
        record |= {"budget": asdict(self.budget)} if self.budget is not None else {}
        self._refuse_if_gone()
        with writing(self._matrix.status):
            write_json(self._matrix.status, record)

    def log(self, event: str, **known: object) -> None:
        """Append a line to the journal."""
        self._refuse_if_gone()
        with writing(self._matrix.journal):
            append_jsonl(self._matrix.journal, {"time": time.time(), "event": event, **known})

    def _refuse_if_gone(self) -> None:
        """Raise LaunchError if the matrix is no longer at its path: its status must not begin again there."""
        if not self._matrix.path.is_dir():
            raise LaunchError(
                f"{self._matrix.path} is gone",
                why="it was moved or deleted while its runs trained",
                hint="continue it at its new path (TARGET=): the runs resume from their last checkpoints",
            )
