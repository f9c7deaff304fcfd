"""Muon: momentum, orthogonalized by Newton-Schulz iterations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Bytes of 32-bit weights: the most that an iteration takes at once, if it takes more than one matrix. All matrices of a
# shape of GPT-2 124M fit (113 MB). Those of larger models are larger, so that a few fill a GPU: 3 of 1558M's MLP.
# The memory of an iteration is 2.5 times this bound, five batches in 16 bits, whatever the size of the model.
BATCH = 1 << 27


class Muon(torch.optim.Muon):
    """PyTorch's Muon that orthogonalizes each projection of a fused matrix on its own.

    parts: number of projections in a matrix, stacked by rows; 1 if it is not listed.
    States and groups are PyTorch's. Without any parts every update on the CPU equals PyTorch's bit for bit; a GPU
    computes the products of equal shape in batches, whose kernels may round in another way.
    """

    dtype = torch.bfloat16  # of the iteration

    def __init__(self, params: Any, *, parts: Mapping[nn.Parameter, int], **muon: Any) -> None:
        super().__init__(params, **muon)
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  (torch's signature)
        for group in self.param_groups:
            for matrices, parts in batches(group["params"], self.parts):
                self._update(matrices, parts, group)

    def _update(self, matrices: list[Tensor], parts: int, group: Mapping[str, Any]) -> None:
        """Update matrices (A, B) of one shape, with the same number of projections."""
        x = projected(self._averaged(matrices, group), parts, self.dtype)  # (N P, A / P, B)
        # The norm of each matrix bounds its largest singular value, which the iteration needs to be at most 1.
        x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=group["eps"]))
        x = iterated(x, [group["ns_coefficients"]] * group["ns_steps"])
        rate = group["lr"] * muon_ratio(group["adjust_lr_fn"], *x.shape[-2:])
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(matrices, whole(x, matrices), alpha=-rate)

    def _averaged(self, matrices: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """Update the momentum of matrices with gradients; return it, or Nesterov's, which looks ahead along it."""
        grads = [matrix.grad for matrix in matrices if matrix.grad is not None]
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta: list[Tensor] = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        # torch._foreach_*: one kernel for a list of tensors. Private, but torch's own optimizers are written with them.
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        return list(torch._foreach_lerp(grads, momenta, group["momentum"])) if group["nesterov"] else momenta


def batches(matrices: Sequence[nn.Parameter], parts: Mapping[nn.Parameter, int]) -> Iterator[tuple[list[Tensor], int]]:
    """Yield the matrices that have a gradient, in batches of one shape and number of projections, with the number."""
    alike: dict[tuple[tuple[int, ...], int], list[Tensor]] = {}
    for matrix in matrices:
        if matrix.grad is not None:
            alike.setdefault((tuple(matrix.shape), parts.get(matrix, 1)), []).append(matrix)
    for (shape, count), found in alike.items():
        size = max(1, BATCH // (4 * math.prod(shape)))
        for first in range(0, len(found), size):
            yield found[first : first + size], count


def projected(matrices: list[Tensor], parts: int, dtype: torch.dtype) -> Tensor:
    """Return a copy of N matrices (A, B) of P projections each, as one tensor (N P, A / P, B)."""
    rows, columns = matrices[0].shape
    x = torch.empty(len(matrices), rows, columns, dtype=dtype, device=matrices[0].device)
    torch._foreach_copy_(x.unbind(), matrices)
    return x.view(-1, rows // parts, columns)


def whole(x: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    """Return projections (N P, A / P, B) as N tensors like the matrices (A, B) that they are from."""
    # In the type and layout of the matrices: otherwise foreach functions on a GPU start a kernel for each tensor.
    x = x.to(matrices[0].dtype, memory_format=torch.contiguous_format)
    return list(x.view(len(matrices), *matrices[0].shape).unbind())


def muon_ratio(name: str | None, rows: int, columns: int) -> float:
    """Return the factor of Muon's learning rate for a matrix of this shape. name: as in torch.optim.Muon."""
    if name == "match_rms_adamw":  # Liu et al. 2025, arXiv:2502.16982, section 2.2
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))  # the author's


def iterated(x: Tensor, factors: Sequence[tuple[float, float, float]]) -> Tensor:
    """Return matrices (N, A, B) after X <- a X + (b G + c G G) X for each a, b, c; G = X X', of the shorter side.

    Newton-Schulz iterations (Jordan et al. 2024), towards singular values of 1. On the CPU each matrix has its own
    products, for equal bits in a batch of any size: with sharded states a rank has only some of the matrices, and BLAS
    rounds by the number of products that it gets at once.
    """
    if x.device.type == "cpu":
        return torch.stack([_iterated(matrix, factors, torch.mm, torch.addmm) for matrix in x.unbind()])
    return _iterated(x, factors, torch.bmm, torch.baddbmm)


def _iterated(x: Tensor, factors: Sequence[tuple[float, float, float]], product: Any, sum_and_product: Any) -> Tensor:
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for a, b, c in factors:
        gram = product(x, x.mT)
        x = sum_and_product(x, sum_and_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
