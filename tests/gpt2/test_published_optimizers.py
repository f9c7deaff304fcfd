"""Muon and SPAM compute what their authors' code computes: tests/fixtures/optimizers.json has its numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import build_optimizers
from gpt2.optim.groups import block_matrices
from gpt2.optim.optimizers import Optimizers
from optim_factory import SHAPE, AttentionModel, MatrixModel, Settings, apply_gradients, gradients, run_steps

FIXTURE = json.loads((Path(__file__).resolve().parents[1] / "fixtures" / "optimizers.json").read_text(encoding="utf-8"))
MUON, SPAM = FIXTURE["muon"], FIXTURE["spam"]
SIZE = 6  # width of the fixture's attention
ROUNDING = 2.5e-3  # of three updates whose iterations run in bfloat16; the fused form differs by 0.03


def muon_gradients():
    """Return the gradients of the fixture: those of keys are a tenth, those of values three times those of queries."""
    i, j = torch.arange(3.0 * SIZE).double()[:, None], torch.arange(float(SIZE)).double()[None, :]
    factors = torch.tensor([1.0, 0.1, 3.0]).double().repeat_interleave(SIZE)[:, None]
    return [
        (factors * (torch.sin(1.7 * i + 0.9 * j + 0.37 * t) + torch.cos(0.3 * i * j + t))).float() for t in range(3)
    ]


def muon_weights(**changes):
    """Return the weights of queries, keys and values after the fixture's steps, from zero and without decay."""
    model = AttentionModel(SIZE)
    with torch.no_grad():
        model.qkv.zero_()
    config = Settings(optimizer="muon", learning_rate=0.02, weight_decay=0.0, **changes)
    apply_gradients(build_optimizers(config, model), model.qkv, muon_gradients(), model)
    return model.qkv.detach().clone()


def rms_of_parts(weights):
    return [float(part.square().mean().sqrt()) for part in weights.split(SIZE)]


def test_muon_updates_queries_keys_and_values_as_its_author_does():
    expected = torch.tensor(MUON["weights_after_3_steps"])

    found = muon_weights()

    assert torch.allclose(found, expected, rtol=0, atol=ROUNDING)
    assert rms_of_parts(found) == pytest.approx(MUON["update_rms_of_q_k_v"], rel=0.02)


def test_the_fused_form_is_the_muon_of_pytorch_bit_for_bit():
    config = Settings(optimizer="muon", muon_split_qkv=False)
    ours, theirs = GPT(SHAPE), GPT(SHAPE)
    run_steps(ours, build_optimizers(config, ours), 4)
    matrices = block_matrices(theirs)
    adamw = build_optimizers(config, theirs).optimizers[1]
    muon = torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay)
    run_steps(theirs, Optimizers(muon, adamw), 4)

    for (name, weights), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(weights, other), name


@pytest.mark.parametrize(("split", "factor"), [(True, 0.2 * SIZE**0.5), (False, 0.2 * (3 * SIZE) ** 0.5 / 3**0.5)])
def test_match_rms_adamw_scales_an_update_by_the_shape_of_what_is_orthogonalized(split, factor):
    original = muon_weights(muon_split_qkv=split)

    scaled = muon_weights(muon_split_qkv=split, muon_adjust_lr_fn="match_rms_adamw")

    assert torch.allclose(scaled, factor * original, rtol=0, atol=1e-6)


def spam_gradients():
    i, j = torch.arange(4.0)[:, None], torch.arange(3.0)[None, :]
    grads = [torch.sin(1.7 * i + 0.9 * j + 0.37 * t) for t in range(1, 71)]
    for t in range(5, 71, 9):
        grads[t - 1][0] *= 1000
    return grads


def spam_settings(decay=0.0):
    return Settings(
        optimizer="adamwspam",
        learning_rate=0.01,
        weight_decay=decay,
        spam_interval=30,
        spam_warmup_steps=7,
        spam_theta=4.0,
    )


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_spam_moves_weights_as_its_authors_code_does(decay):
    model, grads = MatrixModel(4, 3), spam_gradients()
    with torch.no_grad():
        model.matrix.fill_(1.0)
    optimizers = build_optimizers(spam_settings(decay), model)
    done = 0
    for step, expected in SPAM["weights_by_decay_and_step"][str(decay)].items():
        apply_gradients(optimizers, model.matrix, grads[done : int(step)], model)
        done = int(step)
        # Decay comes after the update there and before it here: a difference of rate x decay x update in each step.
        tolerance = 2e-5 + 1.2e-3 * decay
        found = model.matrix.detach().flatten()
        assert torch.allclose(found, torch.tensor(expected), rtol=0, atol=tolerance), step


def test_spam_warms_up_after_a_reset_as_its_authors_code_does():
    model, grads = MatrixModel(4, 3), gradients(MatrixModel(4, 3).matrix, steps=40)
    spam = build_optimizers(spam_settings(), model).optimizers[0]
    found = []
    for grad in grads:
        model.matrix.grad = grad.clone()
        spam.step()
        found.append(spam.rate_factor)

    assert found[28:40] == pytest.approx(SPAM["rate_factors_from_step_29"], abs=1e-6)


def test_a_step_of_muon_costs_no_second_state():
    model = GPT(SHAPE)
    optimizers = build_optimizers(replace(Settings(), optimizer="muon"), model)
    run_steps(model, optimizers, 1)

    for matrix in block_matrices(model):
        assert set(optimizers.optimizers[0].state[matrix]) == {"momentum_buffer"}
