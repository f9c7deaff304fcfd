"""Read and write checkpoint files. They are read with weights_only=True, so that they cannot run code."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.contents import out_of_memory, reason
from kmatrix.errors import RecordError
from kmatrix.records.checkpoints import check_file
from kmatrix.records.decode import Count, Record, Scalar, convert
from kmatrix.records.files import replacing


class Head(Record, frozen=True, kw_only=True):
    """What a checkpoint has besides tensors."""

    run_id: str
    step: Count
    config: dict[str, Scalar]  # the fields of TrainConfig
    model: dict[str, Any]
    optimizer: dict[str, Any]  # empty: weights alone, such as of an imported model


def save_checkpoint(path: Path, value: dict[str, Any]) -> None:
    """Write a checkpoint to a file of its own: complete, or not at all."""
    with replacing(path) as partial, partial.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(
    path: Path, device: str | torch.device = "cpu", *, verify: bool = True, mmap: bool = True
) -> dict[str, Any]:
    """Return a checkpoint.

    verify: compare the file with the SHA-256 in its description, if it has one.
    mmap: tensors are private pages of the file, which is read as they are used. Reading all of it takes longer so.
    Raises RecordError if it is missing or damaged.
    """
    if not path.is_file():
        raise RecordError(f"{path} is missing", hint="`make list-checkpoints` lists the checkpoints")
    if verify:
        check_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle of another program's file
            value: dict[str, Any] = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    # Broad, because a file of another program makes zip, pickle and tensors raise exceptions of almost every type.
    except Exception as error:
        if out_of_memory(error):
            raise
        raise damaged(path, reason(error)) from None
    convert(value, Head, str(path))
    return value


def damaged(path: Path, why: str) -> RecordError:
    """Return the error for a damaged checkpoint."""
    return RecordError(f"{path} is damaged", why=why, hint="use another checkpoint of the run")
