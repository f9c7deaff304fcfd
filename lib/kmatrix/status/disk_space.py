"""Full disks: detect them, and estimate the space that a matrix needs to continue."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from kmatrix.errors import KmatrixError
from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.text import disk_size, make_command

FULL = 64 * 1024  # bytes: with less, a run can write neither its status nor its log
RECORDS = 4 * 2**20  # bytes of metrics, recordings and reports per run


def disks(matrix: MatrixDir, runs: Sequence[RunDir]) -> tuple[Path, ...]:
    """Return the folders that runs write to: that of the matrix, and those of checkpoints elsewhere."""
    return (matrix.path, *sorted({checkpoint_dir(run).parent for run in runs} - {run.path for run in runs}))


def is_full(path: Path) -> bool:
    """Return whether the disk of a path has no space left, not even for a status file."""
    try:
        return shutil.disk_usage(_there(path)).free < FULL
    except OSError:
        return False


def how_full(path: Path) -> str:
    """Return the mount point and free space of a disk: "/results has 0 B of 25.2 MB free"."""
    place = _there(path)
    # Users know a disk by its mount point.
    while not place.is_mount() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return f"{place} does not respond: {error.strerror}"
    return f"{place} has {disk_size(usage.free)} of {disk_size(usage.total)} free"


def what_to_do(path: Path) -> str:
    """Return the hint for a full disk. path: of a matrix, or of any file in it."""
    for folder in (path, *path.parents):
        matrix = MatrixDir(folder)
        if matrix.matrix_json.is_file():
            space = f"free at least {disk_size(needed(matrix))}"
            return f"{space}, then run `{make_command('continue', folder)}`; finished runs are kept"
    return "free some space, then run the command again"


def needed(matrix: MatrixDir) -> int:
    """Return the space (bytes) that a matrix needs to continue: a checkpoint and the records of each open run.

    The checkpoint is as large as the largest one of any run, 0 before the first.
    """
    sizes, open_runs = [0], 0
    for run in matrix.runs():
        open_runs += not run.result.exists()
        try:
            sizes += [item.bytes for item in Checkpoints(checkpoint_dir(run)).all()]
        except KmatrixError:
            continue
    # At least for one run: even the status of a finished one could not be written.
    return max(1, open_runs) * (max(sizes) + RECORDS)


def _there(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100  (links are left as they are)
    return next(place for place in (absolute, *absolute.parents) if place.exists())
