"""The cross-entropy of the output layer, computed in chunks of rows if that is faster or takes less memory.

Dimensions in comments: N rows, E width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # a label that the loss does not count: PyTorch's default
CHUNK_ROWS = 128  # 128 x 50304 logits take 26 MB; malloc returns blocks above 32 MB to the system on every free


def padding_bias(vocab_size: int, rows: int) -> Tensor | None:
    """Return the bias added to the logits: 0 for tokens, -inf for padding; None without padding."""
    if rows == vocab_size:
        return None
    # exp(-inf) is 0: padding adds nothing to the softmax, and its rows of the embedding get a gradient of exactly 0.
    return torch.cat([torch.zeros(vocab_size), torch.full((rows - vocab_size,), -math.inf)])  # (V padded,)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap x tanh(logits / cap), which keeps logits within +-cap (Gemma 2, arXiv:2408.00118, section 2)."""
    return cap * torch.tanh(logits / cap)


def chunked_cross_entropy(  # noqa: PLR0917  (in the order of the formula)
    x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int = CHUNK_ROWS, cap: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy of softmax(x head' + bias) for x (N, E), head (V, E), labels (N,).

    Labels may be IGNORED in evaluation alone, where they are not counted.
    rows: how many of the N rows have logits in memory at the same time.  cap: of the logits; 0: none.
    """
    device = x.device.type
    # Every dtype is chosen by hand: autocast would cast some of the operations below, but none with `out=`.
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled():
            loss: Tensor = ChunkedCrossEntropy.apply(x, head, bias, labels, rows, cap)  # type: ignore[no-untyped-call]
            return loss
        # Evaluation: the same sums without gradients.
        w = head.to(x.dtype)
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), rows):
            logits = _logits(x[start : start + rows], w, bias, cap)  # (rows, V padded)
            total += functional.cross_entropy(logits, labels[start : start + rows], reduction="sum")
        return total / (labels != IGNORED).sum()


def _logits(x: Tensor, head: Tensor, bias: Tensor | None, cap: float) -> Tensor:
    """Return the logits of some rows in fp32: (rows, V padded)."""
    if not cap:
        return functional.linear(x, head, None if bias is None else bias.to(x.dtype)).float()
    logits = soft_cap(functional.linear(x, head).float(), cap)
    return logits if bias is None else logits + bias  # after the cap, which would make -inf finite


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradients chunk by chunk in the forward pass; backward only scales them.

    The logits of one chunk exist at a time, and never again: backward would have to recompute them. The idea is that
    of Liger Kernel's fused linear cross-entropy (https://github.com/linkedin/Liger-Kernel).
    """

    @staticmethod
    def forward(  # noqa: PLR0917  (the signature of autograd)
        ctx: Any, x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int, cap: float
    ) -> Tensor:
        """Return the mean loss. Products have the dtype of `x`, (N, E); sums and the gradient of `head` are fp32."""
        w = head.to(x.dtype)  # (V padded, E)
        dx, dw = torch.empty_like(x), torch.zeros_like(head)  # dw in fp32: it sums over all chunks
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), rows):
            part, label = x[start : start + rows], labels[start : start + rows, None]
            logits = _logits(part, w, bias, cap)  # (rows, V padded)
            # The derivative of the cap, 1 - tanh^2; padding has -inf, and a gradient of 0.
            slope = 1 - (logits.clamp(min=-cap) / cap).square() if cap else None
            log_probs = functional.log_softmax(logits, dim=-1)
            del logits
            total -= log_probs.gather(1, label).sum()
            # Gradient of the logits: (softmax - one-hot) / N. In place, because a second buffer would double the peak.
            d = log_probs.exp_().scatter_add_(1, label, -torch.ones_like(label, dtype=torch.float32))
            d = d.div_(len(x))  # (rows, V padded)
            d = (d if slope is None else d.mul_(slope)).to(x.dtype)
            torch.mm(d, w, out=dx[start : start + rows])  # (rows, E)
            dw += d.t() @ part  # (V padded, E)
        ctx.save_for_backward(dx, dw)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        dx, dw = ctx.saved_tensors
        # The loss is a scalar, so the chain rule is one factor (1 / accumulation in training).
        return dx * grads[0], dw * grads[0], None, None, None, None
