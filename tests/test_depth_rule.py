"""nanochat's rules give the batch, steps, rates and decay of the public code by depth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from kmatrix.depth_rule import (
    HEAD,
    RULES,
    adam_rate,
    batch_sequences,
    decay_fraction_at,
    describe,
    matrix_decay,
    matrix_rate,
    momentum_at,
)
from kmatrix.shapes import ModelShape, by_depth

# depth: log2 of the batch in tokens, steps at 12 tokens per scaling parameter, weight decay (base_train.py, 92d63d4)
PUBLIC = {
    4: (18, 528, 1.890),
    6: (18, 1062, 0.940),
    8: (18, 1920, 0.520),
    10: (19, 1605, 0.440),
    12: (19, 2520, 0.280),
    16: (19, 5376, 0.131),
    18: (20, 3712, 0.134),
    20: (20, 4980, 0.100),
    24: (20, 8352, 0.0597),
    26: (20, 10510, 0.0475),
    32: (21, 9600, 0.0368),
}


def nanochat(depth: int) -> ModelShape:
    layers, heads, width = by_depth(depth, 64, 128)
    return ModelShape(
        arch="nanochat",
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        block_size=2048,
        vocab_size=32768,
        value_embeddings=True,
        smear=True,
        backout=True,
        residual_scales=True,
        window_pattern="SSSL",
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    shape: ModelShape
    optimizer: str = "muon_nanochat"
    learning_rate: float = 0.02
    weight_decay: float = 0.28
    tokens_per_step: int = 2**19


@pytest.mark.parametrize("depth", PUBLIC)
def test_batch_steps_and_decay_equal_the_public_table(depth):
    shape, (exponent, steps, decay) = nanochat(depth), PUBLIC[depth]
    batch = batch_sequences(shape) * shape.block_size

    assert batch == 2**exponent
    assert int(12 * shape.scaling_params) // batch == steps
    assert matrix_decay(RULES["muon_nanochat"], 0.28, shape, batch) == pytest.approx(decay, rel=5e-3)


def test_rates_scale_with_the_root_of_the_batch_and_of_the_inverse_width():
    rule = RULES["muon_nanochat"]

    assert matrix_rate(rule, 0.02, 2**20) == pytest.approx(0.02 * math.sqrt(2))
    assert adam_rate(rule.adam[HEAD], width=1536, tokens_per_step=2**20) == pytest.approx(0.008)
    assert matrix_rate(RULES["muon_nanochat2025"], 0.02, 2**20) == 0.02


def test_the_momentum_rises_stays_and_falls_with_the_rate():
    rule = RULES["muon_nanochat"]
    found = [momentum_at(rule, step, 5000, 3250) for step in (0, 200, 400, 1750, 5000)]

    assert found == pytest.approx([0.85, 0.91, 0.97, 0.97, 0.90])
    assert momentum_at(rule, 399, 500, 325) == pytest.approx(0.85 + 0.12 * 399 / 400)  # the rise comes first
    assert momentum_at(RULES["muon_nanochat2025"], 4999, 5000, 1000) == 0.95


def test_the_decay_of_matrices_is_half_a_cosine():
    rule = RULES["muon_nanochat"]

    assert [decay_fraction_at(rule, step, 100) for step in (0, 50, 100)] == pytest.approx([1, 0.5, 0])
    assert decay_fraction_at(RULES["muon_nanochat2025"], 50, 100) == 1


def test_every_rate_is_described_with_its_formula():
    lines = describe(Run(shape=nanochat(24), tokens_per_step=2**20))

    assert lines[0] == "rate of matrices (Muon): 0.02828 = 0.02 x sqrt(1,048,576 / 524,288)"
    assert lines[1].startswith("decay of matrices: 0.05974 = 0.28 x sqrt(1,048,576 / 524,288) x 110,100,912 / ")
    assert len(lines) == 2 + len(RULES["muon_nanochat"].adam)
    assert describe(Run(shape=nanochat(4), optimizer="adamw")) == []
