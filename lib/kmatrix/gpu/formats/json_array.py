"""A JSON array in a file that is valid after every append, at a cost independent of its size."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kmatrix.locks import is_locked_now
from kmatrix.records.decode import decode_line
from kmatrix.records.files import CHUNK

START, TAIL = b"[\n", b"\n]\n"
MAX_OBJECT = 1 << 17  # bytes at the end of a file in which the last object is searched
HELD = "another program writes it"
MAX_DAMAGED = 16  # lines without an object that are skipped in a search


class JsonArrayFile:
    """Appends objects to a JSON array: one write replaces the closing bracket with the next object and a new bracket.

    An existing array is continued, without an incomplete last object. Raises BlockingIOError if another writer has it.
    Raises OSError on a full disk; the array then stays valid, without the new object.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not is_locked_now(self._file):
                raise BlockingIOError(errno.EAGAIN, HELD, str(path))
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
            # One write with the bracket: a reader, or a kill, never sees the array without its end.
            write_at(self._file, data + TAIL, self._end)
        except OSError:
            self._close_array()  # a partial write may have replaced the bracket
            raise
        self._end += len(data)
        self._empty = False

    def close(self) -> None:
        os.close(self._file)

    def is_open_elsewhere(self) -> bool:
        """Return whether another process has the file open; False if the file system cannot tell."""
        # The kernel refuses a write lease while the file is open elsewhere: fcntl(2).
        try:
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
        return False

    def _close_array(self) -> None:
        """Write the closing bracket after the last complete object."""
        write_at(self._file, START + TAIL if self._empty else TAIL, 0 if self._empty else self._end)
        os.ftruncate(self._file, self._end + len(TAIL))


class PublishedArrayFile:
    """Appends objects to a JSON array that readers see with all of its last object, however slowly they read.

    Two hidden copies are written in turn, and each is published by a rename when it is complete. A copy that a reader
    still has open is not written: its objects follow later. Raises OSError as JsonArrayFile does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden = [path.with_name(f".{path.name}.{number}") for number in (1, 2)]
        self._arrays: list[JsonArrayFile] = []
        self._pending: list[list[Mapping[str, Any]]] = [[], []]  # objects that a copy does not have yet
        self._next = 0  # the copy that is not published
        with _locked(path.parent):  # of two that start at the same time, the second sees the copies of the first
            if any(map(_is_written, self._hidden)):
                raise BlockingIOError(errno.EAGAIN, HELD, str(path))
            self._make_copies()

    def append(self, value: Mapping[str, Any]) -> None:
        """Append one object. It is published later if a reader has the other copy open."""
        for pending in self._pending:
            pending.append(value)
        if not self._arrays[self._next].is_open_elsewhere():
            self._publish()

    def close(self) -> None:
        """Publish all objects, and delete the hidden names."""
        try:
            if any(self._pending[1 - self._next]):
                self._publish()
        finally:
            self._delete_copies()

    def _make_copies(self) -> None:
        try:
            for copy in self._hidden:
                copy.unlink(missing_ok=True)  # of a writer that was killed; it may be a link of the published file
                if self._path.exists():
                    shutil.copyfile(self._path, copy)
                self._arrays.append(JsonArrayFile(copy))
            self._publish()
        except OSError:
            self._delete_copies()
            raise

    def _delete_copies(self) -> None:
        for array in self._arrays:
            array.close()
        for copy in self._hidden:
            with suppress(OSError):  # its folder may be gone
                copy.unlink()

    def _publish(self) -> None:
        """Append all objects to the next copy and give it the name of the file."""
        pending, array = self._pending[self._next], self._arrays[self._next]
        while pending:
            array.append(pending[0])
            del pending[0]
        # A second name, because the hidden one is needed again. A rename replaces the published file at once.
        link = self._path.with_name(f".{self._path.name}.link")
        link.unlink(missing_ok=True)
        os.link(self._hidden[self._next], link)
        link.replace(self._path)
        self._next = 1 - self._next


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder during a block, which has to be short: others wait."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_written(copy: Path) -> bool:
    """Return whether another process writes this copy."""
    try:
        with copy.open("rb") as file:
            return not is_locked_now(file.fileno())
    except OSError:
        return False  # there is none


def open_published(path: Path) -> PublishedArrayFile | JsonArrayFile:
    """Return a file that readers always see complete; on a file system without hard links, one that they may not."""
    try:
        return PublishedArrayFile(path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        return JsonArrayFile(path)


def write_at(file: int, data: bytes | bytearray, offset: int) -> None:
    """Write all of `data` at `offset`, or raise OSError: on a full disk, a write can be partial."""
    written = os.pwrite(file, data, offset)
    while written < len(data):
        more = os.pwrite(file, data[written:], offset + written)
        if not more:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += more


def last_entry(path: Path) -> dict[str, Any] | None:
    """Return the last complete object of an array in the layout of JsonArrayFile, or None.

    Reads the end of the file only.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_OBJECT))
            lines = file.read().splitlines()
    except OSError:
        return None  # no recording
    for line in reversed(lines):
        try:
            value = json.loads(line.rstrip(b","))
        except ValueError:
            continue  # a bracket, or an incomplete object
        if isinstance(value, dict):
            return value
    return None


