"""Whether there is room on the disk, before anything is fetched."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpt2.prepare.progress import readable
from kmatrix.errors import DataError


def check(folder: Path, needed: int) -> None:
    """Refuse what does not fit. needed: bytes."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise DataError(
            f"{folder} needs {readable(needed, 'B')}, and {readable(free, 'B')} are free",
            why="shards of 16-bit tokens take 2 bytes a token, and what is fetched lies beside them for a while",
            fix="make room, put DATA_DIR on another disk, or pass DATA_TOKENS=<fewer>",
        )
