"""What the process says, as far as the disk of its log takes it: a full one ends neither it nor a tracker's package."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


class _Lossy(io.RawIOBase):
    """A descriptor that takes everything, and loses what cannot be written."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):  # a full disk: what is said is lost, what is sent is not
            os.write(self._number, data)
        return len(data)


def lossy_output() -> None:
    """Let print and sys.stderr of this process never fail from now on."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(io.BufferedWriter(_Lossy(number)), errors="replace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)  # kept alive, whatever is laid over it: its end would close the descriptor
