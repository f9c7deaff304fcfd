"""Which parameters an optimizer gets, and the groups with their own decay or learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices with weight decay, biases and gains without. Empty groups are omitted."""
    parameters = list(parameters)  # a generator could be read only once
    # As in nanoGPT: everything that is multiplied with activations decays, what shifts or scales them does not.
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    rest = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_group_rates(config: Any, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set the peak rates of embeddings, output layer, and biases and gains, as far as they have their own.

    Parameters with a rate of their own move to a new group of the same optimizer, with the other settings of the old.
    """
    rates = {"embedding": config.embedding_lr, "head": config.head_lr, "scalar": config.scalar_lr}
    kinds = kinds_of(model)
    for optimizer in optimizers:
        for group in list(optimizer.param_groups):
            for kind, rate in rates.items():
                moved = [parameter for parameter in group["params"] if kinds[parameter] == kind]
                if rate is None or not moved:
                    continue
                kept = [parameter for parameter in group["params"] if kinds[parameter] != kind]
                if not kept:
                    group["lr"] = rate
                    break
                group["params"] = kept
                optimizer.add_param_group({**group, "params": moved, "lr": rate})


def kinds_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the kind of each parameter: embedding, head, scalar (not a matrix), or block (the other matrices)."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {}
    for name, parameter in model.named_parameters():
        head = "lm_head" in name.split(".")
        kind = "scalar" if parameter.ndim < 2 else "head" if head else "block"
        found[parameter] = "embedding" if parameter in embeddings else kind
    return found


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices inside the transformer blocks, also if DDP or torch.compile wraps the model."""
    # "h" is GPT-2's list of blocks. Wrappers add prefixes (module., _orig_mod.), so look at every part of the name.
    return [parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and "h" in name.split(".")]


def projections(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the number of projections in each matrix that holds several, stacked by rows: 3 for GPT-2's c_attn."""
    names = [(name.split("."), parameter) for name, parameter in model.named_parameters()]
    return {parameter: 3 for name, parameter in names if name[-2:] == ["c_attn", "weight"]}
