"""Compare the optimizers with their formulas, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import BUILDERS, build_optimizers
from gpt2.optim.groups import block_matrices
from kmatrix.depth_rule import RULES
from kmatrix.errors import ConfigError
from optim_factory import SHAPE, MatrixModel, Settings, apply_gradients, gradients, run_steps

ROOT = Path(__file__).resolve().parents[2]
BRANCHES = {  # settings under which a few steps reach every branch of an optimizer
    "adamwspam": {"spam_interval": 3, "spam_warmup_steps": 2, "spam_theta": 2.0},
    "adamwprune": {"adamwprune_base": "adamwspam", "spam_interval": 4, "amsgrad": True},
    "soap": {"soap_frequency": 2},
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread: small matrices are slower on several, even more so while other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "decay"), [("matrix", 0.1), ("bias", 0.0)])
def test_adamw_follows_its_formula(name, decay):
    model, config = MatrixModel(), Settings(optimizer="adamw")
    parameter = getattr(model, name)
    x, m, v = (parameter.detach().double().clone(), 0.0, 0.0)
    grads = gradients(parameter)
    for t, grad in enumerate((g.double() for g in grads), start=1):
        x *= 1 - 1e-2 * decay
        m = 0.9 * m + 0.1 * grad
        v = 0.95 * v + 0.05 * grad**2
        x -= 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    apply_gradients(build_optimizers(config, model), parameter, grads, model)
    assert torch.allclose(parameter.detach().double(), x, rtol=0, atol=1e-6)


def test_adam_adds_weight_decay_to_the_gradient():
    model, config = MatrixModel(), Settings(optimizer="adam")
    x, m, v = model.matrix.detach().double().clone(), 0.0, 0.0
    grads = gradients(model.matrix)
    for t, raw in enumerate(grads, start=1):
        grad = raw.double() + 0.1 * x
        m = 0.9 * m + 0.1 * grad
        v = 0.95 * v + 0.05 * grad**2
        x -= 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    apply_gradients(build_optimizers(config, model), model.matrix, grads, model)
    assert torch.allclose(model.matrix.detach().double(), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_follows_its_formula(momentum, nesterov):
    model = MatrixModel()
    config = Settings(optimizer="sgd", sgd_momentum=momentum, sgd_nesterov=nesterov)
    x, velocity = model.matrix.detach().double().clone(), 0.0
    grads = gradients(model.matrix)
    for raw in grads:
        grad = raw.double() + 0.1 * x
        velocity = momentum * velocity + grad
        x -= 1e-2 * (grad + momentum * velocity if nesterov else velocity)
    apply_gradients(build_optimizers(config, model), model.matrix, grads, model)
    assert torch.allclose(model.matrix.detach().double(), x, rtol=0, atol=1e-6)


def orthogonal_by_newton_schulz(matrix, steps):
    """Muon's quintic iteration (Jordan 2024) in 32 bits, after the formula X <- a X + (b A + c A A) X, A = X X'."""
    flip = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if flip else matrix
    x = x / x.norm()
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if flip else x


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(12, 8), (8, 12), (32, 32)])
def test_muon_follows_its_formula(rows, columns, nesterov):
    # The library iterates in bfloat16 (8 bits of mantissa: 2**-8 = 4e-3 of each update's entries, which are near
    # 1/sqrt(columns)); with a rate of 1e-2, ten such errors stay below 2e-3, while an update is as large as 1e-2.
    model = MatrixModel(rows, columns)
    config = Settings(optimizer="muon", muon_nesterov=nesterov)
    x, buffer = model.matrix.detach().clone(), 0.0
    grads = gradients(model.matrix, steps=10)
    for grad in grads:
        buffer = 0.95 * buffer + 0.05 * grad
        update = 0.05 * grad + 0.95 * buffer if nesterov else buffer
        x *= 1 - 1e-2 * 0.1
        x -= 1e-2 * max(1, rows / columns) ** 0.5 * orthogonal_by_newton_schulz(update, 5)
    before = model.matrix.detach().clone()
    apply_gradients(build_optimizers(config, model), model.matrix, grads, model)
    assert (model.matrix.detach() - before).abs().max() > 1e-2
    assert torch.allclose(model.matrix.detach(), x, rtol=0, atol=2e-3)


def test_muon_updates_the_block_matrices_and_adamw_the_rest_at_its_own_rate():
    model = GPT(SHAPE)
    muon, adamw = build_optimizers(Settings(optimizer="muon", learning_rate=0.02), model).optimizers
    in_blocks = {id(p) for n, p in model.named_parameters() if n.startswith("h.") and p.ndim == 2}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == in_blocks
    assert len(in_blocks) == 4 * SHAPE.n_layer
    assert [group["lr"] for group in muon.param_groups] == [0.02]
    assert {group["lr"] for group in adamw.param_groups} == {6e-4}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tying", [True, False])
@pytest.mark.parametrize("name", sorted(set(BUILDERS) - set(RULES)))
def test_every_parameter_is_in_one_group_and_only_matrices_decay(name, tying, bias):
    model = GPT(replace_shape(weight_tying=tying, bias=bias))
    groups = [g for o in build_optimizers(Settings(optimizer=name), model).optimizers for g in o.param_groups]
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0)


def replace_shape(**changes):
    return replace(SHAPE, **changes)


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - set(RULES)))
def test_each_kind_of_parameter_has_its_own_rate_and_the_schedule_scales_it(name):
    model = GPT(replace_shape(weight_tying=False))
    config = Settings(optimizer=name, embedding_lr=0.3, head_lr=0.2, scalar_lr=0.1)
    optimizers = build_optimizers(config, model)
    optimizers.set_scale(0.5)
    rates = {p: group["lr"] for o in optimizers.optimizers for group in o.param_groups for p in group["params"]}
    matrices = set(block_matrices(model))

    assert {rates[p] for p in matrices} == {optimizers.lr} == {0.005}
    assert (rates[model.wte.weight], rates[model.wpe.weight], rates[model.lm_head.weight]) == (0.15, 0.15, 0.1)
    assert {rates[p] for p in model.parameters() if p.ndim < 2} == {0.05}
    assert len(rates) == len(list(model.parameters()))
    decays = {p: g["weight_decay"] for o in optimizers.optimizers for g in o.param_groups for p in g["params"]}
    assert all(decays[p] == (0.1 if p.ndim >= 2 else 0.0) for p in model.parameters())


@pytest.mark.parametrize("name", sorted(BUILDERS))
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


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_the_schedule_scales_every_group_from_its_own_peak(name):
    optimizers = build_optimizers(Settings(optimizer=name, learning_rate=0.02), GPT(SHAPE))
    peaks = [group["lr"] for o in optimizers.optimizers for group in o.param_groups]
    optimizers.set_scale(0.5)
    optimizers.set_scale(0.25)
    assert optimizers.lr == pytest.approx(0.005)
    assert [g["lr"] for o in optimizers.optimizers for g in o.param_groups] == pytest.approx([p / 4 for p in peaks])


def test_a_state_loaded_into_fresh_optimizers_keeps_their_peaks():
    model = MatrixModel()
    optimizers = build_optimizers(Settings(), model)
    optimizers.set_scale(0.1)
    restored = build_optimizers(Settings(), model)
    restored.load_state_dict(optimizers.state_dict())
    assert restored.lr == pytest.approx(1e-3)
    restored.set_scale(1.0)
    assert restored.lr == pytest.approx(1e-2)


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError,
        match="adafactor, adam, adamw, adamwadv, adamwprune, adamwspam, adopt, lion, muon, muon_nanochat, "
        "muon_nanochat2025, schedulefree, sgd, soap",
    ):
        build_optimizers(Settings(optimizer="adamv"), MatrixModel())
