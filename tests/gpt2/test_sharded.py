"""Optimizer states sharded over the ranks: who holds what, equal numbers, and states for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forked
from factories import ROOT, environment, train_config
from gpt2.dist import World
from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import BUILDERS, build_optimizers
from gpt2.optim.sharded import SHARES, SMALL, ShardedOptimizers, place, shard, share_of
from kmatrix.errors import ConfigError
from kmatrix.kconfig.tree import Tree
from kmatrix.records.files import read_json
from kmatrix.records.train_config import NOT_SHARDED
from kmatrix.shapes import ModelShape
from once import make_once
from optim_factory import SHAPE, Settings

PROGRAM = "tests/support/sharded_ranks.py"
SHARDED = tuple(sorted(set(BUILDERS) - set(NOT_SHARDED)))
QUICK = ("adamw", "muon", "muon_nanochat")  # the last makes its states in another order
WIDE = ModelShape(n_layer=3, n_head=2, n_embd=48, block_size=16, vocab_size=259)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function that updates with some optimizers on some ranks, and returns what each rank found."""

    def run(ranks, names):
        def make(folder):
            done = forked.run([PROGRAM, str(folder), *names], environment(), ranks=ranks)
            return done.returncode, done.stdout + done.stderr

        folder, (code, output) = make_once(tmp_path_factory, f"sharded-{ranks}-{len(names)}", make)
        assert code == 0, output
        return [read_json(folder / f"{rank}.json") for rank in range(ranks)]

    return run


def check_exact(of_ranks, name):
    for found in (result[name] for result in of_ranks):
        assert found.pop("gradients left") == 0
        assert all(found[key] for key in found if "bytes" not in key), found


@pytest.mark.process
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_with_sharded_states_update_and_resume_bit_for_bit_like_unsharded_ones(results, name):
    check_exact(results(2, QUICK), name)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_every_optimizer_that_can_be_sharded_updates_and_resumes_bit_for_bit(results, ranks, name):
    check_exact(results(ranks, SHARDED), name)


@pytest.mark.process
def test_each_of_two_ranks_holds_half_of_the_states_besides_small_tensors(results):
    found = [result["adamw"] for result in results(2, QUICK)]
    whole, small = found[0]["plain bytes"], 0.02  # of the whole: biases and gains are on both
    assert sum(each["bytes"] for each in found) <= whole * (1 + 2 * small)
    assert all(each["bytes"] == pytest.approx(whole / 2, rel=2 * small) for each in found)


def placed_on(name, ranks):
    """Return the placement of an optimizer's parameters as each rank sees it."""
    kinds = [share_of(optimizer) for optimizer in build_optimizers(Settings(optimizer=name), GPT(WIDE)).optimizers]
    found = []
    for rank in range(ranks):
        optimizers = build_optimizers(Settings(optimizer=name), GPT(WIDE)).optimizers
        found.append([item for items in place(optimizers, kinds, rank=rank, size=ranks) for item in items])
    return found


@pytest.mark.parametrize("name", ["adamw", "muon", "soap"])
@pytest.mark.parametrize("ranks", [2, 7])
def test_each_entry_of_a_large_tensor_is_updated_by_one_rank_and_small_tensors_by_all(name, ranks):
    for of_ranks in zip(*placed_on(name, ranks), strict=True):
        count = of_ranks[0].parameter.numel()
        held = [0 if item.share is None else item.share.numel() for item in of_ranks]
        assert held == [count] * ranks if count < SMALL else sum(held) == count
        assert {item.bounds for item in of_ranks} == {of_ranks[0].bounds}, "the ranks do not agree"


def test_one_rank_or_stage_0_keeps_the_ordinary_optimizers():
    optimizers = build_optimizers(Settings(), GPT(SHAPE))
    alone, two = (World(rank=0, local_rank=0, size=size, device=torch.device("cpu"), backend="gloo") for size in (1, 2))
    assert shard(optimizers, 1, alone) is shard(optimizers, 0, two) is optimizers
    assert not optimizers.sharded
    assert shard(build_optimizers(Settings(), GPT(WIDE)), 1, two).sharded


def test_an_optimizer_that_is_not_known_to_be_divisible_is_refused():
    class Sign(torch.optim.SGD):  # its update of an entry may need others: the name of the base does not count
        pass

    world = World(rank=0, local_rank=0, size=2, device=torch.device("cpu"), backend="gloo")
    with pytest.raises(ConfigError, match="states of Sign cannot be sharded"):
        ShardedOptimizers(Sign([nn.Parameter(torch.zeros(4))], lr=1.0), world=world)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_optimizer_is_either_known_to_be_divisible_or_refused_by_the_configuration(name):
    optimizers = build_optimizers(Settings(optimizer=name), GPT(SHAPE)).optimizers
    config = train_config(optimizer=name, zero_stage=1, pruning="state" if name == "adamwprune" else "none")
    if name in NOT_SHARDED:
        with pytest.raises(ConfigError, match=r"zero_stage.*1"):
            config.check()
        assert f"FORBID_SHARDED_STATES_OF_{name.upper()}" in {symbol.name for symbol in TREE.symbols}
    else:
        assert all(type(optimizer).__name__ in SHARES for optimizer in optimizers)
        config.check()


def test_a_saved_state_of_another_shape_is_refused():
    world = World(rank=1, local_rank=1, size=2, device=torch.device("cpu"), backend="gloo")
    model = GPT(WIDE)
    plain = build_optimizers(Settings(), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    saved = plain.state_dict()
    mine = shard(build_optimizers(Settings(), GPT(WIDE)), 1, world)
    large = next(n for n, s in saved["optimizers"][0]["state"].items() if s["exp_avg"].numel() >= SMALL)
    saved["optimizers"][0]["state"][large]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="a state is"):
        mine.load_state_dict(saved)
    saved["optimizers"][0]["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="other parameters"):
        mine.load_state_dict(saved)


TREE = Tree.parse(srctree=ROOT)
