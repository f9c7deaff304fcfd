"""The output layer and its cross-entropy some rows at a time: the logits of all tokens never exist at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_ROWS = 128  # 128 x 50304 logits are 26 MB: below the 32 MB above which malloc gives memory back at once


def padding_bias(vocab_size: int, rows: int) -> Tensor | None:
    """Return what is added to the logits: 0 for tokens, minus infinity for padding; None without padding."""
    if rows == vocab_size:
        return None
    return torch.cat([torch.zeros(vocab_size), torch.full((rows - vocab_size,), -math.inf)])


def chunked_cross_entropy(
    x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int = CHUNK_ROWS
) -> Tensor:
    """Return the mean cross-entropy of softmax(x head' + bias) for x (N, E), head (V, E), labels (N,) in 0..V-1.

    rows: how many of the N have logits at the same time.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled():
            loss: Tensor = ChunkedCrossEntropy.apply(x, head, bias, labels, rows)  # type: ignore[no-untyped-call]
            return loss
        w, added = head.to(x.dtype), None if bias is None else bias.to(x.dtype)
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), rows):
            logits = functional.linear(x[start : start + rows], w, added).float()  # (rows, V padded)
            total += functional.cross_entropy(logits, labels[start : start + rows], reduction="sum")
        return total / len(x)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The gradients are made on the way forward, while a chunk of logits is there; the way back scales them."""

    @staticmethod
    def forward(  # noqa: PLR0917  (the signature of autograd)
        ctx: Any, x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int
    ) -> Tensor:
        """Return the mean loss; products are in the type of `x`, (N, E), sums and `head`'s gradient in 32 bits."""
        w, added = head.to(x.dtype), None if bias is None else bias.to(x.dtype)
        dx, dw = torch.empty_like(x), torch.zeros_like(head)
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), rows):
            part, label = x[start : start + rows], labels[start : start + rows, None]
            log_probs = functional.log_softmax(functional.linear(part, w, added).float(), dim=-1)  # (rows, V padded)
            total -= log_probs.gather(1, label).sum()
            d = log_probs.exp_().scatter_add_(1, label, -torch.ones_like(label, dtype=torch.float32))
            d = d.div_(len(x)).to(x.dtype)  # gradient of the logits
            torch.mm(d, w, out=dx[start : start + rows])
            dw += d.t() @ part
        ctx.save_for_backward(dx, dw)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dx, dw = ctx.saved_tensors
        return dx * grads[0], dw * grads[0], None, None, None
