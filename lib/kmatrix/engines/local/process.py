"""A command and all its descendants: start it, stop it, kill it with all of them.

The command runs under `guard`, in its own session. Processes are identified by pid and creation time (psutil), so that
a reused pid is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from kmatrix.redaction.log import END_S, RedactedLog

GUARD = Path(__file__).with_name("guard.py")
REMEMBER_S = 1.0  # between two scans of all processes of the machine, each of which takes milliseconds
KILL_S = 10.0  # a process that does not die within this time is stuck in the kernel


class ProcessTree:
    """A running command: the guard, the command, and all processes that they started; and the log of their output."""

    def __init__(self, guard: subprocess.Popen[bytes], log: RedactedLog) -> None:
        self._guard, self._log = guard, log
        self._companions: list[subprocess.Popen[bytes]] = []
        self._log_deadline: float | None = None  # monotonic seconds, after the end of the guard
        self._members: set[psutil.Process] = set()
        self._scanned_at = 0.0  # monotonic seconds

    @property
    def pid(self) -> int:
        """The pid of the guard; SIGTERM to it stops the command."""
        return self._guard.pid

    def poll(self) -> int | None:
        """Return the exit code once all processes have exited, else None. 128 + n: ended by signal n."""
        code = self._guard.poll()
        if code is None:
            # Remember descendants while the guard lives: after its death they are orphans that nothing leads to.
            if time.monotonic() - self._scanned_at >= REMEMBER_S:
                self._remember()
            self._log.poll()
            return None
        self._kill_members()  # none are left, unless the guard itself was killed
        self._end_companions()
        # The end of a run is classified by its log, so its last lines come first.
        self._log_deadline = self._log_deadline or time.monotonic() + END_S
        if not self._log.poll() and time.monotonic() < self._log_deadline:
            return None
        self._log.close()
        return code

    def stop(self) -> None:
        """Ask the trainer to save a checkpoint and exit. The guard kills it after the grace period."""
        if self._guard.poll() is None:
            self._guard.terminate()

    def kill(self) -> int:
        """Kill all processes at once, wait until they have exited, and return the exit code."""
        deadline = time.monotonic() + KILL_S
        while self._guard.poll() is None and time.monotonic() < deadline:
            self._remember()
            _kill(self._members)  # the guard reaps them, and exits after the command
            with contextlib.suppress(subprocess.TimeoutExpired):  # then scan again: a process may have forked
                self._guard.wait(0.05)
        # Last: without the guard, orphaned processes of the run would become children of init.
        if self._guard.poll() is None:
            self._guard.kill()
        code = self._guard.wait()
        self._kill_members()
        self._end_companions()
        self._log.wait()
        return code

    def start_companion(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process next to the command that writes to the same log. Raises OSError if that fails.

        It gets SIGTERM when the command has exited, because the log ends with the last process that writes to it.
        options: of Popen.
        """
        output = self._log.writer()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._log.reader,),  # as for the command: a killed writer of the log must not end it
                **options,
            )
        finally:
            os.close(output)
        self._companions.append(process)
        return process

    def members(self) -> set[psutil.Process]:
        """Return all living descendants of the guard."""
        self._remember()
        return set(self._members)

    def _remember(self) -> None:
        """Update the known descendants, including those of orphaned processes."""
        self._scanned_at = time.monotonic()
        # NoSuchProcess: a process exited during the scan, and its children are found at the next one.
        found: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(self._guard.pid).children(recursive=True))
        # Members that were re-parented since the last scan are no longer below the guard, but may have children.
        for member in self._members - found:
            with contextlib.suppress(psutil.NoSuchProcess):
                if member.is_running():
                    found.update([member, *member.children(recursive=True)])
        self._members = found

    def _kill_members(self) -> None:
        deadline = time.monotonic() + KILL_S
        while (alive := self._alive()) and time.monotonic() < deadline:
            _kill(alive)
            psutil.wait_procs(alive, timeout=0.5)
        self._members.clear()

    def _end_companions(self) -> None:
        for process in self._companions:
            if process.poll() is None:
                process.terminate()
        self._companions.clear()

    def _alive(self) -> set[psutil.Process]:
        if not self._members:
            return set()
        self._remember()
        return {member for member in self._members if _lives(member)}


def start(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    python: Path,
    grace_s: float,
    lock: int | None = None,
) -> ProcessTree:
    """Start a command under a guard; its output is appended to `log`, without keys. Raises OSError if that fails.

    env: the whole environment.  python: interpreter of the guard.  lock: descriptor that guard and command keep open,
    so that the lock is held until both have exited, even if the guard is killed.
    Call it from the main thread: the guard stops the command when the thread that started it exits.
    """
    command = [str(python), "-I", "-S", str(GUARD), str(os.getpid()), str(grace_s), *argv]
    output = RedactedLog(log, python, env)
    try:
        guard = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output.fileno(),
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl+C in the terminal reaches the runner only, which stops runs in order
            # Guard and command keep both open. With the log's pipe, a trainer can still save a checkpoint, and print
            # that, if somebody kills the runner and the writer of the log.
            pass_fds=(output.reader,) if lock is None else (output.reader, lock),
        )
    except OSError:
        output.close()
        raise
    output.started()
    return ProcessTree(guard, output)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
