"""Find the matrix and the runs of a command: TARGET=, RUN=, RESULTS_DIR=."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path

from kmatrix import locks
from kmatrix.cli.commands import Arguments
from kmatrix.engines.ports import Phase, Seen
from kmatrix.errors import ConfigError, KmatrixError, LaunchError
from kmatrix.forms import read_string
from kmatrix.records.matrix import LOCAL, read_plan
from kmatrix.records.paths import ROOT, MatrixDir, RunDir, below_root, find_matrix, matrix_dirs
from kmatrix.records.runs import Status
from kmatrix.status.look import Look
from kmatrix.text import first_names, make_command, plural, shown

MOST_DIGITS = 9  # of the number of a run


def find_target(arguments: Arguments) -> MatrixDir:
    """Return the matrix of TARGET= or of RUN=<run directory>, by default the newest."""
    run = RunDir(Path(arguments.get("RUN", ".")))
    if not arguments.get("TARGET") and run.run_json.is_file():
        return MatrixDir(run.path.resolve().parent)
    return find_named(results_dir(arguments), arguments.get("TARGET"))


def find_named(results_dir: Path, text: str, argument: str = "TARGET") -> MatrixDir:
    """Return the matrix with this path or name in the results folder, by default the newest. Raises RecordError.

    argument: its name in messages.
    """
    return find_matrix(results_dir, text or None, argument)


def running_target(arguments: Arguments) -> MatrixDir | None:
    """Return the matrix of TARGET=, or the running one, None if none runs. Raises ConfigError if several run."""
    if arguments.get("TARGET"):
        return find_target(arguments)
    running = [matrix for matrix in matrix_dirs(results_dir(arguments)) if is_active(matrix)]
    if len(running) > 1:
        raise ConfigError(
            f"{len(running)} matrices are running: {', '.join(matrix.name for matrix in running)}",
            hint="pass TARGET=<one of them>",
        )
    return running[0] if running else None


def live_jobs(matrix: MatrixDir) -> dict[str, Seen]:
    """Return run -> its job that waits or runs, as the scheduler of the matrix says; empty on this machine.

    Raises UnreachableError.
    """
    from kmatrix.engines import jobs  # what only a cluster needs takes a third of the time of a status
    from kmatrix.engines.schedulers import scheduler_of

    scheduler = scheduler_of(read_plan(matrix.path))
    found = jobs.look(matrix.path, scheduler) if scheduler else {}
    return {run: job for run, job in found.items() if job.phase is not Phase.ENDED}


def is_active(matrix: MatrixDir) -> bool:
    """Return whether a matrix is being run, or has jobs that wait."""
    if locks.is_held(matrix.path / ".lock"):
        return True
    try:
        return (matrix.path / "jobs").is_dir() and read_plan(matrix.path).engine != LOCAL and bool(live_jobs(matrix))
    except KmatrixError:  # of one of many matrices: the command that is about it refuses it
        return False


def chosen_runs(matrix: MatrixDir, arguments: Arguments) -> list[RunDir]:
    """Return the runs that match RUN=, a pattern or a run directory; without it, all runs."""
    names, asked = [run.name for run in read_plan(matrix.path).runs], arguments.get("RUN")
    if asked:
        pattern = Path(asked).name if RunDir(Path(asked)).run_json.is_file() else asked
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        names = found or [_named(matrix, names, asked)]
    return [matrix.run(name) for name in names]


def _named(matrix: MatrixDir, names: Sequence[str], asked: str) -> str:
    """Return the run with this number (from 1, in the order of the matrix), or with this unique part of its name."""
    if asked.isdecimal() and 1 <= int(asked[:MOST_DIGITS]) <= len(names):
        return names[int(asked) - 1]
    found = [name for name in names if name.startswith(asked) or name.endswith(asked)]
    if len(found) == 1:
        return found[0]
    why = f"it is part of several names: {first_names(found)}"
    near = difflib.get_close_matches(asked, names, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"RUN={asked} matches no run of {shown(matrix.path)}",
        why=why if found else f"its runs are {first_names(names)}",
        hint="RUN= takes one name or number, or a pattern for several: RUN='gpt2_adamw*'" if "," in asked else hint,
    )


def asked_statuses(arguments: Arguments) -> frozenset[Status]:
    """Return the statuses of STATUS=failed,stopped; none if it is not given, which means all."""
    words = arguments.get("STATUS").split(",") if arguments.get("STATUS") else []
    if unknown := sorted(set(words) - {status.value for status in Status}):
        raise ConfigError(
            f"STATUS={arguments.get('STATUS')}: unknown status {', '.join(unknown) or repr('')}",
            why=f"expected one or more of {', '.join(Status)}",
        )
    return frozenset(Status(word) for word in words)


def with_status(seen: Look, runs: Iterable[RunDir], arguments: Arguments) -> list[str]:
    """Return the runs with a status of STATUS=, all without it; say so if there are none."""
    statuses = asked_statuses(arguments)
    names = [run.name for run in runs if not statuses or seen.states[run.name].status in statuses]
    if not names:
        print(f"no run of {shown(seen.path)} is {arguments.get('STATUS').replace(',', ' or ')}")
    return names


def refuse_if_running(matrix: MatrixDir) -> None:
    """Raise LaunchError if another process is running the matrix, or its jobs on a cluster may write to it."""
    if locks.is_held(matrix.path / ".lock"):
        raise LaunchError(
            f"{matrix.name} is being run",
            hint=f"watch it with `{make_command('status', matrix.path)}`, or stop it with "
            f"`{make_command('stop', matrix.path)}` (runs save a checkpoint)",
        )
    if live := live_jobs(matrix):
        raise LaunchError(
            f"{matrix.name} has {plural(len(live), 'job')} that wait or run",
            why="they write to it",
            hint=f"wait for them, or stop them with `{make_command('stop', matrix.path)}` (runs save a checkpoint)",
        )


def results_dir(arguments: Arguments) -> Path:
    """Return RESULTS_DIR of the command line, else of .config, else the project's root.

    Only this line of .config is read: a matrix can be watched and stopped while somebody edits the file.
    """
    text = arguments.get("RESULTS_DIR") or read_string(arguments.config, "RESULTS_DIR")
    return below_root(text) if text else ROOT
