"""Prepare a matrix to be run again, and report what could not be."""

from __future__ import annotations

from collections.abc import Sequence

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import refuse_if_running
from kmatrix.errors import RecordError
from kmatrix.records.checkpoint_dir import check_own_files, take_folder
from kmatrix.records.lock import held
from kmatrix.records.paths import MatrixDir, below_root
from kmatrix.records.states import read_matrix_status
from kmatrix.runner.archive import finish_rerun
from kmatrix.runner.resume import (
    RestoredRuns,
    restore_runs,
)
from kmatrix.text import first_names, make_command


def open_matrix(matrix: MatrixDir, arguments: Arguments, *, on_cluster: bool = False) -> RestoredRuns:
    """Prepare a matrix to be run again: missing runs are made from its plan. Return those, and what cannot be made.

    on_cluster: other runs of the matrix may be running.
    Raises LaunchError if another process holds the matrix, or if its runs could change the files of another matrix.
    """
    if not on_cluster:
        refuse_if_running(matrix)
    with held(matrix):
        read_matrix_status(matrix)  # refuses the file of a newer version, before anything is written
        if base := arguments.get("CHECKPOINT_DIR"):
            take_folder(matrix, below_root(base))
        check_own_files(matrix)
        restored = restore_runs(matrix)
        archived = finish_rerun(matrix)
    for name in restored.made:
        print(f"{name}: its folder or run.json was missing, made again from {matrix.plan.name}")
    for name in archived:
        print(f"{name}: archived its result, which an interrupted test-rerun had left")
    why = restored.why or f"{matrix.name} has no plan of it"
    for name in restored.lost:
        again = make_command("test-matrix")
        print(f"{name}: missing, and {why}: make it in a new matrix with {again}")
    return restored


def exit_code(matrix: MatrixDir, status: int, lost: RestoredRuns, damaged: Sequence[str]) -> int:
    """Return the exit status of a matrix whose other runs have been run.

    Raises RecordError if it would be 0 although some runs could not be run: lost or with a damaged run.json.
    """
    if not status and damaged:
        raise RecordError(
            f"{matrix.name} is not complete: {first_names(damaged)} could not be run",
            why="run.json is damaged",
            hint=f"delete that run.json and continue: it is made again from {matrix.plan.name}"
            if matrix.plan.exists()
            else "restore that run.json from a copy, or make the run in a new matrix",
        )
    if not status and lost.lost:
        raise RecordError(
            f"{matrix.name} is not complete: {first_names(lost.lost)} could not be run",
            why=f"the run is missing, and {lost.why or f'{matrix.name} has no plan of it'}",
            hint="make it in a new matrix with make test-matrix",
        )
    return status
