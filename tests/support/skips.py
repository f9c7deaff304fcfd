"""Tests that need a program of the system: skipped where it is missing, failed where nothing may be skipped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

NO_SKIPS = "KMATRIX_NO_SKIPS"


def need(program: str) -> Path:
    """Return where `program` is. Without it the test is skipped, or fails where KMATRIX_NO_SKIPS=1.

    Call it inside a test or a fixture. .ci/run sets the variable: there a missing program is a mistake of the set-up.
    """
    found = shutil.which(program)
    if found:
        return Path(found)
    reason = f"the program {program} is missing: install it"
    if os.environ.get(NO_SKIPS) == "1":
        pytest.fail(f"{reason}, or run without {NO_SKIPS}=1", pytrace=False)
    pytest.skip(reason)
