"""The interactive screen: poll a feed, draw, handle keys, and restore the terminal at the end."""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.text import Text

from kmatrix.errors import LaunchError, RecordError, reason_of
from kmatrix.gpu.formats.json_array import open_published
from kmatrix.gpu.formats.samples import GpuSample, Snapshot, legacy, multi
from kmatrix.gputop.feeds import SampleFeed
from kmatrix.gputop.glyphs import Glyphs
from kmatrix.gputop.screen import render
from kmatrix.gputop.view import History, Metric, ScreenSample, View, rows_of
from kmatrix.output import Interrupted, check_interrupt, displayed, forget_interrupt, interrupt

STDIN = 0  # the descriptor: sys.stdin buffers, so that select would miss keys
RESIZE_S = 0.25  # between two checks of the size of the terminal: a resize shows at once, at four wake-ups per second
ENDINGS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
)  # by default, they would leave the terminal without echo
NO_SIZE = ConsoleDimensions(80, 24)  # the size of a terminal that does not report one
TERMINAL_GONE = (errno.EIO, errno.EPIPE)  # errors of a terminal that was closed
NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    " ": "space",
    "k": "up",
    "j": "down",
    "\x03": "q",  # Ctrl+C and Ctrl+D, on terminals that send them as characters
    "\x04": "q",
}
ESCAPE_S = 0.05  # time for the rest of an escape sequence, which a slow connection may split
ARRAY_STARTS = (b"[\n{", b"[\n\n]", b"[\n]")  # first bytes of an array that can be continued


@dataclass(slots=True, kw_only=True)
class Session:
    """The state of the screen: the feed, the selection and the newest sample."""

    feed: SampleFeed
    asked: str | None = None  # the GPUs to show, as index or UUID list
    stats: StatsFiles | None = None
    metric: Metric = Metric.UTILIZATION
    selected: int | None = None
    large: bool = False  # show charts only
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
        rows = () if self.sample is None else rows_of(self.sample, self.history, self.feed.now())
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
        """Handle a key. Return False to exit."""
        if key == "q":
            return False
        if key == "m":
            order = list(Metric)
            self.metric = order[(order.index(self.metric) + 1) % len(order)]
        elif key in ("l", "\n", "\r"):
            self.large = not self.large
        elif key in ("up", "down", "page up", "page down"):
            self._select({"up": -1, "down": 1, "page up": -10, "page down": 10}[key])
        elif self.feed.press(key):  # before the digits: 0 is the start of a replay
            self.poll()
        elif key.isdecimal() and int(key) in self._indices():
            self.selected = int(key)
        return True

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
    raise LaunchError(
        f"--gpus names {item}",
        why=f"{len(found)} GPUs match this prefix" if found else "there is no such GPU",
        hint=f"select GPUs by index or UUID: {', '.join(f'{s.gpu_index} ({s.uuid or s.gpu_name})' for s in samples)}",
    )


def watch(session: Session, console: Console, glyphs: Glyphs, *, interval: float, seconds: float | None) -> None:
    """Refresh the screen until the key q, a signal or the time limit, and always restore the terminal."""
    try:
        # Signals outermost: their handlers stay in place until keyboard and screen are restored.
        with _signals_end(), Keyboard(STDIN) as keyboard:
            live = Live(console=console, screen=True, auto_refresh=False)
            with _suspends(live, keyboard), displayed(live):
                try:
                    _draw(session, live, glyphs, keyboard, interval=interval, seconds=seconds)
                finally:
                    _ignore_signals()
    except OSError as error:
        if error.errno not in TERMINAL_GONE:
            raise  # otherwise the window was closed: nobody reads the error, and there is nothing to restore


def _draw(
    session: Session, live: Live, glyphs: Glyphs, keyboard: Keyboard, *, interval: float, seconds: float | None
) -> None:
    """Refresh at each interval, after each key and after each resize of the terminal."""
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    due = 0.0
    while time.monotonic() < deadline:
        if time.monotonic() >= due:
            session.poll()
            due = time.monotonic() + interval
        # Set explicitly: Rich would prefer COLUMNS and LINES of the environment, which are those of the start.
        size = live.console.size = terminal_size()
        lines = render(session.view(), width=size.width, height=size.height, glyphs=glyphs)
        live.update(Text("\n", no_wrap=True, end="").join(lines), refresh=True)
        keys: list[str] = []
        end = min(due, deadline)
        while not keys and terminal_size() == size and time.monotonic() < end:
            keys = keyboard.read(max(0.0, min(RESIZE_S, end - time.monotonic())))
            check_interrupt()
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
    with _signals_end():
        while seconds is None or time.monotonic() < begin + seconds:
            session.poll()
            # From the last due time, not from now: the interval includes the poll. After a stall, no burst.
            due = max(due + interval, time.monotonic())
            end = due if seconds is None else min(due, begin + seconds)
            time.sleep(max(0.0, end - time.monotonic()))
            check_interrupt()


