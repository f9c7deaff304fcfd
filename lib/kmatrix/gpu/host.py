"""The ranks of a run on the CPU, as devices: what the processes use, and the joules that the machine counts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from kmatrix.gpu.source import AT, UNKNOWN, WIDTH, Device, Extra, Process, Slow

MIB = 2**20
TRAINER = "gpt2.train"
LAUNCHERS = ("torch.distributed.run", "torchrun", "guard.py")  # their command lines hold the trainer's
WINDOW_S = 0.5  # of the CPU's share: the kernel counts in hundredths of a second
ENDED_S = 5.0  # ranks of a run end within this of one another; one that ends earlier is lost
POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Found:
    """A rank's process. world_size: None where its environment cannot be read."""

    rank: int
    process: psutil.Process
    world_size: int | None


class HostSource:
    """Ranks of a run. utilization: percent of one processor, so that two busy threads make 200. memory: RSS in MiB."""

    device_type: ClassVar[str] = "cpu"

    def __init__(self, root: int, run_dir: Path, ranks: Sequence[Found]) -> None:
        self._root, self._run_dir = root, run_dir
        total = psutil.virtual_memory().total / MIB
        count = max([rank.world_size or 0 for rank in ranks] + [rank.rank + 1 for rank in ranks])
        self.devices = tuple(
            Device(gpu_index=rank, gpu_name=f"CPU rank {rank}", uuid=f"cpu-rank-{rank}", rank=rank, memory_total=total)
            for rank in range(count)
        )
        self._ranks: list[_Usage | None] = [None] * count
        self._ended: list[float | None] = [None] * count  # monotonic seconds at which a rank was missed
        self._rapl = Rapl.open()
        self._take(ranks)

    @property
    def energy_source(self) -> str | None:
        """rapl: the processors count their joules, for the machine and not for a rank."""
        return "rapl" if self._rapl else None

    def read(self, values: list[float]) -> None:
        now = time.monotonic()
        for position, usage in enumerate(self._ranks):
            base = position * WIDTH
            values[base : base + WIDTH] = [UNKNOWN] * WIDTH
            if usage is None:
                continue
            try:
                values[base + AT["utilization"]], values[base + AT["memory_used"]] = usage.read(now)
            except psutil.Error:
                self._ranks[position], self._ended[position] = None, now

    def timed(self, device: int) -> Mapping[str, tuple[float, float]]:
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

    def slow(self, device: int) -> Slow:  # noqa: ARG002 (every source has it)
        return Slow()

    def extra(self, device: int) -> Extra:  # noqa: ARG002
        return Extra()

    def processes(self, device: int) -> tuple[Process, ...]:  # noqa: ARG002
        return ()

    def is_lost(self, device: int) -> bool:
        """Whether a rank ended while others go on."""
        ended = self._ended[device]
        others = any(usage is not None for usage in self._ranks)
        return ended is not None and others and time.monotonic() - ended > ENDED_S

    def recover(self, device: int) -> bool:
        """Look for ranks that have not been seen yet."""
        self._take(find(self._root, self._run_dir))
        return self._ranks[device] is not None

    def host_joules(self) -> float | None:
        return self._rapl.joules() if self._rapl else None

    def close(self) -> None:
        pass

    def _take(self, ranks: Sequence[Found]) -> None:
        for found in ranks:
            if found.rank < len(self._ranks) and self._ranks[found.rank] is None:
                self._ranks[found.rank], self._ended[found.rank] = _Usage(found.process), None


class _Usage:
    """What one process uses: the CPU's share since at least WINDOW_S ago."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._since: tuple[float, float] | None = None  # monotonic seconds, seconds of the CPU
        self._share = UNKNOWN

    def read(self, now: float) -> tuple[float, float]:
        """Return percent of one processor (NaN in the first moments) and MiB. Raises psutil.Error when it is gone."""
        with self._process.oneshot():
            times, memory = self._process.cpu_times(), self._process.memory_info().rss / MIB
        used = times.user + times.system
        if self._since is None:
            self._since = (now, used)
        elif now - self._since[0] >= WINDOW_S:
            self._share = 100.0 * (used - self._since[1]) / (now - self._since[0])
            self._since = (now, used)
        if not memory and self._process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(self._process.pid)
        return self._share, memory


@dataclass(slots=True)
class Rapl:
    """The processors' counters of energy (Intel and AMD), summed over sockets; readable by root on most systems."""

    domains: tuple[tuple[Path, int], ...]  # the counter, the value after which it starts again; microjoules
    last: list[int]
    total: int = 0

    @classmethod
    def open(cls, root: Path = POWERCAP) -> Rapl | None:
        """Return the counters; None where there are none or they may not be read."""
        try:
            folders = sorted(root.glob("intel-rapl:[0-9]*"))
            domains = tuple(
                (folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()))
                for folder in folders
                if folder.name.count(":") == 1  # a socket: below it are parts of it
            )
            return cls(domains, [int(path.read_text()) for path, _ in domains]) if domains else None
        except (OSError, ValueError):
            return None

    def joules(self) -> float | None:
        """Return joules since the counters were opened."""
        for at, (path, span) in enumerate(self.domains):
            try:
                now = int(path.read_text())
            except (OSError, ValueError):
                return None
            self.total += now - self.last[at] + (span if now < self.last[at] else 0)
            self.last[at] = now
        return self.total / 1e6


def find(root: int, run_dir: Path) -> list[Found]:
    """Return the trainer's processes below `root`, in order of ranks.

    A rank is what RANK in its environment says; where that cannot be read, the order of pids.
    """
    candidates = list(_trainers(root, run_dir))
    pids = {process.pid for process, _ in candidates}
    found: dict[int, Found] = {}
    unnamed: list[psutil.Process] = []
    for process, environment in candidates:
        with contextlib.suppress(psutil.Error):
            if environment is None or "RANK" not in environment:
                unnamed.append(process)
            elif process.ppid() not in pids or environment["RANK"] not in _rank_of(candidates, process.ppid()):
                rank, size = int(environment["RANK"]), int(environment.get("WORLD_SIZE", "0")) or None
                found[rank] = Found(rank, process, size)
    if not found:
        found = {rank: Found(rank, process, None) for rank, process in enumerate(_topmost(unnamed))}
    return [found[rank] for rank in sorted(found)]


def _trainers(root: int, run_dir: Path) -> Iterator[tuple[psutil.Process, Mapping[str, str] | None]]:
    try:
        top = psutil.Process(root)
        below = [top, *top.children(recursive=True)]
    except psutil.Error:
        return
    for process in sorted(below, key=lambda each: each.pid):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        text = " ".join(line)
        if TRAINER not in text or str(run_dir) not in text or any(name in text for name in LAUNCHERS):
            continue
        try:
            yield process, process.environ()
        except (psutil.Error, OSError):
            yield process, None


def _rank_of(candidates: Sequence[tuple[psutil.Process, Mapping[str, str] | None]], pid: int) -> set[str]:
    """Return the rank of the candidate with this pid: a rank's own children carry its environment too."""
    return {
        environment["RANK"]
        for process, environment in candidates
        if process.pid == pid and environment and "RANK" in environment
    }


def _topmost(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return those whose parent is none of them."""
    pids = {process.pid for process in processes}
    kept = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.ppid() not in pids:
                kept.append(process)
    return kept
