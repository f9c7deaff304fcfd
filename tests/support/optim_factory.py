"""Small models, settings and gradients for tests of optimizers and pruning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kmatrix.shapes import ModelShape

SHAPE = ModelShape(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=29)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields of TrainConfig that optimizers read."""

    optimizer: str = "adamw"
    learning_rate: float = 1e-2
    embedding_lr: float | None = None
    head_lr: float | None = None
    scalar_lr: float | None = None
    weight_decay: float = 0.1
    sgd_momentum: float = 0.9
    sgd_nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    muon_ns_steps: int = 5
    muon_adamw_lr: float = 6e-4
    muon_split_qkv: bool = True
    muon_adjust_lr_fn: str = "original"
    adafactor_beta2_decay: float = -0.8
    adafactor_clip: float = 1.0
    amsgrad: bool = False
    adamwprune_base: str = "adamw"
    spam_theta: float = 5000.0
    spam_interval: int = 500
    spam_warmup_steps: int = 150
    soap_frequency: int = 10
    pruning: str = "none"
    target_sparsity: float = 0.5
    pruning_warmup: float = 0.1
    pruning_ramp_end: float = 0.75
    pruning_frequency: int = 3
    max_iters: int = 20
    device: str = "cpu"

    # What nanochat's rules read; not fields, because a run of these settings has its own.
    @property
    def shape(self) -> ModelShape:
        return SHAPE

    @property
    def tokens_per_step(self) -> int:
        return 2**19

    @property
    def dtype(self) -> str:
        return "fp32"

    @property
    def schedule(self) -> str:
        return "constant"

    @property
    def wsd_decay_fraction(self) -> None:
        return None


class MatrixModel(nn.Module):
    """A matrix and a bias in a block, and an embedding: the kinds of parameter that optimizers treat differently."""

    def __init__(self, rows: int = 12, columns: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.h = nn.ModuleList([nn.Linear(columns, rows)])
        self.wte = nn.Embedding(7, columns)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.5, generator=generator)

    @property
    def matrix(self) -> nn.Parameter:
        return self.h[0].weight

    @property
    def bias(self) -> nn.Parameter:
        return self.h[0].bias


class AttentionModel(nn.Module):
    """One fused projection of queries, keys and values in a block, named as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width)})])

    @property
    def qkv(self) -> nn.Parameter:
        return self.h[0]["c_attn"].weight


def gradients(parameter, steps=20, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator) for _ in range(steps)]


def apply_gradients(optimizers, parameter, grads, model):
    """Take one step per gradient of `parameter`; every other parameter gets a zero gradient."""
    for grad in grads:
        for other in model.parameters():
            other.grad = torch.zeros_like(other)
        parameter.grad = grad.clone()
        optimizers.step()
        optimizers.zero_grad()


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SHAPE.vocab_size, (4, SHAPE.block_size + 1), generator=generator)
    return model(tokens[:, :-1], tokens[:, 1:])[1]


def run_steps(model, optimizers, count, first=0):
    for step in range(first, first + count):
        optimizers.set_scale(1 / (step + 1))
        loss_of(model, seed=step).backward()
        optimizers.step()
        optimizers.zero_grad()


def equal(left: Any, right: Any) -> bool:
    """Return whether two nested values are equal, tensors bit for bit and wherever they are."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left.cpu(), right.cpu())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)
