"""Compare relatives of AdamW and the optimizers of pytorch_optimizer with their formulas and with other code."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from factories import train_fields
from gpt2.checkpoint import TrainingState, load_checkpoint, save_checkpoint, saved_weights, snapshot
from gpt2.dist import World
from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import build_optimizers
from gpt2.optim.optimizers import Optimizers
from gpt2.optim.spam import CLIP_AFTER
from kmatrix.records.train_config import TrainConfig
from optim_factory import SHAPE, MatrixModel, Settings, apply_gradients, gradients, run_steps

SPAM = Settings(optimizer="adamwspam", spam_interval=30, spam_warmup_steps=7, spam_theta=4.0, weight_decay=0.0)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def spam_by_hand(x, grads, *, lr, theta, interval, warmup, decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8):
    """Algorithm 1 of Huang et al. 2025 with the delayed clipping of the authors' code, in 64 bits."""
    x, m, v = x.double().clone(), 0.0, 0.0
    for t, raw in enumerate(grads, start=1):
        grad, since = raw.double(), t % interval
        if since == 0:
            m, v = 0.0, 0.0
        elif since >= CLIP_AFTER:
            bound = (theta * v).sqrt()
            grad = torch.where(grad.abs() > bound, grad.sign() * bound, grad)
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        rising = t >= interval and since < warmup
        rate = lr * (1 - 0.99 * (1 + math.cos(math.pi * since / (warmup + 1))) / 2) if rising else lr
        x *= 1 - lr * decay
        x -= rate * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return x


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_spam_follows_its_algorithm_over_spikes_resets_and_warm_ups(decay):
    config, grads = replace(SPAM, weight_decay=decay), spiky_gradients(MatrixModel().matrix, 75)
    found = run(config, grads)

    expected = spam_by_hand(
        MatrixModel().matrix.detach(), grads, lr=1e-2, theta=4.0, interval=30, warmup=7, decay=decay
    )

    assert torch.allclose(found.double(), expected, rtol=0, atol=2e-5)


def test_spam_agrees_with_an_independent_implementation(monkeypatch):
    import pytorch_optimizer
    from pytorch_optimizer.optimizer import spam as theirs

    # Its warm-up is one step ahead of the authors' code since it replaced the argument of CosineAnnealingLR.step.
    def death_rate(self, step):
        return 0.99 * (1 + math.cos(math.pi * step / (self.t_max + 1))) / 2 if step < self.t_max else 0.0

    monkeypatch.setattr(theirs.CosineDecay, "get_death_rate", death_rate)
    our_model, their_model = MatrixModel(), MatrixModel()
    grads = spiky_gradients(our_model.matrix, 75)
    found = run(SPAM, grads, our_model)
    options = {"threshold": 4, "update_proj_gap": 30, "warmup_epoch": 7, "grad_accu_steps": CLIP_AFTER}
    their_optimizer = pytorch_optimizer.SPAM(their_model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, **options)
    apply_gradients(Optimizers(their_optimizer), their_model.matrix, grads, their_model)

    assert (found - MatrixModel().matrix.detach()).abs().max() > 0.05
    assert torch.allclose(found, their_model.matrix.detach(), rtol=0, atol=2e-5)


def test_spam_without_spikes_and_resets_equals_adamw_bit_for_bit():
    quiet = replace(SPAM, spam_interval=0, spam_theta=0.0, weight_decay=0.1)
    grads = gradients(MatrixModel().matrix, steps=30)

    assert torch.equal(run(quiet, grads), run(replace(quiet, optimizer="adamw"), grads))


def test_a_nan_gradient_is_not_clipped_to_a_number():
    grads = gradients(MatrixModel().matrix, steps=25)
    grads[24][0, 0] = float("nan")

    assert torch.isnan(run(SPAM, grads)[0, 0])


