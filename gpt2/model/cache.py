"""The key-value cache of text generation.

Dimensions in comments: R rows, one per text, B of them at work; Q new tokens, K all tokens; L layers, H heads of keys
and values, D channels per head, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kmatrix.shapes import ModelShape

FIRST_CAPACITY = 64  # tokens per row that are allocated first; doubled when a text grows


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's view of the cache during a forward pass."""

    keys: Tensor  # (B, capacity, H, D), a view into the cache
    values: Tensor  # (B, capacity, H, D), a view into the cache
    positions: Tensor  # (B, Q), of the new tokens
    mask: Tensor  # (B, 1, Q, K), True if a query attends to a key

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, (B, H, Q, D), and return those of all tokens: (B, H, K, D)."""
        rows = torch.arange(len(k), device=k.device)[:, None]  # (B, 1)
        # Rows have different lengths, so each writes to its own positions.
        self.keys[rows, self.positions] = k.transpose(1, 2).to(self.keys.dtype)
        self.values[rows, self.positions] = v.transpose(1, 2).to(self.values.dtype)
        length = self.mask.shape[-1]  # K, of the longest row; the mask hides what shorter rows do not have
        return self.keys[:, :length].transpose(1, 2), self.values[:, :length].transpose(1, 2)


class Cache:
    """Key-value cache with one row per text. `lengths[row]` counts cached tokens; set it to 0 to reuse the row."""

    def __init__(
        self, shape: ModelShape, rows: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.block_size = shape.block_size
        self.lengths = [0] * rows  # cached tokens of each row
        self.windows = shape.windows
        head = (shape.kv_heads, shape.head_dim)
        self._kv = torch.zeros((2, shape.n_layer, rows, 0, *head), device=device, dtype=dtype)  # (2, L, R, T, H, D)
        # The embedding of the newest token of each row, which a model with a smear adds to the next one.
        self.newest = torch.zeros((rows, shape.n_embd if shape.smear else 0), device=device, dtype=dtype)  # (R, E)

    def append(self, first: int, rows: int, new: int) -> list[Layer]:
        """Append `new` tokens to each of the rows first..first + rows, and return the view of each layer.

        Raises ValueError if a row outgrows the context.
        """
        starts = self.lengths[first : first + rows]
        longest = max(starts) + new
        if longest > self.block_size:
            raise ValueError(f"{longest} tokens in a row, but the model's context is {self.block_size}")
        self._reserve(longest)
        device = self._kv.device
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)  # (B, Q)
        before = positions[..., None] - torch.arange(longest, device=device)  # (B, Q, K): positions back to a key
        masks = {window: ((before >= 0) & (before <= window))[:, None] for window in set(self.windows)}
        for row in range(first, first + rows):
            self.lengths[row] += new
        keys, values = self._kv[:, :, first : first + rows]  # each (L, B, T, H, D)
        return [Layer(keys[i], values[i], positions, masks[window]) for i, window in enumerate(self.windows)]

    def move(self, source: int, target: int) -> None:
        """Copy the text of one row into another."""
        length = self.lengths[source]
        self._kv[:, :, target, :length] = self._kv[:, :, source, :length]
        self.newest[target] = self.newest[source]
        self.lengths[target] = length

    def _reserve(self, length: int) -> None:
        """Extend the cache to this many tokens per row, filled with zeros: masked values must still be finite."""
        kinds, layers, rows, capacity, *head = self._kv.shape
        if length <= capacity:
            return
        # Doubling copies each token about once in total, and a short text does not allocate the whole context.
        wanted = min(self.block_size, max(FIRST_CAPACITY, length, 2 * capacity))
        grown = self._kv.new_zeros((kinds, layers, rows, wanted, *head))
        grown[:, :, :, :capacity] = self._kv
        self._kv = grown
