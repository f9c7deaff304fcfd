"""Copies of data on a disk of the node: made once, checked, shared by the runs there, and removed when unused.

STAGE_DIR is a folder of each node. The record of a run keeps the path of its data on the shared storage; ranks look up
the copy in the environment (`kmatrix.records.dataset.local_copy`). Without space or rights, they read the original.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.errors import reason_of
from kmatrix.own_file import IN_PLACE, open_file
from kmatrix.records.dataset import RECORD, STAGED, read_dataset_or_empty
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.text import disk_size

MARK = "copy.json"  # in a complete copy: the files of the original, as they were
LOCK = re.compile(r"\.(.+-[0-9a-f]{12})\.lock")  # of a copy: other programs may have files in that folder, such as /tmp
UNUSED_S = 86400.0  # a copy that nobody has used for so long is removed
SPARE = 1 << 30  # bytes that stay free
CHUNK = 1 << 24  # bytes
WAIT_S = 0.5  # between two looks at a copy that another process makes


class StagingError(Exception):
    """The data cannot be copied; the original is read instead."""


@dataclass(slots=True)
class Stage:
    """The copies that this process uses. They are kept as long as it lives."""

    folder: Path
    say: Callable[[str], None]
    is_cancelled: Callable[[], bool] = lambda: False
    copies: dict[str, str] = field(default_factory=dict)  # folder of the original -> that of the copy
    _locks: list[int] = field(default_factory=list)

    def environment(self, runs: Iterable[RunDir]) -> Mapping[str, str]:
        """Return the variable that tells ranks where the copies are, after the data of these runs were copied."""
        for data in sorted({path for run in runs for path in folders_of(run)}):
            if data in self.copies or self.is_cancelled():
                continue
            try:
                self.copies[data] = str(self._copy(Path(data)))
            except (OSError, StagingError) as error:
                why = reason_of(error) if isinstance(error, OSError) else str(error)
                self.say(f"note: {data} is read from the shared storage: STAGE_DIR={self.folder}: {why}")
        return {STAGED: json.dumps(self.copies)}

    def _copy(self, data: Path) -> Path:
        """Return the copy of a folder, which is made if there is none. Raises OSError or StagingError."""
        if not self.folder.is_absolute():  # a variable without a value: the copy would be made in the checkout
            raise StagingError("not an absolute path on this node")
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_unused(self.folder, older_s=UNUSED_S)
        files = contents(data)
        # The path is part of the name: two folders may have the same one.
        target = self.folder / f"{data.name}-{hashlib.sha256(os.fsencode(data)).hexdigest()[:12]}"
        lock = open_file(target.with_name(f".{target.name}.lock"), IN_PLACE, 0o600)
        try:
            is_alone = self._lock(lock, target)
            if marked(target) != files:
                if not is_alone:
                    raise StagingError(f"{target} is an older copy, which other runs use")
                self._make(data, target, files)
            else:
                self.say(f"reads {data} from its copy {target}")
            os.utime(lock)
            fcntl.flock(lock, fcntl.LOCK_SH)
        except BaseException:
            os.close(lock)
            raise
        self._locks.append(lock)
        return target

    def _lock(self, lock: int, target: Path) -> bool:
        """Lock a copy, after the process that makes it; return whether no other process uses it."""
        is_reported = False
        while True:
            for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):  # shared: others read it; neither: one makes it
                with suppress(BlockingIOError):
                    fcntl.flock(lock, kind | fcntl.LOCK_NB)
                    return kind == fcntl.LOCK_EX
            if not is_reported:
                self.say(f"waiting for another process of this node that copies to {target}")
                is_reported = True
            if self.is_cancelled():
                raise StagingError("stopped")
            time.sleep(WAIT_S)

    def _make(self, data: Path, target: Path, files: Mapping[str, list[int]]) -> None:
        needed = sum(size for size, _ in files.values())
        free = shutil.disk_usage(self.folder).free
        if free < needed + SPARE:
            remove_unused(self.folder, older_s=0.0)
            free = shutil.disk_usage(self.folder).free
        if free < needed + SPARE:
            raise StagingError(f"{disk_size(needed)} and {disk_size(SPARE)} to spare needed, {disk_size(free)} free")
        began = time.monotonic()
        shutil.rmtree(target, ignore_errors=True)  # an incomplete or outdated copy
        target.mkdir(mode=0o700)
        known = {shard.name: shard.sha256 for shard in read_dataset_or_empty(data / RECORD).shards}
        for name in files:
            found = self._copy_file(data / name, target / name)
            if name in known and found != known[name]:
                shutil.rmtree(target, ignore_errors=True)
                raise StagingError(f"{name} is damaged: its hash is {found[:12]}..., expected {known[name][:12]}...")
        write_json(target / MARK, {"source": str(data), "files": files})
        self.say(f"copied {data} to {target}: {disk_size(needed)} in {time.monotonic() - began:.0f} s")

    def _copy_file(self, source: Path, target: Path) -> str:
        """Copy a file with its time; return its SHA-256."""
        digest = hashlib.sha256()
        with source.open("rb") as read, target.open("xb") as write:
            while chunk := read.read(CHUNK):
                if self.is_cancelled():
                    raise StagingError("stopped")
                digest.update(chunk)
                write.write(chunk)
        shutil.copystat(source, target)
        return digest.hexdigest()


def folders_of(run: RunDir) -> set[str]:
    """Return the folders with the data of a run: of a mix, that of each of its datasets."""
    train = read_run_file_or_empty(run).train
    data = train.data_path
    if not data or train.data_streaming:  # streamed shards are not there yet
        return set()
    return {data, *(source.path for source in read_dataset_or_empty(Path(data) / RECORD).sources)}


def contents(data: Path) -> dict[str, list[int]]:
    """Return file -> size (bytes) and modification time (ns) of a data folder. Raises OSError."""
    found = {}
    with os.scandir(data) as entries:
        for entry in entries:
            if entry.is_file() and not entry.name.startswith("."):
                about = entry.stat()
                found[entry.name] = [about.st_size, about.st_mtime_ns]
    return dict(sorted(found.items()))


def marked(target: Path) -> Mapping[str, list[int]] | None:
    """Return the files of a complete copy of this user, None without one.

    STAGE_DIR may be a folder of all users, such as /tmp: another user could have put anything there.
    """
    with suppress(Exception):  # a damaged mark: it is copied again
        if target.lstat().st_uid != os.geteuid():
            return None
        files = read_json(target / MARK)["files"]
        sizes = {name: (target / name).stat().st_size for name in files}
        if all(sizes[name] == size for name, (size, _) in files.items()):
            return dict(files)
    return None


def remove_unused(folder: Path, *, older_s: float) -> list[str]:
    """Remove the copies that no process uses, and has used for this time (s); return their names."""
    removed = []
    for path in sorted(folder.glob(".*.lock")):
        found = LOCK.fullmatch(path.name)
        if found is None:
            continue
        with suppress(OSError):
            lock = open_file(path, os.O_RDWR)
            try:
                if time.time() - os.fstat(lock).st_mtime < older_s:  # both of this node
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                target = folder / found[1]
                if target.is_dir():
                    shutil.rmtree(target)
                    removed.append(target.name)
            finally:
                os.close(lock)
    return removed


def stage_folder(text: str) -> Path | None:
    """Return the folder of STAGE_DIR on this node, None for none. Variables of the job may be in it."""
    return Path(os.path.expandvars(text)).expanduser() if text else None
