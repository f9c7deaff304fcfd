"""A JSON array in a file that is whole after every append, at a cost that does not grow with the file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START, TAIL = b"[\n", b"\n]\n"
MOST_OBJECT = 1 << 17  # bytes within which the last object of an array is looked for


class JsonArrayFile:
    """Appends objects to a JSON array: one write lays the next object and the closing bracket over the old bracket.

    An array that is there already is continued; a last object that was cut short is left out of it.
    Raises OSError when the disk takes nothing more: the array stays whole, without that object.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._end, self._empty = _resume(self._file)
            self._close_array()
        except OSError:
            os.close(self._file)
            raise

    def append(self, value: Mapping[str, Any]) -> None:
        """Append one object."""
        text = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        data = text if self._empty else b",\n" + text
        try:
            write_at(self._file, data + TAIL, self._end)
        except OSError:
            self._close_array()
            raise
        self._end += len(data)
        self._empty = False

    def close(self) -> None:
        os.close(self._file)

    def _close_array(self) -> None:
        """Put the closing bracket behind the last whole object."""
        write_at(self._file, START + TAIL if self._empty else TAIL, 0 if self._empty else self._end)
        os.ftruncate(self._file, self._end + len(TAIL))


def write_at(file: int, data: bytes | bytearray, offset: int) -> None:
    """Write all of `data` at `offset`, or raise OSError: a full disk can take a part."""
    written = os.pwrite(file, data, offset)
    while written < len(data):
        more = os.pwrite(file, data[written:], offset + written)
        if not more:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += more


def last_entry(path: Path) -> dict[str, Any] | None:
    """Return the newest whole object of an array that such a file holds; None where there is none.

    Costs the end of the file, however long it is.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_OBJECT))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            value = json.loads(line.rstrip(b","))
        except ValueError:
            continue  # a bracket, or an object that is being written
        if isinstance(value, dict):
            return value
    return None


def _resume(file: int) -> tuple[int, bool]:
    """Return where the last whole object ends, and whether there is none. One object is one line."""
    size = os.fstat(file).st_size
    position, last = size, b""
    while position > len(START):
        step = min(1 << 16, position - len(START))
        position -= step
        last = os.pread(file, step, position) + last
        begin = 0 if position == len(START) else last.find(b"\n") + 1
        end = _last_object(last[begin:]) if begin or position == len(START) else None
        if end is not None:
            return position + begin + end, False
    return len(START), True


def _last_object(text: bytes) -> int | None:
    """Return where the last whole object of these lines ends, without the comma behind it."""
    end = len(text)
    while end > 0:
        begin = text.rfind(b"\n", 0, end) + 1
        line = text[begin:end].rstrip(b",\n")
        try:
            if isinstance(json.loads(line), dict):
                return begin + len(line)
        except ValueError:
            pass  # a bracket, or a line that was cut short
        end = begin - 1
    return None
