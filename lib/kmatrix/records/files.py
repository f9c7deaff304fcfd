"""Read and write the files of a run: JSON objects, append-only logs, and the end of a growing file.

A reader of an append-only log returns the complete lines, and skips a half-written last one.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from kmatrix.records.decode import SCHEMA, decode, decode_line, indented_text
from kmatrix.redaction.redactor import redact_json


def before(_what: str, _path: Path) -> None:
    """Be called before each change of a file: tests let a process die here, or another one be faster."""


CHUNK = 1 << 18  # bytes per read: bounds the memory of a process that starts to follow a large file
R = TypeVar("R")
LARGEST = 1 << 1023  # integers below are finite as floats
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})  # storage without hard links


def _partial(path: Path) -> Path:
    # Two nodes may write one file. os.urandom, as secrets imports OpenSSL: 4 MiB of the 25 that a recorder may use.
    return path.with_name(f".{path.name}.{os.uname().nodename[:16]}.{os.urandom(4).hex()}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` if the block succeeds: readers see the old file or the new one.

    The caller flushes to disk if that matters.
    """
    temporary = _partial(path)
    try:
        yield temporary
        before("rename", path)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # half-written, after an exception


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = True, parents: bool = True) -> None:
    """Write a JSON object with its schema, without keys, atomically; durable and parents as for `write_bytes`."""
    write_bytes(path, _encoded(value), durable=durable, parents=parents)


def create_json(path: Path, value: Mapping[str, Any]) -> None:
    """Make a JSON file, complete: of two processes on any hosts, one succeeds. Raises FileExistsError."""
    data = _encoded(value)
    temporary = _partial(path)
    with _named(path):
        try:
            before("write", temporary)
            temporary.write_bytes(data)
            before("link", path)
            os.link(temporary, path)  # as O_EXCL, but a kill leaves no empty file
        except OSError as error:
            if error.errno == errno.EEXIST and temporary.stat().st_nlink == 2:
                return  # made, and the answer of a server of NFS was lost: link(2)
            if error.errno not in NO_LINKS:
                raise
            with path.open("xb") as file:
                file.write(data)
        finally:
            temporary.unlink(missing_ok=True)


def move(path: Path, target: Path) -> None:
    """Rename a file or a folder."""
    before("move", path)
    path.rename(target)


def names(folder: Path | str) -> list[str]:
    """Return the names in a folder, none without it. On NFS a list is fresh where looking for a name may not be."""
    try:
        return os.listdir(folder)  # noqa: PTH208 (names are enough)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _encoded(value: Mapping[str, Any]) -> bytes:
    return f"{indented_text({'schema': SCHEMA, **redact_json(value)})}\n".encode()


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, *, durable: bool = True, parents: bool = True) -> None:
    """Write a file atomically, and create its folder.

    durable: flush it to disk before it replaces the old one; not worth it for one that is written every second.
    parents: without it, a missing folder raises FileNotFoundError: what was moved must not begin again at its old path.
    """
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    with _named(path):
        before("write", path)
        with replacing(path) as temporary, temporary.open("xb") as file:
            file.write(data)
            file.flush()
            # Before the rename: after a power failure, some file systems have the new name but not yet its content.
            if durable:
                os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Give an error of a disk the name of the file: it has that of a temporary one, or none while bytes are written."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """Return one JSON object as it is. Raises RecordError if it is missing or damaged."""
    return decode(path, dict[str, Any])


def finite(value: object) -> float | None:
    """Return a JSON value as a float, or None if it is not a finite number.

    >>> finite(3), finite(float("nan")), finite("3"), finite(True)
    (3.0, None, None, None)
    """
    # type(): True is an int. JSON allows integers of any size.
    if type(value) is float or (type(value) is int and abs(value) < LARGEST):
        return float(value) if math.isfinite(value) else None
    return None


def append_jsonl(path: Path, value: Mapping[str, Any]) -> None:
    """Append one line to an append-only log, without keys: the whole line, or nothing if an OSError is raised."""
    rest = (json.dumps({"schema": SCHEMA, **redact_json(value)}) + "\n").encode()
    before("append", path)
    with _named(path), path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while rest:  # the last block of a disk may have space for a part of the line
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise


def end_torn_line(path: Path) -> None:
    """End the last line of an append-only log after a crash, so that the next entry starts on its own line."""
    with suppress(FileNotFoundError), _named(path), path.open("rb+", buffering=0) as file:
        if file.seek(0, 2) and file.seek(-1, 2) is not None and file.read(1) != b"\n":
            file.write(b"\n")


class LineTail(Generic[R]):
    """Read the new complete lines of an append-only log as records of one type, a chunk per call."""

    def __init__(self, path: Path, kind: type[R], *, last_bytes: int | None = None) -> None:
        """Start at the beginning of the file. last_bytes: of what it holds now, skip all but these."""
        self._path, self._kind = path, kind
        self._offset = max(0, path.stat().st_size - last_bytes) if last_bytes is not None and path.exists() else 0

    def read(self) -> list[tuple[int, R]]:
        """Return the next records, each with its offset in the file; an empty list if nothing is new.

        Damaged lines are skipped. A file that has become shorter was replaced, and is read from its beginning.
        Raises OSError if the file exists but cannot be read.
        """
        found: list[tuple[int, R]] = []
        for line in self._lines():
            value = decode_line(line, self._kind)
            if value is not None:
                found.append((self._offset, value))
            self._offset += len(line)
        return found

    def _lines(self) -> Iterator[bytes]:
        """Yield the complete lines of the next chunk; a line longer than a chunk extends it."""
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
        # The rest after the last line end is read again by the next call.
        yield from part[: part.rfind(b"\n") + 1].splitlines(keepends=True)


def last_lines(file: BinaryIO, *, most_bytes: int = 1 << 16, start: int = 0) -> list[str]:
    """Return the lines in the last bytes of a text file after `start`, and leave the file at its end.

    A line that begins before the last `most_bytes` is omitted, unless it is the only one.
    """
    begin = max(start, file.seek(0, 2) - most_bytes)
    file.seek(begin)
    lines = file.read().decode("utf-8", errors="replace").splitlines(keepends=True)
    return lines[1:] if begin > start and len(lines) > 1 else lines
