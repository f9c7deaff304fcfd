"""Where the checkpoints of a run are, and which matrix may change them.

They are in the run directory, or below CHECKPOINT_DIR in a folder of the matrix, which matrix.json names once. An owner
file in that folder identifies the matrix, so that a copy of the matrix never changes the checkpoints of the original.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kmatrix.errors import ConfigError, LaunchError, RecordError
from kmatrix.records.decode import Record, as_json, decode, decode_optional
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir, RunDir

OWNER = "owner.json"
KEY = "checkpoints"  # of matrix.json: the folder below CHECKPOINT_DIR, null for the run directories
INDEX = "index.json"
Inode = Annotated[int, Meta(ge=0)]  # 64 bits


class Owner(Record, frozen=True, kw_only=True):
    """owner.json: the matrix that a folder of checkpoints belongs to."""

    matrix: str  # its real path
    inode: Inode  # of its directory
    device: Inode

    @classmethod
    def of(cls, matrix: MatrixDir, path: Path | None = None) -> Owner:
        """Return the identity of a matrix. path: the path that it will be renamed to."""
        stat = matrix.path.stat()
        return cls(matrix=str(path or matrix.path.resolve()), inode=stat.st_ino, device=stat.st_dev)

    def is_same(self, other: Owner) -> bool:
        """Return whether both are the same directory, also after it was renamed or its disk was mounted again."""
        # A copy has another inode. The device number may change with a reboot, and the path with `mv`, but not both:
        # two fresh disks often use the same inode numbers.
        return self.inode == other.inode and (self.matrix == other.matrix or self.device == other.device)


class _Folder(Record, frozen=True, kw_only=True):
    """The keys of matrix.json that this module reads."""

    place: Owner | None = None  # where the matrix was made

    checkpoints: str | None = None  # the folder below CHECKPOINT_DIR, None for the run directories


class _Recorded(Record, frozen=True, kw_only=True):
    """The key of run.json that this module reads."""

    checkpoints: str | None = None  # relative to CHECKPOINT_DIR


def checkpoint_dir(run: RunDir) -> Path:
    """Return the folder of a run's checkpoints, to read it; it may not exist.

    Raises RecordError if matrix.json is damaged, SchemaError if it is too new.
    """
    matrix = MatrixDir(run.path.absolute().parent)
    if folder := _of_matrix(matrix):
        return folder / run.name
    # Of a matrix without matrix.json, the folder of its checkpoints is unknown: training would start from scratch.
    record = None if matrix.matrix_json.exists() else decode_optional(run.run_json, _Recorded)
    if record and record.checkpoints:
        raise RecordError(
            f"{matrix.matrix_json} is missing",
            why=f"it names the folder of the checkpoints {record.checkpoints}",
            hint="restore it from a copy of the matrix",
        )
    return run.checkpoints


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
    runs = matrix.runs()
    for run in runs:
        checkpoint_dir(run)  # raises RecordError if it is unknown
    # Also without runs: a missing run is made again, and may have left checkpoints.
    if (folder := _of_matrix(matrix)) and (folder.exists() or runs):
        _check_owner(matrix, folder)


def new_folder(base: Path, matrix: MatrixDir, path: Path) -> Path:
    """Make the folder for the checkpoints of a new matrix below CHECKPOINT_DIR, and return it.

    path: the path that the matrix will be renamed to, which gives the folder its name.
    """
    base.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = base.resolve() / (path.name + (f"_{number}" if number > 1 else ""))
        try:
            folder.mkdir()  # never one that exists: matrices of two results folders may have the same name
        except FileExistsError:
            continue
        break
    write_json(folder / OWNER, as_json(Owner.of(matrix, path)))
    return folder


def take_folder(matrix: MatrixDir, base: Path) -> None:
    """Make a folder below `base`, which the user named, the one for the checkpoints of a matrix.

    The caller holds the matrix. Raises ConfigError if its checkpoints are in the run directories, LaunchError if the
    folder belongs to another matrix, or may belong to one: a directory that has left its place is not known to be gone.
    """
    record = read_json(matrix.matrix_json)
    current = _of_matrix(matrix)
    if current is None:
        raise ConfigError(
            f"CHECKPOINT_DIR={base}: the checkpoints of {matrix.name} are in its run directories",
            hint="leave CHECKPOINT_DIR= out; it is set when a matrix is made",
        )
    # A folder in `base` keeps the name that it was given when the matrix was made.
    folder = base.expanduser().resolve() / current.name
    owner = read_owner(folder)
    if owner is not None and not owner.is_same(Owner.of(matrix)) and not _has_left(owner, folder):
        why, hint = _other_owner(matrix, owner, folder)
        raise LaunchError(f"{folder} has the checkpoints of another matrix", why=why, hint=hint)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / OWNER, as_json(Owner.of(matrix)))
    write_json(matrix.matrix_json, {**record, KEY: str(folder)})


def read_owner(folder: Path) -> Owner | None:
    """Return the owner of a folder of checkpoints, None if it is unknown."""
    return decode_optional(folder / OWNER, Owner)


def _find(owner: Owner) -> Path | None:
    """Return where the owner is now: at its path, or renamed within its parent directory; None if it is not there."""
    recorded = Path(owner.matrix)
    paths = [recorded]
    with suppress(OSError), os.scandir(recorded.parent) as entries:
        paths += [recorded.parent / entry.name for entry in entries if entry.inode() == owner.inode]
    for path in paths:
        with suppress(OSError):
            if owner.is_same(Owner.of(MatrixDir(path))):
                return path
    return None


def _has_left(owner: Owner, folder: Path) -> bool:
    """Return whether the owner of a folder certainly has its checkpoints elsewhere now."""
    found = _find(owner)
    try:
        if found is None or not MatrixDir(found).matrix_json.exists():
            return False
        current = _of_matrix(MatrixDir(found))
    except (OSError, RecordError):
        return False  # there, but unreadable: it may still need its checkpoints
    return current is None or current.resolve() != folder.resolve()


def _other_owner(matrix: MatrixDir, owner: Owner, folder: Path) -> tuple[str, str]:
    """Return why a matrix may not change the checkpoints of this owner, and a hint."""
    another = f"pass another CHECKPOINT_DIR=; copy {folder} there first to resume from its checkpoints"
    if found := _find(owner):
        return f"they belong to {found}, and {matrix.path} may be a copy of it", another
    # It may have been moved, or be on a disk that is not mounted, also if another directory has its place now.
    place = "has another directory now" if os.path.lexists(owner.matrix) else "does not exist now"
    why = f"they belong to the matrix that was {owner.matrix}, which {place}; {matrix.path} may be a copy of it"
    gone = f"if it is gone for good, delete {folder / OWNER} and pass CHECKPOINT_DIR={folder.parent}"
    return why, f"{gone}; else {another}"


def _check_owner(matrix: MatrixDir, folder: Path) -> None:
    """Raise LaunchError if a folder outside the matrix belongs to another matrix, or to an unknown one."""
    owner, this = read_owner(folder), Owner.of(matrix)
    if owner is None or not owner.is_same(this):
        why = "nothing records that they belong to this matrix: this may be a copy"
        hint = (
            f"pass CHECKPOINT_DIR={folder.parent} if they are its own, else another folder "
            f"(copy {folder.name} there first, to resume from its checkpoints)"
        )
        if owner is not None:
            why, hint = _other_owner(matrix, owner, folder)
        raise LaunchError(
            f"the checkpoints of {matrix.path} are in {folder}, and may be another matrix's", why=why, hint=hint
        )
    if owner != this:  # moved, or mounted again: both never change at once without a refusal
        write_json(folder / OWNER, as_json(this))


def _of_matrix(matrix: MatrixDir) -> Path | None:
    """Return the folder of the checkpoints that matrix.json names, None for the run directories."""
    text = record.checkpoints if (record := _folder(matrix)) else None
    if text is None:
        return None
    # Its last part names a folder below CHECKPOINT_DIR: it must not lead out of that.
    if not Path(text).is_absolute() or os.path.normpath(text) != text or not Path(text).name:
        why = f"{KEY} is {text!r}, expected an absolute path or null"
        raise RecordError(f"{matrix.matrix_json} is damaged", why=why)
    return Path(text)


def original_of(matrix: MatrixDir) -> str:
    """Return the place where the original of a copied matrix was made, "" for an original, or if it is unknown.

    A matrix that was renamed, or whose disk was mounted again, is still the original; one from a backup is a copy.
    """
    record = _folder(matrix)
    made = record.place if record else None
    return "" if made is None or made.is_same(Owner.of(matrix)) else made.matrix


def _folder(matrix: MatrixDir) -> _Folder | None:
    """Return the keys of matrix.json, None if it is missing. Raises RecordError if it is damaged."""
    path = matrix.matrix_json
    try:
        stat = path.stat()
    except OSError:
        return None
    return _in_matrix_json(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _in_matrix_json(path: Path, *_version: int) -> _Folder:
    """Read matrix.json. _version: changes with the file, which lists thousands of runs."""
    return decode(path, _Folder)


def refuse_links(matrix: MatrixDir) -> None:
    """Raise LaunchError if any file or folder of a matrix is a link out of it. The matrix itself may be one."""
    # The type of an entry comes with its name: no file is looked at, so 2,000 runs take 0.1 s.
    folders = [matrix.path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    refuse_link(matrix, Path(entry.path))
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))


def refuse_link(matrix: MatrixDir, path: Path) -> None:
    """Raise LaunchError if a path in the matrix is a link out of it: a copy of the matrix has the same link."""
    if path.is_symlink() and not path.resolve().is_relative_to(matrix.path.resolve()):
        raise LaunchError(
            f"{path} is a link to {path.resolve()}",
            why="that is outside the matrix, and may belong to another one",
            hint="replace the link by the folder itself, then run the command again",
        )
