"""Stop a matrix: its runs save a checkpoint and exit, on this machine or in the jobs of a cluster."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import ask, job_counts, look, results_dir, running_target
from kmatrix.engines.base import GRACE_S, Scheduler, UnreachableError
from kmatrix.engines.polling import known_jobs, own_views
from kmatrix.engines.schedulers import find_scheduler
from kmatrix.errors import LaunchError
from kmatrix.records.jobs.files import LIVE, REPORT, EngineFile, read_submission
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.lock import Process, held, holder
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import Status, read_matrix_file_or_empty
from kmatrix.runner.cluster import own_engine, refuse_others
from kmatrix.runner.submit import cancel_jobs, need_submissions, submitting
from kmatrix.status.activity import Activity, MatrixActivity
from kmatrix.status.status_file import recover_status
from kmatrix.text import first_names, make_command, plural, shown

STOP_POLL_S = 0.1  # between two checks whether the runner has exited
JOBS_S = 300.0  # jobs of a cluster have ended within this time, or it is left to the user
JOBS_POLL_S = 1.0  # between two looks at their files


def stop(arguments: Arguments) -> int:
    """Stop the runner of a matrix: its runs save a checkpoint and exit. Wait for it, and print the result."""
    matrix = running_target(arguments)
    if matrix is not None and (activity := look(matrix)).engine is not None:
        if activity.original:
            return _stop_former_jobs(matrix, activity, activity.engine)
        need_submissions(JobsDir(matrix), activity.engine)  # else jobs of a damaged one would go on, and nobody says so
        if activity.activity is not Activity.NONE:
            try:
                return _stop_jobs(matrix, activity, activity.engine)
            except UnreachableError as error:
                hold = make_command("hold", matrix.path, RUN="*")
                raise UnreachableError(
                    error.what, why=error.why, hint=f"repeat it later; runners follow this through their files: {hold}"
                ) from None
        raise LaunchError(
            f"no job of {matrix.name} runs or waits", hint=f"see its runs: {make_command('status', matrix.path)}"
        )
    owner = holder(matrix) if matrix else None
    if matrix is None or owner is None:
        where = shown(matrix.path if matrix else results_dir(arguments))
        raise LaunchError(f"no matrix is running in {where}", hint="pass TARGET=<matrix> or RESULTS_DIR=<folder>")
    signal_runner(matrix, owner)
    print(f"sent SIGTERM to the runner (pid {owner.pid}) of {shown(matrix.path)}", flush=True)
    # The lock is released when the runner has exited: after that, no status changes any more.
    announced: set[str] = set()
    while matrix.is_held():
        for run in (run for run in matrix.runs() if run.name not in announced and _is_running(run)):
            announced.add(run.name)
            print(f"  waiting for {run.name} to save a checkpoint and exit, {GRACE_S:.0f} s at most", flush=True)
        time.sleep(STOP_POLL_S)
    states = [recover_status(run, has_runner=False).status for run in matrix.runs()]
    print("stopped: " + ", ".join(f"{states.count(s)} {s}" for s in Status if s in states))
    if Status.STOPPED in states or Status.PLANNED in states:
        print(f"  continue: {make_command('continue', matrix.path)}")
    return 0


def _is_running(run: RunDir) -> bool:
    return recover_status(run, has_runner=True).status is Status.RUNNING


def signal_runner(matrix: MatrixDir, owner: Process) -> None:
    """Send SIGTERM to the runner, never to another process with a reused pid."""
    # First the handle, then the check: from then on, the handle cannot refer to another process.
    try:
        handle = os.pidfd_open(owner.pid or 0)
    except (OSError, AttributeError):  # AttributeError: not on macOS
        handle = -1
    try:
        if handle < 0 or not owner.lives_here():
            raise LaunchError(
                f"{matrix.name} is being run by process {owner.pid} on {owner.host}",
                why="that process cannot be signalled from here",
                hint="run make stop on that machine, or in that container",
            )
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just exited
    except PermissionError:
        raise LaunchError(
            f"{matrix.name} is being run by process {owner.pid}, which belongs to another user",
            hint="ask that user, or run make stop as that user",
        ) from None
    finally:
        if handle >= 0:
            os.close(handle)


def _stop_jobs(matrix: MatrixDir, activity: MatrixActivity, engine: EngineFile) -> int:
    """Cancel all jobs of a matrix on a cluster, wait until they have ended, and print what happened to each run.

    Raises UnreachableError if the scheduler does not answer.
    """
    refuse_others(matrix)
    scheduler = find_scheduler(engine.engine, engine.settings)
    ran = [run for run in matrix.runs() if activity.has_runner(run.name)]
    with submitting(matrix) as submitter:  # no other command submits meanwhile, so that these are all of its jobs
        live = _live_jobs(matrix, engine, scheduler)
        # There is nothing to report; or the last job would submit the next seeds.
        is_planned = all(recover_status(run, has_runner=True).status is Status.PLANNED for run in matrix.runs())
        if is_planned if live else read_matrix_file_or_empty(matrix).verdict.seeds_auto:
            live |= _live_jobs(matrix, engine, scheduler, reports=True)
        cancel_jobs(submitter, scheduler, live, why="make stop")
    names = f": {first_names(live.values())}" if live else ", because all have ended"
    print(f"cancelled {plural(len(live), 'job')} of {shown(matrix.path)}{names}", flush=True)
    if ran:
        names = first_names(run.name for run in ran)
        print(f"  waiting for {names} to save a checkpoint and exit; Ctrl+C stops waiting only", flush=True)
    left = _wait(matrix, activity)
    for run in ran:
        os.listdir(run.path)  # noqa: PTH208  (on network storage, a list refreshes the names in it)
        state = recover_status(run, has_runner=activity.has_runner(run.name))
        print(f"  {run.name}: {state.status}" + (f", {state.reason}" if state.reason else ""))
    states = [recover_status(run, has_runner=activity.has_runner(run.name)).status for run in matrix.runs()]
    print("stopped: " + ", ".join(f"{states.count(s)} {s}" for s in Status if s in states))
    if left:
        print(f"  after {JOBS_S:.0f} s, {left}: {make_command('status', matrix.path)}")
    if Status.STOPPED in states or Status.PLANNED in states:
        print(f"  continue: {make_command('continue', matrix.path)}")
    return 0


def _stop_former_jobs(matrix: MatrixDir, activity: MatrixActivity, engine: EngineFile) -> int:
    """Kill the jobs of a matrix that was moved: they train at a path that is not there any more.

    Raises LaunchError for a copy, whose jobs are those of the original.
    """
    if activity.is_copy:
        raise LaunchError(
            f"no job of {matrix.name} runs or waits",
            why=f"it is a copy of {engine.path}, and the jobs are those of the original",
            hint=f"to stop them: {make_command('stop', Path(engine.path))}",
        )
    refuse_others(matrix)
    with held(matrix):
        _, message = own_engine(matrix, engine, find_scheduler(engine.engine, engine.settings))
    print(f"{shown(matrix.path)}: {message}" + ("" if "cancelled" in message else ", and no job is left"))
    print(f"  continue: {make_command('continue', matrix.path)}")
    return 0


def _live_jobs(matrix: MatrixDir, engine: EngineFile, scheduler: Scheduler, *, reports: bool = False) -> dict[str, str]:
    """Return share id -> job of the jobs that train, or may: not the one that writes the report after them.

    reports: those that write reports instead.
    """
    folders = JobsDir(matrix).submissions()
    last = {folder.number for folder in folders if (found := read_submission(folder)) and found.kind == REPORT}
    jobs = known_jobs(matrix, engine, scheduler)
    known = {share: job for share, job in jobs.items() if (_number(share) in last) == reports}
    views = own_views(scheduler, engine, known)
    return {share: job for share, job in known.items() if share in views and views[share].phase in LIVE}


def _number(share: str) -> int:
    """Return the submission of a share id."""
    return int(share.partition(".")[0])


def _wait(matrix: MatrixDir, activity: MatrixActivity) -> str:
    """Wait until no job of a matrix runs or waits; return which do after the limit, "" for none."""
    activity.refresh(ask(matrix, now=True))
    deadline = time.monotonic() + JOBS_S
    # Not for the report, which is to be written.
    while any(state.activity is not Activity.NONE for state in activity.shares()):
        if time.monotonic() > deadline:
            return job_counts(activity.counts())
        time.sleep(JOBS_POLL_S)
        activity.refresh(ask(matrix))
    return ""
