"""Locks that the kernel releases when their holder dies: one runner per matrix, one attempt of a run at a time.

The lock is flock's, not the file: a file without a holder locks nothing. It names its holder with its start time and
the boot of the machine, so that a reused pid is not mistaken for it.
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
from typing import Annotated

from msgspec import Meta

from kmatrix.errors import LaunchError
from kmatrix.own_file import IN_PLACE, open_file, read_file
from kmatrix.records.decode import Count, Record, decode_line
from kmatrix.records.files import replacing
from kmatrix.records.paths import MatrixDir, made_path
from kmatrix.text import make_command

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAKING = "made"  # what the holder of a matrix does with it, after "is being"; in its lock file
RETRY_S = 0.3  # `holder` takes the lock briefly, which must not make a runner fail
# A killed process keeps its lock until the kernel has ended it, and so does a child that it was just starting: the lock
# is released when the child executes its program. On a busy machine both take a while.
DYING_S = 5.0
WAIT_S = 0.02  # between two tries


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process, identified by pid, start time and boot: a reused pid is another process."""

    pid: int | None  # None if the file that names the process is incomplete
    host: str
    pid_started: int | None = None  # clock ticks after the boot
    boot_id: str | None = None  # the kernel's id of this boot

    def lives_here(self) -> bool:
        """Return whether this process runs on this machine now."""
        if self.pid is None or self.pid_started is None or self.boot_id is None or self.boot_id != boot_id():
            return False
        return start_of(self.pid) == self.pid_started

    def died_here(self) -> bool:
        """Return whether this process ran on this machine since its boot, and has exited."""
        known = self.pid is not None and self.host == socket.gethostname() and self.boot_id == boot_id()
        return known and not self.lives_here()


def this_process() -> Process:
    """Return the current process."""
    return Process(pid=os.getpid(), host=socket.gethostname(), pid_started=start_of(os.getpid()), boot_id=boot_id())


def boot_id() -> str | None:
    """Return the kernel's id of this boot of the machine, None if the system has none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None


def start_of(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after the boot, None if there is no such process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None  # starttime, field 22 of proc(5); two were cut off


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name (state, ppid, ...), empty without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The name of the command is in parentheses, and may contain spaces and parentheses itself.
    return stat[stat.rindex(")") + 2 :].split()


@contextmanager
def held(matrix: MatrixDir, doing: str = "run") -> Iterator[None]:
    """Return a context that holds the matrix. Raises LaunchError with the holder if another runner holds it.

    doing: what this process does with the matrix, for the message that others get.
    """
    handle = _lock_or_wait(matrix)
    if handle is None:
        raise in_use(matrix)
    try:
        # The file is never deleted: a process could lock the old file while another one locks a new file.
        _write(handle, matrix.lock, doing)
        yield
    finally:
        os.close(handle)


def holder(matrix: MatrixDir) -> Process | None:
    """Return the runner that holds the matrix, or None: then a status "running" is outdated."""
    if not matrix.lock.exists():
        return None
    handle = _lock_or_wait(matrix, known=True)
    if handle is not None:
        os.close(handle)
        return None
    # A copy made with hard links shares the lock of the original until it is run itself.
    return None if _is_of_another(matrix) else _read(matrix.lock)


def _lock_or_wait(matrix: MatrixDir, *, known: bool = False) -> int | None:
    """Return a descriptor that holds the matrix, None if another process holds it and is not about to release it.

    known: do not wait for a process that the lock file names and that lives.
    """
    # Monotonic: a change of the wall clock must not shorten or prolong the wait.
    began = time.monotonic()
    while (handle := try_lock(matrix.lock)) is None:
        other = _read(matrix.lock)
        if known and other.lives_here():
            return None
        if time.monotonic() > began + (DYING_S if other.died_here() else RETRY_S):
            return None
        time.sleep(WAIT_S)
    return handle


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock until it is closed, None if another process holds it."""
    while (handle := _try_file(path)) is not None:
        found = os.fstat(handle)
        if not _is_file(path, found):  # another process has replaced it just now, as below
            os.close(handle)
        elif found.st_nlink <= 1:
            break
        else:
            # A copy made with hard links shares the file, and with it the lock. This process has it now: no other one
            # replaces the file at the same time.
            _replace(path)
            os.close(handle)
    return handle


