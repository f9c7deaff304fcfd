"""The ranks of a run on the CPU as devices: CPU and memory of each process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from kmatrix.gpu.devices import (
    COLUMN_INDEX,
    UNKNOWN,
    WIDTH,
    Device,
    DeviceLimits,
    DeviceProcess,
    ExtraMetrics,
    ProcessShare,
)
from kmatrix.gpu.formats.samples import RANK_UUID
from kmatrix.gpu.processes import TRAINER

MIB = 2**20
LAUNCHERS = ("torch.distributed.run", "torchrun")  # their command lines contain the trainer's
WINDOW_S = 0.5  # averaging window of CPU utilization: the kernel counts in 10 ms ticks
EXIT_SPREAD_S = 5.0  # ranks of a run exit within this time of each other; an earlier exit counts as lost


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank."""

    rank: int  # of all ranks of the run
    process: psutil.Process
    on_host: range | None  # the ranks of its run on this host; None if its environment is not readable


class HostSource:
    """The ranks of a run. Utilization: percent of one core (two busy threads: 200). Memory: RSS in MiB."""

    device_type: ClassVar[str] = "cpu"

    def __init__(self, root: int, run_dir: Path, ranks: Sequence[RankProcess]) -> None:
        self._root, self._run_dir = root, run_dir
        total = psutil.virtual_memory().total / MIB
        # By rank, not by order of appearance: ranks start within seconds of each other, and some may be missing yet.
        self._on_host = next(
            (each.on_host for each in ranks if each.on_host), range(max(each.rank for each in ranks) + 1)
        )
        self.devices = tuple(
            Device(
                gpu_index=rank, gpu_name=f"CPU rank {rank}", uuid=f"{RANK_UUID}{rank}", rank=rank, memory_total=total
            )
            for rank in self._on_host
        )
        self._ranks: list[_CpuUsage | None] = [None] * len(self.devices)
        self._ended: list[float | None] = [None] * len(self.devices)  # s, monotonic: when a rank was found to be gone
        self._attach(ranks)

    @property
    def energy_source(self) -> str | None:
        return None

    def read(self, values: list[float]) -> None:
        now = time.monotonic()
        for position, usage in enumerate(self._ranks):
            base = position * WIDTH
            values[base : base + WIDTH] = [UNKNOWN] * WIDTH
            if usage is None:
                continue
            try:
                values[base + COLUMN_INDEX["utilization"]], values[base + COLUMN_INDEX["memory_used"]] = usage.read(now)
            except psutil.Error:  # it has exited; whether too early, `is_lost` decides later
                self._ranks[position], self._ended[position] = None, now

    def read_timed(self, device: int) -> Mapping[str, tuple[float, float]]:
        usage = self._ranks[device]
        if usage is None:
            return {}
        begin = time.perf_counter()
        try:
            utilization, memory = usage.read(time.monotonic())
        except psutil.Error:
            return {}
        seconds = time.perf_counter() - begin
        return {"utilization": (utilization, seconds), "memory_used": (memory, seconds)}

    def limits(self, device: int) -> DeviceLimits:  # noqa: ARG002 (every source has it)
        return DeviceLimits()

    def extra_metrics(self, device: int) -> ExtraMetrics:  # noqa: ARG002
        return ExtraMetrics()

    def processes(self, device: int) -> tuple[DeviceProcess, ...]:  # noqa: ARG002
        return ()

    def process_shares(self, device: int) -> Mapping[int, ProcessShare]:  # noqa: ARG002 (every source has it)
        return {}

    def is_lost(self, device: int) -> bool:
        """Return whether a rank exited while others are running."""
        ended = self._ended[device]
        # At the end of a run all ranks exit, some later than others: that is not a loss.
        others = any(usage is not None for usage in self._ranks)
        return ended is not None and others and time.monotonic() - ended > EXIT_SPREAD_S

    def failure(self, device: int) -> str:  # noqa: ARG002 (every source has it)
        return ""

    def recover(self, device: int) -> bool:
        """Attach ranks that have started since the last call."""
        self._attach(find_ranks(self._root, self._run_dir))
        return self._ranks[device] is not None

    def close(self) -> None:
        pass

    def _attach(self, ranks: Sequence[RankProcess]) -> None:
        for found in ranks:
            place = found.rank - self._on_host.start
            if found.rank in self._on_host and self._ranks[place] is None:
                self._ranks[place], self._ended[place] = _CpuUsage(found.process), None


