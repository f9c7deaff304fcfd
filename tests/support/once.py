"""Make expensive data once for all xdist workers, which otherwise each run a fixture of scope module."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the temporary directory that all workers of this session share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> tuple[Path, T]:
    """Return a directory and what `make` returned for it. The first worker makes it; tests only read it."""
    folder = session_folder(factory) / name
    result = folder.with_suffix(".pickle")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker whose `make` failed
            folder.mkdir()
            result.write_bytes(pickle.dumps(make(folder)))
    return folder, pickle.loads(result.read_bytes())
