"""Check what a checkpoint file contains before it is used: keys, types, and weights that fit the configuration."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping
from typing import Any

import torch

# Required keys and their types.
KINDS: dict[str, type] = {
    **{"run_id": str, "step": int, "tokens": int, "config": dict},
    **{"model": dict, "optimizer": dict, "rng": list, "carried": dict},
}
LARGEST = 2**63 - 1
# A file may claim a size of a tensor that is larger than itself; PyTorch reports that as a lack of memory.
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
    return f"{type(error).__name__}: {line[:200]}" if line else type(error).__name__


def problem(value: Mapping[str, Any]) -> str:
    """Return the first problem of a checkpoint of the current schema, "" if it can be used."""
    if missing := KINDS.keys() - value.keys():
        return f"missing keys: {', '.join(sorted(missing))}"
    for name, kind in KINDS.items():
        if not isinstance(value[name], kind) or isinstance(value[name], bool):  # a bool is an int
            return f"{name} is not {_named(kind)}"
    if not (0 <= value["step"] <= LARGEST and 0 <= value["tokens"] <= LARGEST):
        return "step or tokens out of range"
    for name, setting in value["config"].items():
        if not isinstance(name, str) or not _is_setting(setting):
            return f"config has an invalid entry {str(name)[:40]!r}"
    for key in ("model", "judged"):
        if found := _weights_problem(value.get(key, {})):
            return f"{key}: {found}"
    return ""


def shape_problem(weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> str:
    """Return the first difference between the shapes of weights and the expected shapes, "" if there is none."""
    for name, shape in expected.items():
        if name not in weights:
            return f"{name} is missing"
        if tuple(weights[name].shape) != shape:
            return f"{name} is {_sizes(weights[name].shape)}, the configuration says {_sizes(shape)}"
    return ""


def layers_of(weights: Mapping[str, torch.Tensor]) -> int:
    """Return the number of transformer blocks in weights: their names start with h.<number>."""
    return len({name.split(".")[1] for name in weights if name.startswith("h.")})


def weights_sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the hash of names and values, sorted by name, so that equal weights have equal hashes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\0{tuple(weights[name].shape)}\0".encode())
        digest.update(bytes_of(weights[name]).numpy().tobytes())
    return digest.hexdigest()


def saved_weights(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint to evaluate, sample, serve and export."""
    found: dict[str, torch.Tensor] = value["judged"] if "judged" in value else value["model"]
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


def _weights_problem(weights: object) -> str:
    """Return why this is not a dictionary of weights, "" if it is."""
    if not isinstance(weights, dict):
        return "not a dictionary"
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            return f"{str(name)[:40]!r} is not a named tensor"
        # Strides in a damaged file can make a huge tensor of a few bytes, which would be allocated when it is copied.
        if tensor.is_sparse or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            return f"{name[:80]} is larger than its data"
        if not tensor.is_floating_point():
            return f"{name[:80]} is of type {tensor.dtype}"
    return ""


def _is_setting(value: object) -> bool:
    if value is None or isinstance(value, bool | str):
        return True
    if type(value) is int:
        return -LARGEST <= value <= LARGEST
    return isinstance(value, float) and math.isfinite(value)


def _named(kind: type) -> str:
    return {str: "a text", int: "an integer", dict: "a dictionary", list: "a list"}[kind]


def _sizes(shape: tuple[int, ...] | torch.Size) -> str:
    return " x ".join(map(str, shape)) or "a number"
