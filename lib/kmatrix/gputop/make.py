"""The make that started this program: its end is that of the program."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

NAMES = ("make", "gmake")
EVERY_S = 0.5
FIELD = "SigCgt:"  # of /proc/PID/status: the signals that a process handles, a bit each
ENDINGS = 1 << signal.SIGINT - 1 | 1 << signal.SIGHUP - 1


def end_with_make() -> None:
    """Send SIGTERM to this process when make, its parent, has ended, or was told to.

    make passes SIGTERM on. After SIGINT or SIGHUP it waits for its programs, and no longer handles that signal.
    """
    make = os.getppid()
    if _read(make, "comm").strip() not in NAMES:
        return
    handled = _handled(make)

    def watch() -> None:
        while os.getppid() == make and _handled(make) == handled:
            time.sleep(EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _handled(pid: int) -> int:
    """Return the signals in ENDINGS that a process handles."""
    found = next((line for line in _read(pid, "status").splitlines() if line.startswith(FIELD)), f"{FIELD} 0")
    return int(found.removeprefix(FIELD), 16) & ENDINGS


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
