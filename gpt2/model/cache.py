"""The key-value cache of text generation.

Dimensions in comments: Q new tokens, K all tokens, T tokens of context; L layers, H heads of keys and values,
D channels per head, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kmatrix.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's view of the cache during a forward pass."""

    keys: Tensor  # (1, K, H, D), a view into the cache
    values: Tensor  # (1, K, H, D), a view into the cache
    mask: Tensor  # (Q, K), True if a query attends to a key

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, (1, H, Q, D), and return those of all tokens: (1, H, K, D)."""
        new = k.shape[2]
        self.keys[:, -new:] = k.transpose(1, 2)
        self.values[:, -new:] = v.transpose(1, 2)
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)


class Cache:
    """Key-value cache of a text. `length` counts its cached tokens; 0 starts again."""

    def __init__(
        self, shape: ModelShape, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.length, self.windows = 0, shape.windows
        sizes = (2, shape.n_layer, 1, shape.block_size, shape.kv_heads, shape.head_dim)
        self._kv = torch.zeros(sizes, device=device, dtype=dtype)  # (2, L, 1, T, H, D)
        # The embedding of the newest token, which a model with a smear adds to the next one.
        self.newest = torch.zeros((1, shape.n_embd if shape.smear else 0), device=device, dtype=dtype)  # (1, E)

    def append(self, new: int) -> tuple[Tensor, list[Layer]]:
        """Append `new` tokens, at most to the end of the context; return their positions (Q,) and each layer's view."""
        start, self.length = self.length, self.length + new
        places = torch.arange(self.length, device=self._kv.device)  # (K,)
        before = places[start:, None] - places  # (Q, K): positions back to a key
        masks = {window: (before >= 0) & (before <= window) for window in set(self.windows)}
        keys, values = self._kv[:, :, :, : self.length]  # each (L, 1, K, H, D)
        return places[start:], [Layer(keys[i], values[i], masks[window]) for i, window in enumerate(self.windows)]
