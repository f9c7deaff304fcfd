"""What follows the last run of a matrix: the report, and the user's ON_FINISH command."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from kmatrix.clock import clock
from kmatrix.errors import ConfigError, KmatrixError, path_problem
from kmatrix.locks import is_held
from kmatrix.records.control import stop_of
from kmatrix.records.matrix import read_plan
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.report.analyse import analyse
from kmatrix.report.page import write_page
from kmatrix.report.write import draw_graphs, ending, write_summary
from kmatrix.status.fold import overall
from kmatrix.status.look import look
from kmatrix.text import shown

FINISH_LIMIT_S = 60.0  # the ON_FINISH command is killed after this time


def wait_for_trackers(path: Path) -> None:
    """Wait until the trackers of a matrix have sent what is pending, or have given up; a stop ends the wait."""
    left = MatrixDir(path).runs()
    while (left := [run for run in left if is_held(run.track_lock)]) and stop_of(path) is None:
        clock.sleep(0.5)


def conclude(path: Path) -> None:
    """Write the report of a matrix, print its short form, and run ON_FINISH, which finds the report in the results."""
    symbols = read_plan(path).common.symbols
    try:
        report(MatrixDir(path), draw=symbols.get("AUTO_GENERATE_GRAPHS") == "y")
    except (KmatrixError, OSError) as error:
        print(f"note: there is no report: {path_problem(error) or error}", flush=True)
    if why := finish(path, symbols.get("ON_FINISH", "")):
        print(f"note: {why}", flush=True)


def report(matrix: MatrixDir, *, draw: bool) -> None:
    """Write the report of a matrix and print its short form with the names of the files. draw: draw the graphs, too."""
    results = analyse(matrix)
    count = len(draw_graphs(matrix, results)[0]) if draw else 0
    page = write_page(matrix, results)
    write_summary(matrix, results)
    files = [f"Report: {shown(page)}", f"Summary: {shown(matrix.summary)}"]
    files += [f"Graphs: {shown(matrix.graphs)} ({count} files)"] if count else []
    print(ending(results, files), end="", flush=True)


def command_of(text: str) -> list[str]:
    """Return the arguments of ON_FINISH, [] for none. Raises ConfigError if it cannot be run."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"invalid ON_FINISH={text}", why=str(error), hint="close the quotes") from None
    if words and shutil.which(words[0]) is None:
        raise ConfigError(
            f"ON_FINISH={text}: program {words[0]} not found",
            why="checked now, because the command runs after the last run",
            hint='use an installed program, or pass ON_FINISH=""',
        )
    return words


def finish(path: Path, text: str) -> str:
    """Run the ON_FINISH command after the end of a matrix; return why it did not run or failed, "" on success."""
    # Errors are returned, not raised: the matrix has ended, and its exit status is that of its runs.
    try:
        words = command_of(text)
        if words and path.stat().st_uid != os.getuid():
            return f"ON_FINISH={text} was not run: {path.name} belongs to another user"
        if words:
            subprocess.run(words, env=_about(path), stdin=subprocess.DEVNULL, timeout=FINISH_LIMIT_S, check=True)
    except ConfigError as error:
        return error.what
    except subprocess.TimeoutExpired:
        return f"ON_FINISH={text} took longer than {FINISH_LIMIT_S:g} s and was killed"
    except subprocess.CalledProcessError as error:
        return f"ON_FINISH={text} ended with status {error.returncode}"
    except OSError as error:
        return f"ON_FINISH={text} could not be run: {error.strerror}"
    return ""


def _about(path: Path) -> dict[str, str]:
    """Return the environment of the ON_FINISH command."""
    states = list(look(path).states.values())
    counts = Counter(state.status for state in states)
    return {
        **os.environ,
        "KMATRIX_MATRIX": str(path.resolve()),
        "KMATRIX_STATUS": str(overall(states)),
        "KMATRIX_FINISHED": str(counts[Status.FINISHED]),
        "KMATRIX_FAILED": str(counts[Status.FAILED]),
    }