def test_adamwadv_divides_by_the_largest_second_moment():
    grads = spiky_gradients(MatrixModel().matrix, 20)
    x, m, v, maximum = MatrixModel().matrix.detach().double().clone(), 0.0, torch.zeros(()), torch.zeros(())
    for t, grad in enumerate((g.double() for g in grads), start=1):
        x *= 1 - 1e-2 * 0.1
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        maximum = torch.maximum(maximum, v)
        x -= 1e-2 * (m / (1 - 0.9**t)) / ((maximum / (1 - 0.95**t)).sqrt() + 1e-8)

    assert torch.allclose(run(Settings(optimizer="adamwadv"), grads).double(), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("base", ["adamw", "adamwspam"])
def test_adamwprune_without_pruning_equals_its_base(base):
    config, grads = replace(SPAM, adamwprune_base=base), spiky_gradients(MatrixModel().matrix, 40)

    assert torch.equal(run(replace(config, optimizer="adamwprune"), grads), run(replace(config, optimizer=base), grads))


def test_lion_follows_its_formula():
    config = Settings(optimizer="lion", learning_rate=1e-3, beta1=0.95, beta2=0.98, weight_decay=1.0)
    x, m = MatrixModel().matrix.detach().double().clone(), 0.0
    grads = gradients(MatrixModel().matrix)
    for grad in (g.double() for g in grads):
        x -= 1e-3 * (torch.sign(0.95 * m + 0.05 * grad) + 1.0 * x)
        m = 0.98 * m + 0.02 * grad

    assert torch.allclose(run(config, grads).double(), x, rtol=0, atol=1e-6)


def test_adopt_follows_its_algorithm():
    config = Settings(optimizer="adopt", beta2=0.9999, epsilon=1e-6)
    grads = spiky_gradients(MatrixModel().matrix, 20)
    x, m = MatrixModel().matrix.detach().double().clone() * (1 - 1e-2 * 0.1), 0.0
    v = grads[0].double() ** 2
    for t, grad in enumerate((g.double() for g in grads[1:]), start=2):
        x *= 1 - 1e-2 * 0.1
        normed = (grad / v.sqrt().clamp(min=1e-6)).clamp(-(t**0.25), t**0.25)
        m = 0.9 * m + 0.1 * normed
        x -= 1e-2 * m
        v = 0.9999 * v + 0.0001 * grad**2

    assert torch.allclose(run(config, grads).double(), x, rtol=0, atol=1e-5)


def test_soap_is_adam_in_the_eigenbasis_of_its_preconditioners():
    """Algorithm 3 of Vyas et al. 2024 in 64 bits: the first gradient only initializes the bases."""
    config = Settings(optimizer="soap", beta1=0.95, soap_frequency=3)
    model = MatrixModel(8, 8)
    grads = gradients(model.matrix, steps=12)
    x = model.matrix.detach().double().clone()
    first = grads[0].double()
    left, right = 0.05 * first @ first.T, 0.05 * first.T @ first
    q_left, q_right = (torch.linalg.eigh(side).eigenvectors.flip(1) for side in (left, right))
    m = v = torch.zeros(8, 8, dtype=torch.float64)
    for t, grad in enumerate((g.double() for g in grads[1:]), start=1):
        m = 0.95 * m + 0.05 * grad
        v = 0.95 * v + 0.05 * (q_left.T @ grad @ q_right) ** 2
        scale = 1e-2 * math.sqrt(1 - 0.95**t) / (1 - 0.95**t)
        x -= scale * q_left @ ((q_left.T @ m @ q_right) / (v.sqrt() + 1e-8)) @ q_right.T
        x *= 1 - 1e-2 * 0.1
        left, right = 0.95 * left + 0.05 * grad @ grad.T, 0.95 * right + 0.05 * grad.T @ grad
        if t % 3 == 0:
            rows = torch.argsort((q_left * (left @ q_left)).sum(0), descending=True)
            columns = torch.argsort((q_right * (right @ q_right)).sum(0), descending=True)
            v = v[rows][:, columns]
            q_left = torch.linalg.qr(left @ q_left[:, rows]).Q
            q_right = torch.linalg.qr(right @ q_right[:, columns]).Q

    assert torch.allclose(run(config, grads, model).double(), x, rtol=0, atol=1e-4)


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
