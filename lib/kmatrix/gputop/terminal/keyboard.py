"""The keys of a terminal: names of what was typed, also of escape sequences."""

from __future__ import annotations

import os
import select
import termios
import time
import tty
from types import TracebackType
from typing import Self

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
    "\x0c": "repaint",  # Ctrl+L
    "k": "up",
    "j": "down",
    "\x03": "q",  # Ctrl+C and Ctrl+D, on terminals that send them as characters
    "\x04": "q",
}
STEPS = {"up": -1, "down": 1, "page up": -10, "page down": 10}  # keys that select or scroll
ESCAPE_S = 0.05  # time for the rest of an escape sequence, which a slow connection may split


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
            alone, self._rest = self._rest == "\x1b", ""
            return ["escape"] if alone else []
        try:
            typed = os.read(self._fd, 1024)
        except OSError:
            typed = b""
        if not typed:  # readable without data: the terminal was closed
            return ["q"]
        keys, self._rest = decode(self._rest + typed.decode(errors="replace"))
        return keys
