"""Where the checkpoints of a matrix are, and which matrix may change them.

They are in the run directories, or in a folder below CHECKPOINT_DIR that matrix.json names. A matrix at another path
than the one where it was made is a copy as long as there is one at that path, else it was moved.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.records.decode import Record, decode
from kmatrix.records.paths import MatrixDir, RunDir, is_matrix


class Recorded(Record, frozen=True, kw_only=True):
    """The keys of matrix.json that say where a matrix and its checkpoints are."""

    place: str = ""  # where the matrix was made
    checkpoints: str | None = None  # the folder below CHECKPOINT_DIR, None for the run directories
    owner: str = ""  # where the matrix was that got this folder later; empty: it was made with it


def recorded(matrix: MatrixDir) -> Recorded:
    """Return where a matrix and its checkpoints are. Raises RecordError."""
    path = matrix.matrix_json
    return _decoded(path, path.stat().st_mtime_ns) if path.exists() else Recorded()


@lru_cache(maxsize=64)
def _decoded(path: Path, _changed: int) -> Recorded:  # it lists thousands of runs
    return decode(path, Recorded)


def _other(matrix: MatrixDir, place: str) -> str:
    """Return `place` if another matrix is there than this one, else ""."""
    return place if place not in ("", str(matrix.path.resolve())) and is_matrix(MatrixDir(Path(place))) else ""


def original_of(matrix: MatrixDir) -> str:
    """Return the path of the matrix that this one is a copy of, "" for an original. Raises RecordError."""
    return _other(matrix, recorded(matrix).place)


def checkpoint_dir(run: RunDir) -> Path:
    """Return the folder of a run's checkpoints, to read it; it may not exist."""
    folder = recorded(MatrixDir(run.path.absolute().parent)).checkpoints
    return Path(folder) / run.name if folder else run.checkpoints


def own_checkpoint_dir(run: RunDir) -> Path:
    """Return the folder of a run's checkpoints, to change it. Raises LaunchError if it belongs to another matrix."""
    check_own_files(MatrixDir(run.path.absolute().parent))
    return checkpoint_dir(run)


def check_own_files(matrix: MatrixDir) -> None:
    """Raise LaunchError if the checkpoints of the runs of a matrix belong to the one that it is a copy of."""
    known = recorded(matrix)
    if known.checkpoints and (other := _other(matrix, known.owner or known.place)):
        raise LaunchError(
            f"the checkpoints in {known.checkpoints} belong to {other}",
            why=f"{matrix.path} is a copy of it",
            hint=f"pass another CHECKPOINT_DIR=, with a copy of {known.checkpoints} in it to resume from them",
        )
