"""The claim on a share: a file that the runner in a job rewrites, where a lock of the kernel would not do.

On network storage, two nodes may hold the same flock, and a file may look as it did half a minute ago. A claim needs
neither: one process writes it, each time by a rename, with a counter that grows; a reader lists the folder first, and
measures its age by the clock of the storage, against a file that it has just written there itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.errors import SchemaError
from kmatrix.own_file import open_to_read, opener
from kmatrix.records.decode import as_json, replaced
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import ShareOwner, read_share_owner
from kmatrix.records.jobs.paths import ShareDir

PULSE_S = 10.0  # between two writes
# A claim that was not rewritten for this long has no runner: a few pulses, and caches of network storage of up to a
# minute (acregmax of nfs(5)).
FRESH_S = 100.0


@dataclass(slots=True)
class Claim:
    """The claim that this process has on a share; a thread rewrites it until `end`."""

    share: ShareDir
    owner: ShareOwner
    on_loss: Callable[[], None] | None = None  # called in a thread when another runner has taken the share
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Write the claim, and keep it fresh. Raises OSError if it cannot be written."""
        self.share.folder.mkdir(parents=True, exist_ok=True)
        self._write()
        threading.Thread(target=self._keep, daemon=True, name="claim").start()

    def end(self) -> None:
        """Stop rewriting the claim, whose file stays as it is."""
        self._over.set()

    def publish(self, spent: Mapping[str, float]) -> None:
        """Publish what the runs of the share have taken, with the next pulse. spent: run -> seconds."""
        with self._lock:
            self.owner = replaced(self.owner, spent=dict(spent))

    def is_ours(self) -> bool:
        """Return whether no other job, and no later start of this job, has taken the share meanwhile."""
        try:
            found = fresh_owner(self.share)
        except SchemaError:  # of a later version of kmatrix: not this process
            return False
        return found is None or (found.job == self.owner.job and found.restart <= self.owner.restart)

    def _keep(self) -> None:
        while not self._over.wait(PULSE_S):
            with suppress(OSError):  # a full disk, or storage that does not answer: the next pulse tries again
                if not self.share.path.is_dir():  # moved or deleted: it must not begin again at its old path
                    return
                if self.is_ours():
                    self._write()
                    continue
                if self.on_loss is not None:
                    self.on_loss()
                    return

    def _write(self) -> None:
        with self._lock:
            self.owner = replaced(self.owner, counter=self.owner.counter + 1)
            write_json(self.share.owner, as_json(self.owner), durable=False, parents=False)


def fresh_owner(share: ShareDir) -> ShareOwner | None:
    """Return the claim of a share as it is on the storage now, however old it is; None without one."""
    return read_share_owner(share) if is_listed(share.owner) else None


def is_listed(path: Path) -> bool:
    """Return whether a folder lists a file. A list is fresh where looking for the name may not be, and refreshes it."""
    try:
        return path.name in os.listdir(path.parent)  # noqa: PTH208  (names alone)
    except OSError:
        return False


def age_s(path: Path) -> float | None:
    """Return the seconds since a file was written, by the clock of its storage; None if it is missing.

    Caches may make it look older than it is, by as long as they keep attributes.
    """
    if not is_listed(path):
        return None
    try:
        now = storage_time(path.parent)
        # Opened, because that asks a server of NFS for the attributes, where looking for the name may not.
        with open_to_read(path) as file:
            return max(0.0, now - os.fstat(file.fileno()).st_mtime)
    except OSError:
        return None


def is_claimed(share: ShareDir) -> bool:
    """Return whether a runner has rewritten the claim of a share lately."""
    age = age_s(share.owner)
    return age is not None and age < FRESH_S


def storage_time(folder: Path) -> float:
    """Return the time of the storage of a folder: that of a file which was just written. Unix seconds.

    Raises OSError if nothing can be written there.
    """
    path = folder / f".time.{os.uname().nodename[:16]}.{os.urandom(4).hex()}"
    try:
        with open(path, "xb", opener=opener) as file:
            file.write(b"\n")  # not empty: some servers set the time at the first write only
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)
