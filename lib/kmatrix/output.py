"""Run a program to a clean end, whatever happens to its output: a closed pipe, a full disk, no stdout at all."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF})  # errors of writing to stdout


def run_program(main: Callable[[], int]) -> int:
    """Call `main` and return the exit status: its own, or 1 if its output could not be written."""
    # Started with >&-, Python has no stdout. Opened here, before another file gets its descriptor.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (stays open until the exit)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    try:
        try:
            status = main()
        except SystemExit as ended:  # argparse, after its help or an error
            if not isinstance(ended.code, int):
                raise
            status = ended.code
        sys.stdout.flush()
    except BrokenPipeError:  # `program | head` has read enough
        _discard_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        _discard_output()
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _discard_output() -> None:
    """Write further output to /dev/null: Python flushes stdout again at exit, and would print a traceback."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
