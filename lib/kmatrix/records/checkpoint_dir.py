"""Where the checkpoints of a run are, and which matrix may change them.

They are in the run directory, or below CHECKPOINT_DIR in a folder of the matrix, which matrix.json names. owner.json
there says which matrix it belongs to, so that a copy of the matrix never changes the checkpoints of the original.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records.decode import as_json, decode_optional
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.place import Place, recorded, refuse_link, refuse_links

OWNER = "owner.json"


def checkpoint_dir(run: RunDir) -> Path:
    """Return the folder of a run's checkpoints, to read it; it may not exist."""
    folder = recorded(MatrixDir(run.path.absolute().parent)).checkpoints
    return Path(folder) / run.name if folder else run.checkpoints


def own_checkpoint_dir(run: RunDir) -> Path:
    """Return the folder of a run's checkpoints, to change it. Raises LaunchError if it belongs to another matrix."""
    matrix = MatrixDir(run.path.absolute().parent)
    for path in (run.path, run.checkpoints, run.archive):
        refuse_link(matrix, path)
    place = checkpoint_dir(run)
    if place != run.checkpoints:
        _check_owner(matrix, place.parent)
    return place


def check_own_files(matrix: MatrixDir) -> None:
    """Raise LaunchError if changing the runs of a matrix would change files of another one."""
    refuse_links(matrix)
    if folder := recorded(matrix).checkpoints:
        _check_owner(matrix, Path(folder))


def new_folder(base: Path, matrix: MatrixDir, path: Path) -> Path:
    """Make the folder for the checkpoints of a new matrix below CHECKPOINT_DIR, and return it.

    path: the path that the matrix will be renamed to, which gives the folder its name.
    """
    base.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}_{number}" for number in itertools.count(2)))
    # Never one that exists: matrices of two results folders may have the same name.
    folder = next(base.resolve() / name for name in names if not (base / name).exists())
    write_json(folder / OWNER, as_json(Place.of(matrix, path)))
    return folder


def take_folder(matrix: MatrixDir, base: Path) -> None:
    """Make a folder below `base`, which the user named, the one for the checkpoints of a matrix.

    The caller holds the matrix. Raises ConfigError if its checkpoints are in the run directories, LaunchError if the
    folder belongs to another matrix.
    """
    current = recorded(matrix).checkpoints
    if current is None:
        raise ConfigError(
            f"CHECKPOINT_DIR={base}: the checkpoints of {matrix.name} are in its run directories",
            hint="leave CHECKPOINT_DIR= out; it is set when a matrix is made",
        )
    folder = base.expanduser().resolve() / Path(current).name
    if (folder / OWNER).exists():
        _check_owner(matrix, folder)
    write_json(folder / OWNER, as_json(Place.of(matrix)))
    write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "checkpoints": str(folder)})


def _check_owner(matrix: MatrixDir, folder: Path) -> None:
    """Raise LaunchError if a folder of checkpoints belongs to another matrix, or to an unknown one."""
    owner, this = decode_optional(folder / OWNER, Place), Place.of(matrix)
    if owner is None or not owner.is_same(this):
        raise LaunchError(
            f"the checkpoints in {folder} belong to {owner.matrix if owner else 'an unknown matrix'}",
            why=f"{matrix.path} may be a copy of it, or this node does not share the folder",
            hint=f"pass another CHECKPOINT_DIR=, with a copy of {folder} in it to resume from its checkpoints (without "
            f"{OWNER}). If this is the only one, delete {folder / OWNER} and pass CHECKPOINT_DIR={folder.parent}",
        )
    if owner != this:  # moved, or mounted again: both never change at once without a refusal
        write_json(folder / OWNER, as_json(this))
