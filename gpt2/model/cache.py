"""The key-value cache of text generation.

Dimensions in comments: B sequences of equal length; Q new tokens, K all tokens; L layers, H heads of keys and values,
D channels per head, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kmatrix.shapes import ModelShape

FIRST_CAPACITY = 64  # tokens that are allocated first; doubled when a text grows


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's view of the cache during a forward pass."""

    keys: Tensor  # (B, K, H, D), a view into the cache
    values: Tensor  # (B, K, H, D), a view into the cache
    mask: Tensor  # (Q, K), True if a query attends to a key

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, (B, H, Q, D), and return those of all tokens: (B, H, K, D)."""
        new = k.shape[2]
        self.keys[:, -new:] = k.transpose(1, 2)
        self.values[:, -new:] = v.transpose(1, 2)
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)


class Cache:
    """Key-value cache of `rows` sequences. `length` counts their cached tokens; 0 starts again."""

    def __init__(
        self,
        shape: ModelShape,
        rows: int = 1,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.block_size, self.windows = shape.block_size, shape.windows
        self.length = 0
        head = (shape.kv_heads, shape.head_dim)
        self._kv = torch.zeros((2, shape.n_layer, rows, 0, *head), device=device, dtype=dtype)  # (2, L, B, T, H, D)
        # The embedding of the newest token, which a model with a smear adds to the next one.
        self.newest = torch.zeros((rows, shape.n_embd if shape.smear else 0), device=device, dtype=dtype)  # (B, E)

    def append(self, new: int) -> tuple[Tensor, list[Layer]]:
        """Append `new` tokens to each sequence; return their positions (Q,) and the view of each layer.

        Raises ValueError if a sequence outgrows the context.
        """
        start, self.length = self.length, self.length + new
        if self.length > self.block_size:
            raise ValueError(f"{self.length} tokens in a row, but the model's context is {self.block_size}")
        self._reserve(self.length)
        places = torch.arange(self.length, device=self._kv.device)  # (K,)
        before = places[start:, None] - places  # (Q, K): positions back to a key
        masks = {window: (before >= 0) & (before <= window) for window in set(self.windows)}
        keys, values = self._kv[:, :, :, : self.length]  # each (L, B, K, H, D)
        return places[start:], [Layer(keys[i], values[i], masks[window]) for i, window in enumerate(self.windows)]

    def _reserve(self, length: int) -> None:
        """Extend the cache to this many tokens."""
        kinds, layers, rows, capacity, *head = self._kv.shape
        if length <= capacity:
            return
        # Doubling copies each token about once in total, and a short text does not allocate the whole context.
        wanted = min(self.block_size, max(FIRST_CAPACITY, length, 2 * capacity))
        grown = self._kv.new_zeros((kinds, layers, rows, wanted, *head))
        grown[:, :, :, :capacity] = self._kv
        self._kv = grown
