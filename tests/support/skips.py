"""Skip tests whose system program is missing, or fail them if skipping is not allowed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

NO_SKIPS = "KMATRIX_NO_SKIPS"


def require_program(program: str) -> Path:
    """Return the path of `program`. If it is missing, skip the test, or fail it with KMATRIX_NO_SKIPS=1.

    Call it inside a test or a fixture. .ci/run sets the variable, because there a missing program is a setup error.
    """
    found = shutil.which(program)
    if found:
        return Path(found)
    reason = f"the program {program} is missing: install it"
    if os.environ.get(NO_SKIPS) == "1":
        pytest.fail(f"{reason}, or run without {NO_SKIPS}=1", pytrace=False)
    pytest.skip(reason)
