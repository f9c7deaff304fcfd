"""The checkpoints of a run and their index: which exist, why each is kept, and which can be deleted. No torch.

The index is written before a checkpoint is created and before one is deleted: a checkpoint is whole, or it is not
listed. A file that a kill left is named in the index, and deleted with the next change.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError, is_full
from kmatrix.own_file import open_to_read
from kmatrix.records.checkpoint_dir import INDEX
from kmatrix.records.decode import Count, Number, Record, UnixTime, as_json, decode, replaced
from kmatrix.records.files import replacing, write_json

PARTIAL = ".*.partial"  # left by a save that was killed
BLOCK = 1 << 22  # bytes hashed per read


class CheckpointKind(StrEnum):
    """Why a checkpoint is kept; it may have several kinds."""

    ROLLING = "rolling"  # one of the newest
    BEST = "best"  # lowest validation loss
    FINAL = "final"  # end of a finished run
    EMERGENCY = "emergency"  # saved when a run was stopped


# At most one checkpoint is of each of these kinds; best.pt and final.pt are hard links to it.
NAMED = (CheckpointKind.BEST, CheckpointKind.FINAL)

# A checkpoint that is only of these kinds is deleted when newer ones exist.
EXPIRING = frozenset({CheckpointKind.ROLLING, CheckpointKind.EMERGENCY})


class Entry(Record, frozen=True, kw_only=True):
    """One checkpoint in the index."""

    name: str  # file name
    step: Count  # optimizer steps done
    kinds: frozenset[CheckpointKind]
    bytes: Count  # size of the file
    sha256: str  # of the file, hexadecimal
    val_loss: Number | None  # nats/token, the last one measured; None before the first evaluation
    attempt: Count  # the attempt that wrote it, from 1
    time: UnixTime

    def __post_init__(self) -> None:
        # `remove` deletes this file: a damaged index must not name one outside the folder.
        if Path(self.name).name != self.name or "\0" in self.name:
            raise ValueError(f"{self.name!r} is not the name of a file in the folder")

    def to_json(self) -> dict[str, Any]:
        return {**as_json(self), "kinds": sorted(self.kinds)}


class IndexFile(Record, frozen=True, kw_only=True):
    """index.json: the checkpoints of a run, oldest first."""

    checkpoints: tuple[Entry, ...]
    deleting: tuple[str, ...] = ()  # files of deleted checkpoints that may still exist


class CheckpointIndex:
    """The checkpoints of one run. entries: oldest first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries, self.deleting = _read(folder)

    @property
    def present(self) -> list[Entry]:
        """Return the entries whose file exists and has the recorded size."""
        return [entry for entry in self.entries if file_size(self.folder / entry.name) == entry.bytes]

    def of_kind(self, kind: CheckpointKind) -> Entry | None:
        """Return the newest present checkpoint of a kind."""
        return next((entry for entry in reversed(self.present) if kind in entry.kinds), None)

    def announce(self, entry: Entry) -> None:
        """Add a checkpoint to the index; its file must be created next."""
        self.entries = [*(without_kinds(old, entry.kinds & {*NAMED}) for old in self.entries), entry]
        self._write()

    def insert(self, entry: Entry) -> None:
        """Add a checkpoint whose entry was lost, before those of later steps: it is not the newest one."""
        # By steps, not by the time of the file: a clock may have been set back, and a copy may have changed the time.
        place = next((n for n, other in enumerate(self.entries) if other.step > entry.step), len(self.entries))
        self.entries = [*self.entries[:place], entry, *self.entries[place:]]
        self._write()

    def mark(self, entry: Entry, kinds: Iterable[CheckpointKind]) -> Entry:
        """Add kinds to a checkpoint and return its new entry."""
        more = frozenset(kinds)
        marked = replaced(entry, kinds=entry.kinds | more)
        others = [without_kinds(old, more & {*NAMED}) for old in self.entries if old != entry]
        self.entries = sorted([*others, marked], key=lambda e: self.names.index(e.name))
        self._write()
        return marked

    @property
    def names(self) -> list[str]:
        """Return the file names, oldest first."""
        return [entry.name for entry in self.entries]

    def remove(self, entries: Iterable[Entry]) -> None:
        """Delete checkpoints: first their entries, all at once, then their files."""
        going = {entry.name for entry in entries}
        if not going:
            return
        # One rename decides. Without the names of the files, one that a kill left would look like a lost entry.
        self.entries = [entry for entry in self.entries if entry.name not in going]
        self.deleting = [*self.deleting, *sorted(going)]
        try:
            self._write()
        except OSError as error:
            if not is_full(error):
                raise
            # These files may be the only way to make room for the index. An entry without its file does not count.
            self._delete_files()
        self.finish_deleting()

    def finish_deleting(self) -> None:
        """Delete the files of checkpoints that were removed from the index before a kill."""
        if not self.deleting:
            return
        self._delete_files()
        self.deleting = []
        # Without the names, because a file that the user restores later under one of them is a checkpoint again.
        self._write()

    def _delete_files(self) -> None:
        listed = {entry.name for entry in self.entries}
        for name in self.deleting:
            if name in listed:
                continue
            for path in (*(self.folder / f"{kind}.pt" for kind in NAMED), self.folder / name):
                if path.name == name or same_file(path, self.folder / name):
                    path.unlink(missing_ok=True)

    def name_links(self) -> None:
        """Update the hard links best.pt and final.pt. A file system without hard links has only the index."""
        for kind in NAMED:
            link = self.folder / f"{kind}.pt"
            entry = self.of_kind(kind)
            if entry is None:
                # Only a second name of a file: the last name is a checkpoint that an index has lost.
                if any(same_file(link, path) for path in self.folder.glob("step_*")):
                    link.unlink(missing_ok=True)
            elif not same_file(link, self.folder / entry.name):
                with contextlib.suppress(OSError), replacing(link) as temporary:
                    temporary.hardlink_to(self.folder / entry.name)

    def tidy(self) -> list[str]:
        """Remove entries without a file and the remains of killed saves and deletions; return the missing files."""
        self.finish_deleting()
        missing = [entry.name for entry in self.entries if not (self.folder / entry.name).exists()]
        for partial in self.folder.glob(PARTIAL):
            partial.unlink(missing_ok=True)
        if missing:
            self.entries = [entry for entry in self.entries if entry.name not in missing]
            self._write()
        return missing

    def _write(self) -> None:
        deleting = {"deleting": self.deleting} if self.deleting else {}
        write_json(self.folder / INDEX, {"checkpoints": [entry.to_json() for entry in self.entries], **deleting})


