"""Keys from a terminal, one at a time, and the terminal put right afterwards."""

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
    "k": "up",
    "j": "down",
    "\x03": "q",
    "\x04": "q",
}
HALF_S = 0.05  # how long the rest of an escape sequence may take


def decode(text: str) -> tuple[list[str], str]:
    """Return the names of the keys in what was typed, and an escape sequence that is not whole yet."""
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
    """Return the length of the escape sequence that begins a text; None while its end is to come."""
    if len(text) < 2:
        return None
    if text[1] == "O":
        return 3 if len(text) > 2 else None
    if text[1] != "[":
        return 1
    return next((i + 1 for i in range(2, len(text)) if "@" <= text[i] <= "~"), None)


class Keyboard:
    """The keys of the terminal `fd`; without a terminal there is no key. A context manager: leaving it restores."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._saved: list[int | list[bytes | int]] | None = None
        self._rest = ""

    def __enter__(self) -> Self:
        if os.isatty(self._fd):
            self._saved = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            try:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, saved)
            except termios.error:
                return  # the terminal is gone: there is nothing to restore

    def read(self, timeout: float) -> list[str]:
        """Wait up to `timeout` seconds and return the keys pressed; a terminal that is gone is the key q."""
        if self._saved is None:
            time.sleep(timeout)
            return []
        if not select.select([self._fd], [], [], HALF_S if self._rest else timeout)[0]:
            self._rest = ""  # a lone escape means nothing here
            return []
        try:
            typed = os.read(self._fd, 1024)
        except OSError:
            typed = b""
        if not typed:
            return ["q"]
        keys, self._rest = decode(self._rest + typed.decode(errors="replace"))
        return keys
