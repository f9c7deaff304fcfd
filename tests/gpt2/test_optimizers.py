"""Optimizers x properties: each follows its formula or its authors' code, and all have the properties of the docs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from factories import train_fields
from gpt2.checkpoint import TrainingState, load_checkpoint, save_checkpoint, saved_weights, snapshot
from gpt2.dist import World
from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import BUILDERS, build_optimizers
from gpt2.optim.groups import block_matrices
from kmatrix.depth_rule import HEAD, RULES
from kmatrix.errors import ConfigError
from kmatrix.records.train_config import TrainConfig
from models import _one_thread_and_default_precision  # noqa: F401  (a fixture for all)
from optim_factory import SHAPE, AttentionModel, MatrixModel, Settings, apply_gradients, gradients, run_steps

NAMES = sorted(BUILDERS)
BRANCHES = {  # settings under which a few steps reach every branch of an optimizer
    "adamwspam": {"spam_interval": 3, "spam_warmup_steps": 2, "spam_theta": 2.0},
    "adamwprune": {"adamwprune_base": "adamwspam", "spam_interval": 4, "amsgrad": True},
    "soap": {"soap_frequency": 2},
}
FIXTURE = json.loads((Path(__file__).resolve().parents[1] / "fixtures" / "optimizers.json").read_text(encoding="utf-8"))
MUON, SPAM = FIXTURE["muon"], FIXTURE["spam"]
SPAM_SETTINGS = Settings(optimizer="adamwspam", weight_decay=0.0, spam_interval=30, spam_warmup_steps=7, spam_theta=4.0)
SIZE = 6  # width of the attention in the numbers of Muon
ROUNDING = 2.5e-3  # of three updates whose iterations run in bfloat16; the fused form differs by 0.03


def spiky_gradients(parameter, count):
    """Return gradients with a spike of a thousand times the usual size in every ninth."""
    grads = gradients(parameter, steps=count)
    for grad in grads[4::9]:
        grad.view(-1)[::5] *= 1000.0
    return grads


def run(config, grads, model=None):
    model = model or MatrixModel()
    apply_gradients(build_optimizers(config, model), model.matrix, grads, model)
    return model.matrix.detach().clone()


def adam(x, grads, *, decay=0.1, coupled=False, amsgrad=False):
    m, v, largest = 0.0, 0.0, torch.zeros(())
    for t, raw in enumerate(grads, start=1):
        grad = raw + decay * x if coupled else raw
        x = x if coupled else x * (1 - 1e-2 * decay)
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        largest = torch.maximum(largest, v) if amsgrad else v
        x = x - 1e-2 * (m / (1 - 0.9**t)) / ((largest / (1 - 0.95**t)).sqrt() + 1e-8)
    return x


def sgd(x, grads, *, momentum, nesterov=False):
    velocity = 0.0
    for raw in grads:
        grad = raw + 0.1 * x
        velocity = momentum * velocity + grad
        x = x - 1e-2 * (grad + momentum * velocity if nesterov else velocity)
    return x


def lion(x, grads):
    m = 0.0
    for grad in grads:
        x = x - 1e-2 * (torch.sign(0.9 * m + 0.1 * grad) + 0.1 * x)
        m = 0.95 * m + 0.05 * grad
    return x


def adopt(x, grads):
    x, m, v = x * (1 - 1e-2 * 0.1), 0.0, grads[0] ** 2
    for t, grad in enumerate(grads[1:], start=2):
        normed = (grad / v.sqrt().clamp(min=1e-6)).clamp(-(t**0.25), t**0.25)
        m = 0.9 * m + 0.1 * normed
        x = x * (1 - 1e-2 * 0.1) - 1e-2 * m
        v = 0.9999 * v + 0.0001 * grad**2
    return x


def soap(x, grads):
    """Algorithm 3 of Vyas et al. 2024: the first gradient only initializes the bases."""
    left, right = 0.05 * grads[0] @ grads[0].T, 0.05 * grads[0].T @ grads[0]
    q_left, q_right = (torch.linalg.eigh(side).eigenvectors.flip(1) for side in (left, right))
    m = v = torch.zeros_like(x)
    for t, grad in enumerate(grads[1:], start=1):
        m = 0.95 * m + 0.05 * grad
        v = 0.95 * v + 0.05 * (q_left.T @ grad @ q_right) ** 2
        scale = 1e-2 * math.sqrt(1 - 0.95**t) / (1 - 0.95**t)
        x = x - scale * q_left @ ((q_left.T @ m @ q_right) / (v.sqrt() + 1e-8)) @ q_right.T
        x = x * (1 - 1e-2 * 0.1)
        left, right = 0.95 * left + 0.05 * grad @ grad.T, 0.95 * right + 0.05 * grad.T @ grad
        if t % 3 == 0:
            rows = torch.argsort((q_left * (left @ q_left)).sum(0), descending=True)
            columns = torch.argsort((q_right * (right @ q_right)).sum(0), descending=True)
            v = v[rows][:, columns]
            q_left = torch.linalg.qr(left @ q_left[:, rows]).Q
            q_right = torch.linalg.qr(right @ q_right[:, columns]).Q
    return x


@pytest.mark.parametrize(
    ("settings", "formula", "options", "tolerance"),
    [
        ({"optimizer": "adamw"}, adam, {}, 1e-6),
        ({"optimizer": "adam"}, adam, {"coupled": True}, 1e-6),
        ({"optimizer": "adamwadv"}, adam, {"amsgrad": True}, 1e-6),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, sgd, {"momentum": 0.0}, 1e-6),
        ({"optimizer": "sgd"}, sgd, {"momentum": 0.9}, 1e-6),
        ({"optimizer": "sgd", "sgd_nesterov": True}, sgd, {"momentum": 0.9, "nesterov": True}, 1e-6),
        ({"optimizer": "lion"}, lion, {}, 1e-6),
        ({"optimizer": "adopt", "beta2": 0.9999, "epsilon": 1e-6}, adopt, {}, 1e-5),
        ({"optimizer": "soap", "beta1": 0.95, "soap_frequency": 3}, soap, {}, 1e-4),
    ],
)
def test_an_optimizer_follows_its_formula_in_64_bits(settings, formula, options, tolerance):
    model = MatrixModel(8, 8)
    spikes = settings["optimizer"] in ("adamwadv", "adopt")
    grads = (spiky_gradients if spikes else gradients)(model.matrix, 12)
    expected = formula(model.matrix.detach().double(), [grad.double() for grad in grads], **options)
    assert torch.allclose(run(Settings(**settings), grads, model).double(), expected, rtol=0, atol=tolerance)


QUIET = replace(SPAM_SETTINGS, spam_interval=0, spam_theta=0.0, weight_decay=0.1)


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (QUIET, replace(QUIET, optimizer="adamw")),
        (replace(SPAM_SETTINGS, optimizer="adamwprune", adamwprune_base="adamwspam"), SPAM_SETTINGS),
        (Settings(optimizer="adamwprune"), Settings()),
        (Settings(optimizer="adamwprune", adamwprune_base="adam"), Settings(optimizer="adam")),
        (Settings(optimizer="adamwprune", adamwprune_base="adamwadv"), Settings(optimizer="adamwadv")),
    ],
)
def test_settings_that_mean_the_same_have_equal_bits(config, same):
    grads = spiky_gradients(MatrixModel().matrix, 40)
    assert torch.equal(run(config, grads), run(same, grads))


def test_a_nan_gradient_is_not_clipped_to_a_number():
    grads = gradients(MatrixModel().matrix, steps=25)
    grads[24][0, 0] = float("nan")
    assert torch.isnan(run(SPAM_SETTINGS, grads)[0, 0])


def test_muon_updates_queries_keys_and_values_as_its_author_does():
    """Gradients of keys are a tenth, those of values three times those of queries."""
    i, j = torch.arange(3.0 * SIZE).double()[:, None], torch.arange(float(SIZE)).double()[None, :]
    factors = torch.tensor([1.0, 0.1, 3.0]).double().repeat_interleave(SIZE)[:, None]
    grads = [
        (factors * (torch.sin(1.7 * i + 0.9 * j + 0.37 * t) + torch.cos(0.3 * i * j + t))).float() for t in range(3)
    ]
    model = AttentionModel(SIZE)
    with torch.no_grad():
        model.qkv.zero_()
    config = Settings(optimizer="muon", learning_rate=0.02, weight_decay=0.0)

    apply_gradients(build_optimizers(config, model), model.qkv, grads, model)

    found = model.qkv.detach()
    assert torch.allclose(found, torch.tensor(MUON["weights_after_3_steps"]), rtol=0, atol=ROUNDING)
    rms = [float(part.square().mean().sqrt()) for part in found.split(SIZE)]
    assert rms == pytest.approx(MUON["update_rms_of_q_k_v"], rel=0.02)


def spam_gradients():
    i, j = torch.arange(4.0)[:, None], torch.arange(3.0)[None, :]
    grads = [torch.sin(1.7 * i + 0.9 * j + 0.37 * t) for t in range(1, 71)]
    for t in range(5, 71, 9):
        grads[t - 1][0] *= 1000
    return grads


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_spam_moves_weights_as_its_authors_code_does(decay):
    model, grads = MatrixModel(4, 3), spam_gradients()
    with torch.no_grad():
        model.matrix.fill_(1.0)
    optimizers = build_optimizers(replace(SPAM_SETTINGS, weight_decay=decay), model)
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
    spam = build_optimizers(SPAM_SETTINGS, model).optimizers[0]
    found = []
    for grad in grads:
        model.matrix.grad = grad.clone()
        spam.step()
        found.append(spam.rate_factor)

    assert found[28:40] == pytest.approx(SPAM["rate_factors_from_step_29"], abs=1e-6)


@pytest.mark.parametrize("tying", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_has_one_group_with_the_decay_and_rate_of_its_kind(name, tying):
    model = GPT(replace(SHAPE, weight_tying=tying))
    own = {} if name in RULES else {"embedding_lr": 0.3, "head_lr": 0.2, "scalar_lr": 0.1}
    optimizers = build_optimizers(Settings(optimizer=name, **own), model)
    groups = [group for o in optimizers.optimizers for group in o.param_groups]
    peaks = [group["lr"] for group in groups]
    optimizers.set_scale(0.5)
    optimizers.set_scale(0.25)

    assert [group["lr"] for group in groups] == pytest.approx([peak / 4 for peak in peaks])
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    rates = {parameter: 4 * group["lr"] for group in groups for parameter in group["params"]}
    if name in RULES:
        assert rates[model.head] == pytest.approx(RULES[name].adam[HEAD].rate * (768 / SHAPE.n_embd) ** 0.5)
        return
    decays = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert all(decays[p] == (0.1 if p.ndim >= 2 else 0.0) for p in model.parameters())
    assert {rates[p] for p in block_matrices(model)} == {4 * optimizers.lr} == {0.01}
    assert (rates[model.wte.weight], rates[model.wpe.weight]) == (0.3, 0.3)
    assert rates[model.head] == (0.3 if tying else 0.2)
    assert {rates[p] for p in model.parameters() if p.ndim < 2} == {0.1}


def test_muon_has_the_matrices_of_blocks_and_adamw_the_rest_at_its_own_rate():
    model = GPT(SHAPE)
    muon, adamw = build_optimizers(Settings(optimizer="muon", learning_rate=0.02), model).optimizers
    in_blocks = {id(p) for n, p in model.named_parameters() if n.startswith("h.") and p.ndim == 2}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == in_blocks
    assert len(in_blocks) == 4 * SHAPE.n_layer
    assert {group["lr"] for group in muon.param_groups} == {0.02}
    assert {group["lr"] for group in adamw.param_groups} == {6e-4}


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_state_continues_bit_for_bit(name, tmp_path):
    """With a rate per group, over resets and new bases, wherever the run was cut."""
    config = replace(Settings(optimizer=name, embedding_lr=3e-3, scalar_lr=1e-3), **BRANCHES.get(name, {}))
    uninterrupted = GPT(SHAPE)
    run_steps(uninterrupted, build_optimizers(config, uninterrupted), 9)
    for cut in (1, 5):
        model = GPT(SHAPE)
        optimizers = build_optimizers(config, model)
        run_steps(model, optimizers, cut)
        torch.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, tmp_path / "saved.pt")
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        model = GPT(SHAPE, seed=99)
        optimizers = build_optimizers(config, model)
        model.load_state_dict(saved["model"])
        optimizers.load_state_dict(saved["optimizer"])
        run_steps(model, optimizers, 9 - cut, first=cut)
        for (key, a), b in zip(uninterrupted.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(a, b), (cut, key)


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=", ".join(NAMES)):
        build_optimizers(Settings(optimizer="adamv"), MatrixModel())


def schedule_free_by_hand(x, grads, rates, *, decay, beta1=0.9, beta2=0.95, eps=1e-8):
    """Algorithm 1 of Defazio et al. 2024: return y, where gradients are taken, and x, the average, in 64 bits."""
    x = x.double().clone()
    y, z, v, total = x.clone(), x.clone(), 0.0, 0.0
    for t, (raw, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        grad = raw.double()
        v = beta2 * v + (1 - beta2) * grad**2
        z = z - rate * (grad / ((v / (1 - beta2**t)).sqrt() + eps) + decay * y)
        total += max(rates[:t]) ** 2
        weight = max(rates[:t]) ** 2 / total
        x = (1 - weight) * x + weight * z
        y = (1 - beta1) * z + beta1 * x
    return y, x


def test_schedule_free_trains_one_point_and_is_evaluated_at_the_average():
    model, scales = MatrixModel(), [0.25, 0.5, 0.75, *[1.0] * 17]
    optimizers = build_optimizers(Settings(optimizer="schedulefree"), model)
    grads = gradients(model.matrix)
    start = model.matrix.detach().clone()
    for scale, grad in zip(scales, grads, strict=True):
        optimizers.set_scale(scale)
        apply_gradients(optimizers, model.matrix, [grad], model)
    y, x = schedule_free_by_hand(start, grads, [1e-2 * scale for scale in scales], decay=0.1)

    assert optimizers.averages
    assert torch.allclose(model.matrix.detach().double(), y, rtol=0, atol=1e-5)
    with optimizers.evaluation_weights():
        assert torch.allclose(model.matrix.detach().double(), x, rtol=0, atol=1e-5)
    assert (y - x).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["adamw", "schedulefree"])
def test_the_training_weights_are_restored_bit_for_bit_after_an_evaluation_even_if_it_fails(name):
    model = GPT(SHAPE)
    optimizers = build_optimizers(Settings(optimizer=name), model)
    run_steps(model, optimizers, 4)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    with pytest.raises(KeyboardInterrupt), optimizers.evaluation_weights():
        raise KeyboardInterrupt

    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_evaluations_do_not_change_the_training():
    undisturbed, model = GPT(SHAPE), GPT(SHAPE)
    config = Settings(optimizer="schedulefree")
    run_steps(undisturbed, build_optimizers(config, undisturbed), 6)
    optimizers = build_optimizers(config, model)
    for first in range(6):
        with optimizers.evaluation_weights():
            pass
        run_steps(model, optimizers, 1, first=first)

    assert all(torch.equal(a, b) for a, b in zip(undisturbed.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "schedulefree"])
def test_a_checkpoint_contains_the_evaluation_weights_if_they_differ(name, tmp_path):
    model = GPT(SHAPE)
    optimizers = build_optimizers(Settings(optimizer=name), model)
    run_steps(model, optimizers, 3)
    config = TrainConfig.from_json(train_fields(tmp_path, "none"))
    world = World(rank=0, size=1, device=torch.device("cpu"))
    parts = TrainingState(config=config, world=world, model=model, optimizers=optimizers)
    save_checkpoint(tmp_path / "a.pt", snapshot(parts, step=3, run_id="x"))
    value = load_checkpoint(tmp_path / "a.pt")

    with optimizers.evaluation_weights():
        evaluation_weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert ("evaluation" in value) == (name == "schedulefree")
    assert all(torch.equal(saved_weights(value)[key], tensor) for key, tensor in evaluation_weights.items())
    assert all(torch.equal(value["model"][key], tensor) for key, tensor in model.state_dict().items())
