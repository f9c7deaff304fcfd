"""nanochat's rules from the size of a model to its batch, learning rates and weight decay.

Source: scripts/base_train.py of https://github.com/karpathy/nanochat, commit 92d63d4 for muon_nanochat and commit
2874eda for muon_nanochat2025. docs/nanochat.md explains them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import ModelShape, by_depth

REFERENCE_DEPTH, REFERENCE_WIDTH = 12, 768  # of the model for which rates, batch and decay were tuned
REFERENCE_TOKENS = 2**19  # its global batch
BATCH_EXPONENT = 0.383  # of the batch by the number of training tokens
MATRICES, EMBEDDING, VALUES, HEAD = "matrices", "embedding", "value embeddings", "output layer"
SCALES, START_SCALES, SMEAR = "residual scales", "x0 scales", "smear and backout"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamRule:
    """The AdamW settings of one kind of parameters."""

    rate: float  # at the reference width and batch
    betas: tuple[float, float]
    decay: float = 0.0
    by_width: bool = False  # the rate is scaled by sqrt(768 / width)
    by_batch: bool = True  # and by sqrt(batch / 2^19 tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule:
    """The settings of one of nanochat's optimizers. Muon's rate and decay are LEARNING_RATE and WEIGHT_DECAY."""

    adam: dict[str, AdamRule]  # by kind of parameters
    epsilon: float  # of AdamW
    momentum: tuple[float, float, int]  # of Muon: at first, after the rise, steps of the rise
    last_momentum: float | None  # at the end of the run, reached while the rate falls; None: it stays
    least_rate: float  # at the last step, fraction of the peak
    by_batch: bool  # Muon's rate is scaled by sqrt(batch / 2^19 tokens), and its decay by batch and size


RULES = {
    "muon_nanochat": OptimizerRule(
        adam={
            HEAD: AdamRule(rate=0.008, betas=(0.8, 0.96), decay=0.01, by_width=True),
            EMBEDDING: AdamRule(rate=0.3, betas=(0.8, 0.995), decay=0.001, by_width=True),
            VALUES: AdamRule(rate=0.15, betas=(0.8, 0.995), decay=0.01, by_width=True),
            SCALES: AdamRule(rate=0.005, betas=(0.8, 0.95), decay=0.05),
            START_SCALES: AdamRule(rate=0.5, betas=(0.96, 0.95)),
            SMEAR: AdamRule(rate=0.2, betas=(0.8, 0.95), by_batch=False),
        },
        epsilon=1e-10,
        momentum=(0.85, 0.97, 400),
        last_momentum=0.90,
        least_rate=0.05,
        by_batch=True,
    ),
    # The parts that the model of 2025 does not have get the rates that later versions gave them.
    "muon_nanochat2025": OptimizerRule(
        adam={
            HEAD: AdamRule(rate=0.004, betas=(0.8, 0.95), by_width=True, by_batch=False),
            EMBEDDING: AdamRule(rate=0.2, betas=(0.8, 0.95), by_width=True, by_batch=False),
            VALUES: AdamRule(rate=0.1, betas=(0.8, 0.95), by_width=True, by_batch=False),
            SCALES: AdamRule(rate=0.005, betas=(0.8, 0.95), by_batch=False),
            START_SCALES: AdamRule(rate=0.5, betas=(0.96, 0.95), by_batch=False),
            SMEAR: AdamRule(rate=0.2, betas=(0.8, 0.95), by_batch=False),
        },
        epsilon=1e-10,
        momentum=(0.85, 0.95, 300),
        last_momentum=None,
        least_rate=0.0,
        by_batch=False,
    ),
}


def least_rate(optimizer: str, peak: float) -> float:
    """Return the learning rate at the last step, by default a tenth of the peak.

    A tenth: nanoGPT, after Hoffmann et al. 2022 (arXiv:2203.15556).
    """
    return peak * RULES[optimizer].least_rate if optimizer in RULES else peak / 10


def reference(shape: ModelShape) -> ModelShape:
    """Return the model of depth 12 with the same vocabulary and parts, for which the rules were tuned."""
    layers, heads, width = by_depth(REFERENCE_DEPTH, 64, 128)
    return replace(shape, n_layer=layers, n_head=heads, n_embd=width, n_kv_head=0)


def batch_sequences(shape: ModelShape) -> int:
    """Return the global batch in sequences, at least one: 2^19 tokens x (scaling / reference)^0.383, as a power of two.

    The rule is one of training tokens, which the same ratio to the scaling parameters gives both models.
    """
    ratio = shape.scaling_params / reference(shape).scaling_params
    exponent = round(math.log2(REFERENCE_TOKENS * ratio**BATCH_EXPONENT))
    return max(1, (1 << exponent) // shape.block_size)


def batch_factor(tokens_per_step: int) -> float:
    """Return sqrt(batch / 2^19 tokens)."""
    return math.sqrt(tokens_per_step / REFERENCE_TOKENS)


def width_factor(width: int) -> float:
    """Return sqrt(768 / width)."""
    return math.sqrt(REFERENCE_WIDTH / width)


def adam_rate(rule: AdamRule, *, width: int, tokens_per_step: int) -> float:
    """Return the peak learning rate of one kind of parameters."""
    by_width = width_factor(width) if rule.by_width else 1.0
    return rule.rate * by_width * (batch_factor(tokens_per_step) if rule.by_batch else 1.0)


def matrix_rate(rule: OptimizerRule, rate: float, tokens_per_step: int) -> float:
    """Return Muon's peak learning rate. rate: at the reference batch."""
    return rate * (batch_factor(tokens_per_step) if rule.by_batch else 1.0)


