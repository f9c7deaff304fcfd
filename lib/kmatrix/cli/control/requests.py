"""Hold and release single runs of a matrix: RUN= or STATUS=."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import ask, asked_statuses, chosen_runs, find_target, look, running_target
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records.lock import held
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import Status
from kmatrix.records.states import (
    RunRequest,
    read_matrix_status,
    read_requests,
    requests_locked,
    write_requests,
)
from kmatrix.status.activity import Activity, MatrixActivity
from kmatrix.status.state import Freed, Requested, RunState, after
from kmatrix.status.status_file import recover_status, write_state, writing
from kmatrix.status.watch import alerts_of_run
from kmatrix.text import make_command, shown


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
    statuses, activity = asked_statuses(arguments), look(matrix)
    states = {
        run.name: recover_status(run, has_runner=activity.has_runner(run.name))
        for run in chosen_runs(matrix, arguments)
    }
    states = {name: state for name, state in states.items() if not statuses or state.status in statuses}
    if not states:
        print(f"no run of {shown(matrix.path)} is {arguments.get('STATUS').replace(',', ' or ')}")
        return 0
    ended = {name: state.status for name, state in states.items() if hold and state.status is Status.FINISHED}
    names = [name for name in states if name not in ended]
    # Until the statuses are written, another such command waits: it would take this one for the runner.
    with requests_locked(matrix):
        with writing(matrix.requests):
            former = write_requests(matrix, names, hold=hold)
        written = _write_at_once(matrix, names, activity)
    later = read_matrix_status(matrix).unselected if len(written) < len(names) else ()
    for name, status in ended.items():
        print(f"{name}: {status}, nothing to {arguments.target}")
    for name in names:
        answer = _answer(former.get(name), states[name], hold=hold, followed=name in written, later=name in later)
        print(f"{name}: {answer or _to_come(activity.of(name).activity, hold=hold)}")
    if not hold and former.keys() & {*written, *later}:
        print(f"  continue: {make_command('continue', matrix.path)}")
    return 0


def _to_come(activity: Activity, *, hold: bool) -> str:
    """Return how a runner follows a request: on this machine or in a running job, or in one that waits."""
    done = "held" if hold else "released"
    if activity is not Activity.QUEUED:
        return f"{done}, the runner follows within a second"
    return f"{done}; its job still waits, and " + ("ends as soon as it starts" if hold else "runs it")


def _answer(before: RunRequest | None, state: RunState, *, hold: bool, followed: bool, later: bool) -> str:
    """Return what a request does to a run, "" if a runner has still to follow it. before: its former request.

    followed: it is in the status already.  later: a runner leaves the run alone, because it was not selected.
    """
    done = "held" if hold else "released"
    if hold and before is not None:
        return "already held"
    if not hold and before is None:
        return "not held"
    if state.status is Status.FAILED:
        return f"{done}; it has failed, and is not retried" if hold else f"{done}; it has failed"
    if followed:
        return done
    if not hold and later:
        return f"{done}; the command that is running did not select it: continue when that has ended"
    return ""


def _write_at_once(matrix: MatrixDir, names: Sequence[str], activity: MatrixActivity) -> Sequence[str]:
    """Write the requests of runs to their status, and return the runs; not of those that a runner has, and will do it.

    On one machine, a runner has all of them. On a cluster, the runner in a job reads the requests when it starts.
    """
    activity.refresh(ask(matrix))  # a runner may have ended while another command had the requests
    free = [name for name in names if activity.of(name).activity is Activity.NONE]
    if not free:
        return []
    try:
        with held(matrix):
            requests = read_requests(matrix)
            for run in (matrix.run(name) for name in free):
                state = recover_status(run, has_runner=False)
                now = after(state, Requested(requests[run.name]) if run.name in requests else Freed())
                if now != state:
                    write_state(run, now, alerts=alerts_of_run(run))
    except LaunchError:
        if matrix.is_held():  # a runner was faster
            return []
        raise
    return free
