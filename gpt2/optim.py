"""Optimizer builders by name, and what all optimizers of a run have in common.

To add an optimizer, write one builder, one line in BUILDERS and one Kconfig entry: docs/optimizers.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kmatrix.errors import ConfigError

# A config is any object with the fields of kmatrix.records.train_config.TrainConfig that its optimizer reads: the tests
# and the example in docs/optimizers.md build optimizers without a complete run.
Builder = Callable[[Any, nn.Module], list[torch.optim.Optimizer]]
CLIP_AFTER = 20  # steps after a reset until the second moment is a usable bound (the authors' code)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # names in the state of torch's AdamW; the last with AMSGrad


def build(config: Any, model: nn.Module) -> Optimizers:
    """Return the optimizer named by `config.optimizer` over all parameters of the model."""
    builder = BUILDERS.get(config.optimizer)
    if builder is None:
        raise ConfigError(
            f"optimizer {config.optimizer!r} is not known",
            why=f"known are {', '.join(sorted(BUILDERS))}",
            hint="choose one of them, or add a builder to BUILDERS in gpt2/optim.py (docs/optimizers.md)",
        )
    optimizers = builder(config, model)
    set_group_rates(config, model, optimizers)
    return Optimizers(*optimizers)


def sgd(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return SGD with L2 regularization (weight decay is added to the gradient)."""
    # torch raises a ValueError with its own argument names; the user knows the symbols.
    if config.sgd_nesterov and not config.sgd_momentum:
        raise ConfigError(
            "SGD with Nesterov momentum has a momentum of 0",
            why="Nesterov's method looks ahead along the momentum, and there is none",
            hint="set GPT2_SGD_MOMENTUM above 0 (0.9 is usual), or GPT2_SGD_NESTEROV=n",
        )
    groups = decay_groups(model.parameters(), config.weight_decay)
    options = {"lr": config.learning_rate, "momentum": config.sgd_momentum, "nesterov": bool(config.sgd_nesterov)}
    # fused, here and below: one kernel for all parameters, instead of several small ones per parameter.
    return [torch.optim.SGD(groups, fused=True, **options)]


