"""Run a program to a clean end: its output is a closed pipe, a full disk or missing, or a signal ends it."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, Protocol, TextIO

from kmatrix.errors import PATHS_HINT, KmatrixError, path_problem

REFUSED = 2  # exit status of an error that the user can fix
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF})  # errors of writing to stdout


class OutputError(OSError):
    """Stdout could not be written. An OSError of its own, because a full disk can also fail any other write."""


ENDINGS = (signal.SIGTERM, signal.SIGQUIT)  # by default they end Python at once, without the cursor of the terminal


class Interrupted(BaseException):
    """A signal asked the program to exit. Like KeyboardInterrupt not an Exception, which a handler would swallow."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the signal
        super().__init__(number)


_interrupt: list[BaseException] = []  # what a signal has raised


def interrupt(error: BaseException) -> NoReturn:
    """Raise what a signal asks for, for a handler. `check_interrupt` raises it again."""
    _interrupt[:] = [error]
    raise error


def check_interrupt() -> None:
    """Raise what a signal has asked for and was lost. To be called by loops that only a signal ends.

    A handler runs between any two steps of Python. In a callback of the garbage collector or of an import, Python
    prints the exception, and goes on.
    """
    if _interrupt:
        raise _interrupt[0]


def forget_interrupt() -> None:
    """Drop the exception of a signal that was handled."""
    _interrupt.clear()


@contextmanager
def ending() -> Iterator[None]:
    """Turn SIGTERM and SIGQUIT into Interrupted, so that displays restore the terminal.

    Handlers that exist, and ignored signals, stay. Outside the main thread, Python allows no handlers.
    """

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        interrupt(KeyboardInterrupt() if number == signal.SIGINT else Interrupted(number))

    main = threading.current_thread() is threading.main_thread()
    default = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(ENDINGS, signal.SIG_DFL)}
    ours = [number for number, handler in default.items() if main and signal.getsignal(number) is handler]
    former = [signal.signal(number, end) for number in ours]
    try:
        yield
    finally:
        for number, handler in zip(ours, former, strict=True):
            signal.signal(number, handler)
        forget_interrupt()


class Display(Protocol):
    """A live display, such as rich.live.Live."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


@contextmanager
def displayed(display: Display) -> Iterator[None]:
    """Start a display and stop it at the end. A signal waits while it starts or stops: half of it leaves no cursor."""
    try:
        with _without_signals():
            display.start()
        yield
    finally:
        with _without_signals():
            display.stop()


@contextmanager
def _without_signals() -> Iterator[None]:
    """Pause the signals that end a program; they are delivered after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, *ENDINGS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_reporting(main: Callable[[], int]) -> int:
    """Run a program of its own: as `run_program`, with status 2 and one message for an error of the user."""

    def checked() -> int:
        try:
            return main()
        except KmatrixError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run_program(checked)


def run_program(main: Callable[[], int]) -> int:
    """Call `main` and return the exit status: its own, 1 if its output could not be written, 2 for an unusable path."""
    # Started with >&-, Python has no stdout. Opened here, before another file gets its descriptor.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (stays open until the exit)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal lacks must not end a report
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            status = main()
        except SystemExit as ended:  # argparse, after its help or an error
            if not isinstance(ended.code, int):
                raise
            status = ended.code
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # `program | head` has read enough
            discard(sys.stdout)
            return 0
        if why := path_problem(error):
            warn(f"error: {why}\n  hint: {PATHS_HINT}")
            return REFUSED
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        discard(sys.stdout)
        warn(f"error: cannot write the output: {error.strerror}")
        return 1
    finally:
        warn("")
    return status


def warn(text: str) -> None:
    """Write a line to stderr, and what it buffers; do nothing if it cannot be written."""
    try:
        sys.stderr.write(f"{text}\n" if text else "")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Write further output to /dev/null: Python flushes a stream again at exit, and would print a traceback."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
