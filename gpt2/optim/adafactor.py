"""Adafactor that never waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Bytes of weights whose updates are in memory at once, if there are more than one tensor's. PyTorch's foreach form
# keeps the updates of all: a second copy of the model.
BATCH = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A parameter in a step: a matrix with a row and a column of its second moment, or a vector with all of it."""

    weights: Tensor
    grad: Tensor
    moments: tuple[Tensor, ...]  # (A, 1) and (1, B); or (n,)
    step: float  # 1 in the first


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor with its states, and its numbers up to rounding in 32 bits.

    PyTorch's reads two numbers of each parameter from the GPU, the root mean squares of weights and update, and so
    waits for it 296 times per step with GPT-2's 148 parameters. Here they stay on the device.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  (torch's signature)
        for group in self.param_groups:
            for tensors in _batches(self._tensors(group)):
                _update(tensors, group)

    def _tensors(self, group: dict[str, Any]) -> list[_Tensor]:
        """Return the parameters of a group that have a gradient, and count the step."""
        weights, grads, rows, columns, variances, steps = lists = ([], [], [], [], [], [])  # type: ignore[var-annotated]
        self._init_group(group, *lists)
        if steps:  # foreach functions refuse empty lists
            torch._foreach_add_(steps, 1.0)
        return [
            _Tensor(
                weights=weight,
                grad=-grad if group["maximize"] else grad,
                moments=(row, column) if variance is None else (variance,),
                step=float(step),  # PyTorch keeps it in CPU memory: no wait
            )
            for weight, grad, row, column, variance, step in zip(
                weights, grads, rows, columns, variances, steps, strict=True
            )
        ]


def _batches(tensors: list[_Tensor]) -> Iterator[list[_Tensor]]:
    """Yield matrices and vectors in batches of at most BATCH bytes, or of one tensor."""
    for kind in (True, False):
        batch: list[_Tensor] = []
        size = 0
        for tensor in (tensor for tensor in tensors if (tensor.grad.ndim > 1) == kind):
            if batch and size + tensor.weights.nbytes > BATCH:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.weights.nbytes
        if batch:
            yield batch


# torch._foreach_*: one kernel for a list of tensors. Private, but torch's own optimizers are written with them.
def _update(tensors: list[_Tensor], group: Mapping[str, Any]) -> None:
    """Update matrices or vectors. Source: torch/optim/_adafactor.py, version 2.13."""
    weights = [tensor.weights for tensor in tensors]
    grads = [tensor.grad for tensor in tensors]
    least, least_scale = group["eps"]
    least = torch.finfo(weights[0].dtype).eps if least is None else least
    # The step size, relative to the root mean square of the weights before decay: a number per tensor, on the device.
    sizes = torch._foreach_norm(weights)
    torch._foreach_div_(sizes, [tensor.weights.numel() ** 0.5 for tensor in tensors])
    torch._foreach_clamp_min_(sizes, least_scale)
    torch._foreach_mul_(sizes, [-min(group["lr"], 1 / tensor.step**0.5) for tensor in tensors])
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])

    shares = [tensor.step ** group["beta2_decay"] for tensor in tensors]  # of this gradient in the moments
    updates = (_factored if grads[0].ndim > 1 else _whole)(tensors, shares, least)
    torch._foreach_clamp_min_(updates, least * least)  # squared, because the root follows
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, grads)
    # Clipping: divide by the root mean square of the update where it exceeds d.
    norms = torch._foreach_norm(updates)
    torch._foreach_div_(norms, [tensor.weights.numel() ** 0.5 * group["d"] for tensor in tensors])
    torch._foreach_clamp_min_(norms, 1.0)
    torch._foreach_div_(sizes, norms)
    torch._foreach_mul_(updates, sizes)
    torch._foreach_add_(weights, updates)


def _factored(tensors: list[_Tensor], shares: list[float], least: float) -> list[Tensor]:
    """Update rows and columns; return the second moments of matrices (A, B), the products of both."""
    rows, columns = ([tensor.moments[side] for tensor in tensors] for side in (0, 1))
    for moments, axis in ((rows, -1), (columns, -2)):
        # The mean of the squares, without a square of the size of the gradient.
        means = [torch.linalg.vector_norm(tensor.grad, dim=axis, keepdim=True) for tensor in tensors]
        torch._foreach_mul_(means, means)
        torch._foreach_div_(means, [float(tensor.grad.shape[axis]) for tensor in tensors])
        torch._foreach_lerp_(moments, means, shares)
    estimates = [row @ column for row, column in zip(rows, columns, strict=True)]
    scales = [row.mean(dim=-2, keepdim=True).clamp_(min=least) for row in rows]
    torch._foreach_div_(estimates, scales)
    return estimates


def _whole(tensors: list[_Tensor], shares: list[float], least: float) -> list[Tensor]:  # noqa: ARG001  (as above)
    """Update the second moments of vectors; return copies."""
    grads = [tensor.grad for tensor in tensors]
    moments = [tensor.moments[0] for tensor in tensors]
    torch._foreach_lerp_(moments, torch._foreach_mul(grads, grads), shares)
    return [moment.clone() for moment in moments]
