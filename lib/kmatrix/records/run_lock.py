"""The lock of a run: shared by all processes of one attempt, so that a new attempt starts after the last one exited.

A new attempt takes the lock exclusively, writes its token into the file and then shares the lock. The guard and
torchrun inherit it. torchrun closes the descriptors of its ranks, so each rank opens the file again, shares the lock,
and then checks the token: a rank that comes late, after a new attempt began, finds another token and exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.own_file import open_file
from kmatrix.records.files import json_object
from kmatrix.records.lock import start_of, try_lock
from kmatrix.records.paths import RunDir

TOKEN = "KMATRIX_ATTEMPT"  # environment variable: the token of the attempt that a process belongs to
LOCK = "KMATRIX_LOCK"  # environment variable: the lock that ranks share, if not the run's: another node has its own
SPENT = "KMATRIX_SPENT_S"  # environment variable: time (s) that earlier attempts at the run took
LAUNCHER = "KMATRIX_LAUNCHER"  # environment variable: pid and start time of torchrun, set by the guard
PROC = Path("/proc")
KINDS = (("guard.py", "guard"), ("torch.distributed.run", "torchrun"), ("gpt2.train", "rank"))


@dataclass(frozen=True, slots=True)
class Member:
    """A process that shares the lock of a run on this machine."""

    pid: int
    started: int | None  # clock ticks after the boot
    what: str  # guard, torchrun, rank, or the name of its program
    of_run: bool  # its command line names the run

    def __str__(self) -> str:
        return f"{self.what} (pid {self.pid})"


def begin_attempt(run: RunDir, number: int) -> tuple[int, str] | None:
    """Lock the run for a new attempt; return a descriptor that holds it and the token of the attempt.

    None if processes of an earlier attempt still share the lock. Raises LaunchError if the file cannot be locked, and
    OSError if it cannot be written.
    """
    handle = try_lock(run.lock)
    if handle is None:
        return None
    try:
        token = f"{number}-{os.urandom(8).hex()}"
        # Before the lock is shared: a rank of an earlier attempt that waits for it must find the new token. In place:
        # a rename would replace the file that is locked.
        data = f'{{"schema": 1, "attempt": {number}, "token": "{token}"}}\n'.encode()
        os.pwrite(handle, data, 0)
        os.ftruncate(handle, len(data))
        fcntl.flock(handle, fcntl.LOCK_SH)
    except OSError:
        os.close(handle)
        raise
    return handle, token


def join_attempt(run: RunDir) -> int | None:
    """Share the lock of a run as a process of its attempt, until this process exits; return the descriptor.

    Raises LaunchError if another attempt has begun since. A rank that was started by hand has no token and is not
    checked; None if no attempt ever had the lock.
    """
    token = os.environ.get(TOKEN, "")
    path = Path(os.environ.get(LOCK) or run.lock)
    try:
        handle = open_file(path, os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_SH)  # exclusive holders keep it for milliseconds only
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(f"cannot lock {path}", why=error.strerror or str(error)) from error
    current = json_object(os.pread(handle, 4096, 0)) or {}
    if token and current.get("token") != token:
        os.close(handle)
        raise LaunchError(f"attempt {token.partition('-')[0]} of {run.name} has ended", why="another attempt has begun")
    return handle


def launched_at() -> float | None:
    """Return when torchrun started, in seconds of CLOCK_BOOTTIME; None if it is unknown."""
    started = os.environ.get(LAUNCHER, "").partition(":")[2]
    return int(started) / os.sysconf("SC_CLK_TCK") if started.isdecimal() else None


def launcher_died() -> bool:
    """Return whether torchrun has exited; False if it is unknown."""
    pid, _, started = os.environ.get(LAUNCHER, "").partition(":")
    return pid.isdecimal() and started.isdecimal() and start_of(int(pid)) != int(started)


def members(run: RunDir, mark: str = "") -> list[Member]:
    """Return the processes of this machine that have the lock of a run open, as far as they are visible.

    mark: what command lines name it by, "" for the name of the folder.
    """
    try:
        lock = run.lock.stat()
    except OSError:
        return []
    # A copy made with hard links shares the lock, and its runs have the same names.
    mark = mark or (str(run.path) if lock.st_nlink > 1 else run.name)
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid() and _has_open(entry, (lock.st_dev, lock.st_ino)):
            pid, words = int(entry.name), _command_line(entry)
            text = " ".join(words)
            program = Path(words[0]).name if words else "a process"
            what = next((kind for part, kind in KINDS if part in text), program)
            of_run = any(mark in word for word in words)
            found.append(Member(pid, start_of(pid), what, of_run))
    return sorted(found, key=lambda member: member.pid)


def kill(found: list[Member]) -> None:
    """Send SIGKILL to processes of a run, never to a process with a reused pid or to one that only reads the lock."""
    for member in found:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(member.pid)
            try:
                # First the handle, then the check: from then on, the handle cannot refer to another process.
                if member.of_run and start_of(member.pid) == member.started:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _has_open(process: Path, file: tuple[int, int]) -> bool:
    """Return whether a process has a file open. file: device and inode."""
    try:
        for entry in os.scandir(process / "fd"):
            with contextlib.suppress(OSError):
                status = entry.stat()
                if (status.st_dev, status.st_ino) == file:
                    return True
    except OSError:  # it has exited, or belongs to another user
        return False
    return False


def _command_line(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
