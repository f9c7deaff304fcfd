"""Copies of the state of training in CPU memory, so that it goes on while they are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

Kind = tuple[torch.dtype, torch.Size, bool]


class Copies:
    """Copies into the same memory each time: to be given fresh memory takes longer than the copying."""

    def __init__(self) -> None:
        self._memory: defaultdict[Kind, list[torch.Tensor]] = defaultdict(list)
        self._taken: defaultdict[Kind, int] = defaultdict(int)

    def of(self, value: Any) -> Any:
        """Return a nested value with every tensor copied; the copies that were made before are overwritten.

        Those of tensors of a GPU are pinned, and made when its stream comes to them.
        """
        self._taken.clear()
        return self._copy(value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._place(value).copy_(value.detach(), non_blocking=True)
        if isinstance(value, Mapping):
            return {name: self._copy(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item) for item in value)
        return value

    def _place(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy: what the last checkpoint no longer needs, or new."""
        kind = (like.dtype, like.shape, like.device.type == "cuda")
        number = self._taken[kind]
        self._taken[kind] += 1
        if number == len(self._memory[kind]):
            self._memory[kind].append(torch.empty(like.shape, dtype=like.dtype, pin_memory=kind[2]))
        return self._memory[kind][number]


def size_of(value: Any) -> int:
    """Return the bytes of all tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(size_of(item) for item in items)
