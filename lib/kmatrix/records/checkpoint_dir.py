"""Where a matrix and its checkpoints are, and which matrix may change them.

Checkpoints are in the run directory, or below CHECKPOINT_DIR in a folder of the matrix, which matrix.json names;
owner.json there has the path of the matrix that may change it. A matrix at another path is a copy as long as there is
one at the first path, else it was moved.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path

from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records.decode import Record, as_json, decode, decode_optional
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir, RunDir, is_matrix


class Owner(Record, frozen=True, kw_only=True):
    """owner.json."""

    matrix: str  # its real path


class _Recorded(Record, frozen=True, kw_only=True):
    """The keys of matrix.json that say where a matrix and its checkpoints are."""

    place: str = ""  # where the matrix was made
    checkpoints: str | None = None  # the folder below CHECKPOINT_DIR, None for the run directories


def _recorded(matrix: MatrixDir) -> _Recorded:
    path = matrix.matrix_json
    try:
        stat = path.stat()
    except OSError:
        return _Recorded()
    return _decoded(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _decoded(path: Path, *_version: int) -> _Recorded:
    """Read matrix.json. _version: changes with the file, which lists thousands of runs."""
    return decode(path, _Recorded)


def original_of(matrix: MatrixDir) -> str:
    """Return the path of the matrix that this one is a copy of, "" for an original. Raises RecordError."""
    made = _recorded(matrix).place
    return made if made not in ("", str(matrix.path.resolve())) and is_matrix(MatrixDir(Path(made))) else ""


def checkpoint_dir(run: RunDir) -> Path:
    """Return the folder of a run's checkpoints, to read it; it may not exist."""
    folder = _recorded(MatrixDir(run.path.absolute().parent)).checkpoints
    return Path(folder) / run.name if folder else run.checkpoints


def own_checkpoint_dir(run: RunDir) -> Path:
    """Return the folder of a run's checkpoints, to change it. Raises LaunchError if it belongs to another matrix."""
    check_own_files(MatrixDir(run.path.absolute().parent))
    return checkpoint_dir(run)


def check_own_files(matrix: MatrixDir) -> None:
    """Raise LaunchError if the checkpoints of the runs of a matrix belong to another one."""
    if folder := _recorded(matrix).checkpoints:
        _check_owner(matrix, Path(folder))


def new_folder(base: Path, path: Path) -> Path:
    """Make the folder for the checkpoints of a new matrix below CHECKPOINT_DIR, and return it. path: of the matrix."""
    base.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}_{number}" for number in itertools.count(2)))
    # Never one that exists: matrices of two results folders may have the same name.
    folder = next(base.resolve() / name for name in names if not (base / name).exists())
    write_json(folder / "owner.json", as_json(Owner(matrix=str(path.resolve()))))
    return folder


def take_folder(matrix: MatrixDir, base: Path) -> None:
    """Make a folder below `base`, which the user named, the one for the checkpoints of a matrix.

    Raises ConfigError if its checkpoints are in the run directories, LaunchError if it belongs to another matrix.
    """
    current = _recorded(matrix).checkpoints
    if current is None:
        raise ConfigError(
            f"CHECKPOINT_DIR={base}: the checkpoints of {matrix.name} are in its run directories",
            hint="leave CHECKPOINT_DIR= out; it is set when a matrix is made",
        )
    folder = base.expanduser().resolve() / Path(current).name
    if (folder / "owner.json").exists():
        _check_owner(matrix, folder)
    write_json(folder / "owner.json", as_json(Owner(matrix=str(matrix.path.resolve()))))
    write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "checkpoints": str(folder)})


def _check_owner(matrix: MatrixDir, folder: Path) -> None:
    """Raise LaunchError if a folder of checkpoints belongs to another matrix that is still there."""
    owner, here = decode_optional(folder / "owner.json", Owner), str(matrix.path.resolve())
    if owner is None or (owner.matrix != here and is_matrix(MatrixDir(Path(owner.matrix)))):
        raise LaunchError(
            f"the checkpoints in {folder} belong to {owner.matrix if owner else 'an unknown matrix'}",
            why=f"{matrix.path} is a copy of it" if owner else "owner.json is missing there",
            hint=f"pass another CHECKPOINT_DIR=, with a copy of {folder} in it to resume from its checkpoints",
        )
    if owner.matrix != here:  # the matrix was moved
        write_json(folder / "owner.json", as_json(Owner(matrix=here)))
