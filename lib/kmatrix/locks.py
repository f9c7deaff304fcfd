"""Locks of files: held until the file is closed, also by the programs that inherit it.

On storage without flock a lock holds nothing: there, the pulses of `kmatrix.records.attempts` decide.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kmatrix.clock import clock

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
TRIES_S = 0.5  # a reader holds a lock for some microseconds


def is_locked_now(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file, for this process alone or shared; return False if another one has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds a lock; None: another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if is_locked_now(handle, shared=shared):
            return handle
    except OSError:
        os.close(handle)
        raise
    os.close(handle)
    return None


def lock(path: Path) -> int | None:
    """Return `try_lock`, after some tries."""
    until = clock.monotonic() + TRIES_S
    while (handle := try_lock(path)) is None and clock.monotonic() < until:
        clock.sleep(0.01)
    return handle


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Return a context that waits for a lock and holds it."""
    while (handle := try_lock(path)) is None:
        clock.sleep(0.01)
    try:
        yield
    finally:
        release(handle)


def is_held(path: Path) -> bool:
    """Return whether a process on this host holds a lock; for readers, who may not be allowed to write."""
    try:
        with path.open("rb") as file:
            return not is_locked_now(file.fileno(), shared=True)
    except OSError:
        return False


def release(handle: int) -> None:
    """Release a lock of this process."""
    os.close(handle)
