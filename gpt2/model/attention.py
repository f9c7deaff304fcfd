"""Causal attention, full or in a window: PyTorch's fused kernels, or plain matrix products where they are faster.

Dimensions in comments: B sequences, T tokens, H heads of queries, K heads of keys and values, D channels per head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

# On a CPU, products are faster up to here: docs/decisions/0003-attention-and-precision-on-the-cpu.md
PRODUCTS_MAX_TOKENS = 256
ROWS = 256  # queries per block of attention in a window


def window_mask(window: int) -> Tensor:
    """Return the mask of ROWS queries that see `window` tokens before them, to be added to scores.

    (ROWS, window + ROWS): row i is the query at position p, column j the key at p - i - window + j: 0 if that is p or
    one of the `window` positions before, -inf otherwise.
    """
    before = window + torch.arange(ROWS)[:, None] - torch.arange(window + ROWS)  # positions from the key to the query
    mask = torch.zeros(ROWS, window + ROWS)
    return mask.masked_fill((before < 0) | (before > window), -math.inf)


def attention(q: Tensor, k: Tensor, v: Tensor, *, window: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Return causal softmax(q k' / sqrt(D)) v for q (B, H, T, D), k and v (B, K, T, D): (B, H, T, D).

    window: the `window_mask` of tokens that do not see all before them. dropout: probability, of full attention.
    """
    t = q.shape[2]
    if by_products(q):
        mask = torch.full((t, t), -math.inf).triu(1) if window is None else window[:t, window.shape[1] - ROWS :][:, :t]
        return _products(q, k, v, mask, dropout)
    if window is None:  # is_causal instead of a mask, because the flash kernels on GPUs do not take one
        return fused_attention(q, k, v, dropout=dropout)
    # Blocks of queries with the keys that they can see, so that time and memory grow with T x window, not with T^2.
    before, out = window.shape[1] - ROWS, []
    for start in range(0, t, ROWS):
        stop, first = min(start + ROWS, t), max(0, start - before)
        skipped = before - (start - first)  # columns of keys before the sequence
        mask = window[: stop - start, skipped : before + stop - start].to(q.dtype)  # (rows, keys)
        keys, values = k[:, :, first:stop], v[:, :, first:stop]
        out.append(fused_attention(q[:, :, start:stop], keys, values, mask=mask))
    return torch.cat(out, dim=2)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Return PyTorch's fused attention of q (B, H, T, D) over k and v (B, K, T, D): causal without a mask."""
    # The option exists for grouped queries; without them its default allows more kernels.
    grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, **grouped
    )


def by_products(q: Tensor) -> bool:
    """Return whether matrix products are faster than fused attention for queries (B, H, T, D)."""
    return q.device.type == "cpu" and q.shape[2] <= PRODUCTS_MAX_TOKENS


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    b, h, t, d = q.shape
    k, v = (x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))  # (B H, T, D), because bmm takes one batch dimension
    # One kernel for product, scale and mask, instead of three passes over the scores, the largest tensor here.
    scores = torch.baddbmm(mask.to(q.dtype), q, k.transpose(1, 2), alpha=1 / math.sqrt(d))  # (B H, T, T)
    weights = functional.softmax(scores, dim=-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return torch.bmm(weights.to(v.dtype), v).view(b, h, t, d)
