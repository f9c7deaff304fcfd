"""The commands that take up a matrix that is there: go on with it, or run some of its runs anew."""

from __future__ import annotations

from pathlib import Path

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.execution import detach, execute, monitor, need_torch, recording, symbols
from kmatrix.cli.planning import gpus_here
from kmatrix.cli.session import shown
from kmatrix.cli.targets import chosen_runs, find_target
from kmatrix.cli.trackers import asked_trackers
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.launch.aside import set_aside
from kmatrix.launch.lock import held, holder
from kmatrix.launch.reopen import follow_move, in_words, reopen, too_few_gpus
from kmatrix.records import MatrixDir, RunDir, read_json

EXIT_FAILED = 1
RESUMES = ("auto", "latest", "best", "none")


def continue_(arguments: Arguments) -> int:
    """Go on with a matrix: finished runs stay, the others get their next attempt from their last good checkpoint."""
    matrix = find_target(arguments)
    names = {run.name for run in chosen_runs(matrix, arguments)}
    need_torch()
    chosen = asked_trackers(arguments)
    refuse_if_running(matrix)
    follow_move(matrix)
    gpus, notes = gpus_here(arguments)
    for note in notes:
        print(f"note: {note}")
    retry = yes(arguments, "RETRY_FAILED")
    going = reopen(matrix, gpus, names=names, resume=beginning(arguments.get("RESUME", "auto")), retry_failed=retry)
    print(f"{shown(matrix.path)}: {'nothing' if not going.plans else len(going.plans)} to run")
    for line in in_words(going):
        print(f"  {line}")
    if yes(arguments, "DETACH") and going.plans:
        return detach(matrix, arguments, "RUN", "RESUME", "RETRY_FAILED", "GPUS", "SIMULATE", "TRACKER")
    recorder = monitor(arguments.get("SIMULATE"), *recording(symbols(matrix)))
    status = execute(matrix, going, recorder, gpus, chosen)
    return status or (EXIT_FAILED if any(state.status == "failed" for state in going.stays.values()) else 0)


def test_rerun(arguments: Arguments) -> int:
    """Run some runs of a matrix anew: their old results are kept aside, and the report reads the new ones."""
    if not arguments.get("TARGET"):
        raise ConfigError("test-rerun needs a matrix", fix="pass TARGET=<matrix>: its results are replaced")
    matrix = find_target(arguments)
    runs = _of_optimizers(chosen_runs(matrix, arguments), arguments.get("OPTIMIZER"))
    need_torch()
    chosen = asked_trackers(arguments)
    refuse_if_running(matrix)
    follow_move(matrix)
    gpus, _ = gpus_here(arguments)
    for run in runs:
        if why := too_few_gpus(read_json(run.run_json)["train"], len(gpus)):
            raise LaunchError(f"{run.name} cannot be run here", why=why, fix="pass RUN=<pattern> for the others")
    recorder = monitor(arguments.get("SIMULATE"), *recording(symbols(matrix)))
    with held(matrix):
        for run in runs:
            former = set_aside(run)
            print(f"{run.name}: " + (f"its former result is in {shown(former)}" if former else "it has no result yet"))
    return execute(matrix, reopen(matrix, gpus, names={run.name for run in runs}), recorder, gpus, chosen)


def _of_optimizers(runs: list[RunDir], asked: str) -> list[RunDir]:
    """Return the runs of these optimizers, a comma list; all without it."""
    if not asked:
        return runs
    wanted = set(asked.split(","))
    known = {run.name: str(read_json(run.run_json)["train"].get("optimizer")) for run in runs}
    if missing := wanted - set(known.values()):
        there = ", ".join(sorted(set(known.values())))
        raise ConfigError(f"OPTIMIZER={asked}: no run has {', '.join(sorted(missing))}", why=f"there are {there}")
    return [run for run in runs if known[run.name] in wanted]


def refuse_if_running(matrix: MatrixDir) -> None:
    """Refuse a matrix that another runner has, before anything is said of it."""
    other = holder(matrix)
    if other is not None:
        raise LaunchError(
            f"{matrix.name} is being run by process {other.pid} on {other.host}",
            fix="`make status` shows it, `make stop` ends it",
        )


def beginning(text: str) -> str:
    """Return what an attempt is to begin from, as the trainer takes it: a word, or the path of a checkpoint."""
    if text in RESUMES:
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"RESUME={text} is neither a checkpoint nor a word for one",
            why=f"the words are {', '.join(RESUMES)}",
            fix="`make list-checkpoints` lists the files",
        )
    return str(path.resolve())


def yes(arguments: Arguments, name: str) -> bool:
    """Return whether NAME=1 (or y) was given; NAME=0 and NAME=n are no."""
    text = arguments.get(name)
    if text not in ("", "0", "1", "n", "y"):
        raise ConfigError(f"{name}={text}", why="it is 1 or 0")
    return text in ("1", "y")
