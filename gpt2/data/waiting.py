"""Whether this process waits for data that are being made: the watchdog must not take it for a hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_waits = 0  # in all threads
_lock = threading.Lock()


@contextmanager
def waiting_for_data() -> Iterator[None]:
    """Mark this process as waiting inside the block."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def is_waiting() -> bool:
    """Return whether a thread of this process waits for data now."""
    return _waits > 0


def _count(more: int) -> None:
    global _waits  # noqa: PLW0603  (one count per process, which its watchdog reads)
    with _lock:
        _waits += more
