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
from gpt2.optim.muon import Muon, iterated, muon_ratio, projected, whole
from kmatrix import depth_rule
from kmatrix.depth_rule import EMBEDDING, HEAD, RULES, SCALES, SMEAR, START_SCALES, VALUES

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
LEAST_VARIANCE = 1e-10  # of NorMuon
KINDS = {  # of parameters by their names; others are embeddings if they are matrices, else scales
    **{"wte": EMBEDDING, "lm_head": HEAD, "value_embeds": VALUES, "x0_lambdas": START_SCALES},
    **dict.fromkeys(("smear_gate", "smear_lambda", "backout_lambda"), SMEAR),
}


def muon_nanochat(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return nanochat's optimizer of 2026."""
    tokens = config.tokens_per_step
    muon = NanochatMuon(
        block_matrices(model),
        parts=projections(model),
        lr=depth_rule.matrix_rate(RULES[config.optimizer], config.learning_rate, tokens),
        weight_decay=depth_rule.matrix_decay(RULES[config.optimizer], config.weight_decay, config.shape, tokens),
    )
    muon.dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    return [scheduled(config, muon), adam_by_kind(config, model)]


def muon_nanochat2025(config: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return nanochat's optimizer of October 2025: PyTorch's Muon, with a schedule of the momentum."""
    rate = depth_rule.matrix_rate(RULES[config.optimizer], config.learning_rate, config.tokens_per_step)
    muon = Muon(block_matrices(model), parts=projections(model), lr=rate, weight_decay=config.weight_decay)
    return [scheduled(config, muon), adam_by_kind(config, model)]


def scheduled(config: Any, muon: Any) -> Muon:
    """Return Muon, whose momentum and weight decay depend on the 0-based step from now on."""
    rule, steps = RULES[config.optimizer], config.max_iters
    decay_steps = round((config.wsd_decay_fraction or 0.0) * steps) if config.schedule == "wsd" else 0
    for group in muon.param_groups:
        group["first_decay"] = group["weight_decay"]  # in the group, and so in checkpoints

    def begin_step(step: int) -> None:
        for group in muon.param_groups:
            group["momentum"] = depth_rule.momentum_at(rule, step, steps, decay_steps)
            group["weight_decay"] = group["first_decay"] * depth_rule.decay_fraction_at(rule, step, steps)

    muon.begin_step = begin_step
    return muon  # type: ignore[no-any-return]


def adam_by_kind(config: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW for the parameters outside of the blocks' matrices, with a group per kind."""
    rule = RULES[config.optimizer]
    groups = []
    for kind, parameters in parameters_by_kind(model).items():
        part = rule.adam[kind]
        rate = depth_rule.adam_rate(part, width=config.shape.n_embd, tokens_per_step=config.tokens_per_step)
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


class NanochatMuon(Muon):
    """Muon as in nanochat in 2026.

    In order: Nesterov momentum; rows of equal norm (MuonEq); orthogonalization by Polar Express; a fixed norm (Muon+);
    a second moment per row or column (NorMuon, Li et al. 2025, arXiv:2510.05491); weight decay only of entries that the
    update does not increase (cautious, Chen et al. 2025, arXiv:2510.12402).
    """

    def _update(self, matrices: list[Tensor], parts: int, group: Mapping[str, Any]) -> None:
        """Update matrices (P A, B) of one shape, of P projections each."""
        x = projected(self._averaged(matrices, group), parts, self.dtype)  # (N P, A, B)
        rows, columns = len(matrices[0]) // parts, matrices[0].shape[1]
        short = (parts, rows, 1) if rows >= columns else (parts, 1, columns)
        for matrix in matrices:
            if "second_moment" not in self.state[matrix]:
                self.state[matrix]["second_moment"] = torch.zeros(short, device=matrix.device)
        seconds = [self.state[matrix]["second_moment"] for matrix in matrices]
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
