"""What a runner writes down of a matrix: how its runs stand, in status.json, and what happened, in the journal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kmatrix.alerts import Alert
from kmatrix.errors import RecordError
from kmatrix.launch.engine import JobState
from kmatrix.launch.lock import this_process
from kmatrix.launch.pool import Pool
from kmatrix.launch.standing import write_state, writing
from kmatrix.launch.state import Event, RunState, after
from kmatrix.records import MatrixDir, Status, append_jsonl, end_torn_line, read_json, write_json


class Book:
    """states: how each run stands. Raises LaunchError where a file cannot be written.

    pool: the GPUs that runs may get, None where none of them needs one.
    """

    def __init__(self, matrix: MatrixDir, pool: Pool | None) -> None:
        self._matrix, self._pool = matrix, pool
        self._started = time.time()
        self.states: dict[str, RunState] = {}

    def open(self) -> None:
        """Write that a runner has the matrix, and end a line of the journal that a crash cut short."""
        self.write_matrix(Status.RUNNING)
        with writing(self._matrix.journal):
            end_torn_line(self._matrix.journal)

    def move(self, name: str, event: Event) -> None:
        """Take note of what happened to a run."""
        self.states[name] = after(self.states.get(name, RunState()), event)

    def counts(self) -> dict[str, int]:
        """Return status -> runs."""
        found = Counter(state.status for state in self.states.values())
        return {status.value: found[status] for status in Status if found[status]}

    def write_run(
        self,
        name: str,
        alerts: Sequence[Alert],
        *,
        job: JobState | None = None,
        log_tail: Sequence[str] = (),
        unless_ended: bool = False,
    ) -> None:
        """Write the status.json of a run. unless_ended: only where what stands there is not so any more."""
        run, state = self._matrix.run(name), self.states[name]
        if unless_ended and _says(run.status) == state.status:
            return
        write_state(run, state, job=job, log_tail=log_tail, alerts=alerts)

    def write_matrix(self, status: Status) -> None:
        """Write the status.json of the matrix."""
        ended = None if status is Status.RUNNING else time.time()
        record = {"status": status, "started": self._started, "ended": ended, **asdict(this_process())}
        gpus = self._pool.report() if self._pool else []
        with writing(self._matrix.status):
            write_json(self._matrix.status, {**record, "counts": self.counts(), "gpus": gpus})

    def note(self, event: str, **known: object) -> None:
        """Append a line to the journal."""
        with writing(self._matrix.journal):
            append_jsonl(self._matrix.journal, {"time": time.time(), "event": event, **known})


def _says(path: Path) -> str | None:
    """The status that a file has now; what cannot be read is left for a person to see."""
    try:
        return str(read_json(path).get("status")) if path.exists() else None
    except RecordError:
        return Status.FAILED