@contextmanager
def _signals_end() -> Iterator[None]:
    """Convert termination signals into an exception that is suppressed here, so that cleanup runs."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        _ignore_signals()  # a second Ctrl+C would leave the terminal without echo
        interrupt(Interrupted(number))

    before = {one: signal.signal(one, end) for one in ENDINGS}
    try:
        yield
    except Interrupted:
        return
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        forget_interrupt()


def _ignore_signals() -> None:
    """Ignore further termination signals, so that cleanup is not interrupted."""
    for one in ENDINGS:
        signal.signal(one, signal.SIG_IGN)


@contextmanager
def _suspends(live: Live, keyboard: Keyboard) -> Iterator[None]:
    """Restore the terminal while the program is suspended by Ctrl+Z, and redraw afterwards."""

    def suspend(_number: int, _frame: FrameType | None) -> None:
        live.stop()
        keyboard.__exit__(None, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)  # cannot be caught; the next line runs after SIGCONT (`fg`)
        keyboard.__enter__()
        live.start(refresh=True)

    before = signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def decode(text: str) -> tuple[list[str], str]:
    """Return the names of the typed keys, and an incomplete escape sequence at the end."""
    keys: list[str] = []
    while text:
        if text[0] != "\x1b":
            keys.append(NAMES.get(text[0], text[0]))
            text = text[1:]
            continue
        end = _end_of_escape(text)
        if end is None:
            return keys, text
        if text[:end] in NAMES:
            keys.append(NAMES[text[:end]])
        text = text[end:]
    return keys, ""


def _end_of_escape(text: str) -> int | None:
    """Return the length of the escape sequence at the start of a text, or None if it is incomplete."""
    if len(text) < 2:
        return None
    if text[1] == "O":
        return 3 if len(text) > 2 else None
    if text[1] != "[":
        return 1
    return next((i + 1 for i in range(2, len(text)) if "@" <= text[i] <= "~"), None)


class Keyboard:
    """The keys of the terminal `fd`, none if it is not a terminal. The context manager restores its settings."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._saved: list[int | list[bytes | int]] | None = None
        self._rest = ""

    def __enter__(self) -> Self:
        if os.isatty(self._fd):
            self._saved = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)  # not raw: Ctrl+C and Ctrl+Z stay signals
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            try:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, saved)
            except termios.error:
                return  # the terminal was closed

    def read(self, timeout: float) -> list[str]:
        """Wait up to `timeout` s and return the keys pressed. A closed terminal returns the key q."""
        if self._saved is None:
            time.sleep(timeout)
            return []
        if not select.select([self._fd], [], [], ESCAPE_S if self._rest else timeout)[0]:
            self._rest = ""  # a single escape key has no function
            return []
        try:
            typed = os.read(self._fd, 1024)
        except OSError:
            typed = b""
        if not typed:  # readable without data: the terminal was closed
            return ["q"]
        keys, self._rest = decode(self._rest + typed.decode(errors="replace"))
        return keys


class StatsFiles:
    """Appends snapshots to both statistics files. `problem`: the error of the last write, or empty."""

    def __init__(self, path: Path) -> None:
        self.problem = ""
        pair = (path, multi_path(path))
        for one in pair:
            _check_appendable(one)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._single, self._multi = (open_published(one) for one in pair)
        except OSError as error:
            raise RecordError(f"cannot write {path}", why=reason_of(error), hint="pass another path") from None

    def append(self, snapshot: Snapshot, selected: int | None) -> None:
        """Write one snapshot: of the selected GPU (by default the first), and of all GPUs."""
        if not snapshot.samples:
            return
        one = next((sample for sample in snapshot.samples if sample.gpu_index == selected), snapshot.samples[0])
        try:
            self._single.append(legacy(one, snapshot.time))
            self._multi.append(multi(snapshot))
        except OSError as error:
            self.problem = f"cannot write statistics: {error.strerror}"
        else:
            self.problem = ""

    def close(self) -> None:
        self._single.close()
        self._multi.close()


def multi_path(path: Path) -> Path:
    """Return X_multi_gpu.json for X.json."""
    return path.with_name(f"{path.stem}_multi_gpu{path.suffix}")


def _check_appendable(path: Path) -> None:
    """Raise RecordError for an existing file that is not a statistics file."""
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"cannot read {path}", why=reason_of(error), hint="pass another file") from None
    if begin and not begin.startswith(ARRAY_STARTS):
        raise RecordError(
            f"{path} exists and is not a statistics file",
            why="only files written by gputop or the recorder can be continued",
            hint="pass another file",
        )
