"""Signals as something that was asked for, not as an exception in the middle of a write."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SAME_KEY_S = 0.2  # `timeout -s INT` and some shells deliver one Ctrl+C twice


@dataclass(slots=True)
class Asked:
    """What signals asked for. since: monotonic seconds of the first.  by: its name.  kill: a second SIGINT came."""

    since: float | None = None
    by: str = ""
    kill: bool = False

    def take(self, number: int, _frame: FrameType | None = None) -> None:
        """Note one signal."""
        now = time.monotonic()
        if self.since is None:
            self.since, self.by = now, signal.Signals(number).name
        elif number == signal.SIGINT and now - self.since > SAME_KEY_S:
            self.kill = True


@contextmanager
def listening() -> Iterator[Asked]:
    """Note SIGINT, SIGTERM and SIGHUP instead of dying by them. Under nohup SIGHUP stays ignored.

    Outside the main thread Python takes no handlers: nothing is noted then.
    """
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    former = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            former[number] = signal.signal(number, asked.take)
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
