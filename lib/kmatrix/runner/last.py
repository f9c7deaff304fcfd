"""`kmatrix last FOLDER`: the job after all others of a cluster submits what is due now, or writes the report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kmatrix.clock import clock
from kmatrix.engines import jobs
from kmatrix.engines.schedulers import scheduler_of
from kmatrix.errors import KmatrixError
from kmatrix.records.matrix import read_plan
from kmatrix.records.runs import Status
from kmatrix.runner.conclude import conclude
from kmatrix.runner.controller import controller_of
from kmatrix.runner.supervisor import DONE, REFUSED
from kmatrix.status.fold import is_over
from kmatrix.status.look import look

LOOK_S, PER_RUN_S = 10.0, 0.01  # between two looks of a job that waits


def main(words: Sequence[str]) -> int:
    """Run the program; return its exit status. --wait: until the runs before it have ended."""
    folder = Path(words[-1]).absolute()
    try:
        return after_all(folder.parent.parent) if words[0] != "--wait" else after_waiting(folder)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED


def after_all(path: Path) -> int:
    """Submit what is due; the report follows if that is nothing. Raises KmatrixError."""
    scheduler = scheduler_of(read_plan(path))
    if scheduler is not None:
        ours = jobs.ClusterJobs(path=path, scheduler=scheduler)
        controller_of(path, ours, jobs.known_runs(path)).step()
        if ours.submitted:
            return DONE
    conclude(path)
    return DONE


def after_waiting(folder: Path) -> int:
    """Write the report after the runs have ended: a pod may not ask for jobs, so their files tell."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # process 1 of a container ignores it otherwise
    path = folder.parent.parent
    while True:
        later = (one for one in (path / "jobs").glob("[0-9]*/runs") if int(one.parent.name) > int(folder.name))
        if any(not one.read_text(encoding="utf-8") for one in later):
            return DONE  # a later last job has taken its place
        seen = look(path)
        states = [seen.states[run] for run in jobs.known_runs(path) if run in seen.states]
        is_waiting = seen.stop is None and any(not is_over(one) and one.is_due for one in states)
        if not is_waiting and not any(one.status is Status.RUNNING for one in states):
            conclude(path)
            return DONE
        clock.sleep(LOOK_S + PER_RUN_S * len(seen.states))
