"""nanochat's optimizers: Muon for the matrices in blocks with schedules, AdamW with a rate per kind of parameter.

Source: https://github.com/karpathy/nanochat, commit 92d63d4 (nanochat/optim.py) for muon_nanochat and commit 2874eda
for muon_nanochat2025; the rates are in kmatrix.depth_rule, and explained in docs/nanochat.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.optim.groups import block_matrices, projections
from gpt2.optim.muon import Muon, batches, iterated, muon_ratio, projected, whole
from kmatrix.depth_rule import (
    EMBEDDING,
    HEAD,
    RULES,
    SCALES,
    SMEAR,
    START_SCALES,
    VALUES,
    OptimizerRule,
    adam_rate,
    decay_fraction_at,
    matrix_decay,
    matrix_rate,
    momentum_at,
)

# Polar Express (Amsel et al. 2025, arXiv:2505.16932) for five steps, with the safety factor 1.01: a, b, c of
# X <- a X + (b G + c G G) X with G = X X'. nanochat/optim.py, 92d63d4.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233002106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SAFETY, LEAST = 1.01, 1e-6  # factor and summand of a matrix's norm before the first step
BETA2 = 0.9  # of NorMuon's second moment
KINDS = {  # of parameters by their names; others are embeddings if they are matrices, else scales
    **{"wte": EMBEDDING, "lm_head": HEAD, "value_embeds": VALUES, "x0_lambdas": START_SCALES},
    **dict.fromkeys(("smear_gate", "smear_lambda", "backout_lambda"), SMEAR),
}
LEAST_VARIANCE = 1e-10  # of NorMuon


def muon_nanochat(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return nanochat's optimizer of 2026."""
    rule = RULES[config.optimizer]
    tokens = config.tokens_per_step
    return [
        NanochatMuon(
            block_matrices(model),
            parts=projections(model),
            lr=matrix_rate(rule, config.learning_rate, tokens),
            weight_decay=matrix_decay(rule, config.weight_decay, config.shape, tokens),
            dtype=torch.bfloat16 if config.dtype == "bf16" else torch.float32,
            schedule=MuonSchedule(config, rule),
        ),
        adam_by_kind(config, model),
    ]


