"""Stop a matrix, on this machine or in the jobs of a cluster; hold and release single runs of it: RUN= or STATUS=."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kmatrix import locks
from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import chosen_runs, find_target, is_active, live_jobs, results_dir, running_target, with_status
from kmatrix.clock import clock
from kmatrix.engines import jobs
from kmatrix.engines.ports import UnreachableError
from kmatrix.engines.schedulers import scheduler_of
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records import control
from kmatrix.records.matrix import LOCAL
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import Status
from kmatrix.runner import requests
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
    if live and (scheduler := scheduler_of(look(matrix.path).plan)):
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


def hold(arguments: Arguments) -> int:
    """Pause runs: waiting ones are not started, running ones save a checkpoint and free their GPUs."""
    return _request(arguments, hold=True)


def release(arguments: Arguments) -> int:
    """Continue runs that were held."""
    return _request(arguments, hold=False)


def _request(arguments: Arguments, *, hold: bool) -> int:
    """Hold or release runs, for the runner of the matrix now or later."""
    if not arguments.get("RUN") and not arguments.get("STATUS"):
        raise ConfigError(
            f"{arguments.target} needs runs", hint="pass RUN=<name, number or pattern>, or STATUS=planned"
        )
    matrix = None if RunDir(Path(arguments.get("RUN"))).run_json.is_file() else running_target(arguments)
    matrix = matrix or find_target(arguments)
    seen = look(matrix.path)
    if not (names := with_status(seen, chosen_runs(matrix, arguments), arguments)):
        return 0
    (requests.hold if hold else requests.release)(seen, names)
    active = is_active(matrix)
    for name in names:
        print(f"{name}: {_answer(seen.states[name].status, hold=hold, was_held=seen.files[name].request is not None)}")
    if active and (hold or seen.plan.engine == LOCAL):
        print("takes effect in a few seconds")
    elif not hold:  # on a cluster, its job has ended
        print(f"  continue: {make_command('continue', matrix.path)}")
    return 0


def _answer(status: Status, *, hold: bool, was_held: bool) -> str:
    """Return what a request does to a run."""
    if hold and was_held:
        return "already held"
    if not hold and not was_held:
        return "not held"
    done = "held" if hold else "released"
    if status in (Status.FINISHED, Status.FAILED):
        return f"{done}; it has {status}"
    return done
