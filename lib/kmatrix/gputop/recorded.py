"""What a recording has only once per second, and what the driver adds to it while the run is active on this machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kmatrix.gpu.devices import EXTRA_NAMES
from kmatrix.gpu.formats.json_array import entry_until
from kmatrix.gpu.formats.samples import Snapshot, time_of
from kmatrix.gpu.nvml.source import NvmlSource, open_source
from kmatrix.gputop.host import ProcessTable
from kmatrix.gputop.view import ProcessRow
from kmatrix.records.files import finite

OLD_S = 3.0  # expensive metrics of a recording that are older are not shown
ROUNDED_S = 1e-3  # times in text are rounded
PROCESSES_S = 5.0  # between two queries of the processes: milliseconds per GPU on some drivers
AGAIN_S = 0.25  # means of the driver and of the system need two readings
JOIN_S = 1.0  # time for a pending call at the end


class RecordedExtras:
    """The expensive metrics of a recording, from its gpu_stats_<run>_multi_gpu.json."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def added(self, snapshot: Snapshot) -> Snapshot:
        """Return a sample with the expensive metrics at its time, as far as the recording has them."""
        entry = entry_until(self._path, lambda one: time_of(one.get("timestamp")), snapshot.time + ROUNDED_S) or {}
        time, gpus = time_of(entry.get("timestamp")), entry.get("multi_gpu_data")
        if time is None or time < snapshot.time - OLD_S or not isinstance(gpus, list):
            return snapshot
        known = {(gpu.get("gpu_index"), gpu.get("uuid")): _extras(gpu) for gpu in gpus if isinstance(gpu, dict)}
        samples = (replace(one, extra=known.get((one.gpu_index, one.uuid), ())) for one in snapshot.samples)
        return replace(snapshot, samples=tuple(samples))


def _extras(gpu: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    return tuple((name, value) for name in EXTRA_NAMES if (value := finite(gpu.get(name))) is not None)


class FollowedProcesses:
    """The processes on the GPUs of a run that is active on this machine.

    The driver is asked in a thread: if it hangs, the screen still shows the recording.
    """

    def __init__(self, gpus: Mapping[str, int]) -> None:
        """Ask nothing yet. gpus: UUID -> index in the recording."""
        self.rows: tuple[ProcessRow, ...] | None = None  # None: not known yet, or not on this machine
        self.is_elsewhere = not gpus  # the driver of this machine has none of these GPUs
        self._gpus = gpus
        self._thread: threading.Thread | None = None
        self._known, self._ending = threading.Event(), threading.Event()

    def start(self) -> None:
        """Start to read the processes, if this was not done yet."""
        if self._thread is None and not self.is_elsewhere:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until the processes are known, at most this time."""
        if self._thread is not None:
            self._known.wait(seconds)

    def close(self) -> None:
        """End the thread, unless a call hangs."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        # Only this thread uses the driver.
        source = open_source()
        places = [
            (place, self._gpus[device.uuid])
            for place, device in enumerate(source.devices if source else ())
            if device.uuid in self._gpus
        ]
        self.is_elsewhere = not places
        if source is not None and places:
            self._follow(source, places)
        self._known.set()
        if source is not None:
            source.close()

    def _follow(self, source: NvmlSource, places: Sequence[tuple[int, int]]) -> None:
        table, again = ProcessTable(), AGAIN_S
        while True:
            rows: list[ProcessRow] = []
            for place, index in places:
                found = source.processes(place)
                rows += table.rows(index, found, source.process_shares(place) if found else {})
            table.forget(row.pid for row in rows)
            self.rows = tuple(rows)
            if again == PROCESSES_S:  # the second time: means are known
                self._known.set()
            if self._ending.wait(again):
                return
            again = PROCESSES_S
