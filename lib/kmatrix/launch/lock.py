"""Locks that die with their holder: one runner a matrix, one attempt at a time of a run.

The kernel holds them (flock), not the files: a file that a dead runner left behind locks nothing. Who holds one
stands in it with the time of its start and the boot of the machine, so that no other process is taken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.records import MatrixDir

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RETRY_S = 0.3  # `holder` takes the lock for an instant, which must not turn a runner away


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that is not taken for another one that has its number today.

    pid: None where the file that names it does not say.  pid_started: clock ticks after the boot of the machine.
    boot_id: the kernel's name for this boot.
    """

    pid: int | None
    host: str
    pid_started: int | None = None
    boot_id: str | None = None

    def lives_here(self) -> bool:
        """Whether this very process runs on this machine now, and not only one with its number."""
        if self.pid is None or self.pid_started is None or self.boot_id is None or self.boot_id != boot_id():
            return False
        return start_of(self.pid) == self.pid_started


def this_process() -> Process:
    """Return the process that asks."""
    return Process(pid=os.getpid(), host=socket.gethostname(), pid_started=start_of(os.getpid()), boot_id=boot_id())


def boot_id() -> str | None:
    """Return the kernel's name for this boot of the machine; None where the system has none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None


def start_of(pid: int) -> int | None:
    """Return when a process began, in clock ticks after the boot; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(stat[stat.rindex(")") + 2 :].split()[19])


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


def holder(matrix: MatrixDir) -> Process | None:
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
        os.pwrite(handle, json.dumps(asdict(this_process())).encode(), 0)
    except OSError as error:
        raise LaunchError(
            f"cannot write {path}", why=error.strerror or str(error), fix="free some space, then run it again"
        ) from error


def _read(path: Path) -> Process:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        host, pid = str(value["host"]), int(value["pid"])
        return Process(pid=pid, host=host, pid_started=value.get("pid_started"), boot_id=value.get("boot_id"))
    except (OSError, ValueError, KeyError, TypeError):
        return Process(pid=None, host=socket.gethostname())


def _refuse(matrix: MatrixDir, other: Process) -> None:
    who = f"process {other.pid}" if other.pid is not None else "another process"
    raise LaunchError(
        f"{matrix.name} is being run by {who} on {other.host}",
        why="two runners would start each run twice",
        fix="wait for it, or stop it with `make stop`, or with Ctrl+C in its terminal: its runs save first",
    )
