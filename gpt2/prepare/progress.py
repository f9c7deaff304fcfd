"""How far a preparation is, on stderr: a line that moves on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import sys
import threading
import time

ON_TERMINAL_S, ELSEWHERE_S = 0.5, 60.0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class StoppedError(Exception):
    """Raised in the threads of a work that is given up."""


class Progress:
    """`with Progress("tinystories", "tokens") as progress: progress.add(1000, "file 1 of 4")`."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit, self.count, self.started = name, unit, 0, time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.stopped = False  # then whoever tells of more is stopped too
        self._lock = threading.Lock()  # downloads tell from several threads
        self._next = self.started + (ON_TERMINAL_S if self.terminal else ELSEWHERE_S)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminal and self.count:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def add(self, count: int, place: str = "") -> None:
        """Take in what was done."""
        if self.stopped:
            raise StoppedError
        with self._lock:
            self.count += count
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + (ON_TERMINAL_S if self.terminal else ELSEWHERE_S)
        done, rate = readable(self.count), readable(self.count / (now - self.started))
        line = f"{self.name}: {done} {self.unit}, {rate} {self.unit}/s{', ' if place else ''}{place}"
        end = "" if self.terminal else "\n"
        print(f"\r\x1b[K{line}" if self.terminal else line, end=end, file=sys.stderr, flush=True)


def readable(number: float, unit: str = "") -> str:
    """Return a number with three digits and a letter for its thousands: 1.12M, 19.8GB."""
    for letter in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g}{letter}{unit}"
        number /= 1000
    return f"{number:.3g}T{unit}"
