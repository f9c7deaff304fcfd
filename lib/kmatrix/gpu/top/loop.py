"""The screen while it runs: reads a feed, draws what is known, takes keys, and puts the terminal right at the end."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.text import Text

from kmatrix.errors import LaunchError
from kmatrix.gpu.formats import GpuSample
from kmatrix.gpu.top.feeds import Feed
from kmatrix.gpu.top.ink import Glyphs
from kmatrix.gpu.top.keys import Keyboard
from kmatrix.gpu.top.screen import render
from kmatrix.gpu.top.stats_file import StatsFiles
from kmatrix.gpu.top.values import History, Metric, Moment, View, rows_of

STDIN = 0
LOOK_S = 0.25  # how often the size of the terminal is looked at
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NO_SIZE = ConsoleDimensions(80, 24)
GONE = (errno.EIO, errno.EPIPE)  # what a terminal that went away answers


class Ended(BaseException):
    """Somebody asked the program to end: no error."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One look at a feed: what is chosen, and the newest moment. asked: the GPUs to show, as `chosen` takes them."""

    feed: Feed
    asked: str | None = None
    stats: StatsFiles | None = None
    metric: Metric = Metric.UTILIZATION
    selected: int | None = None
    large: bool = False
    history: History = field(init=False)
    moment: Moment | None = field(init=False, default=None)
    _gpus: frozenset[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.history = History(self.feed.bucket_s)

    def poll(self) -> None:
        """Take in what is new, and write it down where that was asked for."""
        before = self.moment
        moment = self.feed.poll(self.history)
        if moment is None:
            return
        if self._gpus is None:
            self._gpus = chosen(self.asked, moment.snapshot.samples)
        self.moment = moment.of(self._gpus)
        if self.selected not in self._indices():
            self.selected = next(iter(self._indices()), None)
        if before is None or before.snapshot.time != moment.snapshot.time:
            self.write()

    def write(self) -> None:
        """Write the newest moment down, where that was asked for."""
        if self.stats is not None and self.moment is not None:
            self.stats.append(self.moment.snapshot, self.selected)

    @property
    def is_empty(self) -> bool:
        """Whether there is no GPU to show."""
        return self.moment is None or not self.moment.snapshot.samples

    def view(self) -> View:
        """Return what the screen is to show now."""
        notices = self.feed.notices()
        if self.stats is not None and self.stats.problem:
            notices = (*notices, self.stats.problem)
        rows = () if self.moment is None else rows_of(self.moment, self.history, self.feed.now())
        return View(
            rows=rows,
            alerts=self.feed.alerts(rows),
            mode=self.feed.mode,
            clock=self.feed.clock,
            title=self.feed.title,
            noun=self.feed.noun,
            notices=notices,
            metric=self.metric,
            selected=self.selected,
            large=self.large,
        )

    def press(self, key: str) -> bool:
        """Take a key. False: it ends the screen."""
        if key == "q":
            return False
        if key == "m":
            order = list(Metric)
            self.metric = order[(order.index(self.metric) + 1) % len(order)]
        elif key in ("l", "\n", "\r"):
            self.large = not self.large
        elif key in ("up", "down", "page up", "page down"):
            self._select({"up": -1, "down": 1, "page up": -10, "page down": 10}[key])
        elif self.feed.press(key):
            self.poll()
        elif key.isdecimal() and int(key) in self._indices():
            self.selected = int(key)
        return True

    def _select(self, steps: int) -> None:
        indices = self._indices()
        if indices:
            place = indices.index(self.selected) if self.selected in indices else 0
            self.selected = indices[min(len(indices) - 1, max(0, place + steps))]

    def _indices(self) -> list[int]:
        return [] if self.moment is None else [sample.gpu_index for sample in self.moment.snapshot.samples]


def chosen(asked: str | None, samples: Sequence[GpuSample]) -> frozenset[int] | None:
    """Return the GPU indices that a comma list names by index or UUID (whole or its beginning); None: all."""
    items = [item.strip() for item in (asked or "").split(",") if item.strip()]
    return frozenset(_named(item, samples).gpu_index for item in items) if items else None


def _named(item: str, samples: Sequence[GpuSample]) -> GpuSample:
    if item.isdecimal():
        found = [sample for sample in samples if sample.gpu_index == int(item)]
    else:
        found = [sample for sample in samples if sample.uuid.startswith(item)]
    if len(found) == 1:
        return found[0]
    raise LaunchError(
        f"--gpus names {item}",
        why=f"{len(found)} GPUs begin so" if found else "there is no such GPU",
        fix=f"name GPUs by index or UUID: {', '.join(f'{s.gpu_index} ({s.uuid or s.gpu_name})' for s in samples)}",
    )


def watch(session: Session, console: Console, signs: Glyphs, *, interval: float, seconds: float | None) -> None:
    """Draw until the key q, a signal or the time ends it; the terminal is as before, however it ends."""
    try:
        with _signals_end(), Keyboard(STDIN) as keyboard:
            live = Live(console=console, screen=True, auto_refresh=False)
            with _suspends(live, keyboard), live:
                try:
                    _draw(session, live, signs, keyboard, interval=interval, seconds=seconds)
                finally:
                    _deafen()
    except OSError as error:
        if error.errno not in GONE:
            raise


def _draw(
    session: Session, live: Live, signs: Glyphs, keyboard: Keyboard, *, interval: float, seconds: float | None
) -> None:
    """Draw at each interval, after each key and after each change of the terminal's size."""
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    due = 0.0
    while time.monotonic() < deadline:
        if time.monotonic() >= due:
            session.poll()
            due = time.monotonic() + interval
        size = live.console.size = terminal_size()
        lines = render(session.view(), width=size.width, height=size.height, signs=signs)
        live.update(Text("\n", no_wrap=True, end="").join(lines), refresh=True)
        keys: list[str] = []
        end = min(due, deadline)
        while not keys and terminal_size() == size and time.monotonic() < end:
            keys = keyboard.read(max(0.0, min(LOOK_S, end - time.monotonic())))
        if not all(session.press(key) for key in keys):
            return


def terminal_size() -> ConsoleDimensions:
    """Return the size of the terminal now, NO_SIZE where it says none. COLUMNS and LINES grow old: not read."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return NO_SIZE
    return ConsoleDimensions(size.columns, size.lines) if size.columns and size.lines else NO_SIZE


def follow(session: Session, *, interval: float, seconds: float | None) -> None:
    """Poll without a screen until a signal or the time ends it. The next moment is due by the clock, without drift."""
    begin = time.monotonic()
    due = begin
    with _signals_end():
        while seconds is None or time.monotonic() < begin + seconds:
            session.poll()
            due = max(due + interval, time.monotonic())
            end = due if seconds is None else min(due, begin + seconds)
            time.sleep(max(0.0, end - time.monotonic()))


@contextmanager
def _signals_end() -> Iterator[None]:
    """Turn the signals that end a program into an orderly way out."""

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        _deafen()
        raise Ended

    before = {one: signal.signal(one, end) for one in ENDINGS}
    try:
        yield
    except Ended:
        return
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _deafen() -> None:
    """Ignore the signals that end a program: the way out is not to be cut short."""
    for one in ENDINGS:
        signal.signal(one, signal.SIG_IGN)


@contextmanager
def _suspends(live: Live, keyboard: Keyboard) -> Iterator[None]:
    """Give the terminal back while Ctrl+Z holds the program, and take it again afterwards."""

    def suspend(_number: int, _frame: FrameType | None) -> None:
        live.stop()
        keyboard.__exit__(None, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        keyboard.__enter__()
        live.start(refresh=True)

    before = signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
