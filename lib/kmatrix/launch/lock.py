"""Locks that die with their holder: one runner a matrix, one attempt at a time of a run.

The kernel holds them (flock), not the files: a file that a dead runner left behind locks nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.records import MatrixDir

RETRY_S = 0.3  # `holder` takes the lock for an instant, which must not turn a runner away


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The runner that has a matrix. pid is None where the lock's file does not say."""

    pid: int | None
    host: str


@contextmanager
def held(matrix: MatrixDir) -> Iterator[None]:
    """Hold the matrix. Raises LaunchError, naming who has it, when another runner does."""
    deadline = time.monotonic() + RETRY_S
    while (handle := try_lock(matrix.lock)) is None:
        if time.monotonic() > deadline:
            _refuse(matrix, _read(matrix.lock))
        time.sleep(0.02)
    try:
        _write(handle, matrix.lock)
        yield
    finally:
        os.close(handle)


def holder(matrix: MatrixDir) -> Holder | None:
    """Return the runner that has the matrix now, or None: then no status file that says running is to be trusted."""
    if not matrix.lock.exists():
        return None
    handle = try_lock(matrix.lock)
    if handle is not None:
        os.close(handle)
        return None
    return _read(matrix.lock)


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock until it is closed, or None when another process has it."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LaunchError(
            f"cannot open {path}", why=error.strerror or str(error), fix="is the folder there, and yours to write?"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError as error:
        os.close(handle)
        raise LaunchError(
            f"cannot lock {path}", why=error.strerror or str(error), fix="put RESULTS_DIR on a disk that can lock files"
        ) from error
    return handle


def _write(handle: int, path: Path) -> None:
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    except OSError as error:
        raise LaunchError(
            f"cannot write {path}", why=error.strerror or str(error), fix="free some space, then run it again"
        ) from error


def _read(path: Path) -> Holder:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Holder(pid=int(value["pid"]), host=str(value["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(pid=None, host=socket.gethostname())


def _refuse(matrix: MatrixDir, other: Holder) -> None:
    who = f"process {other.pid}" if other.pid is not None else "another process"
    raise LaunchError(
        f"{matrix.name} is being run by {who} on {other.host}",
        why="two runners would start each run twice",
        fix="wait for it, or stop it with Ctrl+C in its terminal, or with `kill <process>`: its runs save first",
    )