def _is_file(path: Path, found: os.stat_result) -> bool:
    """Return whether a path names the file that was opened, or none because its directory was renamed meanwhile."""
    try:
        return os.path.samestat(path.lstat(), found)
    except OSError:
        return True


def _replace(path: Path) -> None:
    """Replace a lock file by an empty one."""
    try:
        with replacing(path) as temporary:
            temporary.touch()
    except OSError as error:
        raise LaunchError(
            f"cannot write {path}", why=error.strerror or str(error), hint="check the permissions of that directory"
        ) from error


def _try_file(path: Path) -> int | None:
    try:
        handle = open_file(path, IN_PLACE)  # never a link: in a foreign folder, it may lead to a file of the user
    except OSError as error:
        raise LaunchError(
            f"cannot open {path}",
            why=error.strerror or str(error),
            hint="check that the directory exists and is writable",
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError as error:
        os.close(handle)
        raise LaunchError(
            f"cannot lock {path}",
            why=error.strerror or str(error),
            hint="set RESULTS_DIR to a disk that supports file locks",
        ) from error
    return handle


def _write(handle: int, path: Path, doing: str) -> None:
    try:
        # In place: an atomic rename would replace the file that is locked.
        os.ftruncate(handle, 0)
        known = {**asdict(this_process()), "doing": doing, "inode": path.parent.stat().st_ino}
        os.pwrite(handle, json.dumps(known).encode(), 0)
    except OSError as error:
        raise LaunchError(
            f"cannot write {path}", why=error.strerror or str(error), hint="free some space, then run the command again"
        ) from error


def _read(path: Path) -> Process:
    found = _holder(path)
    if found.pid is None:
        return Process(pid=None, host=socket.gethostname())
    return Process(pid=found.pid, host=found.host, pid_started=found.pid_started, boot_id=found.boot_id)


class _Holder(Record, frozen=True, kw_only=True):
    """The process that wrote a lock file. None: the file is incomplete."""

    pid: Count | None = None
    host: str = ""
    pid_started: Count | None = None
    boot_id: str | None = None
    doing: str = ""
    inode: Annotated[int, Meta(ge=0)] | None = None  # of the directory that is held; 64 bits


def _holder(path: Path) -> _Holder:
    """Return the content of a lock file; empty while its holder writes it, or if it is damaged."""
    # No warning: without the content the lock counts all the same.
    try:
        return decode_line(read_file(path), _Holder) or _Holder()
    except OSError:
        return _Holder()


def _is_of_another(matrix: MatrixDir) -> bool:
    """Return whether the lock file is shared with the directory that it was written for."""
    inode = _holder(matrix.lock).inode
    try:
        # Only with several links: not every network file system has the same inode numbers each time.
        return inode is not None and inode != matrix.path.stat().st_ino and matrix.lock.stat().st_nlink > 1
    except OSError:
        return False


def in_use(matrix: MatrixDir) -> LaunchError:
    """Return the error for a matrix that another process holds."""
    other = _read(matrix.lock)
    who = f"process {other.pid}" if other.pid is not None else "another process"
    if _is_of_another(matrix):
        return LaunchError(
            f"{matrix.name} shares its lock with a matrix that is being run by {who} on {other.host}",
            why="it was copied with hard links",
            hint="wait until that matrix has ended, or copy it with `cp -a`",
        )
    path = made_path(matrix.path)
    if _holder(matrix.lock).doing == MAKING or path != matrix.path:
        return LaunchError(
            f"{path.name} is being made by {who} on {other.host}",
            why="its runs are not complete yet",
            hint=f"wait for it; `{make_command('status', path)}` shows when its runs start",
        )
    return LaunchError(
        f"{matrix.name} is being run by {who} on {other.host}",
        why="two runners would start each run twice",
        hint=f"wait for it, or stop it with `{make_command('stop', matrix.path)}` or Ctrl+C (runs save a checkpoint)",
    )
