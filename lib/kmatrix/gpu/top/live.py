"""The GPUs of this machine now, asked of NVIDIA's driver, else of AMD's."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from kmatrix.alerts import Alert
from kmatrix.gpu import amd
from kmatrix.gpu.formats import Snapshot
from kmatrix.gpu.nvml import detect, open_source
from kmatrix.gpu.processes import Rank, rank_of
from kmatrix.gpu.source import WIDTH, Slow, Source, snapshot
from kmatrix.gpu.top import alarms
from kmatrix.gpu.top.feeds import clock
from kmatrix.gpu.top.values import History, Moment, Row

RANKS_S = 10.0  # between two looks at the processes of the GPUs: the expensive question
SLOW_S = 1.0  # between two looks at limits and throttling, which cost more than the rest
RECOVER_S = 5.0  # between two looks for a GPU that was lost


class GPUMonitor:
    """The GPUs that the driver knows: `initialize`, then `gpu_count` and `read`. Without any, all of it is empty."""

    def __init__(self) -> None:
        self.gpu_count = 0
        self.notes: tuple[str, ...] = ()
        self._source: Source | None = None
        self._values: list[float] = []
        self._slow: list[Slow] = []
        self._ranks: list[Rank | None] = []
        self._slow_due = self._recover_due = self._ranks_due = 0.0

    def initialize(self) -> bool:
        """Open the driver; whether it knows of a GPU. A second call opens it anew."""
        self.close()
        self._source = open_source() or amd.open_source()
        if self._source is None:
            self.notes = detect().notes
            return False
        self.gpu_count = len(self._source.devices)
        self._values = [math.nan] * (WIDTH * self.gpu_count)
        self._slow_due = self._recover_due = self._ranks_due = 0.0
        return True

    def read(self) -> Moment:
        """Read every GPU once; what one does not tell is None."""
        source = self._source
        if source is None:
            return Moment(snapshot=Snapshot(time=time.time(), monotonic=time.monotonic(), samples=()))
        now = time.monotonic()
        if now >= self._recover_due:
            self._recover_due = now + RECOVER_S
            for position in range(self.gpu_count):
                if source.is_lost(position):
                    source.recover(position)
        source.read(self._values)
        if now >= self._slow_due:
            self._slow_due = now + SLOW_S
            self._slow = [source.slow(position) for position in range(self.gpu_count)]
        if now >= self._ranks_due:
            self._ranks_due = now + RANKS_S
            self._ranks = [_rank_on(source, position) for position in range(self.gpu_count)]
        devices = source.devices
        found = {device.gpu_index: rank for device, rank in zip(devices, self._ranks, strict=True) if rank}
        return Moment(
            snapshot=snapshot(devices, self._values, self._slow, time.time()),
            throttle={
                device.gpu_index: tuple(sorted(slow.throttled))
                for position, (device, slow) in enumerate(zip(devices, self._slow, strict=True))
                if not source.is_lost(position)
            },
            ranks={index: rank.rank for index, rank in found.items() if rank.rank is not None},
            runs={index: rank.run for index, rank in found.items()},
        )

    def close(self) -> None:
        """Close the driver."""
        source, self._source = self._source, None
        self.gpu_count, self._slow = 0, []
        if source is not None:
            source.close()


def _rank_on(source: Source, position: int) -> Rank | None:
    """Return the rank of a run that has this GPU, by its processes; None where none of them is one that is seen."""
    return next((rank for process in source.processes(position) if (rank := rank_of(process.pid))), None)


class LiveFeed:
    """Asks the driver at every poll."""

    mode, title, noun, bucket_s, grows = "live", "", "GPU", 1.0, False

    def __init__(self) -> None:
        self._monitor = GPUMonitor()
        self._monitor.initialize()

    @property
    def clock(self) -> str:
        return clock(self.now())

    def now(self) -> float:
        return time.time()

    def poll(self, history: History) -> Moment | None:
        if not self._monitor.gpu_count:
            return None
        moment = self._monitor.read()
        history.add(moment.snapshot)
        return moment

    def press(self, _key: str, /) -> bool:
        return False

    def alerts(self, rows: Sequence[Row]) -> tuple[Alert, ...]:
        return alarms.of_rows(rows, alarms.OF_A_MACHINE, self.now())

    def notices(self) -> tuple[str, ...]:
        return tuple(f"no GPU: {note}" for note in self._monitor.notes) if not self._monitor.gpu_count else ()

    def close(self) -> None:
        self._monitor.close()
