"""Copies of a state in CPU memory, which a thread writes to a checkpoint while training continues."""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

BufferKey = tuple[torch.dtype, torch.Size, tuple[int, ...]]
ALIGN = 64  # bytes: of each tensor in memory, as PyTorch allocates on the CPU
PORTABLE = 1  # cudaHostRegisterPortable (driver_types.h): pinned for all GPUs, as PyTorch registers memory


class CopyBuffers:
    """Copies tensors into the same buffers every time: allocating fresh memory takes longer than copying.

    pin: registers memory, by address and bytes, for asynchronous copies from a GPU.
    """

    def __init__(self, pin: Callable[[int, int], None] | None = None) -> None:
        self._memory: defaultdict[BufferKey, list[Tensor]] = defaultdict(list)
        self._taken: defaultdict[BufferKey, int] = defaultdict(int)
        self._pin = pin or pin_memory

    def of(self, value: Any) -> Any:
        """Return a nested value with all tensors copied, overwriting the previous copies.

        Copies of GPU tensors are made asynchronously, in stream order.
        """
        self._allocate(list(_tensors(value)))
        self._taken.clear()
        return self._copy(value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            kind = _kind(value)
            self._taken[kind] += 1
            return self._memory[kind][self._taken[kind] - 1].copy_(value.detach(), non_blocking=True)
        if isinstance(value, Mapping):
            return {name: self._copy(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item) for item in value)
        return value

    def _allocate(self, tensors: Sequence[Tensor]) -> None:
        """Make buffers for the tensors that have none yet: all of them at the first checkpoint."""
        # By dtype, shape and strides in order of appearance: the state has the same tensors every time.
        needed: defaultdict[BufferKey, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            needed[_kind(tensor)].append(tensor)
        missing = [tensor for kind, found in needed.items() for tensor in found[len(self._memory[kind]) :]]
        pin = self._pin if any(tensor.device.type == "cuda" for tensor in missing) else None
        for tensor, buffer in zip(missing, buffers(missing, pin), strict=True):
            self._memory[_kind(tensor)].append(buffer)


def buffers(tensors: Sequence[Tensor], pin: Callable[[int, int], None] | None) -> list[Tensor]:
    """Return CPU tensors of the same types, shapes and strides in one piece of memory, registered by `pin`.

    It has the bytes of the tensors, each rounded up to ALIGN. `pin_memory=True` would round each up to a power of two
    (https://github.com/pytorch/pytorch/issues/95823): 28.2 GB instead of 18.7 GB for GPT-2 1558M with AdamW.
    """
    size = sum(_aligned(tensor) for tensor in tensors)
    if not size:
        return [torch.empty_like(tensor, device="cpu") for tensor in tensors]
    memory = mmap.mmap(-1, size)  # whole pages of its own: no other memory is registered with them
    if pin:
        pin(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), size)
    found, offset = [], 0
    for tensor in tensors:
        count = tensor.numel()
        # From the buffer, not as a view: torch.save writes all of the memory that a view has a part of.
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset) if count else None
        found.append(torch.empty(tensor.shape) if flat is None else flat.as_strided(tensor.shape, _strides(tensor)))
        offset += _aligned(tensor)
    return found


def pin_memory(address: int, size: int) -> None:
    """Register memory with CUDA, so that copies to it are asynchronous. Without success they take longer."""
    # It stays registered until the process ends, as the buffers of its checkpoints do.
    if int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE)):  # type: ignore[no-untyped-call]
        # Such as a system that does not let this much memory be locked. The next kernel raises the error of this call.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _kind(tensor: Tensor) -> BufferKey:
    # Strides because products of matrices round by them, and a resumed SOAP has to go on with the same numbers.
    return tensor.dtype, tensor.shape, tensor.stride()


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a copy: those of the tensor if it has no gaps in its memory."""
    return torch.empty_like(tensor, device="meta").stride()


def _aligned(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGN) * ALIGN
