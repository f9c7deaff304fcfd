"""What is asked of devices beside the samples, from a thread: a call that takes 20 ms delays no sample."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kmatrix.gpu.source import Extra, Source

EVERY_S = 1.0
PATIENCE_S = 1.0  # for a call that is under way when the recording ends


class Aside:
    """Asks each device for its extra values once a second. `latest` has the newest of each; a driver that hangs
    keeps this thread, and nothing else.
    """

    def __init__(self, source: Source, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.latest = [Extra()] * len(source.devices)
        self.looks = 0
        self._source, self._every_s, self._clock = source, every_s, clock
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """End the thread; return whether it has ended, so that the driver may be closed."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = self._clock()
        while not self._ending.wait(max(0.0, due - self._clock())):
            for device in range(len(self.latest)):
                self.latest[device] = self._source.extra(device)
            self.looks += 1
            due = max(due + self._every_s, self._clock())
