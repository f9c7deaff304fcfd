"""The guard process between the runner and torchrun: no process that it started outlives it, or the runner.

    python -I -S guard.py RUNNER_PID GRACE_SECONDS COMMAND...

torchrun starts each worker in its own session, so no process group contains them all. The guard is their
subreaper: orphaned processes become its children. The kernel sends it SIGTERM when the runner dies
(PR_SET_PDEATHSIG), even by SIGKILL. On SIGTERM it forwards the signal, waits for the grace period, and kills the
remaining processes.

It is a program and not a preexec_fn of the runner, because Python code between fork and exec can deadlock if a
library has started a thread, and PR_SET_PDEATHSIG alone would leave torchrun's workers running when torchrun itself
is killed. The guard has one thread, imports only the standard library, starts in about 20 ms, and sleeps in the
kernel until a signal arrives.
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
STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})  # forwarded to the command, as SIGTERM
LINGER_S = 1.0  # time for remaining processes to clean up, such as multiprocessing's resource tracker
KILL_S = 10.0  # a process that does not die within this time, stuck in the kernel, is given up
LIBC = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Run the command and return its exit code, 128 + n after signal n."""
    runner, grace, command = int(argv[1]), float(argv[2]), argv[3:]
    # Blocked before anything else: a signal that arrives now stays pending until sigwaitinfo collects it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP | {signal.SIGCHLD})
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # PR_SET_PDEATHSIG reports only deaths after this call. A new parent means that the runner had died before.
    if os.getppid() != runner:
        return 128 + signal.SIGTERM
    child = _start(command, mask)
    code = _wait(child, grace)
    _kill_descendants(linger=LINGER_S if code is not None else 0.0)
    return 128 + signal.SIGKILL if code is None else code


def _start(command: list[str], mask: set[int | signal.Signals]) -> int:
    """Start the command with the guard's original signal mask; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # Not inherited across fork. The command must also end if somebody kills the guard with SIGKILL.
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Two inheritable descriptors above 2 stay open: the run's lock, which the command holds after the death of the
        # guard, and the other end of the log's pipe. The variable tells ranks which process has to be alive: they may
        # start after its death.
        os.environ["KMATRIX_LAUNCHER"] = f"{os.getpid()}:{_start_time()}"
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)  # the shell's code for a command that cannot be run; no cleanup of the parent's state


def _start_time() -> str:
    """Return the start time of this process in clock ticks after the boot, "" if the system has no /proc."""
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2 :].split()[19]  # starttime, field 22 of proc(5); two were cut off


def _wait(child: int, grace: float) -> int | None:
    """Return the exit code of the command, None if it outlived the grace period after a stop signal."""
    deadline: float | None = None
    while True:
        if deadline is None:
            got: int | None = signal.sigwaitinfo(STOP | {signal.SIGCHLD}).si_signo
        else:
            info = signal.sigtimedwait(STOP | {signal.SIGCHLD}, max(0.0, deadline - time.monotonic()))
            got = None if info is None else info.si_signo
        # Reap after any signal: several exits can be merged into one SIGCHLD.
        ended = _reap()
        if child in ended:
            return ended[child]
        if got in STOP and deadline is None:  # a second signal does not extend the grace period
            deadline = time.monotonic() + grace
            os.kill(child, signal.SIGTERM)
        if deadline is not None and time.monotonic() >= deadline:
            return None


def _reap() -> dict[int, int]:
    """Collect the exit codes of all children that have exited: pid -> exit code, 128 + n after signal n."""
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


def _kill_descendants(*, linger: float) -> None:
    """Kill and reap all descendants, after `linger` seconds in which they may exit by themselves."""
    begin = time.monotonic()
    while time.monotonic() - begin < linger + KILL_S:
        _reap()
        # Scan again after each round: a process that was killed may have forked before.
        below = _descendants(os.getpid())
        if not below:
            return
        if time.monotonic() - begin >= linger:
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants(root: int) -> list[int]:
    """Return the descendants of a process, from one scan of /proc."""
    parent: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue  # it has exited meanwhile
            # The command name is in parentheses and may itself contain spaces and parentheses.
            parent[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    found = {root}
    while more := {pid for pid, above in parent.items() if above in found} - found:
        found |= more
    return sorted(found - {root})


if __name__ == "__main__":
    sys.exit(main(sys.argv))
