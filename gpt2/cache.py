"""Keys and values of the tokens that a model has seen, so that a new token costs one row and not the whole text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kmatrix.shapes import ModelShape

FIRST_CAPACITY = 64  # tokens of a row that memory is taken for at first; it doubles as texts grow


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's part of a turn: where its new keys and values go, and which of the old ones each token sees.

    keys, values: (B, capacity, H, D), views into the cache.  positions: (B, Q).
    mask: (B, 1, Q, K), True where a query sees a key.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    mask: Tensor

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the new tokens, (B, H, Q, D), and return those of all: (B, H, K, D)."""
        rows = torch.arange(len(k), device=k.device)[:, None]  # (B, 1)
        self.keys[rows, self.positions] = k.transpose(1, 2).to(self.keys.dtype)
        self.values[rows, self.positions] = v.transpose(1, 2).to(self.values.dtype)
        length = self.mask.shape[-1]
        return self.keys[:, :length].transpose(1, 2), self.values[:, :length].transpose(1, 2)


class Cache:
    """Room for `rows` texts. lengths[r]: tokens of row r that are in it; set it to 0 to begin another text."""

    def __init__(
        self, shape: ModelShape, rows: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.block_size = shape.block_size
        self.lengths = [0] * rows
        head = (shape.n_head, shape.n_embd // shape.n_head)
        self._kv = torch.zeros((2, shape.n_layer, rows, 0, *head), device=device, dtype=dtype)  # (2, L, R, T, H, D)

    def turn(self, first: int, rows: int, new: int) -> list[Layer]:
        """Count `new` tokens more in each of the rows first..first + rows, and return each layer's part.

        Raises ValueError where a row would be longer than the context.
        """
        starts = self.lengths[first : first + rows]
        longest = max(starts) + new
        if longest > self.block_size:
            raise ValueError(f"{longest} tokens in a row, but the model's context is {self.block_size}")
        self._reserve(longest)
        device = self._kv.device
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)  # (B, Q)
        mask = torch.arange(longest, device=device) <= positions[..., None]  # (B, Q, K)
        for row in range(first, first + rows):
            self.lengths[row] += new
        keys, values = self._kv[:, :, first : first + rows]  # each (L, B, T, H, D)
        return [Layer(keys[i], values[i], positions, mask[:, None]) for i in range(len(keys))]

    def move(self, source: int, target: int) -> None:
        """Put the text of one row in the place of another's."""
        length = self.lengths[source]
        self._kv[:, :, target, :length] = self._kv[:, :, source, :length]
        self.lengths[target] = length

    def _reserve(self, length: int) -> None:
        """Make room for rows of this many tokens, with zeros: what a mask hides must still be a number."""
        kinds, layers, rows, capacity, *head = self._kv.shape
        if length <= capacity:
            return
        wanted = min(self.block_size, max(FIRST_CAPACITY, length, 2 * capacity))
        grown = self._kv.new_zeros((kinds, layers, rows, wanted, *head))
        grown[:, :, :, :capacity] = self._kv
        self._kv = grown
