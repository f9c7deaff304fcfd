"""Pruning: the ramp, the scores compared with their formulas, and masks that persist."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune as torch_prune

from factories import train_config
from gpt2 import prune
from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import build_optimizers
from gpt2.prune import Ramp, lowest
from gpt2.train import set_up
from kmatrix.errors import ConfigError
from optim_factory import SHAPE, Settings, loss_of

MAGNITUDE = Settings(pruning="magnitude")
PRUNE = Settings(optimizer="adamwprune", pruning="state")
LEGAL = [
    *(replace(MAGNITUDE, optimizer=name, pruning=method) for method in ("magnitude", "movement") for name in (
        "sgd", "adam", "adamw", "adamwadv", "adamwspam", "lion", "adopt",
    )),
    PRUNE,
    replace(PRUNE, adamwprune_base="adam"),
    replace(PRUNE, adamwprune_base="adamwadv"),
    replace(PRUNE, adamwprune_base="adamwspam", spam_interval=6, spam_warmup_steps=2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def label(config):
    base = f"-{config.adamwprune_base}" if config.optimizer == "adamwprune" else ""
    return f"{config.optimizer}{base}-{config.pruning}"


def start(config, seed=0):
    model = GPT(SHAPE, seed=seed)
    optimizers = build_optimizers(config, model)
    return model, optimizers, prune.build(config, model, optimizers)


def step(model, optimizers, pruner, number):
    """Perform one step of the loop, step `number`, counted from 0."""
    loss_of(model, seed=number).backward()
    pruner.gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizers.step()
    pruner.weights(number + 1)
    optimizers.zero_grad()


def counted(pruner):
    return sum(int((matrix == 0).sum()) for matrix in pruner.matrices) / pruner.total


def zeros(matrices):
    return [(matrix == 0).clone() for matrix in matrices]


@given(st.lists(st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=12), min_size=1, max_size=4), st.floats(0, 1))
def test_exactly_the_lowest_are_selected_and_among_equals_the_first(values, share):
    scores = [torch.tensor(row) + 0.0 for row in values]  # no negative zero, because it would sort before zero
    all_scores = torch.cat(scores)
    count = round(share * all_scores.numel())

    found = torch.cat(lowest(scores, count))

    expected = torch.zeros_like(all_scores, dtype=torch.bool)
    expected[torch.sort(all_scores, stable=True).indices[:count]] = True
    assert torch.equal(found, expected)


def test_pruned_weights_are_lowest():
    (mask,) = lowest([torch.tensor([0.5, -torch.inf, -3.0, 2.0, -torch.inf])], 3)

    assert mask.tolist() == [False, True, True, False, True]


def test_the_ramp_is_cubic_and_ends_at_the_target():
    ramp = Ramp(target=0.8, begin=10, end=60, every=20)

    assert [update for update in range(100) if ramp.due(update)] == [30, 50, 60]
    assert ramp.sparsity(10) == ramp.sparsity(0) == 0.0
    assert ramp.sparsity(35) == pytest.approx(0.8 + (0.0 - 0.8) * (1 - (35 - 10) / 50) ** 3)
    assert ramp.sparsity(60) == ramp.sparsity(10**6) == 0.8


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 30), st.floats(0.01, 0.99))
def test_a_ramp_never_decreases_and_its_last_change_reaches_the_target(begin, length, every, target):
    ramp = Ramp(target=target, begin=begin, end=begin + length, every=every)
    due = [update for update in range(begin + length + 40) if ramp.due(update)]
    sparsities = [ramp.sparsity(update) for update in due]

    assert due[-1] == begin + length
    assert sparsities == sorted(sparsities)
    assert sparsities[-1] == pytest.approx(target)


def test_a_run_that_breaks_a_rule_is_refused_before_it_begins():
    fields = train_config(pruning="magnitude", pruning_warmup=0.75, pruning_ramp_end=0.5).to_json()
    with pytest.raises(ConfigError, match=r"PRUNING_RAMP_END=0.5 is not after PRUNING_WARMUP=0.75"):
        set_up({"train": fields}, None, None)


def test_without_pruning_no_pruner_is_built():
    assert start(Settings())[2] is None


@pytest.mark.parametrize("config", LEGAL, ids=label)
def test_pruned_weights_stay_zero_and_the_target_is_reached_exactly(config):
    model, optimizers, pruner = start(config)
    others = {id(p) for p in model.parameters()} - {id(p) for p in pruner.matrices}
    before = zeros(pruner.matrices)
    for number in range(config.max_iters):
        step(model, optimizers, pruner, number)
        now = zeros(pruner.matrices)
        assert all(bool((old <= new).all()) for old, new in zip(before, now, strict=True))
        assert all(torch.equal(mask, new) for mask, new in zip(pruner.pruned, now, strict=True))
        before = now

    total = sum(matrix.numel() for matrix in pruner.matrices)
    assert sum(int(mask.sum()) for mask in before) == round(0.5 * total)
    assert counted(pruner) == pytest.approx(0.5, abs=1 / total)
    assert all(int((p == 0).sum()) == 0 for p in model.parameters() if id(p) in others and p.ndim == 2)


def test_only_the_matrices_of_blocks_are_pruned():
    model, _, pruner = start(MAGNITUDE)
    names = {name for name, p in model.named_parameters() for matrix in pruner.matrices if p is matrix}

    assert names == {name for name, p in model.named_parameters() if name.startswith("h.") and p.ndim == 2}


def test_magnitude_prunes_what_torch_prunes():
    model, _, pruner = start(replace(MAGNITUDE, pruning_warmup=0.0, pruning_ramp_end=0.05, max_iters=20))
    reference = copy.deepcopy(model)
    pruner.weights(1)
    linears = [module for module in reference.h.modules() if isinstance(module, nn.Linear)]
    torch_prune.global_unstructured([(m, "weight") for m in linears], torch_prune.L1Unstructured, amount=0.5)

    expected = {id(m): m.weight_mask == 0 for m in linears}
    our_linears = [module for module in model.h.modules() if isinstance(module, nn.Linear)]
    assert len(our_linears) == len(pruner.matrices)
    for our_linear, torch_linear in zip(our_linears, linears, strict=True):
        assert torch.equal(our_linear.weight == 0, expected[id(torch_linear)])


def test_movement_prunes_weights_whose_gradients_push_them_towards_zero():
    config = replace(MAGNITUDE, pruning="movement", pruning_warmup=0.0, pruning_ramp_end=0.2, pruning_frequency=99)
    model, optimizers, pruner = start(config)
    scores = [torch.zeros_like(matrix) for matrix in pruner.matrices]
    for number in range(4):
        loss_of(model, seed=number).backward()
        for score, matrix in zip(scores, pruner.matrices, strict=True):
            score.sub_(matrix.detach() * matrix.grad)
        pruner.gradients()
        optimizers.step()
        pruner.weights(number + 1)
        optimizers.zero_grad()

    all_scores = torch.cat([score.flatten() for score in scores])
    pruned = torch.cat([mask.flatten() for mask in pruner.pruned])
    assert all_scores[pruned].max() <= all_scores[~pruned].min()
    assert int(pruned.sum()) == round(0.5 * all_scores.numel())


def test_state_pruning_uses_the_moments_of_the_optimizer():
    config = replace(PRUNE, pruning_warmup=0.0, pruning_ramp_end=0.2, pruning_frequency=99)
    model, optimizers, pruner = start(config)
    for number in range(3):
        step(model, optimizers, pruner, number)
    loss_of(model, seed=3).backward()
    optimizers.step()
    state = optimizers.optimizers[0].state
    scores = [
        (m := matrix.detach().double()) ** 2
        * state[matrix]["exp_avg"].double().abs()
        / (state[matrix]["exp_avg_sq"].double().sqrt() + 1e-8)
        + 0 * m
        for matrix in pruner.matrices
    ]
    pruner.weights(4)

    all_scores = torch.cat([score.flatten() for score in scores])
    pruned = torch.cat([mask.flatten() for mask in pruner.pruned])
    assert all_scores[pruned].max() <= all_scores[~pruned].min() * (1 + 1e-5)


def test_pruned_weights_do_not_contribute_to_the_gradient_norm():
    model, optimizers, pruner = start(MAGNITUDE)
    for number in range(20):
        step(model, optimizers, pruner, number)
    loss_of(model).backward()
    pruner.gradients()

    assert all(
        bool((matrix.grad[mask] == 0).all()) for matrix, mask in zip(pruner.matrices, pruner.pruned, strict=True)
    )


def test_state_pruning_waits_until_the_moments_recover_from_a_reset():
    base = replace(PRUNE, adamwprune_base="adamwspam", spam_interval=8)
    config = replace(base, pruning_frequency=8, pruning_warmup=0.0, pruning_ramp_end=0.85)
    model, optimizers, pruner = start(config)  # due after 8, 16 and 17 updates; the moments are reset after 8 and 16
    changes = []
    for number in range(20):
        before = counted(pruner)
        step(model, optimizers, pruner, number)
        if counted(pruner) != before:
            changes.append(number + 1)

    assert changes == [12, 20]  # half an interval after each reset


def test_the_sparsity_of_a_step_is_that_after_as_many_updates():
    model, optimizers, pruner = start(replace(MAGNITUDE, pruning_frequency=5, pruning_warmup=0.25))
    sparsities = [0.0]
    for number in range(20):
        step(model, optimizers, pruner, number)
        sparsities.append(counted(pruner))
        assert pruner.sparsity(number) == sparsities[number]
        assert pruner.sparsity(number + 1) == sparsities[number + 1]

    assert sparsities[5] == 0.0 < sparsities[10] < sparsities[15] == sparsities[20]


@pytest.mark.parametrize("cut", [5, 11])
@pytest.mark.parametrize("config", [LEGAL[7], *LEGAL[-4:]], ids=label)
def test_a_restored_state_keeps_its_masks_and_continues_bit_for_bit(config, cut, tmp_path):
    uninterrupted, optimizers, pruner = start(config)
    for number in range(20):
        step(uninterrupted, optimizers, pruner, number)
    model, optimizers, pruner = start(config)
    for number in range(cut):
        step(model, optimizers, pruner, number)
    components = {"model": model, "optimizer": optimizers, "pruner": pruner}
    torch.save({name: item.state_dict() for name, item in components.items()}, tmp_path / "saved.pt")

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    model, optimizers, resumed = start(config, seed=99)
    for name, item in {"model": model, "optimizer": optimizers, "pruner": resumed}.items():
        item.load_state_dict(saved[name])
    assert counted(resumed) == counted(pruner)
    assert resumed.sparsity(cut) == pruner.sparsity(cut)
    for number in range(cut, 20):
        step(model, optimizers, resumed, number)

    assert all(torch.equal(a, b) for a, b in zip(uninterrupted.parameters(), model.parameters(), strict=True))
