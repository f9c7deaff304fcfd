"""A table of optimizer builders: a name in the configuration becomes one or two torch optimizers.

An optimizer of your own is one function here, one line in BUILDERS and one Kconfig entry: docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpt2.optim.extra import adopt, lion, schedulefree, soap
from gpt2.optim.groups import block_matrices, decay_groups
from gpt2.optim.optimizers import Optimizers
from gpt2.optim.spam import Spam
from kmatrix.errors import ConfigError

# A config is any object with the fields of gpt2.config.TrainConfig that its optimizer reads.
Builder = Callable[[Any, nn.Module], list[torch.optim.Optimizer]]


def build(config: Any, model: nn.Module) -> Optimizers:
    """Return the optimizer that `config.optimizer` names, over every parameter of the model."""
    builder = BUILDERS.get(config.optimizer)
    if builder is None:
        raise ConfigError(
            f"optimizer {config.optimizer!r} is not known",
            why=f"known are {', '.join(sorted(BUILDERS))}",
            fix="choose one of them, or add a builder to BUILDERS in gpt2/optim/builders.py (docs/optimizers.md)",
        )
    return Optimizers(*builder(config, model))


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


def adamwadv(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW with AMSGrad: a second moment never shrinks."""
    groups = decay_groups(model.parameters(), config.weight_decay)
    return [torch.optim.AdamW(groups, lr=config.learning_rate, fused=True, amsgrad=True, **_adam_options(config))]


def adamwspam(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """SPAM on AdamW: spikes are clipped, the moments are reset at intervals."""
    own = {"theta": config.spam_theta, "interval": config.spam_interval, "warmup": config.spam_warmup_steps}
    options = {**own, **_adam_options(config), "amsgrad": bool(config.amsgrad), "fused": True}
    return [Spam(decay_groups(model.parameters(), config.weight_decay), lr=config.learning_rate, **options)]


def adamwprune(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW or SPAM, by `adamwprune_base`; gpt2/prune.py reads its states to prune."""
    if config.adamwprune_base == "adamwspam":
        return adamwspam(config, model)
    options = {**_adam_options(config), "amsgrad": bool(config.amsgrad), "fused": True}
    groups = decay_groups(model.parameters(), config.weight_decay)
    return [torch.optim.AdamW(groups, lr=config.learning_rate, **options)]


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


BUILDERS: dict[str, Builder] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "adamwadv": adamwadv,
    "adamwspam": adamwspam,
    "adamwprune": adamwprune,
    "muon": muon,
    "adafactor": adafactor,
    "lion": lion,
    "adopt": adopt,
    "soap": soap,
    "schedulefree": schedulefree,
}
