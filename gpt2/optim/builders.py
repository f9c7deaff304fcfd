"""Optimizer builders by name.

To add an optimizer, write one builder, one line in BUILDERS and one Kconfig entry: docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpt2.optim.adafactor import Adafactor
from gpt2.optim.groups import block_matrices, decay_groups, projections, set_group_rates
from gpt2.optim.muon import Muon
from gpt2.optim.nanochat import muon_nanochat, muon_nanochat2025
from gpt2.optim.optimizers import Optimizers
from gpt2.optim.spam import Spam
from kmatrix.errors import ConfigError

# A config is any object with the fields of kmatrix.records.train_config.TrainConfig that its optimizer reads: the tests
# and the example in docs/optimizers.md build optimizers without a complete run.
Builder = Callable[[Any, nn.Module], list[torch.optim.Optimizer]]


def build_optimizers(config: Any, model: nn.Module) -> Optimizers:
    """Return the optimizer named by `config.optimizer` over all parameters of the model."""
    builder = BUILDERS.get(config.optimizer)
    if builder is None:
        raise ConfigError(
            f"optimizer {config.optimizer!r} is not known",
            why=f"known are {', '.join(sorted(BUILDERS))}",
            hint="choose one of them, or add a builder to BUILDERS in gpt2/optim/builders.py (docs/optimizers.md)",
        )
    optimizers = builder(config, model)
    set_group_rates(config, model, optimizers)
    return Optimizers(*optimizers)


def sgd(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return SGD with L2 regularization (weight decay is added to the gradient)."""
    options = {"lr": config.learning_rate, "momentum": config.sgd_momentum, "nesterov": bool(config.sgd_nesterov)}
    # fused, here and below: one kernel for all parameters, instead of several small ones per parameter.
    return [torch.optim.SGD(_groups(config, model), fused=True, **options)]


def adam(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Adam with L2 regularization (weight decay is added to the gradient)."""
    return [torch.optim.Adam(_groups(config, model), **_adam_options(config))]


def adamw(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101)."""
    return [torch.optim.AdamW(_groups(config, model), **_adam_options(config))]


def adamwadv(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return AdamW with AMSGrad, whose second moment never decreases (Reddi et al. 2018, arXiv:1904.09237)."""
    return [torch.optim.AdamW(_groups(config, model), amsgrad=True, **_adam_options(config))]


def adamwspam(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return SPAM on AdamW, which clips gradient spikes and resets the moments at intervals."""
    own = {"theta": config.spam_theta, "interval": config.spam_interval, "warmup": config.spam_warmup_steps}
    return [Spam(_groups(config, model), **own, amsgrad=bool(config.amsgrad), **_adam_options(config))]


def adamwprune(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizer that `adamwprune_base` names. gpt2/prune.py prunes with its moments.

    The four bases are those of mcgrof/AdamWPrune. As there, AMSGrad and the weight decay are adamwprune's own settings.
    """
    base = config.adamwprune_base
    if base == "adamwspam":
        return adamwspam(config, model)
    kind = torch.optim.Adam if base == "adam" else torch.optim.AdamW
    amsgrad = bool(config.amsgrad) or base == "adamwadv"
    return [kind(_groups(config, model), amsgrad=amsgrad, **_adam_options(config))]


def muon(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices in the blocks, and AdamW with its own learning rate for all other parameters.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, which also advises AdamW for embeddings,
    and to treat queries, keys and values as three matrices.
    """
    matrices = block_matrices(model)
    in_muon = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in in_muon]
    return [  # Muon first: `Optimizers.lr`, which the log shows, is the rate of the first group
        Muon(
            matrices,
            parts=projections(model) if config.muon_split_qkv else {},
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            nesterov=bool(config.muon_nesterov),
            ns_steps=config.muon_ns_steps,
            adjust_lr_fn=config.muon_adjust_lr_fn,
        ),
        torch.optim.AdamW(
            decay_groups(rest, config.weight_decay), **(_adam_options(config) | {"lr": config.muon_adamw_lr})
        ),
    ]


def adafactor(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Adafactor, which stores the second moment of a matrix as one row and one column.

    Source: Shazeer and Stern 2018, arXiv:1804.04235.
    """
    options = {"lr": config.learning_rate, "beta2_decay": config.adafactor_beta2_decay, "d": config.adafactor_clip}
    return [Adafactor(_groups(config, model), **options)]


def lion(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Lion, which uses the sign of an interpolated momentum and one state value per parameter.

    Source: Chen et al. 2023, arXiv:2302.06675.
    """
    from pytorch_optimizer import Lion

    betas = (config.beta1, config.beta2)
    return [Lion(_groups(config, model), lr=config.learning_rate, betas=betas, foreach=True)]


def adopt(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return ADOPT: Adam whose second moment excludes the current gradient, with decoupled weight decay.

    Source: Taniguchi et al. 2024, arXiv:2411.02853.
    """
    from pytorch_optimizer import ADOPT

    return [ADOPT(_groups(config, model), weight_decouple=True, foreach=True, **_options(config))]


def soap(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return SOAP: Adam in the eigenbasis of Shampoo's preconditioner; vectors use plain Adam.

    Source: Vyas et al. 2024, arXiv:2409.11321; Shampoo: Gupta et al. 2018, arXiv:1802.09568.
    """
    from pytorch_optimizer import SOAP

    return [SOAP(_groups(config, model), precondition_frequency=config.soap_frequency, **_options(config))]


def schedulefree(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Schedule-Free AdamW, which evaluates an average of the weights (`evaluation_weights`).

    Source: Defazio et al. 2024, arXiv:2405.15682.
    """
    from pytorch_optimizer import ScheduleFreeAdamW

    return [ScheduleFreeAdamW(_groups(config, model), foreach=True, **_options(config))]


BUILDERS: dict[str, Builder] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "adamwadv": adamwadv,
    "adamwspam": adamwspam,
    "adamwprune": adamwprune,
    "muon": muon,
    "muon_nanochat": muon_nanochat,
    "muon_nanochat2025": muon_nanochat2025,
    "adafactor": adafactor,
    "lion": lion,
    "adopt": adopt,
    "soap": soap,
    "schedulefree": schedulefree,
}


def _groups(config: Any, model: nn.Module) -> list[dict[str, Any]]:
    return decay_groups(model.parameters(), config.weight_decay)


def _options(config: Any) -> dict[str, Any]:
    """Return the options that all relatives of Adam have."""
    return {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}


def _adam_options(config: Any) -> dict[str, Any]:
    return {**_options(config), "fused": True}