def entry_until(
    path: Path, time_of: Callable[[Mapping[str, Any]], float | None], until: float
) -> dict[str, Any] | None:
    """Return the last object of an array in the layout of JsonArrayFile whose time is not after `until`, or None.

    The objects are in the order of time, so that a search by halves reads few of them.
    """
    found = None
    try:
        with path.open("rb") as file:
            begin, end = 0, file.seek(0, os.SEEK_END)  # the object begins between these
            while begin < end:
                middle = (begin + end) // 2
                value = _object_from(file, middle, end)
                time = None if value is None else time_of(value)
                if time is None or time > until:
                    end = middle
                else:
                    found, begin = value, file.tell()
    except OSError:
        return None  # no recording
    return found


def _object_from(file: BinaryIO, begin: int, end: int) -> dict[str, Any] | None:
    """Return the first object whose line begins between two offsets, or None. The file is then at the next line."""
    file.seek(max(0, begin - 1))
    if begin:
        file.readline(MAX_OBJECT)  # the rest of a line that begins before
    for _ in range(MAX_DAMAGED):
        if file.tell() >= end:
            return None
        value = decode_line(file.readline(MAX_OBJECT).rstrip(b"\n").removesuffix(b","), dict[str, Any])
        if value is not None:
            return value
    return None


def _resume(file: int) -> tuple[int, bool]:
    """Return the end offset of the last complete object, and whether the array is empty. One object is one line."""
    # From the end, in steps: a recording of days must not be read as a whole to continue it.
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
    """Return the end offset of the last complete object in these lines, without the comma after it."""
    end = len(text)
    while end > 0:
        begin = text.rfind(b"\n", 0, end) + 1
        line = text[begin:end].rstrip(b",\n")
        try:
            if isinstance(json.loads(line), dict):
                return begin + len(line)
        except ValueError:
            pass  # a bracket, or an incomplete line
        end = begin - 1
    return None


class ArrayTail:
    """Reads a growing JSON array written by JsonArrayFile, one object per line.

    The next object overwrites the closing bracket, so only complete objects advance the reader.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the next objects, about one chunk, empty if there is nothing new."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            # Shorter than before: the file was replaced by a new one.
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            part = file.read(CHUNK)
            # An object with hundreds of GPUs can be longer than a chunk: read on until one line is complete.
            while part.count(b"\n") < 2 and (more := file.read(CHUNK)):
                part += more
        return self._objects(part)

    def _objects(self, part: bytes) -> list[dict[str, Any]]:
        found, begin = [], self._offset
        at = 0
        for line in part.splitlines(keepends=True):
            at += len(line)
            value = decode_line(line.rstrip(b"\n").removesuffix(b","), dict[str, Any])
            if value is not None:
                found.append(value)
                self._offset = begin + at - (len(line) - len(line.rstrip(b",\n")))
        return found
