"""Run a matrix from Python."""

from __future__ import annotations

from kmatrix.experiment.inputs.ask import need_torch
from kmatrix.records.checkpoint_dir import check_own_files
from kmatrix.records.paths import MatrixDir
from kmatrix.runner import background
from kmatrix.runner.requests import go_on
from kmatrix.status.look import Look, look


def run_matrix(matrix: MatrixDir, *, gpus: str = "") -> Look:
    """Run all runs of a matrix that have not finished, on this machine, and return where they stand then.

    Finished runs stay; interrupted runs resume from their last checkpoint, so that a second call continues a matrix.
    gpus: indices or UUIDs of the GPUs that may be used, all by default.
    Raises LaunchError if no run can start here, or if another process is running the matrix.
    """
    need_torch()
    check_own_files(matrix)
    go_on(look(matrix.path), settings={"GPUS": gpus})
    background.train(matrix.path)
    return look(matrix.path)
