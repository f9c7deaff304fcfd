"""Matrix products of linear layers in 8-bit floats (FP8), with one scale per tensor that is found at each use.

Formats and scaling: Micikevicius et al. 2022 (arXiv:2209.05433): e4m3 for activations and weights, e5m2 for gradients,
whose range is larger. The sums are 32-bit, results bfloat16. Master weights, norms, attention, embeddings, output layer
and optimizer are not affected.

Dimensions in comments: N rows, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kmatrix.errors import ConfigError

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the products of the hardware take sides that are multiples of this
SMALLEST = 64  # a side below this is a gate: no time to gain, and its values steer whole heads
CAPABILITY = (8, 9)  # of NVIDIA GPUs: Ada
LEAST = 1e-12  # of the largest value in a tensor: a tensor of zeros has a scale, too


def check_device(device: torch.device) -> None:
    """Raise ConfigError if a GPU has no FP8 products."""
    if device.type != "cuda" or torch.version.hip:
        return
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        why = f"its compute capability is {found[0]}.{found[1]}, and FP8 needs {CAPABILITY[0]}.{CAPABILITY[1]}"
        raise ConfigError(f"{name} has no FP8 products", why=why, hint="set FP8=n")


def suits(layer: nn.Linear) -> bool:
    """Return whether a layer can, and should, be computed in FP8."""
    sides = (layer.in_features, layer.out_features)
    return min(sides) >= SMALLEST and all(side % MULTIPLE == 0 for side in sides)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight' + bias, (..., O) in bfloat16, for x (..., I), weight (O, I) and bias (O,)."""
    rows = x.reshape(-1, x.shape[-1])  # (N, I)
    if len(rows) % MULTIPLE:  # a short text in evaluation
        dtype = torch.bfloat16
        return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    product: Tensor = Product.apply(rows, weight)  # type: ignore[no-untyped-call]
    product = product.view(*x.shape[:-1], len(weight))
    return product if bias is None else product + bias.to(product.dtype)


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor in FP8, scaled to the whole range of the format, and the factor () that undoes the scale."""
    x = x.float()
    factor = x.abs().amax().clamp(min=LEAST) / torch.finfo(dtype).max
    return (x / factor).to(dtype), factor


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """Return a b' in bfloat16 for quantized a (N, I) and b (O, I), both in rows."""
    if a[0].device.type == "cpu":  # the operator takes half a second there; the values are the same, and the sums
        return (functional.linear(a[0].float(), b[0].float()) * (a[1] * b[1])).to(torch.bfloat16)
    result: Tensor = torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16)
    return result


def turned(a: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the transpose, in rows: the hardware multiplies rows by rows only."""
    return a[0].t().contiguous(), a[1]


class Product(torch.autograd.Function):
    """The product of a linear layer and its two gradients, each in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        small, weights = quantized(x, FORWARD), quantized(weight, FORWARD)
        ctx.save_for_backward(*small, *weights)  # a byte per element instead of two
        return product(small, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, x_factor, weight, weight_factor = ctx.saved_tensors
        grad = quantized(grads[0], BACKWARD)  # (N, O)
        to_input = product(grad, turned((weight, weight_factor)))  # (N, I)
        to_weight = product(turned(grad), turned((x, x_factor)))  # (O, I)
        return to_input, to_weight.float()