def read_index(folder: Path) -> list[Entry]:
    """Return the entries of a folder, empty without an index.

    Raises RecordError if the index is damaged, SchemaError if it is too new.
    """
    return _read(folder)[0]


def _read(folder: Path) -> tuple[list[Entry], list[str]]:
    """Return the entries of a folder, and the names of files that are being deleted."""
    path = folder / INDEX
    if not path.exists():
        return [], []
    index = decode(path, IndexFile)
    return list(index.checkpoints), [name for name in index.deleting if Path(name).name == name]


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a checkpoint to resume from, as far as names and sizes tell."""
    try:
        entries = read_index(folder)
    except RecordError:
        entries = []  # the trainer makes a damaged index again from the files
    if any(file_size(folder / entry.name) == entry.bytes for entry in entries):
        return True
    return any(path.name not in {entry.name for entry in entries} for path in folder.glob("step_*.pt"))


def start_step(folder: Path, resume: str) -> int | None:
    """Return the step at which an attempt starts, as far as the index tells; 0 from scratch, None if it is unknown.

    resume: none, auto, latest, best or the path of a checkpoint.
    """
    try:
        if resume not in ("none", "auto", "latest", CheckpointKind.BEST):
            named = entry_of(Path(resume))
            return None if named is None else named.step
        entries = [] if resume == "none" else read_index(folder)
    except RecordError:
        return None
    usable = [e for e in entries if file_size(folder / e.name) == e.bytes]
    if resume == CheckpointKind.BEST:
        usable = [entry for entry in usable if CheckpointKind.BEST in entry.kinds]
    return usable[-1].step if usable else 0


def entry_of(path: Path) -> Entry | None:
    """Return the index entry of a checkpoint file, best.pt and final.pt included, or None."""
    entries = read_index(path.parent)
    kind = {f"{kind}.pt": kind for kind in NAMED}.get(path.name)
    return next((e for e in reversed(entries) if e.name == path.name or kind in e.kinds), None)


def weights_alone(path: Path) -> RecordError:
    """Return the error for a checkpoint of weights alone that was named to resume from."""
    return RecordError(
        f"{path} holds weights alone: training cannot resume from it",
        why="it was imported",
        hint=f"start a new run from these weights: INIT_FROM={path}",
    )


def superseded(entries: Sequence[Entry], keep: int) -> list[Entry]:
    """Return the checkpoints that newer ones have replaced, oldest first.

    keep: number of rolling checkpoints to keep. An emergency checkpoint is kept until there is a newer one of any
    kind. A checkpoint that has lost its last kind, such as a former best, is replaced at once.
    """
    rolling = [entry for entry in entries if CheckpointKind.ROLLING in entry.kinds]
    old = rolling[: max(0, len(rolling) - keep)]
    # By the kinds of an entry: without any it is always superseded, an emergency one unless it is the newest.
    expired = {frozenset(): entries, frozenset({CheckpointKind.EMERGENCY}): entries[:-1]}
    return [
        entry
        for entry in entries
        if entry in expired.get(entry.kinds, ()) or (entry in old and entry.kinds <= EXPIRING)
    ]


def without_kinds(entry: Entry, kinds: Iterable[CheckpointKind]) -> Entry:
    """Return an entry without some of its kinds."""
    return replaced(entry, kinds=entry.kinds - frozenset(kinds))


def file_size(path: Path) -> int | None:
    """Return the size of a file in bytes, None if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def same_file(one: Path, other: Path) -> bool:
    """Return whether two paths are hard links to one file."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open_to_read(path) as file:
        digest = hashlib.sha256()
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
