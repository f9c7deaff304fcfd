"""The files that runs are judged by, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kmatrix.errors import DataError


def judging_files(fields: Mapping[str, Any], data_dir: Path) -> dict[str, str]:
    """Return the trainer's fields that name such files, as whole paths; relative ones start at the data's folder."""
    text = str(fields.get("hellaswag") or "")
    return {"hellaswag": str((data_dir / Path(text).expanduser()).resolve()) if text else ""}


def check_judging(runs: Iterable[Mapping[str, Any]], data_dir: Path) -> None:
    """Refuse a matrix whose runs are to be judged by a file that is not there."""
    for path in dict.fromkeys(judging_files(fields, data_dir)["hellaswag"] for fields in runs):
        if path and not Path(path).is_file():
            raise DataError(
                f"HELLASWAG: there is no file {path}",
                why="relative names start at DATA_DIR",
                fix='fetch hellaswag_val.jsonl of the data set (docs/judging.md), or pass HELLASWAG=""',
            )
