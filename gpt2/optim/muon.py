"""Muon: momentum, orthogonalized by Newton-Schulz iterations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Muon(torch.optim.Muon):
    """PyTorch's Muon that orthogonalizes each projection of a fused matrix on its own.

    parts: number of projections in a matrix, stacked by rows; 1 if it is not listed. Without any, every update equals
    PyTorch's bit for bit. States and groups are PyTorch's.
    """

    def __init__(self, params: Any, *, parts: Mapping[nn.Parameter, int], **muon: Any) -> None:
        super().__init__(params, **muon)
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  (torch's signature)
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group)

    def _update(self, matrix: nn.Parameter, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        parts = self.parts.get(matrix, 1)
        if parts > 1:
            update = update.view(parts, len(update) // parts, -1)  # (P, A / P, B): one product for all projections
        update = orthogonal(update, steps=group["ns_steps"], factors=group["ns_coefficients"], least=group["eps"])
        rate = group["lr"] * muon_ratio(group["adjust_lr_fn"], *update.shape[-2:])
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update.reshape(matrix.shape), alpha=-rate)


def muon_ratio(name: str | None, rows: int, columns: int) -> float:
    """Return the factor of Muon's learning rate for a matrix of this shape. name: as in torch.optim.Muon."""
    if name == "match_rms_adamw":  # Liu et al. 2025, arXiv:2502.16982, section 2.2
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))  # the author's


def orthogonal(
    matrices: torch.Tensor, *, steps: int, factors: tuple[float, float, float], least: float
) -> torch.Tensor:
    """Return the matrices (A, B) or (P, A, B) with singular values near 1, in bfloat16, by Newton-Schulz iterations.

    X <- a X + (b G + c G G) X with G = X X'. Source: Jordan et al. 2024.  least: lower bound of the norm.
    """
    a, b, c = factors
    product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the products with the shorter side are cheaper
    # The norm of each matrix bounds its largest singular value, which the iteration needs to be at most 1.
    x = x / x.flatten(-2).norm(dim=-1)[..., None, None].clamp(min=least)
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
