"""The spike rule of the gradient norm, compared with a computation of its own, and its state."""

from __future__ import annotations

import copy
import math
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.optim.builders import build_optimizers
from gpt2.optim.spam import FEWEST, WINDOW, norm_spikes
from optim_factory import MatrixModel, Settings, apply_gradients, gradients

NORM = Settings(optimizer="adamwspam", spam_rule="norm", spam_sigma=2.0)
CPU = torch.device("cpu")


def spikes_of(norms, sigma):
    """Return which norms are spikes, as the rule is described: from a list of all earlier norms, in Python."""
    found, earlier = [], []
    for norm in norms:
        last = earlier[-WINDOW:]
        found.append(
            math.isfinite(norm)
            and len(last) >= FEWEST
            and statistics.pstdev(last) > 0
            and (norm - statistics.fmean(last)) / statistics.pstdev(last) > sigma
        )
        if math.isfinite(norm):
            earlier.append(norm)
    return found


def start(config=NORM, steps=2):
    """Return a model and its optimizers after some steps, so that there are moments, and the spike rule."""
    model = MatrixModel()
    optimizers = build_optimizers(config, model)
    apply_gradients(optimizers, model.matrix, gradients(model.matrix, steps), model)
    return model, optimizers, norm_spikes(config, optimizers, CPU)


def found_by(rule, norms):
    counts = [float(rule.count)]
    for norm in norms:
        rule.update(torch.tensor(norm))
        counts.append(float(rule.count))
    return [now > before for before, now in pairwise(counts)]


NORMS = st.one_of(st.integers(1, 40).map(float), st.sampled_from([math.inf, math.nan, 1000.0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(NORMS, max_size=130), st.sampled_from([0.5, 2.0, 3.0]))
def test_spikes_are_those_of_an_independent_computation(norms, sigma):
    _, optimizers, _ = start(steps=0)
    rule = norm_spikes(Settings(optimizer="adamwspam", spam_rule="norm", spam_sigma=sigma), optimizers, CPU)

    assert found_by(rule, norms) == spikes_of(norms, sigma)


def test_no_norm_is_a_spike_before_the_tenth_and_an_outlier_is_forgotten_after_the_window():
    _, _, rule = start()
    assert not any(found_by(rule, [1.0] * 8 + [9.0]))
    assert found_by(rule, [99.0]) == [True]
    assert found_by(rule, [1.1, 0.9] * (WINDOW // 2 + 1)) == [False] * 2 * (WINDOW // 2 + 1)
    assert float(rule.norms.max()) == pytest.approx(1.1)
    assert found_by(rule, [1.5]) == [True]


def test_a_spike_halves_the_first_moments_and_lowers_the_second_by_a_tenth_and_other_norms_change_nothing():
    model, optimizers, rule = start(Settings(optimizer="adamwspam", spam_rule="norm", spam_sigma=2.0, amsgrad=True))
    state = optimizers.optimizers[0].state[model.matrix]
    before = copy.deepcopy(state)
    assert not any(found_by(rule, [1.0, 1.2] * 5))
    assert all(torch.equal(state[name], before[name]) for name in before)

    assert found_by(rule, [5.0]) == [True]

    assert torch.equal(state["exp_avg"], 0.5 * before["exp_avg"])
    assert torch.allclose(state["exp_avg_sq"], 0.9 * before["exp_avg_sq"], rtol=1e-6, atol=0)
    assert torch.equal(state["max_exp_avg_sq"], before["max_exp_avg_sq"])
    assert torch.equal(state["step"], before["step"])


def test_a_step_after_a_spike_is_that_of_adamw_with_the_weakened_moments():
    """Compared with AdamW's formula in 64 bits."""
    config = Settings(optimizer="adamwspam", spam_rule="norm", spam_sigma=2.0, weight_decay=0.0, spam_interval=0)
    model, optimizers, rule = start(config, steps=3)
    state = optimizers.optimizers[0].state[model.matrix]
    mean, square = (state[name].double().clone() for name in ("exp_avg", "exp_avg_sq"))
    weights, grad = model.matrix.detach().double().clone(), gradients(model.matrix, 9)[8]
    found_by(rule, [1.0, 1.2] * 5)
    rule.update(torch.tensor(50.0))
    apply_gradients(optimizers, model.matrix, [grad], model)

    mean = 0.9 * (0.5 * mean) + 0.1 * grad.double()
    square = 0.95 * (0.9 * square) + 0.05 * grad.double() ** 2
    update = mean / (1 - 0.9**4) / ((square / (1 - 0.95**4)).sqrt() + 1e-8)
    assert torch.allclose(model.matrix.double(), weights - 1e-2 * update, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "has_rule"),
    [
        (NORM, True),
        (Settings(optimizer="adamwspam", spam_rule="both", spam_sigma=2.0), True),
        (Settings(optimizer="adamwprune", adamwprune_base="adamwspam", spam_rule="norm", spam_sigma=2.0), True),
        (Settings(optimizer="adamwspam"), False),
        (Settings(optimizer="adamwprune", spam_rule="norm", spam_sigma=2.0), False),
        (Settings(optimizer="adamw"), False),
    ],
)
def test_only_spam_has_the_rule(config, has_rule):
    assert (start(config)[2] is not None) == has_rule


@pytest.mark.parametrize(("rule", "clips"), [("entries", True), ("norm", False), ("both", True)])
def test_the_rule_of_the_norm_alone_clips_no_entry(rule, clips):
    """A gradient entry of 1000 after 25 of about 1: clipped to sqrt(theta) times its root mean square, or not."""
    config = Settings(optimizer="adamwspam", spam_rule=rule, spam_sigma=1e6, spam_theta=4.0, spam_interval=0)
    model, optimizers, _ = start(config, steps=25)
    spike = torch.full_like(model.matrix, 1000.0)
    apply_gradients(optimizers, model.matrix, [spike], model)
    mean = optimizers.optimizers[0].state[model.matrix]["exp_avg"]

    assert bool((mean.abs() < 10).all()) == clips


def test_a_restored_state_finds_the_same_spikes(tmp_path):
    norms = [1.0, 1.3, 0.8] * 8 + [4.0, 1.0, 1.1, 6.0, 0.9] * 3
    expected = found_by(start()[2], norms)
    first, second = start()[2], start()[2]
    found = found_by(first, norms[:20])
    torch.save(first.state_dict(), tmp_path / "spikes.pt")
    second.load_state_dict(torch.load(tmp_path / "spikes.pt", weights_only=True))

    assert found + found_by(second, norms[20:]) == expected
    assert float(second.count) == sum(expected) > 1
