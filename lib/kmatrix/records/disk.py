"""Full disks: hold a write until there is space again, for a limited time, instead of ending a night's work.

A process that may hold its writes says so with `waiting_for_space`. Every other process fails at once: a person who
reads the status of a matrix does not want to wait.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kmatrix.errors import KmatrixError, is_full

T = TypeVar("T")
WAIT = "KMATRIX_DISK_WAIT"  # environment variable of the trainer: time (s) that a write may be held
POLL_S = 0.5  # between two tries of a write
PROBE = 64 * 1024  # bytes: with less space, a run can write neither its status nor its log


@dataclass(slots=True)
class SpaceWait:
    """How a process holds its writes on a full disk, and what it has held so far."""

    limit_s: float  # per write; 0: fail at once
    failed: set[Path] = field(default_factory=set)  # folders in which a write reached the limit
    on_full: Callable[[Path], object] = lambda _: None  # called when a write is held, with its path
    on_space: Callable[[float], object] = lambda _: None  # called after it succeeded, with the seconds
    is_cancelled: Callable[[], bool] = lambda: False  # fail now: the process was asked to stop
    held_s: float = 0.0  # of all writes
    holding: int = 0  # writes that are held now, in all threads
    sleep: Callable[[float], object] = field(default=time.sleep)


_NEVER = SpaceWait(limit_s=0.0)  # of a process without a policy
_current = _NEVER
_counting = threading.Lock()
_thread = threading.local()  # active: in a report, which is a write itself; at_once: its writes are not held


@contextmanager
def waiting_for_space(policy: SpaceWait) -> Iterator[SpaceWait]:
    """Make the writes of this process wait for space in the block, as `policy` says."""
    global _current  # noqa: PLW0603  (one policy per process: the writers are in all packages)
    before, _current = _current, policy
    try:
        yield policy
    finally:
        _current = before


def limit_from_environment() -> float:
    """Return the time (s) that the runner allows the trainer to hold a write, 0 without a runner."""
    try:
        return max(0.0, float(os.environ.get(WAIT, "0")))
    except ValueError:
        return 0.0


def held_s() -> float:
    """Return the seconds that this process has held writes, in all threads together."""
    return _current.held_s


def is_holding() -> bool:
    """Return whether a thread of this process holds a write now."""
    return _current.holding > 0


def when_there_is_space(path: Path, write: Callable[[], T]) -> T:
    """Call `write` and return its value; while the disk is full, call it again until the limit of this process.

    path: the file, or the folder of several files. `write` must leave nothing if it fails.
    Raises its error after the limit; later writes to the same folder then fail at once, so that the process can end.
    """
    if getattr(_thread, "at_once", False):
        return write()
    policy, begin = _current, time.monotonic()
    held = False
    try:
        while True:
            try:
                value = write()
            except (OSError, KmatrixError) as error:
                # An error of a disk while bytes are written has no name of a file.
                if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                    error.filename = str(path)
                if not is_full(error) or policy.is_cancelled():
                    raise
                folder = path if path.is_dir() else path.parent
                if folder in policy.failed or time.monotonic() - begin >= policy.limit_s:
                    policy.failed.add(folder)
                    raise
            else:
                if policy.failed:
                    policy.failed.discard(path if path.is_dir() else path.parent)
                if held:
                    _report(policy.on_space, time.monotonic() - begin)
                return value
            if not held:
                held = _count(policy, 1)
                _report(policy.on_full, path)
            slept = time.monotonic()
            policy.sleep(POLL_S)
            policy.held_s += time.monotonic() - slept
    finally:
        if held:
            _count(policy, -1)


def _count(policy: SpaceWait, more: int) -> bool:
    with _counting:
        policy.holding += more
    return True


@contextmanager
def at_once() -> Iterator[None]:
    """Make the writes of this thread fail at once on a full disk in the block, whatever the policy."""
    before = getattr(_thread, "at_once", False)
    _thread.at_once = True
    try:
        yield
    finally:
        _thread.at_once = before


def has_space(folder: Path) -> bool:
    """Return whether a small file can be written to a folder; a quota of the user counts, too."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(PROBE))  # zeros would be compressed by some disks
            file.flush()
    except OSError as error:
        return not is_full(error)
    return True


def _report(report: Callable[[T], object], value: T) -> None:
    if getattr(_thread, "active", False):
        return
    _thread.active = True
    try:
        with suppress(OSError, KmatrixError):  # a report that cannot be written must not fail the write
            report(value)
    finally:
        _thread.active = False
