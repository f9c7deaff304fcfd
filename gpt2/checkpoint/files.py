"""Checkpoint files, and the weights in them. They are read with weights_only=True, so that they cannot run code."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kmatrix.errors import RecordError
from kmatrix.records.checkpoints import check_file, damaged
from kmatrix.records.files import replacing

PARTS = ("run_id", "step", "config", "model", "optimizer")  # of every checkpoint
MEMORY_WORDS = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def save_checkpoint(path: Path, value: dict[str, Any]) -> None:
    """Write a checkpoint to a file of its own: complete, or not at all."""
    with replacing(path) as partial, partial.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(
    path: Path, device: str | torch.device = "cpu", *, verify: bool = True, mmap: bool = True
) -> dict[str, Any]:
    """Return a checkpoint. Raises RecordError if it is missing or damaged.

    verify: compare the file with the SHA-256 in its description, if it has one.
    mmap: tensors are private pages of the file, which is read as they are used. Reading all of it takes longer so.
    """
    if not path.is_file():
        raise RecordError(f"{path} is missing", hint="`make list-checkpoints` lists the checkpoints")
    if verify:
        check_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle of another program's file
            value: dict[str, Any] = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        for part in PARTS:
            value[part]
    # Broad, because a file of another program makes zip, pickle and tensors raise exceptions of almost every type.
    except Exception as error:
        if out_of_memory(error):
            raise
        # Not PyTorch's own message: it advises to load the file so that it can run code.
        why = f"{type(error).__name__}: it has other objects than tensors and plain values, or lacks a part of {PARTS}"
        raise damaged(path, why) from None
    return value


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory of this machine or of its GPU."""
    # torch raises OutOfMemoryError for GPU memory only: the CPU's allocator and cuBLAS raise a plain RuntimeError.
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS)


def saved_weights(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint to evaluate, sample, serve and export."""
    found: dict[str, torch.Tensor] = value.get("evaluation") or value["model"]
    return found


def weights_sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the hash of names and values, sorted by name, so that equal weights have equal hashes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\0{tuple(weights[name].shape)}\0".encode())
        digest.update(bytes_of(weights[name]).numpy().tobytes())
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any dtype."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
