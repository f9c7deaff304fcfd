"""Read the expensive metrics in a thread of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kmatrix.gpu.devices import DeviceSource, ExtraMetrics

EVERY_S = 1.0
JOIN_S = 1.0  # time for a pending call at the end


class BackgroundPoller:
    """Reads the expensive metrics of each device once per second, in a thread.

    `latest` has the newest metrics of each device. A driver that hangs blocks this thread only.
    """

    def __init__(
        self, source: DeviceSource, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.latest = [ExtraMetrics()] * len(source.devices)
        self.polls = 0
        self._source, self._every_s, self._clock = source, every_s, clock
        self._ending, self._reading = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Stop the thread. Return whether it has exited, so that the driver can be closed."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = self._clock()
        while not self._ending.wait(max(0.0, due - self._clock())):
            self.poll()
            due = max(due + self._every_s, self._clock())

    def poll(self) -> None:
        """Read the metrics of all devices once, also from another thread."""
        with self._reading:
            for device in range(len(self.latest)):
                self.latest[device] = self._source.extra_metrics(device)  # replaced as a whole: no lock to read it
            self.polls += 1
