"""The machine: its processors, memory and load, and the processes on its GPUs, as the system sees them."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from kmatrix.gpu.devices import DeviceProcess, ProcessShare
from kmatrix.gpu.processes import Rank, rank_of
from kmatrix.gputop.view import HostState, ProcessRow

MIB = 2**20


def host_state() -> HostState:
    """Return the state of the machine. The use of the processors is a mean since the last call, the first time 0."""
    memory = psutil.virtual_memory()
    with suppress(OSError):
        return HostState(
            cpu=psutil.cpu_percent(),
            memory_used=(memory.total - memory.available) / MIB,
            memory_total=memory.total / MIB,
            load=os.getloadavg(),
        )
    return HostState(cpu=psutil.cpu_percent(), memory_used=None, memory_total=memory.total / MIB, load=None)


@dataclass(slots=True)
class _Known:
    """What does not change about a process, and the handle that measures the rest."""

    handle: psutil.Process
    started: float  # Unix s
    user: str | None
    command: str
    rank: Rank | None


class ProcessTable:
    """The processes on GPUs. Names and ranks are looked up once per process: a pid that is used again is another one.

    In a container the driver reports the pids of the host: such a process is listed without what the system knows.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._total = psutil.virtual_memory().total / MIB

    def rows(self, gpu: int, found: Iterable[DeviceProcess], shares: Mapping[int, ProcessShare]) -> list[ProcessRow]:
        """Return the processes on one GPU. shares: pid -> use of the GPU."""
        return [self._row(gpu, process, shares.get(process.pid)) for process in found]

    def forget(self, pids: Iterable[int]) -> None:
        """Drop all processes but these, which are on the GPUs now."""
        kept = set(pids)
        self._known = {pid: known for pid, known in self._known.items() if pid in kept}

    def _row(self, gpu: int, process: DeviceProcess, share: ProcessShare | None) -> ProcessRow:
        known = self._find(process.pid)
        cpu = host = seconds = None
        if known is not None:
            with suppress(psutil.Error):
                with known.handle.oneshot():
                    cpu, host = known.handle.cpu_percent(), known.handle.memory_info().rss / MIB
                seconds = max(0.0, time.time() - known.started)
        rank = known.rank if known else None
        return ProcessRow(
            gpu_index=gpu,
            pid=process.pid,
            kind=process.kind,
            memory_mib=process.memory_mib,
            sm=share.sm if share else None,
            bandwidth=share.memory if share else None,
            user=known.user if known else None,
            host_mib=host,
            host_percent=None if host is None or not self._total else 100.0 * host / self._total,
            cpu=cpu,
            seconds=seconds,
            command=known.command if known else "",
            run=rank.run if rank else "",
            rank=rank.rank if rank else None,
            run_path=rank.path if rank else None,
            visible=known is not None,
        )

    def _find(self, pid: int) -> _Known | None:
        """Return what is known of a process, None if it is not visible or has exited."""
        known = self._known.get(pid)
        if known is not None and known.handle.is_running():
            return known
        self._known.pop(pid, None)
        try:
            handle = psutil.Process(pid)
            with handle.oneshot():
                started, command = handle.create_time(), _command(handle)
            handle.cpu_percent()  # the next call returns the mean since this one
        except (psutil.Error, OSError):
            return None
        user = None
        with suppress(psutil.Error, KeyError):
            user = handle.username()
        found = self._known[pid] = _Known(handle, started, user, command, rank_of(pid))
        return found


def _command(process: psutil.Process) -> str:
    """Return the command line of a process, else its name."""
    with suppress(psutil.Error):
        if words := process.cmdline():
            return shlex.join(words)
    return process.name()
