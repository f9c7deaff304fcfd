"""A terminal that can go away: what a runner says goes on in a file then, and the runner does not notice."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Terminal:
    """Where a runner's words go. lost: SIGHUP came, and `leave` was not called yet."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.lost = False

    def leave(self) -> None:
        """Let everything that is printed from now on go to the log."""
        self.lost = False
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError):
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for number in (1, 2):
                os.dup2(log, number)
            os.close(log)


@contextmanager
def outlived(log: Path) -> Iterator[Terminal]:
    """Survive the end of the terminal: SIGHUP is noted. Where it is ignored already (nohup), it stays so."""
    terminal = Terminal(log)

    def lose(*_: object) -> None:
        terminal.lost = True

    former = signal.getsignal(signal.SIGHUP)
    if former is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lose)
    try:
        yield terminal
    finally:
        signal.signal(signal.SIGHUP, former)
