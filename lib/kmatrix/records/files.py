"""Read and write the files of a run: JSON objects, append-only logs, and the end of a growing file.

Readers refuse a newer schema. A reader of an append-only log returns the complete lines and skips a half-written last
one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from kmatrix.own_file import open_own, open_to_read, opener
from kmatrix.records.decode import SCHEMA, decode, decode_line, decode_optional, indented_text
from kmatrix.redaction.redactor import redact_json


def before(_what: str, _path: Path) -> None:
    """Be called before each change of a file: tests let a process die here, or another one be faster."""


NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})  # storage without hard links


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; rename it to `path` if the block succeeds, else delete it.

    Readers see the old file or the new one, never a part of one. The caller flushes to disk if that matters.
    """
    # Host and random suffix: on a shared file system, two nodes may write the same file under the same process id.
    host = os.uname().nodename[:16]
    # os.urandom instead of secrets, which imports OpenSSL: 4 MiB of the 25 MiB that a recorder may use.
    temporary = path.with_name(f".{path.name}.{host}.{os.urandom(4).hex()}.partial")
    try:
        yield temporary
        before("rename", path)
        temporary.replace(path)
    finally:
        # After the rename there is nothing to delete; after an exception, a half-written file.
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = True, parents: bool = True) -> None:
    """Write a JSON object with its schema, without keys, atomically.

    durable: wait until the data are on disk; not worth it for a file that is rewritten every second.
    parents: as for `write_bytes`.
    """
    write_bytes(path, json_text(value).encode(), durable=durable, parents=parents)


def create_json(path: Path, value: Mapping[str, Any]) -> None:
    """Make a JSON file that must not exist, complete, in a folder that exists.

    Of two processes on any hosts, one succeeds. Raises FileExistsError.
    """
    data = json_text(value).encode()
    temporary = path.with_name(f".{path.name}.{os.uname().nodename[:16]}.{os.urandom(4).hex()}.partial")
    with _named(path):
        try:
            before("write", temporary)
            with open(temporary, "xb", opener=opener) as file:
                file.write(data)
            before("link", path)
            os.link(temporary, path)  # as O_EXCL, but a kill leaves no empty file
        except OSError as error:
            if error.errno == errno.EEXIST and temporary.stat().st_nlink == 2:
                return  # made, and the answer of a server of NFS was lost: link(2)
            if error.errno not in NO_LINKS:
                raise
            with open(path, "xb", opener=opener) as file:
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


def json_text(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON file: an object with its schema."""
    return indented_text({"schema": SCHEMA, **redact_json(value)}) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, *, durable: bool = True, parents: bool = True) -> None:
    """Write a file atomically, and create its folder.

    durable: flush it to disk before it replaces the old one.
    parents: without it, a missing folder raises FileNotFoundError: what was moved must not begin again at its old path.
    """
    with _named(path):
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        before("write", path)
        with replacing(path) as temporary, open(temporary, "xb", opener=opener) as file:
            file.write(data)
            file.flush()
            # Before the rename: after a power failure, some file systems have the new name but not yet its content.
            if durable:
                os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Give an error of a disk the name of the file: one while bytes are written has none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
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
    """Return one JSON object as it is. To use its values, read it as a record: `kmatrix.records.decode`.

    Raises RecordError if it is missing or damaged, SchemaError if it is too new.
    """
    return decode(path, dict[str, Any])


def read_or_empty(path: Path) -> dict[str, Any]:
    """Return one JSON object, or {} if the file is missing or unreadable. Raises SchemaError if it is too new."""
    return decode_optional(path, dict[str, Any]) or {}


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if the line holds anything else."""
    return decode_line(text, dict[str, Any])


def finite(value: object) -> float | None:
    """Return a JSON value as a float, or None if it is not a finite number.

    >>> finite(3), finite(float("nan")), finite("3"), finite(True)
    (3.0, None, None, None)
    """
    if type(value) is float:  # almost all values of metrics.jsonl: a report converts millions of them
        return value if math.isfinite(value) else None
    # In Python, True is an int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON allows integers of any size
        return None
    return number if math.isfinite(number) else None


_appending = threading.Lock()  # threads of a process may append to one log: a failed write truncates only its own part


def append_jsonl(path: Path, value: Mapping[str, Any]) -> None:
    """Append one line to an append-only log, without keys: the whole line, or nothing if an OSError is raised."""
    line = (json.dumps({"schema": SCHEMA, **redact_json(value)}) + "\n").encode()
    before("append", path)
    with _named(path), _appending, open(path, "ab", buffering=0, opener=opener) as file:
        size, rest = file.seek(0, os.SEEK_END), line
        try:
            while rest:  # the last block of a disk may have space for a part of the line
                rest = rest[file.write(rest) :]
            file.close()  # a network file system may report a full quota only now
        except OSError:
            handle = open_own(path, os.O_WRONLY)
            try:
                os.ftruncate(handle, size)
            finally:
                os.close(handle)
            raise


def end_torn_line(path: Path) -> None:
    """End the last line of an append-only log after a crash, so that the next entry starts on its own line."""
    with suppress(FileNotFoundError), _named(path), open(path, "rb+", buffering=0, opener=opener) as file:
        # An empty file has no last byte to seek to.
        if file.seek(0, 2) and file.seek(-1, 2) is not None and file.read(1) != b"\n":
            file.write(b"\n")


CHUNK = 1 << 18  # bytes per read: bounds the memory of a process that starts to follow a large file


R = TypeVar("R")


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
            file = open_to_read(self._path)
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
    """Return the lines in the last bytes of a text file, with their line ends, and leave the file at its end.

    A line that begins before the last `most_bytes` is omitted, unless it is the only one.
    start: ignore the bytes before this offset.
    """
    begin = max(start, file.seek(0, 2) - most_bytes)
    file.seek(begin)
    lines = file.read().decode("utf-8", errors="replace").splitlines(keepends=True)
    return lines[1:] if begin > start and len(lines) > 1 else lines
