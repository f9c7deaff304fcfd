"""Adafactor that never waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Bytes of weights whose updates are in memory at once, if there are more than one tensor's. PyTorch's foreach form
# keeps the updates of all: a second copy of the model.
BATCH = 1 << 27


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor with its states, and its numbers up to rounding in 32 bits.

    PyTorch's reads two numbers of each parameter from the GPU, the root mean squares of weights and update, and so
    waits for it 296 times per step with GPT-2's 148 parameters. Here they stay on the device.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  (torch's signature)
        for group in self.param_groups:
            lists: tuple[list[Any], ...] = ([], [], [], [], [], [])  # weights, grads, rows, columns, variances, steps
            self._init_group(group, *lists)
            steps = [float(step.add_(1)) for step in lists[-1]]  # PyTorch keeps them in CPU memory: no wait
            for batch in _batches(list(zip(*lists[:-1], steps, strict=True))):
                _update(group, map(list, zip(*batch, strict=True)))


def _batches(tensors: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Yield vectors and matrices, weights first in each tuple, in batches of at most BATCH bytes, or of one tensor."""
    for matrices in (False, True):
        batch: list[tuple[Any, ...]] = []
        for tensor in (tensor for tensor in tensors if (tensor[0].ndim > 1) == matrices):
            if batch and sum(weights.nbytes for weights, *_ in [*batch, tensor]) > BATCH:
                yield batch
                batch = []
            batch.append(tensor)
        if batch:
            yield batch


# torch._foreach_*: one kernel for a list of tensors. Private, but torch's own optimizers are written with them.
def _update(group: dict[str, Any], lists: Iterable[list[Any]]) -> None:
    """Update matrices, with rows (A, 1) and columns (1, B) of second moments, or vectors, with whole ones (n,).

    Source: torch/optim/_adafactor.py, version 2.13.
    """
    weights, grads, rows, columns, whole, steps = lists
    least, least_scale = group["eps"]
    least = torch.finfo(weights[0].dtype).eps if least is None else least
    roots = [tensor.numel() ** 0.5 for tensor in weights]
    # The step size, relative to the root mean square of the weights before decay: a number per tensor, on the device.
    sizes = torch._foreach_norm(weights)
    torch._foreach_div_(sizes, roots)
    torch._foreach_clamp_min_(sizes, least_scale)
    torch._foreach_mul_(sizes, [-min(group["lr"], 1 / step**0.5) for step in steps])
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])

    shares = [step ** group["beta2_decay"] for step in steps]  # of this gradient in the moments
    if grads[0].ndim > 1:
        for moments, axis in ((rows, -1), (columns, -2)):
            # The mean of the squares, without a square of the size of the gradient.
            means = [torch.linalg.vector_norm(grad, dim=axis, keepdim=True) for grad in grads]
            torch._foreach_mul_(means, means)
            torch._foreach_div_(means, [float(grad.shape[axis]) for grad in grads])
            torch._foreach_lerp_(moments, means, shares)
        updates = [row @ column for row, column in zip(rows, columns, strict=True)]
        torch._foreach_div_(updates, [row.mean(dim=-2, keepdim=True).clamp_(min=least) for row in rows])
    else:
        torch._foreach_lerp_(whole, torch._foreach_mul(grads, grads), shares)
        updates = [moment.clone() for moment in whole]
    torch._foreach_clamp_min_(updates, least * least)  # squared, because the root follows
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, grads)
    # Clipping: divide by the root mean square of the update where it exceeds d.
    norms = torch._foreach_norm(updates)
    torch._foreach_div_(norms, [root * group["d"] for root in roots])
    torch._foreach_clamp_min_(norms, 1.0)
    torch._foreach_div_(sizes, norms)
    torch._foreach_mul_(updates, sizes)
    torch._foreach_add_(weights, updates)
