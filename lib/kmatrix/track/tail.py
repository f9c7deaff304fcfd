"""Files that grow, each line read once: what was there already, and what is appended while one looks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 18  # bytes that are read at a time


class LineTail:
    """The complete lines of an append-only log, in parts. A half-written last line is left until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the next objects, each with its offset in the file; nothing where nothing is new.

        A file that has become shorter was replaced, and is read from its beginning.
        Raises OSError where it is there and cannot be read.
        """
        found: list[tuple[int, dict[str, Any]]] = []
        for line in self._lines():
            value = _object(line)
            if value is not None:
                found.append((self._offset, value))
            self._offset += len(line)
        return found

    def _lines(self) -> Iterator[bytes]:
        """Yield the complete lines of the next part that holds one."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            part = file.read(CHUNK)
            while part and b"\n" not in part and (more := file.read(CHUNK)):
                part += more
        yield from part[: part.rfind(b"\n") + 1].splitlines(keepends=True)


class ArrayTail:
    """The objects of a JSON array to which a recorder appends, one to a line: gpu.formats.JsonArrayFile writes it.

    The closing bracket is written over by the next object, so only whole objects move the reader on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the next objects of about one chunk; nothing where nothing is new."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            part = file.read(CHUNK)
            while part.count(b"\n") < 2 and (more := file.read(CHUNK)):
                part += more
        return self._objects(part)

    def _objects(self, part: bytes) -> list[dict[str, Any]]:
        found, begin = [], self._offset
        at = 0
        for line in part.splitlines(keepends=True):
            at += len(line)
            value = _object(line.rstrip(b"\n").removesuffix(b","))
            if value is not None:
                found.append(value)
                self._offset = begin + at - (len(line) - len(line.rstrip(b",\n")))
        return found


def is_number(value: object) -> bool:
    """Whether a value of JSON is a number that a tracker can draw."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _object(text: bytes) -> dict[str, Any] | None:
    """Return the object that a line is; None for a bracket, or a line that was cut short."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