def adam(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Adam with L2 regularization (weight decay is added to the gradient)."""
    groups = decay_groups(model.parameters(), config.weight_decay)
    return [torch.optim.Adam(groups, lr=config.learning_rate, fused=True, **_adam_options(config))]


def adamw(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101)."""
    groups = decay_groups(model.parameters(), config.weight_decay)
    return [torch.optim.AdamW(groups, lr=config.learning_rate, fused=True, **_adam_options(config))]


def adamwadv(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return AdamW with AMSGrad, whose second moment never decreases (Reddi et al. 2018, arXiv:1904.09237)."""
    groups = decay_groups(model.parameters(), config.weight_decay)
    return [torch.optim.AdamW(groups, lr=config.learning_rate, fused=True, amsgrad=True, **_adam_options(config))]


def adamwspam(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return SPAM on AdamW, which clips gradient spikes and resets the moments at intervals."""
    own = {"theta": config.spam_theta, "interval": config.spam_interval, "warmup": config.spam_warmup_steps}
    options = {**own, **_adam_options(config), "amsgrad": bool(config.amsgrad), "fused": True}
    return [Spam(decay_groups(model.parameters(), config.weight_decay), lr=config.learning_rate, **options)]


def adamwprune(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return AdamW or SPAM, as `adamwprune_base` says. gpt2/prune.py prunes with its moments (mcgrof/AdamWPrune)."""
    if config.adamwprune_base == "adamwspam":
        return adamwspam(config, model)
    options = {**_adam_options(config), "amsgrad": bool(config.amsgrad), "fused": True}
    groups = decay_groups(model.parameters(), config.weight_decay)
    return [torch.optim.AdamW(groups, lr=config.learning_rate, **options)]


def muon(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices in the blocks, and AdamW with its own learning rate for all other parameters.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, which also advises AdamW for embeddings,
    and to treat queries, keys and values as three matrices.
    """
    matrices = block_matrices(model)
    in_muon = {id(parameter) for parameter in matrices}  # by identity: == of tensors compares their values
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
            decay_groups(rest, config.weight_decay), lr=config.muon_adamw_lr, fused=True, **_adam_options(config)
        ),
    ]


def adafactor(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Adafactor, which stores the second moment of a matrix as one row and one column.

    Source: Shazeer and Stern 2018, arXiv:1804.04235.
    """
    groups = decay_groups(model.parameters(), config.weight_decay)
    options = {"lr": config.learning_rate, "beta2_decay": config.adafactor_beta2_decay, "d": config.adafactor_clip}
    return [torch.optim.Adafactor(groups, **options)]


def _adam_options(config: Any) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2), "eps": config.epsilon}


def lion(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Lion, which uses the sign of an interpolated momentum and one state value per parameter.

    Source: Chen et al. 2023, arXiv:2302.06675.
    """
    from pytorch_optimizer import Lion

    return [Lion(_groups(config, model), lr=config.learning_rate, betas=_betas(config), foreach=True)]


def adopt(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return ADOPT: Adam whose second moment excludes the current gradient, with decoupled weight decay.

    Source: Taniguchi et al. 2024, arXiv:2411.02853.
    """
    from pytorch_optimizer import ADOPT

    options = {"betas": _betas(config), "eps": config.epsilon, "weight_decouple": True, "foreach": True}
    return [ADOPT(_groups(config, model), lr=config.learning_rate, **options)]


def soap(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return SOAP: Adam in the eigenbasis of Shampoo's preconditioner; vectors use plain Adam.

    Source: Vyas et al. 2024, arXiv:2409.11321; Shampoo: Gupta et al. 2018, arXiv:1802.09568.
    """
    from pytorch_optimizer import SOAP

    options = {"betas": _betas(config), "eps": config.epsilon, "precondition_frequency": config.soap_frequency}
    return [SOAP(_groups(config, model), lr=config.learning_rate, **options)]


def schedulefree(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Schedule-Free AdamW, which evaluates an average of the weights (`evaluation_weights`).

    Source: Defazio et al. 2024, arXiv:2405.15682.
    """
    from pytorch_optimizer import ScheduleFreeAdamW

    options = {"betas": _betas(config), "eps": config.epsilon, "foreach": True}
    return [ScheduleFreeAdamW(_groups(config, model), lr=config.learning_rate, **options)]


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


def _groups(config: Any, model: nn.Module) -> list[dict[str, Any]]:
    return decay_groups(model.parameters(), config.weight_decay)


def _betas(config: Any) -> tuple[float, float]:
    return (config.beta1, config.beta2)


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


class Optimizers:
    """One or more torch optimizers used as one. Learning rates are scaled from their initial values, the peaks."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self._peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)  # the first backward then writes instead of adding to zeros

    def set_scale(self, scale: float) -> None:
        """Set the learning rate of each group to `scale` times its peak."""
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale

    @property
    def lr(self) -> float:
        """The current learning rate of the first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def warmed_up(self) -> bool:
        """Return whether the moments of all optimizers are usable. They are not right after a reset by SPAM."""
        return all(getattr(optimizer, "warmed_up", True) for optimizer in self.optimizers)

    @property
    def averages(self) -> bool:
        """Return whether evaluation uses other weights than training."""
        return bool(self._averaging())

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Switch the model to its evaluation weights inside the context, and restore the training weights bit for bit.

        Training weights are kept as copies, because switching back by arithmetic would round them.
        """
        averaging = self._averaging()
        copies = [(p, p.detach().clone()) for o in averaging for group in o.param_groups for p in group["params"]]
        for optimizer in averaging:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in averaging:
                optimizer.train()  # for the optimizer's own flag; its arithmetic is overwritten by the copies
            with torch.no_grad():
                for parameter, weights in copies:
                    parameter.copy_(weights)

    def _averaging(self) -> list[Any]:
        """Return the optimizers that have separate evaluation weights, such as Schedule-Free."""
        # torch.optim.Optimizer has neither train() nor eval(): both are the convention of schedule_free.
        return [optimizer for optimizer in self.optimizers if hasattr(optimizer, "eval")]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


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


class Spam(torch.optim.AdamW):
    """SPAM: AdamW with spike-aware clipping, momentum reset and a cosine warm-up after each reset.

    Source: Huang et al. 2025, arXiv:2501.06842, and the authors' code.
    theta: a gradient entry whose square exceeds theta times its second moment is clipped to that bound; 0: no clipping.
    interval: steps between resets of the moments; 0: no resets.  warmup: steps of warm-up after a reset.
    As in the authors' code, a reset does not restart bias correction, and the warm-up does not reduce weight decay.
    """

    def __init__(self, params: Any, *, theta: float, interval: int, warmup: int, **adamw: Any) -> None:
        super().__init__(params, **adamw)
        self.theta, self.interval, self.warmup = theta, interval, warmup
        for group in self.param_groups:
            group["steps"] = 0  # updates done; in the saved state, as everything in a group

    @property
    def since_reset(self) -> int:
        """Updates since the moments were last reset."""
        steps = int(self.param_groups[0]["steps"])
        return steps % self.interval if self.interval else steps

    @property
    def warmed_up(self) -> bool:
        """Return whether the moments have seen enough gradients since the last reset to rank weights."""
        # Half of a short interval: with fewer than 20 steps between resets they would never be warm.
        return self.since_reset >= (min(CLIP_AFTER, self.interval // 2) if self.interval else CLIP_AFTER)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002  (torch's signature)
        former = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        for group in self.param_groups:
            group["steps"] += 1
            # AdamW creates its states in its first step: until then there is nothing to reset or to compare with.
            states = [(p.grad, self.state[p]) for p in group["params"] if p.grad is not None and self.state[p]]
            if self.interval and self.since_reset == 0:
                _reset_moments([state for _, state in states])
            elif self.theta and self.since_reset >= CLIP_AFTER:
                _clip_spikes([grad for grad, _ in states], [state["exp_avg_sq"] for _, state in states], self.theta)
            group["lr"] *= self.rate_factor
            group["weight_decay"] /= self.rate_factor  # AdamW decays by rate x decay, which the warm-up must not change
        try:
            super().step()
        finally:  # the schedule sets the rate from the peak, and a checkpoint must not store a scaled one
            for group, (rate, decay) in zip(self.param_groups, former, strict=True):
                group["lr"], group["weight_decay"] = rate, decay

    @property
    def rate_factor(self) -> float:
        """The factor of the learning rate in the newest step: 1, or 0.01 to 1 during the warm-up after a reset."""
        steps, since = self.param_groups[0]["steps"], self.since_reset
        if not self.interval or steps < self.interval or since >= self.warmup:
            return 1.0
        # Half a cosine that starts with 1 % of the rate in the step of the reset, as in the authors' code. The first
        # interval has the run's own warm-up.
        return 1 - 0.99 * (1 + math.cos(math.pi * since / (self.warmup + 1))) / 2


# torch._foreach_*: one kernel for a list of tensors. Private, but torch's own optimizers are written with them.
def _reset_moments(states: list[dict[str, torch.Tensor]]) -> None:
    """Set all moments to 0. The step count stays, so bias correction does not restart."""
    if moments := [state[name] for state in states for name in MOMENTS if name in state]:
        torch._foreach_zero_(moments)


def _clip_spikes(grads: list[torch.Tensor], second: list[torch.Tensor], theta: float) -> None:
    """Clip every entry to the square root of theta times its second moment. NaN stays NaN."""
    if not grads:  # foreach functions refuse empty lists
        return
    # Not clamp: minimum and maximum take tensors as bounds and propagate NaN, which the loop has to see.
    bounds = torch._foreach_sqrt(torch._foreach_mul(second, theta))
    torch._foreach_minimum_(grads, bounds)
    torch._foreach_neg_(bounds)
    torch._foreach_maximum_(grads, bounds)
