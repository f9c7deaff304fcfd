"""One finding of the doctor, and the check of the folders that a matrix writes to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

LEAST_FREE = 10e9  # bytes on a disk


class Level(StrEnum):
    OK = "OK"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """name: of what was looked at.  said: what was found.  fix: what to do, empty where there is nothing to do."""

    name: str
    level: Level
    said: str
    fix: str = ""


def ok(name: str, said: str) -> Check:
    return Check(name=name, level=Level.OK, said=said)


def warning(name: str, said: str, fix: str) -> Check:
    return Check(name=name, level=Level.WARNING, said=said, fix=fix)


def broken(name: str, said: str, fix: str) -> Check:
    return Check(name=name, level=Level.BROKEN, said=said, fix=fix)


def places(folders: Mapping[str, Path]) -> Iterator[Check]:
    """Yield whether each folder can be written to, and how much room there is. folders: symbol -> folder.

    A folder that is not there yet is judged by the nearest one above it: nothing is made.
    """
    for name, folder in folders.items():
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir() or not _can_write(there):
            yield broken(name, f"{there} cannot be written to", f"set {name}= to a folder of yours")
            continue
        free = shutil.disk_usage(there).free
        said = f"{free / 1e9:,.1f} GB free in {there}"
        if free < LEAST_FREE:
            yield warning(name, said, f"make room, or set {name}= to another disk; `make plan` says what is needed")
        else:
            yield ok(name, said)


def _can_write(folder: Path) -> bool:
    """Return whether a file can be made there: a file system that is full or read-only refuses only then."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
