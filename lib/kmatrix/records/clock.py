"""Times of the monotonic clock: durations that stay right when the wall clock is set."""

from __future__ import annotations

import time

from kmatrix.records.decode import Amount, Record
from kmatrix.records.lock import boot_id


class Clock(Record, frozen=True):
    """A time of the monotonic clock, which nobody sets and which starts at 0 with each boot of the machine."""

    monotonic: Amount  # s
    boot_id: str | None = None  # the kernel's id of the boot

    @classmethod
    def now(cls) -> Clock:
        """Return the current time."""
        return cls(monotonic=time.monotonic(), boot_id=boot_id())

    def since(self) -> float | None:
        """Return the seconds since then; None on another machine, or after a boot."""
        if self.boot_id is None or self.boot_id != boot_id():
            return None
        return max(0.0, time.monotonic() - self.monotonic)
