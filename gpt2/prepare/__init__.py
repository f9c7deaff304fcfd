"""Prepare datasets: find, download or tokenize them, and describe the result."""

import json
import sys
from pathlib import Path

from kmatrix.errors import DataError, KmatrixError, reason_of


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def explain(error: KmatrixError | OSError, data_dir: Path) -> int:
    """Print an error of the user's as JSON to stdout, for the command that asked, and return the exit status."""
    if isinstance(error, OSError):  # of DATA_DIR, such as a full or read-only disk
        what = f"cannot use {error.filename or data_dir}"
        error = DataError(what, why=reason_of(error), hint="check its permissions, and the disk")
    print(json.dumps({"what": error.what, "why": error.why, "hint": error.hint}), flush=True)
    return 2
