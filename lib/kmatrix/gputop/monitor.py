"""The GPUs of the driver, read at every refresh of the screen; what is expensive is read less often."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

from kmatrix.gpu.devices import WIDTH, DeviceLimits, snapshot
from kmatrix.gpu.formats.samples import Snapshot
from kmatrix.gpu.nvml.detect import detect
from kmatrix.gpu.nvml.facts import DeviceFacts, DriverFacts, device_facts, driver_facts
from kmatrix.gpu.nvml.source import NvmlSource, open_source
from kmatrix.gpu.poller import BackgroundPoller
from kmatrix.gputop.host import ProcessTable, host_state
from kmatrix.gputop.view import HostState, ProcessRow, ScreenSample

LIMITS_S = 1.0  # between two queries of power limits and throttling
PROCESSES_S = 2.0  # between two queries of the processes: milliseconds per GPU on some drivers
RANKS_S = 10.0  # the same if only the ranks of runs are wanted
RECOVER_S = 5.0  # between two tries to reopen a lost GPU
SIMULATE = "KMATRIX_SIMULATE"  # variable of kmatrix.simulate: without it, the simulated driver is absent
AGAIN_S = 0.25  # means of the driver and of the system need two readings


# A public interface, imported from scripts/gputop.py: docs/gputop.md, "From Python".
class GPUMonitor:
    """The GPUs of the driver: call `initialize`, then `gpu_count` and `read`. Without GPUs everything is empty."""

    def __init__(self, *, details: bool = False, interval: float = 1.0) -> None:
        """Read nothing yet. details: also the expensive metrics, processes and the machine, at most every interval."""
        self.gpu_count = 0
        self.notes: tuple[str, ...] = ()
        self._details, self._interval = details, interval
        self._source: NvmlSource | None = None
        self._poller: BackgroundPoller | None = None
        self._values: list[float] = []
        self._limits: list[DeviceLimits] = []
        self._table = ProcessTable()
        self._processes: list[ProcessRow] = []
        self._host: HostState | None = None
        self._limits_due = self._recover_due = self._processes_due = 0.0
        self._driver = DriverFacts()

    def initialize(self) -> bool:
        """Open the driver, and reopen it if it is open. Return whether there is a GPU."""
        self.close()
        self._source = source = open_source()
        if source is None:
            self.notes = detect().notes
            return False
        self.gpu_count = len(source.devices)
        self._values = [math.nan] * (WIDTH * self.gpu_count)
        self._limits_due = self._recover_due = self._processes_due = 0.0
        self._driver = driver_facts(source)
        if self._details:
            self._poller = BackgroundPoller(source, every_s=max(1.0, self._interval))
            self._poller.start()
        return True

    def read(self) -> ScreenSample:
        """Return one sample of all GPUs. Unknown values are None."""
        source = self._source
        if source is None:
            return ScreenSample(snapshot=Snapshot(time=time.time(), monotonic=time.monotonic(), samples=()))
        now = time.monotonic()
        if now >= self._recover_due:
            self._recover_due = now + RECOVER_S
            for position in range(self.gpu_count):
                if source.is_lost(position):
                    source.recover(position)
        source.read(self._values)
        # The slow queries are due at times of their own, not at every refresh of the screen.
        if now >= self._limits_due:
            self._limits_due = now + LIMITS_S
            self._limits = [source.limits(position) for position in range(self.gpu_count)]
        if now >= self._processes_due:
            self._processes_due = now + (PROCESSES_S if self._details else RANKS_S)
            self._read_processes(source)
        devices, extra = source.devices, self._poller.latest if self._poller else ()
        ranks = {row.gpu_index: row for row in reversed(self._processes) if row.run}
        return ScreenSample(
            snapshot=replace(snapshot(devices, self._values, self._limits, time.time(), extra), monotonic=now),
            throttle={
                device.gpu_index: tuple(sorted(slow.throttled))
                for position, (device, slow) in enumerate(zip(devices, self._limits, strict=True))
                if not source.is_lost(position)
            },
            xids={device.gpu_index: slow.xid_counts for device, slow in zip(devices, extra, strict=False)},
            ranks={index: row.rank for index, row in ranks.items() if row.rank is not None},
            runs={index: row.run for index, row in ranks.items()},
            processes=tuple(self._processes) if self._details else None,
            host=self._host,
            # A GPU that was lost from the start has no name, which would have the mark.
            simulated=SIMULATE in os.environ,
            driver_version=self._driver.version,
            cuda_version=self._driver.cuda,
        )

    def facts(self) -> dict[int, DeviceFacts]:
        """Return the settings of each GPU by its index; empty without the NVIDIA driver."""
        source = self._source
        if source is None:
            return {}
        return {device.gpu_index: device_facts(source, position) for position, device in enumerate(source.devices)}

    def poll_again(self) -> None:
        """Wait until values that are means over some time are known, and read them at the next call of `read`."""
        deadline = time.monotonic() + 10 * AGAIN_S
        time.sleep(AGAIN_S)
        self._processes_due = 0.0
        if self._poller is None or self._source is None:
            return
        while not self._poller.polls and time.monotonic() < deadline:  # a driver that hangs must not block a snapshot
            time.sleep(0.01)
        self._poller.poll()

    def close(self) -> None:
        """Close the driver."""
        source, self._source = self._source, None
        poller, self._poller = self._poller, None
        self.gpu_count, self._limits, self._processes = 0, [], []
        can_close = poller.stop() if poller is not None else True
        if source is not None and can_close:
            source.close()

    def _read_processes(self, source: NvmlSource) -> None:
        """Read the processes on all GPUs, and the state of the machine."""
        rows: list[ProcessRow] = []
        for position, device in enumerate(source.devices):
            found = source.processes(position)
            shares = source.process_shares(position) if found and self._details else {}
            rows += self._table.rows(device.gpu_index, found, shares)
        self._table.forget(row.pid for row in rows)
        self._processes = rows
        if self._details:
            self._host = host_state()
