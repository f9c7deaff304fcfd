"""The commands that take up a matrix that is there: go on with it, or run some of its runs anew."""

from __future__ import annotations

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.execution import detach, execute, monitor, need_torch, recording, symbols
from kmatrix.cli.planning import gpus_here
from kmatrix.cli.session import shown
from kmatrix.cli.targets import chosen_runs, find_target
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.launch.lock import holder
from kmatrix.launch.reopen import in_words, reopen
from kmatrix.records import MatrixDir

EXIT_FAILED = 1
RESUMES = ("auto", "latest", "best", "none")


def continue_(arguments: Arguments) -> int:
    """Go on with a matrix: finished runs stay, the others get their next attempt from their last good checkpoint."""
    matrix = find_target(arguments)
    names = {run.name for run in chosen_runs(matrix, arguments)}
    need_torch()
    refuse_if_running(matrix)
    gpus, notes = gpus_here(arguments)
    for note in notes:
        print(f"note: {note}")
    retry = yes(arguments, "RETRY_FAILED")
    going = reopen(matrix, gpus, names=names, resume=arguments.get("RESUME", "auto"), retry_failed=retry)
    print(f"{shown(matrix.path)}: {'nothing' if not going.plans else len(going.plans)} to run")
    for line in in_words(going):
        print(f"  {line}")
    if yes(arguments, "DETACH") and going.plans:
        return detach(matrix, arguments, "RUN", "RESUME", "RETRY_FAILED", "GPUS", "SIMULATE")
    recorder = monitor(arguments.get("SIMULATE"), recording(symbols(matrix)))
    status = execute(matrix, going, recorder)
    return status or (EXIT_FAILED if any(state.status == "failed" for state in going.stays.values()) else 0)


def refuse_if_running(matrix: MatrixDir) -> None:
    """Refuse a matrix that another runner has, before anything is said of it."""
    other = holder(matrix)
    if other is not None:
        raise LaunchError(
            f"{matrix.name} is being run by process {other.pid} on {other.host}",
            fix="`make stop` ends it; its runs save first",
        )


def yes(arguments: Arguments, name: str) -> bool:
    """Return whether NAME=1 (or y) was given; NAME=0 and NAME=n are no."""
    text = arguments.get(name)
    if text not in ("", "0", "1", "n", "y"):
        raise ConfigError(f"{name}={text}", why="it is 1 or 0")
    return text in ("1", "y")
