"""Time: the clocks and the sleep that tests replace."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class Clock:
    """The clocks of this machine, and of the storage of a file."""

    def now(self) -> float:
        """Return Unix seconds, for people: somebody may set this clock."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds of a clock that nobody sets."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def age_s(self, path: Path) -> float:
        """Return the seconds since a file was written, by the clock of its storage: against one that is written now.

        Infinity if the file is missing. Raises OSError if nothing can be written next to it.
        """
        probe = path.with_name(f".now.{os.uname().nodename[:16]}.{os.getpid()}")
        probe.write_bytes(b"\n")
        try:
            return probe.stat().st_mtime - path.stat().st_mtime
        except FileNotFoundError:
            return float("inf")
        finally:
            with suppress(OSError):
                probe.unlink()


clock = Clock()
