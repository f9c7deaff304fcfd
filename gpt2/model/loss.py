"""The cross-entropy of the output layer, computed in chunks of rows if that is faster or takes less memory.

Dimensions in comments: N rows, E width, V vocabulary.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpt2.model import compiled

IGNORED = -100  # a label that the loss does not count: PyTorch's default


def padding_bias(vocab_size: int, rows: int) -> Tensor | None:
    """Return the bias added to the logits: 0 for tokens, -inf for padding; None without padding."""
    if rows == vocab_size:
        return None
    # exp(-inf) is 0: padding adds nothing to the softmax, and its rows of the embedding get a gradient of exactly 0.
    return torch.cat([torch.zeros(vocab_size), torch.full((rows - vocab_size,), -math.inf)])  # (V padded,)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap x tanh(logits / cap), which keeps logits within +-cap (Gemma 2, arXiv:2408.00118, section 2)."""
    return cap * torch.tanh(logits / cap)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the loss of each label (N,), None if gradients are computed, and the mean (), for logits (N, V) in fp32.

    An IGNORED label has a loss of 0, and the mean does not count it.
    """
    if torch.is_grad_enabled():
        return None, functional.cross_entropy(logits, labels)
    log_probs = functional.log_softmax(logits, dim=-1)  # once for both
    return functional.nll_loss(log_probs, labels, reduction="none"), functional.nll_loss(log_probs, labels)


def chunked_cross_entropy(  # noqa: PLR0917  (in the order of the formula)
    x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int, cap: float = 0.0
) -> tuple[Tensor | None, Tensor]:
    """Return the same as `cross_entropy`, of the logits x head' + bias for x (N, E), head (V, E), labels (N,).

    Labels may be IGNORED in evaluation alone, where they are not counted.
    rows: how many of the N rows have logits in memory at the same time.  cap: of the logits; 0: none.
    """
    device = x.device.type
    # Every dtype is chosen by hand: autocast would cast some of the operations below, but none with `out=`.
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    # In a compiled model the operator is one node: the loop would be unrolled, 10,000 nodes at 65,536 tokens.
    fused = torch.compiler.is_compiling()
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled():
            return None, loss_and_gradients(x, head, bias, labels, rows, cap, fused)[0]
        losses: Tensor
        losses, loss = loss_alone(x, head, bias, labels, rows, cap)
        return losses, loss


@torch.library.custom_op("kmatrix::loss_alone", mutates_args=())
def loss_alone(  # noqa: PLR0917  (as above)
    x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int, cap: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each label (N,), and the mean () of those that count."""
    w = head.to(x.dtype)
    losses, total = torch.empty(len(x), device=x.device), torch.zeros((), device=x.device)
    for start in range(0, len(x), rows):
        label = labels[start : start + rows]
        z = _product(x[start : start + rows], w, bias, cap)
        log_probs = functional.log_softmax(capped(z, bias, cap), dim=-1)  # (rows, V padded)
        losses[start : start + rows] = functional.nll_loss(log_probs, label, reduction="none")
        total += functional.nll_loss(log_probs, label, reduction="sum")
    return losses, total / (labels != IGNORED).sum()


@loss_alone.register_fake
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("kmatrix::loss_and_gradients", mutates_args=())
def loss_and_gradients(  # noqa: PLR0917  (as above)
    x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int, cap: float, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss () and its gradients, of `x` (N, E) and of `head` (V padded, E).

    The logits of one chunk exist at a time, and never again: a backward pass would have to recompute them. The idea is
    that of Liger Kernel's fused linear cross-entropy (https://github.com/linkedin/Liger-Kernel).
    Products have the dtype of `x`; sums and the gradient of `head` are fp32.
    fused: what happens to the logits between two products is compiled: read twice and written once.
    """
    w = head.to(x.dtype)  # (V padded, E)
    dx, dw = torch.empty_like(x), torch.zeros_like(head)  # dw in fp32: it sums over all chunks
    total = torch.zeros((), device=x.device)
    between_products = _compiled_gradient(compiled.BACKEND) if fused else _gradient
    for start in range(0, len(x), rows):
        part, label = x[start : start + rows], labels[start : start + rows, None]
        # The products are outside of what is compiled: those of the vendor's library are the fastest.
        z = _product(part, w, bias, cap)
        sum_, d = between_products(z, bias, label, cap, len(x))
        del z
        total -= sum_
        torch.mm(d, w, out=dx[start : start + rows])  # (rows, E)
        dw += d.t() @ part  # (V padded, E)
    return total / len(x), dx, dw


@loss_and_gradients.register_fake
def _(x: Tensor, head: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(head)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ARG001
    _, dx, dw = output
    ctx.mark_non_differentiable(dx, dw)
    ctx.save_for_backward(dx, dw)


def _scale_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
    dx, dw = ctx.saved_tensors
    # The loss is a scalar, so the chain rule is one factor (1 / accumulation in training).
    return dx * grads[0], dw * grads[0], None, None, None, None, None


loss_and_gradients.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _gradient(z: Tensor, bias: Tensor | None, label: Tensor, cap: float, n: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the labels' log-probabilities () and the gradient of the mean loss of n rows by `z`, like `z`.

    z: the product with the output layer (rows, V padded), in fp32 not kept.  label: (rows, 1).
    """
    logits = capped(z, bias, cap)
    # The derivative of the cap, 1 - tanh^2; padding has -inf, and a gradient of 0.
    slope = 1 - (logits.clamp(min=-cap) / cap).square() if cap else None
    log_probs = functional.log_softmax(logits, dim=-1)
    del logits
    found = log_probs.gather(1, label).sum()
    # Gradient of the logits: (softmax - one-hot) / N. In place, because a second buffer would double the peak.
    d = log_probs.exp_().scatter_add_(1, label, -torch.ones_like(label, dtype=torch.float32))
    d = d.div_(n)  # (rows, V padded)
    return found, (d if slope is None else d.mul_(slope)).to(z.dtype)


def _fusable_gradient(z: Tensor, bias: Tensor | None, label: Tensor, cap: float, n: int) -> tuple[Tensor, Tensor]:
    """Return the same as `_gradient`, without operations in place, which keep the compiler from fusing all of it."""
    logits = capped(z, bias, cap)
    log_probs = functional.log_softmax(logits, dim=-1)
    is_label = torch.arange(z.shape[1], device=z.device) == label  # (rows, V padded)
    found = torch.where(is_label, log_probs, 0.0).sum()
    d = (log_probs.exp() - is_label.float()) / n
    if cap:
        d = d * (1 - (logits.clamp(min=-cap) / cap).square())
    return found, d.to(z.dtype)


@cache
def _compiled_gradient(backend: Any) -> Any:
    """Return `_fusable_gradient`, compiled as the model is."""
    return torch.compile(_fusable_gradient, dynamic=False, backend=backend)


def _product(x: Tensor, head: Tensor, bias: Tensor | None, cap: float) -> Tensor:
    """Return what `capped` takes, for some rows: (rows, V padded)."""
    return functional.linear(x, head, None if cap or bias is None else bias.to(x.dtype))


def capped(z: Tensor, bias: Tensor | None, cap: float) -> Tensor:
    """Return logits in fp32 (rows, V padded). A product has the bias, which is not finite, unless there is a cap."""
    if not cap:
        return z.float()
    logits = soft_cap(z.float(), cap)
    return logits if bias is None else logits.add_(bias)  # in place: capped logits are a new tensor
