"""Turn signals into stop requests that the loop polls, instead of exceptions in the middle of a write."""

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
class StopRequest:
    """The stop requests of the signals that were received."""

    since: float | None = None  # monotonic seconds of the first one
    by: str = ""  # name of its signal
    kill: bool = False  # SIGQUIT, or a second SIGINT, was received
    hung_up: bool = False  # the terminal was closed, which stops nothing

    def take(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle one signal."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            self.hung_up = True
        elif number == signal.SIGQUIT:  # Ctrl+\\: at once, but with the terminal restored and the statuses written
            self.since, self.by, self.kill = self.since or now, self.by or "SIGQUIT", True
        elif self.since is None:
            self.since, self.by = now, signal.Signals(number).name
        elif number == signal.SIGINT and now - self.since > SAME_KEY_S:
            self.kill = True


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Collect SIGINT, SIGTERM, SIGQUIT and SIGHUP in a StopRequest instead of dying from them.

    An ignored SIGHUP (nohup) stays ignored; an existing handler of SIGHUP is called, too.
    Outside the main thread, Python allows no handlers: no signal is collected then.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # as in a notebook's worker thread
        yield request
        return
    former = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            former[number] = before = signal.signal(number, request.take)
            if number == signal.SIGHUP and callable(before):
                signal.signal(number, _both(request.take, before))
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _both(first: Handler, second: Handler) -> Handler:
    def take(number: int, frame: FrameType | None) -> None:
        first(number, frame)
        second(number, frame)

    return take