def matrix_decay(rule: OptimizerRule, decay: float, shape: ModelShape, tokens_per_step: int) -> float:
    """Return Muon's weight decay at the first step: decay x sqrt(batch / 2^19) x reference / scaling parameters."""
    if not rule.by_batch:
        return decay
    return decay * batch_factor(tokens_per_step) * reference(shape).scaling_params / shape.scaling_params


def momentum_at(rule: OptimizerRule, step: int, steps: int, decay_steps: int) -> float:
    """Return Muon's momentum at a 0-based step of a run whose rate falls in its last `decay_steps`."""
    first, peak, rise = rule.momentum
    if step < rise:
        return first + (peak - first) * step / rise
    start = steps - decay_steps
    if rule.last_momentum is None or step < start:
        return peak
    return peak + (rule.last_momentum - peak) * (step - start) / max(1, decay_steps)


def decay_fraction_at(rule: OptimizerRule, step: int, steps: int) -> float:
    """Return Muon's weight decay at a 0-based step as a fraction of the first: half a cosine to 0."""
    return 0.5 * (1 + math.cos(math.pi * step / steps)) if rule.by_batch else 1.0


def describe_batch(shape: ModelShape, tokens_per_step: int) -> str:
    """Return the global batch in tokens, and what the rule says for the size of the model."""
    wanted = batch_sequences(shape) * shape.block_size
    sizes = f"({shape.scaling_params:,} / {reference(shape).scaling_params:,})^{BATCH_EXPONENT}"
    rule = f"2^19 x {sizes}, to a power of two"
    if tokens_per_step == wanted:
        return f"batch of {wanted:,} tokens = {rule}"
    return f"batch of {tokens_per_step:,} tokens; by the size: {wanted:,} = {rule} (PARALLEL_BATCH_SIZE=-1)"


def describe(train: TrainConfig) -> list[str]:
    """Return a line per kind of parameters with its peak rate and how that follows; none for other optimizers."""
    shape, tokens_per_step = train.shape, train.tokens_per_step
    rule = RULES.get(train.optimizer)
    if rule is None:
        return []
    a = f"sqrt({REFERENCE_WIDTH} / {shape.n_embd})"
    b = f"sqrt({tokens_per_step:,} / {REFERENCE_TOKENS:,})"
    own = matrix_rate(rule, train.learning_rate, tokens_per_step)
    lines = [f"rate of {MATRICES} (Muon): {own:.4g}" + (f" = {train.learning_rate:g} x {b}" if rule.by_batch else "")]
    if train.weight_decay:
        shrunk = matrix_decay(rule, train.weight_decay, shape, tokens_per_step)
        sizes = f"{reference(shape).scaling_params:,} / {shape.scaling_params:,} parameters"
        lines.append(
            f"decay of {MATRICES}: {shrunk:.4g}"
            + (f" = {train.weight_decay:g} x {b} x {sizes}" if rule.by_batch else "")
        )
    for kind in kinds(shape):
        part = rule.adam[kind]
        factors = [f"{part.rate:g}", *([a] if part.by_width else []), *([b] if part.by_batch else [])]
        value = adam_rate(part, width=shape.n_embd, tokens_per_step=tokens_per_step)
        lines.append(f"rate of {kind} (AdamW): {value:.4g}" + (f" = {' x '.join(factors)}" if len(factors) > 1 else ""))
    return lines


def kinds(shape: ModelShape) -> list[str]:
    """Return the kinds of parameters outside of Muon that a model has."""
    gains = not shape.is_nanochat or shape.norm == "layer"
    has = {
        HEAD: True,
        EMBEDDING: True,  # with tied weights, of positions
        VALUES: shape.value_embeddings,
        SCALES: shape.residual_scales or gains,
        START_SCALES: shape.residual_scales,
        SMEAR: shape.smear or shape.backout,
    }
    return [kind for kind, is_there in has.items() if is_there]
