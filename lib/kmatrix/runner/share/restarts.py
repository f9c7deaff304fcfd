"""Whether a job that starts again and again gets anywhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from kmatrix.errors import KmatrixError
from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.jobs.files import ShareOwner
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import LOST, Status, read_result
from kmatrix.status.state import LOST_KIND, NO_PROGRESS, OPEN, Attempt, Ended, RunState, Started, after
from kmatrix.status.status_file import recover_status, write_state

MOST_IDLE = 2  # starts in a row after which a run without a new checkpoint fails
MOST_LOST_STARTS = 5  # starts in a row that find a lost host in the job again


def saved_steps(runs: Iterable[RunDir]) -> dict[str, int]:
    """Return run -> the step that it has reached for good: of its result, or of its last checkpoint."""
    return {run.name: _saved_step(run) for run in runs}


def _saved_step(run: RunDir) -> int:
    step = 0
    with suppress(KmatrixError, OSError):
        newest = Checkpoints(checkpoint_dir(run)).newest()
        step = newest.step if newest else 0
    with suppress(KmatrixError, OSError):
        result = read_result(run)
        if result is not None and result.status == Status.FINISHED:
            step = max(step, result.step or 0)
    return step


def idle_starts(before: ShareOwner | None, job: str, restart: int, steps: Mapping[str, int]) -> int:
    """Return how many starts of this job in a row have saved no later step. before: the claim of the last start."""
    if before is None or before.job != job or before.restart >= restart:
        return 0
    if before.lost_starts:  # it did not get as far as its runs
        return before.idle
    has_new = any(step > before.steps.get(name, 0) for name, step in steps.items())
    return 0 if has_new else before.idle + 1


def explain_lost(runs: Iterable[RunDir], former: ShareOwner | None) -> None:
    """Record where the runner was that left attempts of these runs without an end. former: its claim.

    A runner writes the end of its attempts, unless it is killed: by the end of its node, too.
    """
    if former is None:
        return
    hosts = " and ".join(former.nodes or (former.host,))
    reason = f"start {former.restart + 1} of job {former.job} on {hosts} was killed, or a node of it failed"
    for run in runs:
        state = recover_status(run, has_runner=False)
        if state.last is not None and (state.last.kind, state.reason) == (LOST_KIND, LOST):
            last = replace(state.last, reason=reason)
            write_state(run, replace(state, reason=reason, attempts=(*state.attempts[:-1], last)))


def fail_open_runs(runs: Iterable[RunDir], idle: int, job: str) -> list[str]:
    """Record the open runs as failed, because their job gets nowhere; return them.

    `continue` leaves failed runs alone, so that a person looks at them first.
    """
    failed = []
    for run in runs:
        state = recover_status(run, has_runner=False)
        if state.status in OPEN:
            reason = f"{idle} restarts of job {job} in a row saved no later step"
            write_state(run, _failed(state, f"{reason} ({state.reason})" if state.reason else reason))
            failed.append(run.name)
    return failed


def _failed(state: RunState, reason: str) -> RunState:
    now = time.time()
    begun = after(state, Started(Attempt(number=state.number + 1, started=now)))
    return after(begun, Ended(status=Status.FAILED, at=now, kind=NO_PROGRESS, reason=reason, seconds=0.0))
