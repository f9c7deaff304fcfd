"""Forecasts compared with the real optimizer states."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from factories import train_config, with_shape
from gpt2 import prune
from gpt2.dist import World
from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import BUILDERS, build_optimizers
from gpt2.optim.sharded import shard
from kmatrix.plan.memory import masks, memory, states, states_per_rank
from optim_factory import SHAPE, Settings, run_steps

BIG = replace(SHAPE, n_embd=32, vocab_size=257, block_size=16)
SHARDED = replace(SHAPE, n_layer=4, n_embd=96, vocab_size=257, block_size=16)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def state_count(optimizers):
    """Return the number of 32-bit values in the optimizer states, without counters."""
    return sum(state_count_of(state) for optimizer in optimizers.optimizers for state in optimizer.state.values())


def state_count_of(state):
    found = []
    for value in state.values() if isinstance(state, dict) else ():
        found += [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor)]
    return sum(tensor.numel() for tensor in found if tensor.ndim)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"adafactor"}))
def test_the_forecast_of_optimizer_states_equals_the_real_states(name, amsgrad):
    config = Settings(optimizer=name, amsgrad=amsgrad)
    model = GPT(BIG)
    optimizers = build_optimizers(config, model)
    run_steps(model, optimizers, 2)
    fields = asdict(config) if name in ("adamwspam", "adamwprune") else {**asdict(config), "amsgrad": None}
    train = train_config(**fields)

    assert states(BIG, train) == pytest.approx(
        state_count(optimizers), rel=0.03
    )  # AdamW updates Muon's gains and biases


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"adafactor", "adamwprune", "schedulefree"}))
def test_the_forecast_of_sharded_states_equals_those_of_the_rank_with_the_most(name, ranks):
    """Which tensors a rank holds is read from the trainer's own optimizers; the sizes are those of the real states."""
    config = Settings(optimizer=name)
    model = GPT(SHARDED)
    optimizers = build_optimizers(config, model)
    run_steps(model, optimizers, 2)
    sizes = {p: state_count_of(state) for o in optimizers.optimizers for p, state in o.state.items()}
    held = []
    for rank in range(ranks):
        world = World(rank=rank, size=ranks, device=torch.device("cpu"))
        share = shard(build_optimizers(config, model), 1, world)
        held.append(sum(sizes[p] for o in share.optimizers for group in o.param_groups for p in group["params"]))
    train = train_config(**asdict(config) | {"amsgrad": None}, num_gpus=ranks, zero_stage=1)

    assert states_per_rank(SHARDED, train) == pytest.approx(max(held), rel=0.03)
    assert states(SHARDED, train) == states_per_rank(SHARDED, replace(train, zero_stage=0))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("base", ["adam", "adamw", "adamwadv", "adamwspam"])
def test_the_forecast_of_each_base_of_adamwprune_equals_its_real_states(base, amsgrad):
    config = Settings(optimizer="adamwprune", adamwprune_base=base, amsgrad=amsgrad)
    model = GPT(BIG)
    optimizers = build_optimizers(config, model)
    run_steps(model, optimizers, 2)

    assert states(BIG, train_config(**asdict(config))) == state_count(optimizers)


def test_the_forecast_of_movement_pruning_equals_its_real_masks_and_scores():
    config = Settings(pruning="movement")
    model = GPT(BIG)
    pruner = prune.build(config, model, build_optimizers(config, model))
    tensors = [*pruner.pruned, *pruner.movement]

    assert masks(BIG, train_config(**asdict(config))) == sum(t.numel() * t.element_size() for t in tensors) / 4
    assert masks(BIG, train_config(**asdict(config))) == 1.25 * 12 * BIG.n_layer * BIG.n_embd**2


def test_another_optimizer_is_planned_with_the_states_of_adam():
    assert states(BIG, train_config(optimizer="signsgd")) == states(BIG, train_config(optimizer="adam"))


@pytest.mark.parametrize(("method", "bytes_each"), [("none", 0), ("magnitude", 1), ("state", 1), ("movement", 5)])
def test_pruning_takes_one_byte_per_block_weight_and_movement_also_a_score(method, bytes_each):
    plain, pruned = (
        memory(with_shape(train_config(optimizer="adamw", pruning=name), BIG)).least for name in ("none", method)
    )
    assert pruned - plain == pytest.approx(bytes_each * 12 * BIG.n_layer * BIG.n_embd**2)
