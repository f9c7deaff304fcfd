"""The interactive screen: poll a feed, draw, handle keys, and restore the terminal at the end."""

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

from kmatrix.errors import LaunchError
from kmatrix.gpu.formats.samples import GpuSample
from kmatrix.gputop.feeds import SampleFeed
from kmatrix.gputop.stats_files import StatsFiles
from kmatrix.gputop.terminal.glyphs import Glyphs
from kmatrix.gputop.terminal.keyboard import STEPS, Keyboard
from kmatrix.gputop.terminal.pages import page_end
from kmatrix.gputop.terminal.paint import Painter
from kmatrix.gputop.terminal.screen import render
from kmatrix.gputop.view import History, Metric, ScreenSample, View, rows_of

STDIN = 0  # the descriptor: sys.stdin buffers, so that select would miss keys
RESIZE_S = 0.25  # between two checks of the size of the terminal: a resize shows at once, at four wake-ups per second
ENDINGS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
)  # by default, they would leave the terminal without echo
PAGES = {"h": "help", "?": "help", "a": "alerts"}  # key -> what covers the table
NO_SIZE = ConsoleDimensions(80, 24)  # the size of a terminal that does not report one
TERMINAL_GONE = (errno.EIO, errno.EPIPE)  # errors of a terminal that was closed


@dataclass(slots=True, kw_only=True)
class Session:
    """The state of the screen: the feed, the selection and the newest sample."""

    feed: SampleFeed
    asked: str | None = None  # the GPUs to show, as index or UUID list
    stats: StatsFiles | None = None
    metric: Metric = Metric.UTILIZATION
    selected: int | None = None
    large: bool = False  # show charts only
    charts: bool = False  # show charts below the table
    page: str = ""  # what covers the table: "help" or "alerts"
    page_at: int = 0  # its first line on the screen
    page_end: int = 0  # the last one that it can be scrolled to, on the terminal as it is now
    history: History = field(init=False)
    sample: ScreenSample | None = field(init=False, default=None)
    _gpus: frozenset[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.history = History(self.feed.bucket_s)

    def poll(self) -> None:
        """Read the newest sample, and write it to the statistics files if there are any."""
        before = self.sample
        sample = self.feed.poll(self.history)
        if sample is None:
            return
        if self._gpus is None:  # resolved once: a lost GPU may change the driver's indices
            self._gpus = chosen(self.asked, sample.snapshot.samples)
        self.sample = sample.of(self._gpus)
        if self.selected not in self._indices():
            self.selected = next(iter(self._indices()), None)
        if before is None or before.snapshot.time != sample.snapshot.time:
            self.write()

    def write(self) -> None:
        """Append the newest sample to the statistics files, if there are any."""
        if self.stats is not None and self.sample is not None:
            self.stats.append(self.sample.snapshot, self.selected)

    @property
    def is_empty(self) -> bool:
        """True if there is no GPU to show."""
        return self.sample is None or not self.sample.snapshot.samples

    def view(self) -> View:
        """Return the current content of the screen."""
        notices = self.feed.notices()
        if self.stats is not None and self.stats.problem:
            notices = (*notices, self.stats.problem)
        sample = self.sample
        rows = () if sample is None else rows_of(sample, self.history, self.feed.now())
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
            charts=self.charts,
            limits=self.feed.limits,
            host=sample.host if sample else None,
            progress=sample.progress if sample else (),
            simulated=sample is not None and sample.simulated,
            driver=sample.driver if sample else "",
            processes=sample.processes if sample else None,
            no_processes=self.feed.no_processes,
            page=self.page,
            page_at=self.page_at,
        )

    def press(self, key: str) -> bool:
        """Handle a key. Return False to exit."""
        if self.page:
            self._press_on_page(key)
        elif key == "q":
            return False
        elif key in PAGES:
            self.page, self.page_at = PAGES[key], 0
        elif key == "m":
            order = list(Metric)
            self.metric = order[(order.index(self.metric) + 1) % len(order)]
        elif key == "c":
            self.charts = not self.charts
        elif key in ("l", "\n", "\r"):
            self.large = not self.large
        elif key in STEPS:
            self._select(STEPS[key])
        elif self.feed.press(key):  # before the digits: 0 is the start of a replay
            self.poll()
        elif key.isdecimal() and int(key) in self._indices():
            self.selected = int(key)
        return True

    def _press_on_page(self, key: str) -> None:
        """Move within the page, or close it: by any key if all of it is visible."""
        if self.page_end and key in STEPS:
            self.page_at = max(0, min(self.page_end, min(self.page_at, self.page_end) + STEPS[key]))
        else:
            self.page = ""

    def _select(self, steps: int) -> None:
        indices = self._indices()
        if indices:
            at = indices.index(self.selected) if self.selected in indices else 0
            self.selected = indices[min(len(indices) - 1, max(0, at + steps))]

    def _indices(self) -> list[int]:
        return [] if self.sample is None else [sample.gpu_index for sample in self.sample.snapshot.samples]


