"""Which matrix and which of its runs a command means: TARGET=, RUN=, RESULTS_DIR=."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import ROOT, config_path, shown
from kmatrix.errors import ConfigError
from kmatrix.records import MatrixDir, RunDir, matrix_dirs
from kmatrix.records.finding import find_matrix

LISTED = 6


def find_target(arguments: Arguments) -> MatrixDir:
    """Return the matrix that TARGET= names; the newest where it names none, or the one of RUN=<a run's folder>."""
    run = RunDir(Path(arguments.get("RUN", ".")))
    if not arguments.get("TARGET") and run.run_json.is_file():
        return MatrixDir(run.path.resolve().parent)
    return find_matrix(results_dir(arguments), arguments.get("TARGET") or None)


def running_target(arguments: Arguments) -> MatrixDir | None:
    """Return the matrix that runs now, or that TARGET= names; None where none runs. Two that run are refused."""
    if arguments.get("TARGET"):
        return find_target(arguments)
    running = [matrix for matrix in matrix_dirs(results_dir(arguments)) if matrix.is_held()]
    if len(running) > 1:
        raise ConfigError(
            f"{len(running)} matrices are running: {', '.join(matrix.name for matrix in running)}",
            fix="pass TARGET=<one of them>",
        )
    return running[0] if running else None


def chosen_runs(matrix: MatrixDir, arguments: Arguments) -> list[RunDir]:
    """Return the runs of a matrix whose names fit RUN=, a pattern or the folder of a run; all without it."""
    runs, asked = matrix.runs(), arguments.get("RUN")
    if not asked:
        return runs
    pattern = Path(asked).name if RunDir(Path(asked)).run_json.is_file() else asked
    found = [run for run in runs if fnmatch.fnmatchcase(run.name, pattern)]
    if not found:
        names = ", ".join(run.name for run in runs[:LISTED]) + (", ..." if len(runs) > LISTED else "")
        raise ConfigError(f"RUN={asked} fits no run of {shown(matrix.path)}", why=f"its runs are {names}")
    return found


def results_dir(arguments: Arguments) -> Path:
    """RESULTS_DIR= of the command line, else of .config, else the project's root."""
    text = arguments.get("RESULTS_DIR")
    if text:
        return Path(text).expanduser()
    path = config_path(arguments)
    if path.exists():
        from kmatrix.cli.session import open_tree
        from kmatrix.kconfig import read_assignments

        for item in read_assignments(open_tree(arguments), path):
            if item.name == "RESULTS_DIR":
                return Path(os.path.normpath(ROOT / Path(item.value).expanduser()))
    return ROOT
