"""Run a matrix from Python."""

from __future__ import annotations

from collections.abc import Callable

from kmatrix.experiment.cluster.resolve import find_gpus
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.records.checkpoint_dir import check_own_files
from kmatrix.records.lock import held
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.archive import finish_rerun
from kmatrix.runner.execute import (
    execute,
    finish,
    matrix_trackers,
    need_torch,
    recorder_launcher,
    recording_hz,
    symbols,
)
from kmatrix.runner.loop import Outcome
from kmatrix.runner.resume import reopen, restore_runs
from kmatrix.status.watch import RunProgress


def run_matrix(
    matrix: MatrixDir,
    *,
    gpus: str = "",
    on_progress: Callable[[RunProgress], None] | None = None,
    on_note: OnMessage = ignore,
) -> Outcome:
    """Run all runs of a matrix that have not finished, on this machine, and return the outcome.

    Finished runs stay; interrupted runs resume from their last checkpoint, so that a second call continues a matrix.
    gpus: indices or UUIDs of the GPUs that may be used, all by default.  on_progress: called several times per second
    with the progress of a run.  on_note: called with notes about GPUs and about the ON_FINISH command.
    Raises LaunchError if no run can start here, or if another process is running the matrix.
    """
    need_torch()
    with held(matrix):
        check_own_files(matrix)
        finish_rerun(matrix)
        for name in restore_runs(matrix).lost:
            on_note(f"{name} is missing, and the matrix has no plan of it")
    found, notes = find_gpus(gpus)
    for note in notes:
        on_note(note)
    values = symbols(matrix)
    outcome = execute(
        matrix,
        reopen(matrix, found),
        gpus=found,
        recorders=recorder_launcher("", recording_hz(values)),
        trackers=matrix_trackers(matrix),
        on_progress=on_progress,
        on_note=on_note,
    )
    command = str(values.get("ON_FINISH") or "")
    if why := finish(matrix, command):
        on_note(why)
    return outcome
