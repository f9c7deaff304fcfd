"""The checkpoints of a run: step_N.pt, and beside each step_N.json, which is written last and deleted first.

So a checkpoint exists if its JSON does; a file that a kill left has none, and is deleted at the next start. No torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from kmatrix.clock import clock
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

        After a resume from an earlier one, later steps of the attempt before are older.
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
            with partial.open("w+b") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())  # without it, a renamed file may be without its data after a power failure
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            path.with_suffix(".json").unlink(missing_ok=True)  # of another file
        sync_folder(self.folder)
        return self.describe(Checkpoint(step=step, bytes=size, sha256=sha256, time=clock.now(), **about))

    def describe(self, item: Checkpoint, **changes: Any) -> Checkpoint:
        """Write the description of a checkpoint, with some fields changed, and return it."""
        changed = replaced(item, **changes)
        write_json(self.path(item).with_suffix(".json"), as_json(changed))
        sync_folder(self.folder)
        return changed

    def set_aside(self, item: Checkpoint) -> None:
        """Rename a damaged checkpoint, so that it is not used again but can be inspected."""
        path = self.path(item)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.rename(path.with_name(f"{path.name}.damaged"))

    def retire(self, keep: int) -> None:
        """Delete all but the newest, the best and the final one. keep: how many of the newest."""
        everything = self.all()
        kept = [*everything[-keep:], self.best(), self.final()]
        for path in [self.path(item) for item in everything if item not in kept]:
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)

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
    return RecordError(f"{path} is damaged", why=why, hint="use another checkpoint of the run")
