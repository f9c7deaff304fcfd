"""The checkpoints of a run as a folder and its index: what each is, what stays, what goes. Without torch.

The index is written before a checkpoint appears and after one disappears, so each file that is there has its entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records import RunDir, read_json, write_json

INDEX = "index.json"
PARTIAL = ".*.partial"  # what a save that was killed left
BLOCK = 1 << 22  # bytes that are hashed at a time


class Kind(StrEnum):
    """Why a checkpoint is there; one may have several reasons."""

    ROLLING = "rolling"  # one of the newest
    BEST = "best"  # of the lowest validation loss
    KEPT = "kept"  # at a multiple of GPT2_KEEP_EVERY: stays for good
    FINAL = "final"  # of a finished run
    EMERGENCY = "emergency"  # of a stop


NAMED = (Kind.BEST, Kind.FINAL)  # there is one of each, and it has a name of its own beside that of its step
AGES = frozenset({Kind.ROLLING, Kind.EMERGENCY})  # what is there for these reasons alone goes when it is old


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One checkpoint.

    step: updates behind it.  bytes, sha256: of the file.  val_loss: the last that was measured, None before the
    first.  attempt: which wrote it.  time: Unix seconds.
    """

    name: str
    step: int
    kinds: frozenset[Kind]
    bytes: int
    sha256: str
    val_loss: float | None
    attempt: int
    time: float

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"kinds": sorted(self.kinds)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Entry:
        """Return an entry; what a newer trainer adds is left out. Raises KeyError, TypeError, ValueError."""
        known = {name: values[name] for name in cls.__slots__}
        if Path(known["name"]).name != known["name"]:
            raise ValueError(f"{known['name']!r} is not the name of a file in the folder")
        return cls(**known | {"kinds": frozenset(Kind(kind) for kind in known["kinds"])})


class Shelf:
    """The checkpoints of one run. entries: in the order in which they were written, the newest last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = read_index(folder)

    @property
    def present(self) -> list[Entry]:
        """The entries whose file is there and has its size."""
        return [entry for entry in self.entries if size(self.folder / entry.name) == entry.bytes]

    def of_kind(self, kind: Kind) -> Entry | None:
        """Return the newest checkpoint that is there for this reason."""
        return next((entry for entry in reversed(self.present) if kind in entry.kinds), None)

    def announce(self, entry: Entry) -> None:
        """Take up a checkpoint whose file will be there in a moment."""
        self.entries = [*(without(old, entry.kinds & {*NAMED}) for old in self.entries), entry]
        self._write()

    def mark(self, entry: Entry, kinds: Iterable[Kind]) -> Entry:
        """Give a checkpoint that is there more reasons to be, and return it as it now is."""
        more = frozenset(kinds)
        marked = replace(entry, kinds=entry.kinds | more)
        others = [without(old, more & {*NAMED}) for old in self.entries if old != entry]
        self.entries = sorted([*others, marked], key=lambda e: self.names.index(e.name))
        self._write()
        return marked

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    def remove(self, entry: Entry) -> None:
        """Remove one checkpoint: first its file, then its entry."""
        (self.folder / entry.name).unlink(missing_ok=True)
        self.entries = [other for other in self.entries if other.name != entry.name]
        self._write()

    def name_links(self) -> None:
        """Let best.pt and final.pt be other names of the files; where a disk has no links the index alone tells."""
        for kind in NAMED:
            link = self.folder / f"{kind}.pt"
            entry = self.of_kind(kind)
            if entry is None:
                link.unlink(missing_ok=True)
            elif not same(link, self.folder / entry.name):
                aside = self.folder / f".{link.name}.partial"
                with contextlib.suppress(OSError):
                    aside.unlink(missing_ok=True)
                    aside.hardlink_to(self.folder / entry.name)
                    aside.replace(link)

    def tidy(self) -> list[str]:
        """Forget entries without a file, remove halves; return the names that are gone."""
        gone = [entry.name for entry in self.entries if not (self.folder / entry.name).exists()]
        for half in self.folder.glob(PARTIAL):
            half.unlink(missing_ok=True)
        if gone:
            self.entries = [entry for entry in self.entries if entry.name not in gone]
            self._write()
        return gone

    def _write(self) -> None:
        write_json(self.folder / INDEX, {"checkpoints": [entry.to_json() for entry in self.entries]})


def folder_of(run_dir: RunDir) -> Path:
    """Return where a run's checkpoints lie: where its run.json says, else in its own folder."""
    try:
        place = read_json(run_dir.run_json).get("train", {}).get("checkpoint_dir")
    except RecordError:
        place = None
    if place and (Path(place) / INDEX).is_file():
        return Path(place)
    return run_dir.checkpoints  # also when the matrix was moved


def read_index(folder: Path) -> list[Entry]:
    """Return the entries of a folder, [] where there is no index. Raises RecordError when it is damaged."""
    path = folder / INDEX
    if not path.exists():
        return []
    try:
        return [Entry.from_json(values) for values in read_json(path)["checkpoints"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{path} is not an index of checkpoints",
            why=f"{type(error).__name__}: {error}",
            fix="remove it; a checkpoint can then be named by its path",
        ) from None


def entry_of(path: Path) -> Entry | None:
    """Return what the index beside a checkpoint says of it; best.pt and final.pt are other names of an entry's file."""
    entries = read_index(path.parent)
    kind = {f"{kind}.pt": kind for kind in NAMED}.get(path.name)
    return next((e for e in reversed(entries) if e.name == path.name or kind in e.kinds), None)


def aged(entries: Sequence[Entry], keep: int) -> list[Entry]:
    """Return what a newer one has replaced, the oldest first.

    Of those that are there for being new the `keep` newest stay; that of a stop until there is any newer one; that of
    a reason which another has taken over (Kind.BEST) goes at once.
    """
    rolling = [entry for entry in entries if Kind.ROLLING in entry.kinds]
    old = rolling[: max(0, len(rolling) - keep)]
    gone = {frozenset(): entries, frozenset({Kind.EMERGENCY}): entries[:-1]}
    return [entry for entry in entries if entry in gone.get(entry.kinds, ()) or (entry in old and entry.kinds <= AGES)]


def without(entry: Entry, kinds: Iterable[Kind]) -> Entry:
    """Return an entry that has these reasons no more."""
    return replace(entry, kinds=entry.kinds - frozenset(kinds))


def size(path: Path) -> int | None:
    """Return the size of a file in bytes, None where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def same(one: Path, other: Path) -> bool:
    """Whether two names are of one file."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk, so that a file that was renamed stays so through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
