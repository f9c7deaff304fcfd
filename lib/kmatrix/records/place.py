"""Where a matrix is: whether it is a copy, and whether a link leads out of it."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kmatrix.errors import LaunchError
from kmatrix.records.decode import Record, decode
from kmatrix.records.paths import MatrixDir

Inode = Annotated[int, Meta(ge=0)]  # 64 bits


class Place(Record, frozen=True, kw_only=True):
    """The directory of a matrix."""

    matrix: str  # its real path
    inode: Inode
    device: Inode

    @classmethod
    def of(cls, matrix: MatrixDir, path: Path | None = None) -> Place:
        """Return the place of a matrix. path: the path that it will be renamed to."""
        stat = matrix.path.stat()
        return cls(matrix=str(path or matrix.path.resolve()), inode=stat.st_ino, device=stat.st_dev)

    def is_same(self, other: Place) -> bool:
        """Return whether both are the same directory, also after it was renamed or its disk was mounted again."""
        # A copy has another inode. The device number may change with a reboot, and the path with `mv`, but not both:
        # two fresh disks often use the same inode numbers.
        return self.inode == other.inode and (self.matrix == other.matrix or self.device == other.device)


class Recorded(Record, frozen=True, kw_only=True):
    """The keys of matrix.json that say where a matrix and its checkpoints are."""

    place: Place | None = None  # where the matrix was made
    checkpoints: str | None = None  # the folder below CHECKPOINT_DIR, None for the run directories


def recorded(matrix: MatrixDir) -> Recorded:
    """Return the keys of matrix.json, empty without it. Raises RecordError if it is damaged."""
    path = matrix.matrix_json
    try:
        stat = path.stat()
    except OSError:
        return Recorded()
    return _decoded(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _decoded(path: Path, *_version: int) -> Recorded:
    """Read matrix.json. _version: changes with the file, which lists thousands of runs."""
    return decode(path, Recorded)


def original_of(matrix: MatrixDir) -> str:
    """Return the place where the original of a copied matrix was made, "" for an original, or if it is unknown.

    A matrix that was renamed, or whose disk was mounted again, is still the original; one from a backup is a copy.
    """
    made = recorded(matrix).place
    return "" if made is None or made.is_same(Place.of(matrix)) else made.matrix


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
