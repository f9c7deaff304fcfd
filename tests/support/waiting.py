"""Wait for a condition with a deadline, the only way in which tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.02


def wait_until(condition: Callable[[], T], what: str = "", seconds: float = 240.0) -> T:
    """Return the first true value of a condition. Raise AssertionError after `seconds`.

    The machine may be busy: the deadline only ends a test that would never end.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what or condition.__doc__ or condition.__name__}")
        time.sleep(POLL_S)
    return found
