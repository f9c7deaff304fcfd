"""Causal attention, full or in a window, fused or from plain matrix products.

Dimensions in comments: B sequences, T tokens, H heads of queries, K heads of keys and values, D channels per head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from kmatrix.shapes import padded

# Query rows per block of plain attention; keys after the last row are skipped. 128 rows measured the same:
# docs/decisions/0003-attention-and-precision-on-the-cpu.md
ROWS = 256


def causal_mask(block_size: int) -> Tensor:
    """Return the causal mask for ROWS query rows, to be added to scores: (ROWS, ceil(block_size / ROWS) x ROWS).

    The last ROWS columns are a causal triangle (0 and -inf); all others are 0.
    """
    rows = min(ROWS, block_size)
    triangle = torch.full((rows, rows), -math.inf).triu(1)
    # The triangle is at the right end, so every block of query rows is a slice of this one buffer.
    return torch.cat([torch.zeros(rows, padded(block_size, rows) - rows), triangle], dim=1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Return causal softmax(q k' / sqrt(D)) v for q, k, v of (B, H, T, D), computed in blocks of query rows.

    Rows start..stop only need keys 0..stop, which saves up to half of the work. `mask`: see causal_mask.
    """
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))  # (B H, T, D), because bmm takes one batch dimension
    rows, width = mask.shape
    if t <= rows:  # one block: slicing would cost a copy in the backward pass
        return _attend(q, k, v, mask[:t, width - rows : width - rows + t], dropout).view(b, h, t, d)
    out = []
    for start in range(0, t, rows):
        stop = min(start + rows, t)
        first = width - rows - start  # column of `mask` for key 0
        causal = mask[: stop - start, first : first + stop]
        out.append(_attend(q[:, start:stop], k[:, :stop], v[:, :stop], causal, dropout))
    return torch.cat(out, dim=1).view(b, h, t, d)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: Tensor, dropout: float) -> Tensor:
    """Return softmax(q k' / sqrt(D) + causal) v for q (B H, rows, D), k and v (B H, keys, D)."""
    # One kernel for product, scale and mask, instead of three passes over the scores, the largest tensor here.
    scores = torch.baddbmm(causal.to(q.dtype), q, k.transpose(1, 2), alpha=1 / math.sqrt(q.shape[-1]))
    weights = functional.softmax(scores, dim=-1)  # (B H, rows, keys), like scores
    weights = functional.dropout(weights, dropout) if dropout else weights
    return torch.bmm(weights.to(v.dtype), v)  # (B H, rows, D); on GPUs, autocast computes the softmax in fp32


def window_mask(window: int) -> Tensor:
    """Return the mask of ROWS query rows for `windowed_attention`, to be added to scores: (ROWS, window + ROWS).

    Row i is the query at position p, column j the key at p - i - window + j: 0 if that is p or one of the `window`
    positions before, -inf otherwise.
    """
    before = window + torch.arange(ROWS)[:, None] - torch.arange(window + ROWS)  # positions from the key to the query
    mask = torch.zeros(ROWS, window + ROWS)
    return mask.masked_fill((before < 0) | (before > window), -math.inf)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, path: str, mask: Tensor) -> Tensor:
    """Return causal attention over a window of keys before each query, for q (B, H, T, D), k and v (B, K, T, D).

    path: "sdpa" or "matmul".  mask: of `window_mask`. Blocks of ROWS queries get the keys that they can see, so time
    and memory grow with T x window, not with T^2.
    """
    rows = len(mask)
    window, t = mask.shape[1] - rows, q.shape[2]
    out = []
    for start in range(0, t, rows):
        stop, first = min(start + rows, t), max(0, start - window)
        skipped = window - (start - first)  # columns of keys before the sequence
        part = mask[: stop - start, skipped : window + stop - start]  # (rows, keys)
        queries, keys, values = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
        if path == "sdpa":
            out.append(fused_attention(queries, keys, values, mask=part.to(q.dtype)))
            continue
        (b, h, n, d), count = queries.shape, keys.shape[2]
        keys, values = (repeat_heads(x, h).reshape(b * h, count, d) for x in (keys, values))
        out.append(_attend(queries.reshape(b * h, n, d), keys, values, part, 0.0).view(b, h, n, d))
    return torch.cat(out, dim=2)  # (B, H, T, D)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return PyTorch's fused attention of q (B, H, T, D) over k and v (B, K, T, D): causal without a mask."""
    # The option exists for grouped queries; without them its default allows more kernels.
    grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **grouped)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values (B, K, T, D) with each head repeated for the queries that share it: (B, H, T, D)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
