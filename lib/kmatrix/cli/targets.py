"""Find the matrix and the runs of a command: TARGET=, RUN=, RESULTS_DIR=."""

from __future__ import annotations

import difflib
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.engines.polling import refresh
from kmatrix.errors import ConfigError, LaunchError, RecordError
from kmatrix.kconfig.assignments import read_string
from kmatrix.records.jobs.files import PollFile
from kmatrix.records.lock import holder, in_use
from kmatrix.records.paths import ROOT, MatrixDir, RunDir, below_root, find_matrix, made_path, matrix_dirs
from kmatrix.records.plan import interrupted_dirs, refuse_unmade
from kmatrix.records.runs import Status
from kmatrix.status.activity import Activity, MatrixActivity
from kmatrix.text import first_names, make_command, plural, shown

MOST_DIGITS = 9  # of the number of a run


def find_target(arguments: Arguments) -> MatrixDir:
    """Return the matrix of TARGET= or of RUN=<run directory>, by default the newest."""
    run = RunDir(Path(arguments.get("RUN", ".")))
    if not arguments.get("TARGET") and run.run_json.is_file():
        return MatrixDir(run.path.resolve().parent)
    return find_named(results_dir(arguments), arguments.get("TARGET"))


def find_named(results_dir: Path, text: str, argument: str = "TARGET") -> MatrixDir:
    """Return the matrix with this path or name in the results folder, by default the newest.

    argument: its name in messages. Raises RecordError or LaunchError, with the reason if its creation was interrupted.
    """
    try:
        return find_matrix(results_dir, text or None, argument)
    except RecordError:
        refuse_unmade(results_dir, text or None, argument)
        raise


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


def look(matrix: MatrixDir) -> MatrixActivity:
    """Return who runs a matrix now, as the lock says, or the scheduler and the jobs of a cluster.

    Raises RecordError if engine.json is damaged.
    """
    return MatrixActivity(matrix, ask(matrix))


def ask(matrix: MatrixDir, *, now: bool = False) -> PollFile | None:
    """Return the newest answer of the scheduler of a matrix, None on one machine. now: ask again."""
    return refresh(matrix, now=now)


def is_active(matrix: MatrixDir) -> bool:
    """Return whether a matrix is being run, or has jobs that wait. A damaged engine.json counts as neither."""
    try:
        return look(matrix).activity is not Activity.NONE
    except RecordError:  # of one of many matrices: the command that is about it refuses it
        return False


def chosen_runs(matrix: MatrixDir, arguments: Arguments) -> list[RunDir]:
    """Return the runs that match RUN=, a pattern or a run directory; without it, all runs."""
    runs, asked = matrix.runs(), arguments.get("RUN")
    if not asked:
        return runs
    pattern = Path(asked).name if RunDir(Path(asked)).run_json.is_file() else asked
    found = [run for run in runs if fnmatch.fnmatchcase(run.name, pattern)]
    return found or [_named(matrix, runs, asked)]


def _named(matrix: MatrixDir, runs: Sequence[RunDir], asked: str) -> RunDir:
    """Return the run with this number (from 1, in the order of the matrix), or with this unique part of its name."""
    if asked.isdecimal() and 1 <= int(asked[:MOST_DIGITS]) <= len(runs):
        return runs[int(asked) - 1]
    found = [run for run in runs if run.name.startswith(asked) or run.name.endswith(asked)]
    if len(found) == 1:
        return found[0]
    why = f"it is part of several names: {first_names(run.name for run in found)}"
    near = difflib.get_close_matches(asked, [run.name for run in runs], 3)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"RUN={asked} matches no run of {shown(matrix.path)}",
        why=why if found else f"its runs are {first_names(run.name for run in runs)}",
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


def warn_missing(matrix: MatrixDir) -> None:
    """Print a note if runs of the plan have no directory: a report must not look complete without them."""
    if missing := matrix.missing():
        print(
            f"note: {plural(len(missing), 'run')} of the plan without a run.json: {first_names(missing)}; "
            f"{make_command('continue', matrix.path)} makes them again",
            file=sys.stderr,
        )


def warn_interrupted(arguments: Arguments) -> None:
    """Print a note about each matrix whose creation was interrupted, if the newest one is asked for."""
    if not arguments.get("TARGET") and not arguments.get("RUN"):
        for path in interrupted_dirs(results_dir(arguments)):
            print(
                f"note: the creation of {made_path(path).name} was interrupted before "
                f"its plan was complete, and nothing was run; {shown(path)} can be removed",
                file=sys.stderr,
            )


def refuse_if_running(matrix: MatrixDir) -> None:
    """Raise LaunchError if another process is running the matrix, or its jobs on a cluster may write to it."""
    if holder(matrix) is not None:
        raise in_use(matrix)
    activity = look(matrix)
    if activity.engine is None or activity.activity is Activity.NONE:
        return
    path, counts = matrix.path, activity.counts()
    if activity.activity is Activity.UNKNOWN:
        raise LaunchError(
            f"{matrix.name} may be running: {activity.scheduler} does not answer",
            why=activity.why_silent,
            hint=f"try again later; `{make_command('status', path)}` shows what its files say",
        )
    raise LaunchError(
        f"{matrix.name} is being run by {activity.scheduler}: {job_counts(counts)}",
        why="its jobs write to it",
        hint=f"wait for them, or stop them with `{make_command('stop', path)}` (runs save a checkpoint)",
    )


def job_counts(counts: Mapping[Activity, int]) -> str:
    """Return `1 job running, 3 jobs waiting`. counts: activity -> jobs."""
    named = {Activity.RUNNING: "running", Activity.QUEUED: "waiting", Activity.UNKNOWN: "unknown"}
    return ", ".join(f"{plural(counts[one], 'job')} {name}" for one, name in named.items() if counts.get(one))


def results_dir(arguments: Arguments) -> Path:
    """Return RESULTS_DIR of the command line, else of .config, else the project's root.

    Only this line of .config is read: a matrix can be watched and stopped while somebody edits the file.
    """
    text = arguments.get("RESULTS_DIR") or read_string(arguments.config, "RESULTS_DIR")
    return below_root(text) if text else ROOT
