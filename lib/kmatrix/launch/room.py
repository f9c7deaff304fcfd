"""A disk that is full: whether it is, how full, and how much a matrix needs there to go on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kmatrix.errors import KmatrixError
from kmatrix.records import MatrixDir
from kmatrix.records.checkpoints import folder_of, read_index

FULL = 64 * 1024  # bytes: with less than that, a run can write neither its status nor its log
RECORDS = 4 * 2**20  # bytes of metrics, recordings and reports that a run is given room for
MIB = 2**20


def is_full(path: Path) -> bool:
    """Whether the disk that holds a path has no room left, not even for a record."""
    try:
        return shutil.disk_usage(_there(path)).free < FULL
    except OSError:
        return False


def how_full(path: Path) -> str:
    """Return which disk it is and how full, in words: "/results has 0.0 of 24 MiB free"."""
    place = _there(path)
    while not place.is_mount() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return f"{place} does not answer: {error.strerror}"
    return f"{place} has {usage.free / MIB:.1f} of {usage.total / MIB:,.0f} MiB free"


def what_to_do(path: Path) -> str:
    """Return how much room to make and what to type then. path: of a matrix, or of a file anywhere in it."""
    for folder in (path, *path.parents):
        matrix = MatrixDir(folder)
        if matrix.matrix_json.is_file():
            room = f"make room for {needed(matrix) / MIB:,.0f} MiB there or more"
            return f"{room}, then `make continue TARGET={folder}`; finished runs are kept"
    return "free some space, then run it again"


def needed(matrix: MatrixDir) -> int:
    """Return the bytes with which a matrix can go on: for each run that is open a checkpoint more, and its records.

    The checkpoint is the largest that any run has; none, where none was written yet.
    """
    sizes, open_runs = [0], 0
    for run in matrix.runs():
        open_runs += not run.result.exists()
        try:
            sizes += [entry.bytes for entry in read_index(folder_of(run))]
        except KmatrixError:
            continue
    return max(1, open_runs) * (max(sizes) + RECORDS)


def _there(path: Path) -> Path:
    """Return the path, or the nearest folder above it that there is."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100  (links are left as they are)
    return next(place for place in (absolute, *absolute.parents) if place.exists())
