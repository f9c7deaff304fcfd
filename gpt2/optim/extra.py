"""Optimizers of the package pytorch_optimizer, imported only where one of them is chosen: that takes a second."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpt2.optim.groups import decay_groups


def lion(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Lion: the sign of an interpolated momentum; one number kept for each parameter."""
    from pytorch_optimizer import Lion

    return [Lion(_groups(config, model), lr=config.learning_rate, betas=_betas(config), foreach=True)]


def adopt(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """ADOPT: Adam whose second moment leaves the present gradient out; decoupled weight decay."""
    from pytorch_optimizer import ADOPT

    options = {"betas": _betas(config), "eps": config.epsilon, "weight_decouple": True, "foreach": True}
    return [ADOPT(_groups(config, model), lr=config.learning_rate, **options)]


def soap(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """SOAP: Adam in the slowly turning eigenbasis of Shampoo's preconditioner; vectors get plain Adam."""
    from pytorch_optimizer import SOAP

    options = {"betas": _betas(config), "eps": config.epsilon, "precondition_frequency": config.soap_frequency}
    return [SOAP(_groups(config, model), lr=config.learning_rate, **options)]


def schedulefree(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Schedule-Free AdamW: gradients at one point, and an average of the weights that is judged (`judged`)."""
    from pytorch_optimizer import ScheduleFreeAdamW

    options = {"betas": _betas(config), "eps": config.epsilon, "foreach": True}
    return [ScheduleFreeAdamW(_groups(config, model), lr=config.learning_rate, **options)]


def _groups(config: Any, model: nn.Module) -> list[dict[str, Any]]:
    return decay_groups(model.parameters(), config.weight_decay)


def _betas(config: Any) -> tuple[float, float]:
    return (config.beta1, config.beta2)
