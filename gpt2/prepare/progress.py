"""What a preparation prints: lines to stderr, an error as JSON to stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kmatrix.errors import DataError, KmatrixError, reason_of


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def explain(error: KmatrixError | OSError, data_dir: Path) -> int:
    """Print an error of the user's as JSON to stdout, for the command that asked, and return the exit status."""
    known = as_known(error, data_dir)
    print(json.dumps({"what": known.what, "why": known.why, "hint": known.hint}), flush=True)
    return 2


def as_known(error: KmatrixError | OSError, data_dir: Path) -> KmatrixError:
    """Return an error of DATA_DIR, such as a full or read-only disk, as one that the user can fix."""
    if isinstance(error, KmatrixError):
        return error
    what = f"cannot use {error.filename or data_dir}"
    return DataError(what, why=reason_of(error), hint="check its permissions, and the disk")
