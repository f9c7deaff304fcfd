"""The process between the runner and torchrun: nothing that it started outlives it, or the runner.

    python -I -S guard.py RUNNER_PID GRACE_SECONDS COMMAND...

torchrun puts each worker in a session of its own, so no process group holds them all. The guard
is their subreaper: what loses its parent becomes the guard's child. The kernel tells it when
the runner dies (PR_SET_PDEATHSIG), even by SIGKILL; it then does what it does on SIGTERM: pass
the signal on, wait for the grace, kill what is left.

A program and not a preexec_fn of the runner: Python code between fork and exec can deadlock where
a library has started a thread, and a process with PR_SET_PDEATHSIG alone would leave torchrun's
workers behind when torchrun itself is killed. The guard has one thread: it imports only the
standard library, starts in about 20 ms, and sleeps in the kernel until a signal comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
LINGER_S = 1.0  # what is left after the command may clean up this long (multiprocessing's resource tracker does)
KILL_S = 10.0  # a process that sits in the kernel for longer than this is given up
LIBC = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Run the command to its end; return its exit code, 128 + n when signal n ended it."""
    runner, grace, command = int(argv[1]), float(argv[2]), argv[3:]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP | {signal.SIGCHLD})
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != runner:
        return 128 + signal.SIGTERM  # the runner died before the kernel was asked to tell
    _keep_descriptors()
    child = _start(command, mask)
    code = _wait(child, grace)
    _clear(linger=LINGER_S if code is not None else 0.0)
    return 128 + signal.SIGKILL if code is None else code


def _keep_descriptors() -> None:
    """Pass on no descriptor but 0, 1 and 2: the run's lock is the guard's alone."""
    for entry in Path("/proc/self/fd").iterdir():
        if int(entry.name) > 2:
            with contextlib.suppress(OSError):  # the one that this listing used
                os.set_inheritable(int(entry.name), False)


def _start(command: list[str], mask: set[int | signal.Signals]) -> int:
    """Start the command with the signal mask that the guard was given; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _wait(child: int, grace: float) -> int | None:
    """Return the command's exit code, or None when it outlived the grace after a stop signal."""
    deadline: float | None = None
    while True:
        if deadline is None:
            got: int | None = signal.sigwaitinfo(STOP | {signal.SIGCHLD}).si_signo
        else:
            info = signal.sigtimedwait(STOP | {signal.SIGCHLD}, max(0.0, deadline - time.monotonic()))
            got = None if info is None else info.si_signo
        ended = _reap()
        if child in ended:
            return ended[child]
        if got in STOP and deadline is None:
            deadline = time.monotonic() + grace
            os.kill(child, signal.SIGTERM)
        if deadline is not None and time.monotonic() >= deadline:
            return None


def _reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> exit code, 128 + n for signal n."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def _clear(*, linger: float) -> None:
    """Kill and collect everything below the guard, after letting it end by itself for `linger` seconds."""
    begin = time.monotonic()
    while time.monotonic() - begin < linger + KILL_S:
        _reap()
        below = _below(os.getpid())
        if not below:
            return
        if time.monotonic() - begin >= linger:
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _below(root: int) -> list[int]:
    """Every process whose chain of parents leads to `root`, from one look at /proc."""
    parent: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            parent[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    found = {root}
    while more := {pid for pid, above in parent.items() if above in found} - found:
        found |= more
    return sorted(found - {root})


if __name__ == "__main__":
    sys.exit(main(sys.argv))
