"""Skip tests whose system program is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def require_program(program: str) -> Path:
    """Return the path of `program`; skip the test if it is missing. Call it inside a test or a fixture."""
    if found := shutil.which(program):
        return Path(found)
    pytest.skip(f"the program {program} is missing: install it")
