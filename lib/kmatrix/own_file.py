"""Open files of a results folder, which may be a copy, or somebody else's.

They are never written through a link. Only files are read: a named pipe or a device in their place has no end.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20  # bytes per read of a file that is copied
MOST_BYTES = 1 << 31  # of a file that is read as a whole
IN_PLACE = os.O_RDWR | os.O_CREAT  # what a file is opened for that is written at any position


def open_own(path: str | Path, flags: int = IN_PLACE, mode: int = 0o644) -> int:
    """Return a descriptor of a file that is written in place. Programs that this process starts do not inherit it.

    A file with other hard links (`cp -al`) is replaced by a copy first, so that the others stay as they
    are. Raises OSError for a symbolic link, and for anything else that is not a file.
    """
    handle = open_file(path, flags & ~os.O_TRUNC, mode)  # truncated last: it may be somebody else's file until then
    try:
        if os.fstat(handle).st_nlink > 1:
            _replace_by_copy(Path(path))
            os.close(handle)
            handle = open_file(path, flags & ~os.O_TRUNC, mode)
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
    except OSError:
        os.close(handle)
        raise
    return handle


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder during a block, which has to be short: others wait."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def lock_writing(handle: int) -> bool:
    """Lock a file until it is closed, for this writer alone. Return False if another one has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some file systems have no locks.
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def opener(name: str, flags: int) -> int:
    """Open a file for `open(..., opener=opener)`."""
    return open_own(name, flags)


def private_opener(name: str, flags: int) -> int:
    """Open a file as `opener` does; if it is new, only its owner may read it."""
    return open_own(name, flags, 0o600)


def open_file(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """Return a descriptor of a file, which may have other hard links. Raises OSError as `open_own` does."""
    try:
        # O_NONBLOCK: a named pipe must not make it wait.
        handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which could lead to any file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return handle


def open_to_read(path: str | Path) -> BinaryIO:
    """Open a file for reading, also through links. Raises OSError for anything else, such as a named pipe."""
    return os.fdopen(read_descriptor(path), "rb")


_storage = {"lists names first": False}
# The last folder, whose files are mostly read in a row; its names; and whether other files stay missing.
_listed: tuple[str, frozenset[str], bool] = ("", frozenset(), False)


def list_names_first() -> None:
    """List the folder of each file before it is opened for reading, from now on, in this process.

    On network storage, a host that has looked for a missing file may not find it for up to a minute after it was made;
    a list is fresh, and a name that was never looked for in vain is found at once.
    """
    _storage["lists names first"] = True


def may_exist(path: str | Path) -> bool:
    """Return whether it is worth looking for a file: False if its folder, listed as above, does not have it."""
    if not _storage["lists names first"]:
        return True
    folder, name = os.path.split(path)
    last, names, is_final = _listed  # once: another thread may replace it
    # A file that was removed since is looked for in vain, and stays away.
    if last == folder and (is_final or name in names):
        return name in names
    return name in _list(folder, is_final=False)


def _list(folder: str, *, is_final: bool) -> frozenset[str]:
    global _listed  # noqa: PLW0603  (a cache of one entry)
    try:
        names = frozenset(os.listdir(folder or "."))  # noqa: PTH208  (names alone)
    except OSError:
        return frozenset()
    _listed = (folder, names, is_final)
    return names


@contextmanager
def listed_once(folder: str) -> Iterator[None]:
    """Return a context for reading the files of a folder to which nobody writes now.

    A file that it does not have stays missing for as long as files of no other folder are read, without further lists.
    """
    if not _storage["lists names first"]:
        yield
        return
    _list(folder, is_final=True)
    try:
        yield
    finally:
        _list_again()


def _list_again() -> None:
    global _listed  # noqa: PLW0603  (a cache of one entry)
    _listed = ("", frozenset(), False)


def read_descriptor(path: str | Path) -> int:
    """Return a descriptor of a file for reading. Raises OSError as `open_to_read` does."""
    if not may_exist(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a named pipe must not make it wait
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a file", str(path))


def read_file(path: str | Path) -> bytes:
    """Return the content of a file. Raises OSError as `open_to_read` does, and for a file that is too large."""
    with open(read_descriptor(path), "rb", buffering=0) as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it is too large: {size / 2**30:.1f} GiB", str(path))
        return file.readall()


def _replace_by_copy(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
    try:
        with path.open("rb") as source, temporary.open("xb") as target:
            while data := source.read(CHUNK):
                target.write(data)
        temporary.chmod(path.stat().st_mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
