"""Hold and release single runs of a matrix: RUN= or STATUS=."""

from __future__ import annotations

from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import asked_statuses, chosen_runs, find_target, is_active, running_target
from kmatrix.errors import ConfigError
from kmatrix.records.matrix import LOCAL
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.runner import requests
from kmatrix.status.look import look
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
    statuses, seen = asked_statuses(arguments), look(matrix.path)
    names = [run.name for run in chosen_runs(matrix, arguments)]
    names = [name for name in names if not statuses or seen.states[name].status in statuses]
    if not names:
        print(f"no run of {shown(matrix.path)} is {arguments.get('STATUS').replace(',', ' or ')}")
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
