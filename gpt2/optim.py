"""A table of optimizer builders: a name in the configuration becomes one or two torch optimizers.

An optimizer of your own is one function here, one line in BUILDERS and one Kconfig entry: docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from kmatrix.errors import ConfigError

# A config is any object with the fields of gpt2.config.TrainConfig that its optimizer reads.
Builder = Callable[[Any, nn.Module], list[torch.optim.Optimizer]]


class Optimizers:
    """One or more torch optimizers that step as one, each group at a share of its own peak learning rate.

    The rates that the optimizers have when this is made are the peaks.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self._peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_scale(self, scale: float) -> None:
        """Set each group's learning rate to `scale` times its peak."""
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale

    @property
    def lr(self) -> float:
        """The present learning rate of the first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def build(config: Any, model: nn.Module) -> Optimizers:
    """Return the optimizer that `config.optimizer` names, over every parameter of the model."""
    builder = BUILDERS.get(config.optimizer)
    if builder is None:
        raise ConfigError(
            f"optimizer {config.optimizer!r} is not known",
            why=f"known are {', '.join(sorted(BUILDERS))}",
            fix="choose one of them, or add a builder to BUILDERS in gpt2/optim.py (docs/optimizers.md)",
        )
    return Optimizers(*builder(config, model))


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


def sgd(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Stochastic gradient descent; weight decay is added to the gradient."""
    if config.sgd_nesterov and not config.sgd_momentum:
        raise ConfigError(
            "SGD with Nesterov momentum has a momentum of 0",
            why="Nesterov's method looks ahead along the momentum, and there is none",
            fix="set GPT2_SGD_MOMENTUM above 0 (0.9 is usual), or GPT2_SGD_NESTEROV=n",
        )
    groups = decay_groups(model.parameters(), config.weight_decay)
    options = {"lr": config.learning_rate, "momentum": config.sgd_momentum, "nesterov": bool(config.sgd_nesterov)}
    return [torch.optim.SGD(groups, fused=True, **options)]


def adam(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam; weight decay is added to the gradient, and so divided by its root mean square."""
    groups = decay_groups(model.parameters(), config.weight_decay)
    return [torch.optim.Adam(groups, lr=config.learning_rate, fused=True, **_adam_options(config))]


def adamw(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam with decoupled weight decay."""
    groups = decay_groups(model.parameters(), config.weight_decay)
    return [torch.optim.AdamW(groups, lr=config.learning_rate, fused=True, **_adam_options(config))]


def muon(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices in blocks at the learning rate; AdamW for everything else at its own."""
    matrices = block_matrices(model)
    taken = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    return [
        torch.optim.Muon(
            matrices,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            nesterov=bool(config.muon_nesterov),
            ns_steps=config.muon_ns_steps,
        ),
        torch.optim.AdamW(
            decay_groups(rest, config.weight_decay), lr=config.muon_adamw_lr, fused=True, **_adam_options(config)
        ),
    ]


def adafactor(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adafactor: the second moments of a matrix are kept as one row and one column."""
    groups = decay_groups(model.parameters(), config.weight_decay)
    options = {"lr": config.learning_rate, "beta2_decay": config.adafactor_beta2_decay, "d": config.adafactor_clip}
    return [torch.optim.Adafactor(groups, **options)]


def _adam_options(config: Any) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2), "eps": config.epsilon}


BUILDERS: dict[str, Builder] = {"sgd": sgd, "adam": adam, "adamw": adamw, "muon": muon, "adafactor": adafactor}
