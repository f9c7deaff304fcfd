"""The checkpoints of a run: step_N.pt, and beside each step_N.json, which is written last and deleted first.

So a checkpoint exists if its JSON does; a file that a kill left has none, and is deleted at the next start. No torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from kmatrix.errors import RecordError
from kmatrix.records.decode import Count, Number, Record, UnixTime, as_json, decode, decode_optional, replaced
from kmatrix.records.files import replacing, sync_folder, write_json

NAME = re.compile(r"step_(\d{8,})\.pt")


class Checkpoint(Record, frozen=True, kw_only=True):
    """One checkpoint: step_N.json."""

    step: Count  # optimizer steps done
    bytes: Count  # of the file
    sha256: str  # of the file, hexadecimal
    attempt: Count  # that wrote it, from 1
    time: UnixTime
    val_loss: Number | None = None  # nats/token, measured at this step
    final: bool = False  # the end of a finished run

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"step_{self.step:08d}.pt"


class Checkpoints:
    """The checkpoints in a folder, which may not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first. One with a damaged description is omitted, with a warning.

        After a resume from an earlier one, later steps of the attempt before are older. Raises SchemaError.
        """
        found = [decode_optional(path, Checkpoint) for path in self.folder.glob("step_*.json")]
        present = [item for item in found if item and self.path(item).is_file()]
        return sorted(present, key=lambda item: (item.attempt, item.step))

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def best(self) -> Checkpoint | None:
        """Return the one with the lowest validation loss; of equal ones the latest, which saw more data."""
        known = [(item.val_loss, -item.step, item) for item in self.all() if item.val_loss is not None]
        return min(known, key=lambda each: each[:2])[2] if known else None

    def final(self) -> Checkpoint | None:
        """Return the one at the end of the finished run."""
        return next((item for item in reversed(self.all()) if item.final), None)

    def path(self, item: Checkpoint) -> Path:
        return self.folder / item.name

    def put(self, step: int, write: Callable[[BinaryIO], object], **about: Any) -> Checkpoint:
        """Write a checkpoint: the file to disk, then its description. It replaces an earlier one of this step.

        about: the other fields of the description.
        """
        self.folder.mkdir(exist_ok=True)  # not of a run that was moved or deleted
        path = self.folder / f"step_{step:08d}.pt"
        with replacing(path) as partial:
            with partial.open("wb") as file:
                hashing = Hashing(file)
                write(hashing)  # type: ignore[arg-type]  # torch uses only write and flush
                file.flush()
                os.fsync(file.fileno())  # without it, a renamed file may be without its data after a power failure
            path.with_suffix(".json").unlink(missing_ok=True)  # of another file
        sync_folder(self.folder)
        item = Checkpoint(step=step, bytes=hashing.bytes, sha256=hashing.hexdigest(), time=time.time(), **about)
        return self.describe(item)

    def describe(self, item: Checkpoint, **changes: Any) -> Checkpoint:
        """Write the description of a checkpoint, with some fields changed, and return it."""
        changed = replaced(item, **changes)
        write_json(self.path(item).with_suffix(".json"), as_json(changed))
        sync_folder(self.folder)
        return changed

    def remove(self, item: Checkpoint) -> None:
        self.path(item).with_suffix(".json").unlink(missing_ok=True)
        self.path(item).unlink(missing_ok=True)

    def set_aside(self, item: Checkpoint) -> None:
        """Rename a damaged checkpoint, so that it is not used again but can be inspected."""
        path = self.path(item)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.rename(path.with_name(f"{path.name}.damaged"))

    def retire(self, keep: int) -> None:
        """Delete all but the newest, the best and the final one. keep: how many of the newest."""
        everything = self.all()
        kept = [*everything[-keep:], self.best(), self.final()]
        for item in everything:
            if item not in kept:
                self.remove(item)

    def tidy(self) -> None:
        """Delete what killed saves and deletions left. Only the trainer that owns the folder calls it."""
        for path in [*self.folder.glob("step_*.pt"), *self.folder.glob(".step_*.partial")]:
            if not path.with_suffix(".json").exists():
                path.unlink()


def check_file(path: Path) -> None:
    """Raise RecordError if a checkpoint is not the file that was written. One without a description is not checked."""
    description = path.with_suffix(".json")
    if not NAME.fullmatch(path.name) or not description.exists():  # such as an imported model
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != decode(description, Checkpoint).sha256:
        raise damaged(path, f"its SHA-256 is not the one in {description.name}")


def damaged(path: Path, why: str) -> RecordError:
    """Return the error for a damaged checkpoint."""
    return RecordError(f"{path} is damaged", why=why, hint="use another checkpoint of the run")


def start_step(folder: Path, resume: str) -> int | None:
    """Return the step at which an attempt starts, as far as files tell; 0 from scratch, None if it is unknown.

    resume: none, auto, latest, best or the path of a checkpoint.
    """
    checkpoints = Checkpoints(folder)
    if resume not in ("none", "auto", "latest", "best"):
        named = NAME.fullmatch(Path(resume).name)
        return int(named[1]) if named else None
    item = None if resume == "none" else checkpoints.best() if resume == "best" else checkpoints.newest()
    return item.step if item else 0


class Hashing:
    """A file that hashes what is written to it, in order: nothing has to be read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        written = self._file.write(data)
        self.bytes += written
        return written

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
