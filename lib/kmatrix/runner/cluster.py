"""engine.json: the cluster of a matrix, and the jobs of a copy or of a matrix that was moved."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from kmatrix.engines.base import Scheduler
from kmatrix.errors import LaunchError
from kmatrix.records.decode import replaced
from kmatrix.records.files import free_path
from kmatrix.records.jobs.files import (
    LIVE,
    EngineFile,
    SubmissionFile,
    is_at_home,
    is_copy,
    job_label,
    read_submission,
    share_job,
    write_engine,
)
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from kmatrix.text import first_names, make_command, plural

ID_BYTES = 6
ENDING_S = 60.0  # jobs that were killed have ended within this time
POLL_S = 1.0  # between two questions whether they have


def new_engine(engine: str, path: Path, settings: Mapping[str, str]) -> EngineFile:
    """Return a new engine.json. path: of the matrix.  settings: symbol -> value."""
    return EngineFile(
        engine=engine,
        id=_new_id(),
        path=str(path.resolve()),
        settings=dict(settings),
    )


def _new_id() -> str:
    """Return a random id of the jobs of a matrix."""
    return os.urandom(ID_BYTES).hex()


def refuse_others(matrix: MatrixDir) -> None:
    """Raise LaunchError if a matrix belongs to another user: its settings name scripts that jobs execute."""
    if not matrix.is_mine():
        raise LaunchError(
            f"{matrix.name} belongs to another user",
            why="its settings can name scripts that jobs execute",
            hint="ask them, or copy the matrix and use the copy",
        )


def own_engine(matrix: MatrixDir, engine: EngineFile, scheduler: Scheduler) -> tuple[EngineFile, str]:
    """Return engine.json for submissions from this path, and a message, "" for none. The caller holds the matrix.

    A copy forgets the jobs of its original. A matrix that was moved has no jobs either: they are killed first, because
    they would train at a path that is not there any more.
    Raises LaunchError if they cannot be, before anything is changed.
    """
    if is_at_home(matrix, engine):
        return engine, ""
    here, former = matrix.path.resolve(), engine.path
    if not is_copy(engine):
        ended = _end_jobs(matrix, engine, scheduler)
        _forget_jobs(matrix)  # they were killed, and their claims look as if they lived
        # A new id: a copy that was made before the move is taken for a move, too, and would have the same jobs.
        moved = replaced(engine, path=str(here), id=_new_id())
        write_engine(matrix, moved)
        return moved, f"the matrix was moved from {former}" + (f": cancelled {ended}" if ended else "")
    _forget_jobs(matrix)
    copied = new_engine(engine.engine, matrix.path, engine.settings)
    write_engine(matrix, copied)
    return copied, f"the matrix is a copy of {former}: its jobs stay those of the original"


def _forget_jobs(matrix: MatrixDir) -> None:
    """Rename the folder of the jobs. Before engine.json is written: after a kill, the path is still another one."""
    jobs = JobsDir(matrix)
    if jobs.path.exists():
        jobs.path.rename(free_path(jobs.former))


def _end_jobs(matrix: MatrixDir, engine: EngineFile, scheduler: Scheduler) -> str:
    """Kill the live jobs of a matrix that was moved, and wait until they have ended. Return their ids as text."""
    folders = JobsDir(matrix).submissions()
    labels = {job_label(engine.id, folder.number): folder for folder in folders}
    shares = {}
    # By label: the ids in jobs.jsonl may have been changed by others, and these jobs are killed.
    for label, job in scheduler.find(list(labels)).items():
        submission = read_submission(labels[label]) or SubmissionFile()
        for entry in submission.shares:
            share = labels[label].share(entry.task)
            shares[share.id] = share_job(job, submission, entry.task)
    live = _live(scheduler, shares)
    if not live:
        return ""
    scheduler.cancel(list(live.values()), now=True)
    deadline = time.monotonic() + ENDING_S
    while left := _live(scheduler, live):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{plural(len(left), 'job')} of the former path of {matrix.name} did not end: "
                f"{first_names(left.values())}",
                why=f"they were killed {ENDING_S:g} s ago",
                hint=f"run it again when they have: {make_command('continue', matrix.path)}",
            )
        time.sleep(POLL_S)
    return first_names(live.values())


def _live(scheduler: Scheduler, shares: Mapping[str, str]) -> dict[str, str]:
    """Return the shares, with their jobs, that are pending or running."""
    views = scheduler.poll(shares) if shares else {}
    return {share: job for share, job in shares.items() if share in views and views[share].phase in LIVE}