def chosen(asked: str | None, samples: Sequence[GpuSample]) -> frozenset[int] | None:
    """Return the GPU indices selected by a comma-separated list of indices or UUID prefixes; None: all."""
    items = [item.strip() for item in (asked or "").split(",") if item.strip()]
    return frozenset(_named(item, samples).gpu_index for item in items) if items else None


def _named(item: str, samples: Sequence[GpuSample]) -> GpuSample:
    if item.isdecimal():
        found = [sample for sample in samples if sample.gpu_index == int(item)]
    else:
        found = [sample for sample in samples if sample.uuid.startswith(item)]
    if len(found) == 1:
        return found[0]
    silent = [f"GPU {sample.gpu_index}" for sample in samples if not sample.uuid]
    unknown = f"; {', '.join(silent)} did not answer, so the UUID is unknown" if silent else ""
    raise LaunchError(
        f"--gpus names {item}",
        why=f"{len(found)} GPUs match this prefix" if found else f"there is no such GPU{unknown}",
        hint=f"select GPUs by index or UUID: {', '.join(f'{s.gpu_index} ({s.uuid or s.gpu_name})' for s in samples)}",
    )


def watch(session: Session, console: Console, glyphs: Glyphs, *, interval: float, seconds: float | None) -> None:
    """Refresh the screen until the key q, a signal or the time limit, and always restore the terminal."""
    try:
        # Signals outermost: their handlers stay in place until keyboard and screen are restored.
        with endings_caught(), Keyboard(STDIN) as keyboard:
            painter = Painter(console)
            with _suspends(painter, keyboard):
                try:
                    painter.start()
                    _draw(session, painter, glyphs, keyboard, interval=interval, seconds=seconds)
                finally:
                    _ignore_signals()
                    painter.stop()
    except OSError as error:
        if error.errno not in TERMINAL_GONE:
            raise  # otherwise the window was closed: nobody reads the error, and there is nothing to restore


def _draw(
    session: Session, painter: Painter, glyphs: Glyphs, keyboard: Keyboard, *, interval: float, seconds: float | None
) -> None:
    """Refresh at each interval, after each key and after each resize of the terminal."""
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    due = 0.0
    while time.monotonic() < deadline:
        if time.monotonic() >= due:
            session.poll()
            due = time.monotonic() + interval
        size = terminal_size()
        view = session.view()
        session.page_end = page_end(view, size.width, size.height)
        lines = render(view, width=size.width, height=size.height, glyphs=glyphs)
        painter.paint(lines, size.width, size.height)
        keys: list[str] = []
        end = min(due, deadline)
        while not keys and painter.is_painted and terminal_size() == size and time.monotonic() < end:
            keys = keyboard.read(max(0.0, min(RESIZE_S, end - time.monotonic())))
        if "repaint" in keys:
            painter.forget()
        if not all(session.press(key) for key in keys):
            return


def terminal_size() -> ConsoleDimensions:
    """Return the current size of the terminal, NO_SIZE if unknown. COLUMNS and LINES are not updated on resize."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return NO_SIZE
    return ConsoleDimensions(size.columns, size.lines) if size.columns and size.lines else NO_SIZE


def follow(session: Session, *, interval: float, seconds: float | None) -> None:
    """Poll without a screen until a signal or the time limit, at a rate without drift."""
    begin = time.monotonic()
    due = begin
    with endings_caught():
        while seconds is None or time.monotonic() < begin + seconds:
            session.poll()
            # From the last due time, not from now: the interval includes the poll. After a stall, no burst.
            due = max(due + interval, time.monotonic())
            end = due if seconds is None else min(due, begin + seconds)
            time.sleep(max(0.0, end - time.monotonic()))


class Ended(BaseException):
    """A signal asked the program to end. Not an Exception, which a handler would swallow."""


@contextmanager
def endings_caught() -> Iterator[None]:
    """Convert termination signals into an exception that is suppressed here, so that cleanup runs.

    SIGHUP stays ignored if it is, as by nohup: then the end of the terminal is not that of the program.
    """

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        _ignore_signals()  # a second Ctrl+C would leave the terminal without echo
        raise Ended

    nohup = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {one: signal.signal(one, end) for one in ENDINGS if one not in nohup}
    try:
        yield
    except Ended:
        return
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _ignore_signals() -> None:
    """Ignore further termination signals, so that cleanup is not interrupted."""
    for one in ENDINGS:
        signal.signal(one, signal.SIG_IGN)


@contextmanager
def _suspends(painter: Painter, keyboard: Keyboard) -> Iterator[None]:
    """Restore the terminal while the program is suspended by Ctrl+Z, and redraw afterwards."""

    def suspend(_number: int, _frame: FrameType | None) -> None:
        painter.stop()
        keyboard.__exit__(None, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)  # cannot be caught; the next line runs after SIGCONT (`fg`)
        keyboard.__enter__()
        painter.start()

    before = signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
