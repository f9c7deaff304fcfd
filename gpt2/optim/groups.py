"""Which parameters an optimizer treats alike: what decays, and what lies in the blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices decay, biases and gains do not. A group without parameters is left out."""
    taken = list(parameters)
    matrices = [parameter for parameter in taken if parameter.ndim >= 2]
    rest = [parameter for parameter in taken if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices inside the transformer blocks, whatever wraps the model (DDP, torch.compile)."""
    return [parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and "h" in name.split(".")]
