"""Stop a matrix: its runs save a checkpoint and exit, on this machine or in the jobs of a cluster."""

from __future__ import annotations

from collections import Counter

from kmatrix import locks
from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import live_jobs, results_dir, running_target
from kmatrix.clock import clock
from kmatrix.engines import jobs
from kmatrix.engines.ports import UnreachableError
from kmatrix.engines.schedulers import scheduler_of
from kmatrix.errors import LaunchError
from kmatrix.records import control
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.status.look import look
from kmatrix.text import make_command, plural, shown

POLL_S = 0.2
JOBS_S, JOBS_POLL_S = 300.0, 2.0  # jobs of a cluster have ended within this time, or it is left to the user


def stop(arguments: Arguments) -> int:
    """Stop a matrix: its runs save a checkpoint and exit. Wait for it, and print the result."""
    matrix = running_target(arguments)
    running = _running(matrix) if matrix else []
    is_held = matrix is not None and locks.is_held(matrix.path / ".lock")
    live = len(_live(matrix)) if matrix and not is_held else 0
    if matrix is None or not (is_held or running or live):
        where = shown(matrix.path if matrix else results_dir(arguments))
        raise LaunchError(f"no matrix is running in {where}", hint="pass TARGET=<matrix> or RESULTS_DIR=<folder>")
    control.stop(matrix.path)
    if live and (scheduler := scheduler_of(look(matrix.path).plan, control.requests_of(matrix.path).settings)):
        print(f"cancelled {plural(jobs.cancel(matrix.path, scheduler), 'job')} of {shown(matrix.path)}", flush=True)
    for name in running:
        print(f"  waiting for {name} to save a checkpoint and exit", flush=True)
    until = clock.monotonic() + JOBS_S
    while _is_busy(matrix, live=live > 0) and (is_held or clock.monotonic() < until):
        clock.sleep(POLL_S if is_held else JOBS_POLL_S)
    states = Counter(state.status for state in look(matrix.path).states.values())
    print("stopped: " + ", ".join(f"{states[status]} {status}" for status in Status if states[status]))
    if left := _running(matrix):
        print(f"  not yet stopped: {plural(len(left), 'run')}; watch: {make_command('status', matrix.path)}")
    if states[Status.STOPPED] or states[Status.PLANNED]:
        print(f"  continue: {make_command('continue', matrix.path)}")
    return 0


def _is_busy(matrix: MatrixDir, *, live: bool) -> bool:
    return locks.is_held(matrix.path / ".lock") or bool(_running(matrix)) or (live and bool(_live(matrix)))


def _running(matrix: MatrixDir) -> list[str]:
    return [name for name, state in look(matrix.path).states.items() if state.status is Status.RUNNING]


def _live(matrix: MatrixDir) -> list[str]:
    """Return the runs with jobs; without an answer of the scheduler, none: the file stops them."""
    try:
        return list(live_jobs(matrix))
    except UnreachableError as error:
        print(f"note: {error}; its jobs follow the files", flush=True)
        return []