class _CpuUsage:
    """The usage of one process, with CPU utilization over at least WINDOW_S."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._since: tuple[float, float] | None = None  # monotonic s, CPU s
        self._share = UNKNOWN

    def read(self, now: float) -> tuple[float, float]:
        """Return utilization in percent of one core (NaN in the first window) and RSS in MiB.

        Raises psutil.Error if the process has exited.
        """
        with self._process.oneshot():
            times, memory = self._process.cpu_times(), self._process.memory_info().rss / MIB
        used = times.user + times.system
        if self._since is None:
            self._since = (now, used)
        elif now - self._since[0] >= WINDOW_S:
            self._share = 100.0 * (used - self._since[1]) / (now - self._since[0])
            self._since = (now, used)
        # A zombie still answers, with its CPU time and no memory. The status costs a read, so memory is checked first.
        if not memory and self._process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(self._process.pid)
        return self._share, memory


def find_ranks(root: int, run_dir: Path) -> list[RankProcess]:
    """Return the trainer processes below `root`, ordered by rank.

    The rank is RANK in the environment of the process. If it is not readable, ranks follow the order of pids.
    """
    candidates = list(_trainers(root, run_dir))
    pids = {process.pid for process, _ in candidates}
    found: dict[int, RankProcess] = {}
    unnamed: list[psutil.Process] = []
    for process, environment in candidates:
        with contextlib.suppress(psutil.Error):  # it has exited meanwhile
            if environment is None or "RANK" not in environment:
                unnamed.append(process)
            # Children of a rank, such as data loader workers, have its command line and RANK: only the topmost counts.
            elif process.ppid() not in pids or environment["RANK"] not in _rank_of(candidates, process.ppid()):
                rank = int(environment["RANK"])
                found[rank] = RankProcess(rank, process, ranks_on_host(environment))
    if not found:
        found = {rank: RankProcess(rank, process, None) for rank, process in enumerate(_topmost(unnamed))}
    return [found[rank] for rank in sorted(found)]


def ranks_on_host(environment: Mapping[str, str]) -> range | None:
    """Return the ranks of a run on the host of one of them, from its environment; None if it says nothing.

    Source: https://pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
    """
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, local_rank, count = (int(environment.get(name, "0")) for name in names)
    if count:
        return range(rank - local_rank, rank - local_rank + count)
    size = int(environment.get("WORLD_SIZE", "0"))  # a launcher of one host may set no more
    return range(size) if size else None


def _trainers(root: int, run_dir: Path) -> Iterator[tuple[psutil.Process, Mapping[str, str] | None]]:
    try:
        top = psutil.Process(root)
        descendants = [top, *top.children(recursive=True)]
    except psutil.Error:
        return
    for process in sorted(descendants, key=lambda each: each.pid):
        try:
            line = process.cmdline()
        except psutil.Error:  # it has exited meanwhile
            continue
        text = " ".join(line)
        if TRAINER not in text or str(run_dir) not in text or any(name in text for name in LAUNCHERS):
            continue
        try:
            yield process, process.environ()
        except (psutil.Error, OSError):
            yield process, None


def _rank_of(candidates: Sequence[tuple[psutil.Process, Mapping[str, str] | None]], pid: int) -> set[str]:
    """Return the RANK of the candidate with this pid. Children of a rank inherit its environment."""
    return {
        environment["RANK"]
        for process, environment in candidates
        if process.pid == pid and environment and "RANK" in environment
    }


def _topmost(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes whose parent is not in the list."""
    pids = {process.pid for process in processes}
    kept = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.ppid() not in pids:
                kept.append(process)
    return kept
