"""One checkpoint as a file: hashed while it is written, whole or absent, read back with weights_only=True."""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kmatrix.errors import FullError, RecordError, is_full
from kmatrix.records.checkpoints import entry_of, sha256_of, sync_folder

SCHEMA = 2  # 1 had the random numbers of one rank, and nothing that is carried over a resume
KEYS = {"schema", "run_id", "step", "tokens", "config", "model", "optimizer", "rng"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written: bytes, SHA-256 of them, and the seconds that it took."""

    bytes: int
    sha256: str
    seconds: float


class Hashing:
    """A file that is written from its beginning to its end, and hashed on the way."""

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


def save(path: Path, value: dict[str, Any], announce: Callable[[Written], object] | None = None) -> Written:
    """Write a checkpoint aside, flush it to the disk, announce it, and put it in place in one step.

    Raises RecordError when it cannot be written, FullError without room; what was there before is then still there.
    """
    partial = path.with_name(f".{path.name}.partial")
    start = time.perf_counter()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            hashing = Hashing(file)
            torch.save(value, hashing)  # type: ignore[arg-type]  # it asks for no more than write and flush
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        written = Written(bytes=hashing.bytes, sha256=hashing.hexdigest(), seconds=seconds)
        if announce:
            announce(written)
        partial.replace(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a full disk, and keeps the cause beside it
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        kind = FullError if is_full(cause) else RecordError
        raise kind(
            f"{path} could not be written",
            why=str(cause).partition("\n")[0],
            fix="make room there, or set CHECKPOINT_DIR to another disk",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return written


def load(path: Path, device: str | torch.device = "cpu", *, verify: bool = True) -> dict[str, Any]:
    """Return a checkpoint. Raises RecordError when it is missing, damaged or too new.

    verify: hold size and hash against the folder's index, where the checkpoint stands in it.
    """
    if not path.is_file():
        raise RecordError(f"{path} is missing", fix="make list-checkpoints lists those that are there")
    if verify:
        check(path)
    try:
        value = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError) as error:
        raise damaged(path, str(error).partition("\n")[0] or "it is empty") from None
    if not isinstance(value, dict) or "schema" not in value:
        raise RecordError(f"{path} is not a checkpoint of kmatrix", why="it holds no schema")
    if value["schema"] > SCHEMA:
        raise RecordError(
            f"{path} has schema {value['schema']}",
            why=f"this trainer reads schemas up to {SCHEMA}",
            fix="use the newer trainer that wrote it",
        )
    if missing := KEYS - value.keys():
        raise damaged(path, f"it lacks {', '.join(sorted(missing))}")
    return upgraded(value)


def check(path: Path) -> None:
    """Refuse a file that is not the one that was written; nothing is known of one that the index does not have."""
    entry = entry_of(path)
    if entry is None:
        return
    size = path.stat().st_size
    if size != entry.bytes:
        raise damaged(path, f"it has {size} bytes, and {entry.bytes} were written")
    if sha256_of(path) != entry.sha256:
        raise damaged(path, "its SHA-256 is not that of what was written")


def damaged(path: Path, why: str) -> RecordError:
    """Return the error of a file that is not what a trainer wrote."""
    return RecordError(f"{path} is not a whole checkpoint", why=why, fix="use another checkpoint of the run")


def upgraded(value: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint of an older schema as one of this."""
    if value["schema"] == SCHEMA:
        return value
    return value | {"schema": SCHEMA, "rng": [], "carried": {}}  # there was nothing to go on with but weights
