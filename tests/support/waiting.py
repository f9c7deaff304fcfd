"""Wait for a condition with a deadline, the only way in which tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.02


def wait_until(condition: Callable[[], T], what: str = "", seconds: float = 480.0) -> T:
    """Return the first true value of a condition. Raise AssertionError after `seconds`.

    The machine may be busy: the deadline only ends a test that would never end. A condition that looks into folders
    which other processes make, move and remove may find one gone between its listing and its reading: not yet true.
    """
    deadline = time.monotonic() + seconds
    while True:
        gone: FileNotFoundError | None = None
        try:
            if found := condition():
                return found
        except FileNotFoundError as error:
            gone = error
        if time.monotonic() > deadline:
            name = what or condition.__doc__ or condition.__name__
            raise AssertionError(f"not within {seconds:g} s: {name}") from gone
        time.sleep(POLL_S)
