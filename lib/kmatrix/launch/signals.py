"""Signals as something that was asked for, not as an exception in the middle of a write."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

Handler = Callable[[int, FrameType | None], object]
SAME_KEY_S = 0.2  # `timeout -s INT` and some shells deliver one Ctrl+C twice


@dataclass(slots=True)
class Asked:
    """What signals asked for. since: monotonic seconds of the first stop.  by: its name.  kill: a second SIGINT came.

    hung_up: the terminal is gone, which stops nothing.
    """

    since: float | None = None
    by: str = ""
    kill: bool = False
    hung_up: bool = False

    def take(self, number: int, _frame: FrameType | None = None) -> None:
        """Note one signal."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            self.hung_up = True
        elif self.since is None:
            self.since, self.by = now, signal.Signals(number).name
        elif number == signal.SIGINT and now - self.since > SAME_KEY_S:
            self.kill = True


@contextmanager
def listening() -> Iterator[Asked]:
    """Note SIGINT, SIGTERM and SIGHUP instead of dying by them.

    Where SIGHUP is ignored already (nohup), it stays so; a handler that is there already is called too.

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
            former[number] = before = signal.signal(number, asked.take)
            if number == signal.SIGHUP and callable(before):
                signal.signal(number, _both(asked.take, before))
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _both(first: Handler, second: Handler) -> Handler:
    def take(number: int, frame: FrameType | None) -> None:
        first(number, frame)
        second(number, frame)

    return take
