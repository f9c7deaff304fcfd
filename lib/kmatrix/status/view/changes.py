"""Which files changed since they were read: a view of thousands of runs reads only those."""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.status.activity import ShareState
from kmatrix.status.view.matrix_view import RunView

FileTime = tuple[int, int, int]  # modification time (ns), size (bytes), inode
Signature = tuple[FileTime | ShareState | bool | None, ...]
# A file may change again without a new modification time until the clock of its file system has advanced, as git's
# "racy" index entries: https://git-scm.com/docs/racy-git
COARSE_S = 2.0  # the longest resolution of such a clock: FAT
FINE_S = 0.1  # of file systems with parts of a second: a tick of the kernel, at most 10 ms, with a margin


class RunList:
    """The runs of a matrix, listed again only if its directory has changed."""

    def __init__(self) -> None:
        self._files = FilesRead()
        self._runs: dict[str, KnownRun] = {}

    def read(self, matrix: MatrixDir, now: float) -> Collection[KnownRun]:
        """Return the runs in order. now: Unix seconds."""
        if self._files.must_read((changed(str(matrix.path)),), now) or not self._runs:
            known, self._runs = self._runs, {}
            self._runs = {name: known.get(name) or KnownRun(run) for run in matrix.all_runs() for name in [run.name]}
        return self._runs.values()


class KnownRun:
    """A run with its last view. Its paths are texts, because thousands are looked at per second."""

    __slots__ = ("_written", "files", "folder", "name", "run", "view")

    def __init__(self, run: RunDir) -> None:
        self.run, self.name, self.folder = run, run.name, str(run.path)
        self._written: tuple[str, ...] = ()
        self.files = FilesRead()
        self.view: RunView | None = None

    def written(self) -> tuple[FileTime | None, ...]:
        """Return the times of the files that a run on this machine changes most."""
        self._written = self._written or (str(self.run.status), str(self.run.metrics))
        return tuple([changed(path) for path in self._written])


class FilesRead:
    """Whether files must be read again, by their signature."""

    __slots__ = ("_final", "_signature", "_since")

    def __init__(self) -> None:
        self._signature: Signature = ()
        self._since = 0.0  # monotonic time at which the signature was first seen
        self._final = False  # whether no change since the last reading can have left the signature as it is

    def must_read(self, signature: Signature, now: float) -> bool:
        """Return whether files must be read, which the caller then does. now: Unix seconds.

        A file that was just written is read a second time after the resolution of its modification time has passed.
        """
        if self._final and signature == self._signature:
            return False
        at = time.monotonic()  # after the signature was taken, and before the files are read
        if signature != self._signature:
            self._signature, self._since = signature, at
        self._final = _is_final(signature, now, at - self._since)
        return True

    def read_again(self) -> None:
        """Read the files the next time, whatever their signature says."""
        self._final = False


def changed(path: str) -> FileTime | None:
    """Return the time, size and inode of a file or directory, None without one.

    Files that are replaced change the time of their directory.
    """
    try:
        status = os.stat(path)  # noqa: PTH116  (texts, not paths: thousands of calls per second)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_final(signature: Signature, now: float, seen_s: float) -> bool:
    """Return whether any change of files from now on changes their signature.

    now: Unix seconds. seen_s: how long the signature has been seen, which does not depend on the clock of a server.
    """
    times = [one[0] for one in signature if isinstance(one, tuple)]
    return all(
        # Times in whole seconds are those of a coarse file system, or were set by a program.
        ns < (now - COARSE_S) * 1e9 or seen_s >= (FINE_S if ns % 1_000_000_000 else COARSE_S)
        for ns in times
    )
