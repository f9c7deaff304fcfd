"""Checkpoint files: hashed while written, atomic, read with weights_only=True; and the choice of the one to resume."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gpt2.checkpoint.contents import out_of_memory, problem, reason
from kmatrix.errors import FullError, KmatrixError, LaunchError, RecordError, SchemaError, is_full
from kmatrix.records.checkpoints import CheckpointIndex, CheckpointKind, entry_of, sha256_of, weights_alone
from kmatrix.records.files import free_path, replacing, sync_folder

SCHEMA = 2  # 1: random generators of one rank only, and no `carried`
NONE, AUTO, LATEST, BEST = "none", "auto", "latest", "best"
ChosenCheckpoint = tuple[Path, dict[str, Any]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCheckpoint:
    """The size and hash of a written checkpoint, and the time it took."""

    bytes: int
    sha256: str
    seconds: float  # to write and flush it


# Hashing during the write saves reading the file again (docs/performance.md, "Checkpoints").
class Hashing:
    """A file wrapper that hashes what is written, for sequential writes only."""

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


def save_checkpoint(
    path: Path, value: dict[str, Any], announce: Callable[[WrittenCheckpoint], object] | None = None
) -> WrittenCheckpoint:
    """Write a checkpoint to a temporary file, flush it, announce it, and rename it into place.

    Raises RecordError if it cannot be written, FullError if the disk is full. The former file then remains.
    """
    # Order: data on disk, entry in the index, rename, folder on disk. A kill in between leaves a partial file or an
    # entry without a file, which the next attempt removes; never a file that looks complete and is not.
    start = time.perf_counter()
    try:
        path.parent.mkdir(exist_ok=True)  # not of a run that was moved or deleted
        for stale in path.parent.glob(f".{path.name}.*partial"):  # of an interrupted save
            stale.unlink(missing_ok=True)
        with replacing(path) as partial:
            with partial.open("wb") as file:
                hashing = Hashing(file)
                torch.save(value, hashing)  # type: ignore[arg-type]  # torch only uses write and flush
                file.flush()
                os.fsync(file.fileno())  # without it, a crash of the machine may leave a renamed file without its data
            seconds = time.perf_counter() - start
            written = WrittenCheckpoint(bytes=hashing.bytes, sha256=hashing.hexdigest(), seconds=seconds)
            if announce:
                announce(written)
        sync_folder(path.parent)  # a rename is on disk only when its folder is
    # On a full disk torch's zip writer raises RuntimeError while it handles the OSError, which is the real cause.
    except (OSError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        kind = FullError if is_full(cause) else RecordError
        raise kind(
            f"{path} could not be written",
            why=str(cause).partition("\n")[0],
            hint="free some disk space, or set CHECKPOINT_DIR to another disk",
        ) from error
    return written


def load_checkpoint(path: Path, device: str | torch.device = "cpu", *, verify: bool = True) -> dict[str, Any]:
    """Return a checkpoint, checked as far as `gpt2.checkpoint.contents.problem` does.

    verify: compare size and hash with the folder's index, if the checkpoint is listed there.
    Raises RecordError if it is missing or damaged, SchemaError if it is too new, and LaunchError if it cannot be read:
    memory is lacking, the disk fails, or access is denied.
    """
    if not path.is_file():
        raise RecordError(f"{path} is missing", hint="`make list-checkpoints` lists the checkpoints")
    try:
        if verify:
            check(path)
        with warnings.catch_warnings(action="ignore"):  # about the pickle of another program's file
            value = torch.load(path, map_location=device, weights_only=True)  # a pickle could execute code
    except KmatrixError:
        raise
    # Broad, because a damaged file makes zip, pickle and tensors raise exceptions of almost every type.
    except Exception as error:
        if out_of_memory(error):  # the file may be sound, and must not be renamed
            raise LaunchError(f"not enough memory to load {path}", why=reason(error)) from None
        if isinstance(error, OSError) and error.errno is not None:
            raise LaunchError(f"{path} cannot be read", why=error.strerror or reason(error)) from None
        foreign = not str(error) or isinstance(error, zipfile.BadZipFile)
        raise damaged(path, "not a file of PyTorch, or cut off" if foreign else reason(error)) from None
    if not isinstance(value, dict) or "schema" not in value:
        raise RecordError(f"{path} is not a checkpoint of kmatrix", why="no schema")
    schema = value["schema"]
    if type(schema) is not int or schema < 1:
        raise damaged(path, "its schema is not a number of a version")
    if schema != SCHEMA:
        raise SchemaError(
            f"{path} has schema {schema}" if schema < 1000 else f"{path} has a schema that is too new",
            why=f"this trainer reads schema {SCHEMA}",
            hint="use the trainer that wrote it",
        )
    if why := problem(value):
        raise damaged(path, why)
    return value


def check(path: Path) -> None:
    """Raise RecordError if a file differs from its entry in the index, or without one from its own checksums."""
    entry = entry_of(path)
    if entry is None:
        check_sums(path)
        return
    size = path.stat().st_size
    if size != entry.bytes:
        raise damaged(path, f"{size} bytes, expected {entry.bytes}")
    if sha256_of(path) != entry.sha256:
        raise damaged(path, "its SHA-256 is not the one in the index")


def check_sums(path: Path) -> None:
    """Raise RecordError if the content of a checkpoint differs from the CRC-32 that the file has of each part."""
    # PyTorch writes them and never checks them: a block that was lost in a power failure would become weights.
    with zipfile.ZipFile(path) as archive:
        part = archive.testzip()
    if part:
        raise damaged(path, f"the checksum of {part} is wrong")


def damaged(path: Path, why: str) -> RecordError:
    """Return the error for a damaged checkpoint."""
    return RecordError(f"{path} is damaged", why=why, hint="use another checkpoint of the run")


def choose(how: str, index: CheckpointIndex, refused: Say) -> ChosenCheckpoint | None:
    """Return the checkpoint to resume from, verified and loaded, or None to start from the beginning.

    how: none, auto (newest valid one, or the beginning), latest (newest valid one, required), best, or a path.
    refused: called with a message for each newer checkpoint that is damaged; its file is renamed.
    Raises RecordError if there is no such checkpoint.
    """
    if how == NONE:
        return None
    if how not in (AUTO, LATEST, BEST):
        path = Path(how)
        value = load_checkpoint(path)
        if not value["optimizer"]:
            raise weights_alone(path)
        return path, value
    if how == BEST:
        entry = index.of_kind(CheckpointKind.BEST)
        if entry is None:
            raise no_checkpoint(index.folder, "no evaluation after step 0 was the best so far, or GPT2_SAVE_BEST=n")
        return index.folder / entry.name, load_checkpoint(index.folder / entry.name)
    for path in newest_first(index):
        try:
            return path, load_checkpoint(path)
        except SchemaError:  # of a newer version, and sound: training over it would lose it
            raise
        except RecordError as error:  # the one before it costs some steps; ending here would cost the whole run
            rename_damaged(index, path)
            refused(f"{error.what}: {error.why}" if error.why else error.what)
    if how == LATEST:
        raise no_checkpoint(index.folder, "none was written, or all are damaged")
    return None


def newest_first(index: CheckpointIndex) -> Iterator[Path]:
    """Yield the complete checkpoints in the index, newest first, then files that a lost index does not list."""
    known = [index.folder / entry.name for entry in reversed(index.entries)]
    yield from known
    yield from sorted(set(index.folder.glob("step_*.pt")) - set(known), reverse=True)


def rename_damaged(index: CheckpointIndex, path: Path) -> None:
    """Rename a damaged checkpoint, so that it is neither listed nor tried again but can be inspected."""
    if path.exists():
        path.rename(free_path(path.with_name(f"{path.name}.damaged")))
    # After the rename: an entry without a file is repaired on the next start, a file without an entry would come back.
    index.remove([entry for entry in index.entries if entry.name == path.name])
    index.name_links()


def no_checkpoint(folder: Path, why: str) -> RecordError:
    return RecordError(
        f"{folder} has no checkpoint to resume from", why=why, hint="start from the beginning: --resume none"
    )