def muon_nanochat2025(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return nanochat's optimizer of October 2025: PyTorch's Muon, with a schedule of the momentum."""
    rule = RULES[config.optimizer]
    muon = ScheduledMuon(
        block_matrices(model),
        parts=projections(model),
        lr=matrix_rate(rule, config.learning_rate, config.tokens_per_step),
        weight_decay=config.weight_decay,
        momentum=rule.momentum[0],
        nesterov=True,
        ns_steps=5,
        adjust_lr_fn="original",
        schedule=MuonSchedule(config, rule),
    )
    return [muon, adam_by_kind(config, model)]


def adam_by_kind(config: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW for the parameters outside of the blocks' matrices, with a group per kind."""
    rule = RULES[config.optimizer]
    groups = []
    for kind, parameters in parameters_by_kind(model).items():
        part = rule.adam[kind]
        rate = adam_rate(part, width=config.shape.n_embd, tokens_per_step=config.tokens_per_step)
        groups.append({"params": parameters, "lr": rate, "betas": part.betas, "weight_decay": part.decay})
    return torch.optim.AdamW(groups, lr=config.learning_rate, eps=rule.epsilon, fused=True)


def parameters_by_kind(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters outside of the blocks' matrices by their kind, as kmatrix.depth_rule names it.

    A tied embedding is the output layer, whose rate it needs. Gains and biases have the rate of the residual scales.
    """
    matrices = set(block_matrices(model))
    has_head = any("lm_head" in name.split(".") for name, _ in model.named_parameters())
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter not in matrices:
            other = EMBEDDING if parameter.ndim >= 2 else SCALES
            kind = next((KINDS[word] for word in name.split(".") if word in KINDS), other)
            found.setdefault(HEAD if "wte" in name.split(".") and not has_head else kind, []).append(parameter)
    return found


class MuonSchedule:
    """Momentum and weight decay of Muon by the step."""

    def __init__(self, config: Any, rule: OptimizerRule) -> None:
        self.rule, self.steps = rule, config.max_iters
        fraction = config.wsd_decay_fraction if config.schedule == "wsd" else None
        self.decay_steps = round((fraction or 0.0) * self.steps)

    def apply(self, group: dict[str, Any], step: int) -> None:
        """Set momentum and decay of a group for a 0-based step."""
        group["momentum"] = momentum_at(self.rule, step, self.steps, self.decay_steps)
        # From the first value, which is in the group and so in checkpoints.
        group["weight_decay"] = group["first_decay"] * decay_fraction_at(self.rule, step, self.steps)


class ScheduledMuon(Muon):
    """Muon whose momentum follows a schedule."""

    def __init__(self, params: Any, *, schedule: MuonSchedule, **muon: Any) -> None:
        super().__init__(params, **muon)
        self.schedule = schedule
        for group in self.param_groups:
            group["first_decay"] = group["weight_decay"]

    def begin_step(self, step: int) -> None:
        """Apply the schedule of a 0-based step."""
        for group in self.param_groups:
            self.schedule.apply(group, step)


class NanochatMuon(torch.optim.Optimizer):
    """Muon as in nanochat in 2026.

    In order: Nesterov momentum; rows of equal norm (MuonEq); orthogonalization by Polar Express; a fixed norm (Muon+);
    a second moment per row or column (NorMuon, Li et al. 2025, arXiv:2510.05491); weight decay only of entries that the
    update does not increase (cautious, Chen et al. 2025, arXiv:2510.12402).
    parts: number of projections in a matrix, stacked by rows; 1 if it is not listed.  dtype: of the orthogonalization.
    """

    def __init__(
        self,
        params: Any,
        *,
        parts: Mapping[nn.Parameter, int],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        schedule: MuonSchedule | None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "first_decay": weight_decay, "momentum": 0.95}
        super().__init__(params, defaults)
        self.parts, self.dtype, self.schedule = parts, dtype, schedule

    def begin_step(self, step: int) -> None:
        """Apply the schedule of a 0-based step."""
        for group in self.param_groups:
            if self.schedule:
                self.schedule.apply(group, step)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  (torch's signature)
        for group in self.param_groups:
            for matrices, parts in batches(group["params"], self.parts):
                self._update(matrices, parts, group)

    def _update(self, matrices: list[Tensor], parts: int, group: Mapping[str, Any]) -> None:
        """Update matrices (P A, B) of one shape, of P projections each."""
        grads = [matrix.grad for matrix in matrices if matrix.grad is not None]
        rows, columns = len(matrices[0]) // parts, matrices[0].shape[1]
        for matrix in matrices:
            if not self.state[matrix]:
                short = (parts, rows, 1) if rows >= columns else (parts, 1, columns)
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
                self.state[matrix]["second_moment"] = torch.zeros(short, device=matrix.device)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        seconds = [self.state[matrix]["second_moment"] for matrix in matrices]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov
        x = projected(updates, parts, self.dtype)  # (N P, A, B)
        del updates  # before the iteration takes more memory

        second = torch.cat(seconds)
        x = normalized_columns(polar_express(normalized_rows(x)), second)  # in 32 bits
        torch._foreach_copy_(seconds, torch.split(second, parts))
        eta = group["lr"] * muon_ratio("original", rows, columns)
        decayed = projected(matrices, parts, x.dtype)
        grows = (x * decayed) >= 0  # the step, -x, brings these entries towards 0, as decay does
        decayed.mul_(eta * group["weight_decay"]).mul_(grows)
        torch._foreach_sub_(matrices, whole(x.mul_(eta).add_(decayed), matrices))


def normalized_rows(x: Tensor) -> Tensor:
    """Return matrices (N, A, B) whose rows have the mean norm of the matrix's rows (MuonEq)."""
    whole = norms(x) / math.sqrt(x.shape[1])
    return x.mul_(whole / torch.linalg.vector_norm(x, dim=2, keepdim=True).clamp_(min=1e-6))


def polar_express(x: Tensor) -> Tensor:
    """Return matrices (N, A, B) with singular values near 1, scaled to the norm of an orthogonal matrix (Muon+)."""
    x = iterated(x.div_(SAFETY * norms(x) + LEAST), POLAR_EXPRESS)
    return x.mul_(math.sqrt(min(x.shape[1:])) / norms(x).clamp_(min=LEAST))


def normalized_columns(x: Tensor, second: Tensor) -> Tensor:
    """Return matrices (N, A, B) divided by the root of a second moment over their shorter side, with the same norm.

    second: (N, A, 1) or (N, 1, B), updated in place; from 0 without bias correction (NorMuon).
    """
    x = x.float()
    square = x.square().mean(dim=2 if second.shape[2] == 1 else 1, keepdim=True)
    second.lerp_(square, 1 - BETA2)
    scaled = x * second.clamp(min=LEAST_VARIANCE).rsqrt_()
    return scaled.mul_(norms(x) / norms(scaled).clamp_(min=1e-10))


def norms(x: Tensor) -> Tensor:
    """Return the Frobenius norms of matrices (N, A, B), as (N, 1, 1)."""
    found: Tensor = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return found
