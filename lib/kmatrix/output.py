"""Run a program to a clean end: a closed pipe, a path that cannot be used, or SIGTERM ends it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kmatrix.errors import KmatrixError, damaged_files, is_full, path_problem, reason_of
from kmatrix.text import printable

REFUSED = 2  # exit status of an error that the user can fix
BUG = 70  # EX_SOFTWARE of sysexits.h


def run_program(main: Callable[[], int]) -> int:
    """Call `main`, print what ends it, and return the exit status.

    That is 0 for a closed pipe, 2 for an error that the user can fix, 70 for a bug, 130 for Ctrl+C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal lacks must not end a report
            stream.reconfigure(errors="backslashreplace")
    # SIGTERM ends it as an exception, so that displays restore the terminal. A handler that exists stays.
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `program | head` has read enough
        _discard_output()
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT  # as shells report it
    except Exception as error:
        return _report(error)
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for text in damaged_files():
            print(f"warning: {printable(text)}", file=sys.stderr)


def _report(error: Exception) -> int:
    """Print an error, and return the exit status."""
    if isinstance(error, KmatrixError):
        found = error
    elif why := path_problem(error):
        found = KmatrixError(why, hint="check the paths of the command and of .config, and their permissions")
    elif is_full(error):
        where = f" ({name})" if (name := getattr(error, "filename", None)) else ""
        found = KmatrixError(
            "a disk is full", why=f"{reason_of(error)}{where}", hint="free some space, then run it again"
        )
        if not where:
            _discard_output()
    else:
        traceback.print_exception(error)
        print("error: this is a bug in kmatrix: please report it with the lines above", file=sys.stderr)
        return BUG
    print(f"error: {printable(str(found))}", file=sys.stderr)
    return REFUSED


def _discard_output() -> None:
    """Write further output to /dev/null: Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _LossyFile(io.FileIO):
    """A file descriptor that drops what cannot be written."""

    def write(self, data: Any) -> int:
        with suppress(OSError):  # a full disk loses log lines, but ends no program
            super().write(data)
        return len(data)


def lossy_output() -> None:
    """Replace stdout and stderr with streams whose writes never fail."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = io.BufferedWriter(_LossyFile(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(file, errors="replace", line_buffering=True))
