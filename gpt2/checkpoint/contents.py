"""The weights in a checkpoint: their shapes, sizes and hash."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch

MEMORY_WORDS = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory of this machine or of its GPU."""
    # torch raises OutOfMemoryError for GPU memory only: the CPU's allocator and cuBLAS raise a plain RuntimeError.
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS)


def reason(error: BaseException) -> str:
    """Return an exception of a library as one short line."""
    # PyTorch's own message advises to load the file with weights_only=False, which runs the code in it.
    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
        return "it contains objects other than tensors and plain values, which could run code"
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:200]}"


def shape_problem(weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> str:
    """Return the first difference between the shapes of weights and the expected shapes, "" if there is none."""
    for name, shape in expected.items():
        if name not in weights:
            return f"{name} is missing"
        if tuple(weights[name].shape) != shape:
            return f"{name} is {tuple(weights[name].shape)}, the configuration says {shape}"
    return ""


def weights_sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the hash of names and values, sorted by name, so that equal weights have equal hashes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\0{tuple(weights[name].shape)}\0".encode())
        digest.update(bytes_of(weights[name]).numpy().tobytes())
    return digest.hexdigest()


def saved_weights(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint to evaluate, sample, serve and export."""
    found: dict[str, torch.Tensor] = value.get("evaluation") or value["model"]
    return found


def size_of(value: Any) -> int:
    """Return the bytes of all tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(size_of(item) for item in items)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any dtype."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
