"""Processes by pid: liveness, membership of a run, and rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmatrix.gpu.devices import DeviceProcess

PROC = Path("/proc")
TRAINER = "gpt2.train"  # module of a rank; the next argument is the run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProcess:
    """A process that uses a GPU of the run but does not belong to it."""

    pid: int
    name: str | None  # None if the process is not visible, for example from a container
    memory_mib: float | None  # MiB, None if the driver does not report it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank of a run."""

    run: str  # name of the run
    rank: int | None  # None if its environment is not readable
    path: Path | None = None  # directory of the run, None if that of the process is not readable


def rank_of(pid: int) -> Rank | None:
    """Return the rank that a process or its parent belongs to, or None. Other containers are not visible."""
    # The parent too: a GPU may be used by a helper process that a rank has forked.
    for candidate in (pid, _parent(pid)):
        arguments = _read_list(candidate, "cmdline") if candidate else []
        if TRAINER in arguments[:-1]:
            variables = dict(text.partition("=")[::2] for text in _read_list(candidate, "environ"))
            number = variables.get("RANK", "")
            folder = Path(arguments[arguments.index(TRAINER) + 1])
            rank = int(number) if number.isdecimal() else None
            return Rank(run=folder.name, rank=rank, path=_absolute(folder, candidate))
    return None


def processes_with(name: str, variable: str, value: str) -> list[int]:
    """Return the pids of this user's processes of this name with this environment variable; none without /proc."""
    pids = [int(path.name) for path in PROC.glob("[0-9]*") if path.name.isdecimal()]
    wanted = f"{variable}={value}"
    return [pid for pid in pids if _name(pid) == name and wanted in _read_list(pid, "environ")]


class ProcessHandle:
    """A process identified by pid and start time, so that a reused pid is not mistaken for it."""

    def __init__(self, pid: int) -> None:
        self._pid, self._started_at = pid, _start_of(pid)

    def is_alive(self) -> bool:
        return self._started_at is not None and _start_of(self._pid) == self._started_at


class RunProcesses:
    """The processes of a run: the descendants of `root`. None: unknown, every process is accepted."""

    def __init__(self, root: int | None) -> None:
        self._root = root

    def others(self, on_gpu: Sequence[DeviceProcess]) -> list[OtherProcess]:
        """Return the processes on one GPU that do not belong to the run.

        In a container, the driver reports pids of the host, which are not visible here. If no visible process belongs
        to the run, the newest invisible one is assumed to be the rank of this GPU.
        """
        if self._root is None:
            return []
        visible = {process.pid: _parent(process.pid) is not None for process in on_gpu}
        # At most one process can be assumed to be the rank: each rank has a GPU of its own.
        own = {process.pid for process in on_gpu if visible[process.pid] and self._is_below(process.pid)}
        invisible = sorted(process.pid for process in on_gpu if not visible[process.pid])
        assumed = set(invisible[-1:]) if not own else set()
        return [
            OtherProcess(pid=process.pid, name=_name(process.pid), memory_mib=process.memory_mib)
            for process in on_gpu
            if process.pid not in own | assumed
        ]

    def _is_below(self, pid: int) -> bool:
        while pid > 1:
            if pid == self._root:
                return True
            parent = _parent(pid)
            if parent is None:
                return False
            pid = parent
        return False


def _absolute(path: Path, pid: int | None) -> Path | None:
    """Return a path as a process sees it, relative to its current directory."""
    try:
        return path if path.is_absolute() else (PROC / str(pid) / "cwd").readlink() / path
    except OSError:
        return None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name (state, ppid, ...), empty without such a process."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    # The name of the command is in parentheses, and may contain spaces and parentheses itself.
    return stat[stat.rindex(")") + 2 :].split()


def _parent(pid: int) -> int | None:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def _start_of(pid: int) -> str | None:
    """Return the start time of a process in clock ticks, or None if it has exited (zombies included)."""
    fields = stat_fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None  # states: Z zombie, X dead


def _name(pid: int) -> str | None:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return None


def _read_list(pid: int | None, name: str) -> list[str]:
    """Return the strings of a NUL-separated file of /proc/PID, empty if it is not readable."""
    try:
        return (PROC / str(pid) / name).read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
