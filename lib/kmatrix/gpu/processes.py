"""Processes, by pid: whether one still lives, whether one on a GPU is a part of the run, and which rank it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmatrix.gpu.source import Process

PROC = Path("/proc")
TRAINER = "gpt2.train"  # what a rank runs; the folder of its run stands behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A process on a GPU of the run that is no part of it. name: None where it cannot be seen."""

    pid: int
    name: str | None
    memory_mib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank of a run. rank: None where its environment may not be read."""

    run: str
    rank: int | None


def rank_of(pid: int) -> Rank | None:
    """Return which rank of which run a process is, or its parent; None for any other, or one of another container."""
    for one in (pid, _parent(pid)):
        words = _texts(one, "cmdline") if one else []
        if TRAINER in words[:-1]:
            variables = dict(text.partition("=")[::2] for text in _texts(one, "environ"))
            number = variables.get("RANK", "")
            folder = words[words.index(TRAINER) + 1]
            return Rank(run=Path(folder).name, rank=int(number) if number.isdecimal() else None)
    return None


class Watched:
    """A process that may end: a pid that was given out again is another process."""

    def __init__(self, pid: int) -> None:
        self._pid, self._born = pid, _born(pid)

    def lives(self) -> bool:
        return self._born is not None and _born(self._pid) == self._born


class Ours:
    """Tells the run's processes from others. root: the process that they are below; None: nothing can be told."""

    def __init__(self, root: int | None) -> None:
        self._root = root

    def foreign(self, on_gpu: Sequence[Process]) -> list[Foreign]:
        """Return the processes on one GPU that are no part of the run.

        In a container the driver's pids are the host's and cannot be looked up. One of those may be the
        rank of this GPU: only what is beyond one is called foreign, the older first.
        """
        if self._root is None:
            return []
        seen = {process.pid: _parent(process.pid) is not None for process in on_gpu}
        ours = {process.pid for process in on_gpu if seen[process.pid] and self._is_below(process.pid)}
        unseen = sorted(process.pid for process in on_gpu if not seen[process.pid])
        maybe = set(unseen[-1:]) if not ours else set()
        return [
            Foreign(pid=process.pid, name=_name(process.pid), memory_mib=process.memory_mib)
            for process in on_gpu
            if process.pid not in ours | maybe
        ]

    def _is_below(self, pid: int) -> bool:
        while pid > 1:
            if pid == self._root:
                return True
            above = _parent(pid)
            if above is None:
                return False
            pid = above
        return False


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name: state, parent, ... [] when there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _born(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks; None when it has ended."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def _name(pid: int) -> str | None:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return None


def _texts(pid: int | None, name: str) -> list[str]:
    """Return the texts in a file of /proc/PID; [] where it may not be read."""
    try:
        return (PROC / str(pid) / name).read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
