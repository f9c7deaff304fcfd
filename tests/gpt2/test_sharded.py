"""Optimizer states sharded over the ranks: who holds what, equal numbers, and states for any number of ranks."""

from __future__ import annotations

import kconfiglib as kc
import pytest
import torch

import forked
from factories import ROOT, environment
from gpt2.dist import World
from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import BUILDERS, build_optimizers
from gpt2.optim.sharded import shard
from kmatrix.errors import ConfigError
from kmatrix.kconfig.tree import Tree
from kmatrix.records.files import read_json
from kmatrix.shapes import UPDATED_BY_ALL, owners
from once import make_once
from optim_factory import SHAPE, Settings

PROGRAM = "tests/support/sharded_ranks.py"
WHOLE = ("adamwprune", "schedulefree")  # their update of a tensor needs others
SHARDED = tuple(sorted(set(BUILDERS) - set(WHOLE)))
QUICK = ("adamw", "muon", "muon_nanochat")  # the last makes its states in another order


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
def test_each_of_two_ranks_holds_about_half_of_the_states(results):
    found = [result["adamw"] for result in results(2, QUICK)]
    whole, small = found[0]["plain bytes"], 0.02  # of the whole: biases and gains are on both
    assert sum(each["bytes"] for each in found) <= whole * (1 + 2 * small)
    assert all(each["bytes"] == pytest.approx(whole / 2, rel=0.1) for each in found)


def test_the_largest_tensors_are_placed_first_each_on_the_rank_with_the_fewest_entries():
    small = UPDATED_BY_ALL - 1
    assert owners([2000, small, 5000, 4000, 3000], 2) == [0, None, 0, 1, 1]


def test_one_rank_or_stage_0_keeps_the_ordinary_optimizers():
    optimizers = build_optimizers(Settings(), GPT(SHAPE))
    alone, two = (World(rank=0, size=size, device=torch.device("cpu"), backend="gloo") for size in (1, 2))
    assert shard(optimizers, 1, alone) is shard(optimizers, 0, two) is optimizers
    assert not optimizers.sharded
    assert shard(build_optimizers(Settings(), GPT(SHAPE)), 1, two).sharded


def test_averages_of_weights_are_refused_because_a_rank_would_evaluate_its_share_only():
    averaging = build_optimizers(Settings(optimizer="schedulefree"), GPT(SHAPE))
    with pytest.raises(ConfigError, match="averages the weights cannot be sharded"):
        shard(averaging, 1, World(rank=0, size=2, device=torch.device("cpu")))


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_needs_other_tensors_is_refused_by_the_configuration(name):
    forbidden = Tree.parse(srctree=ROOT).kconf.syms["FORBID_SHARDED_STATES_OF_THIS_OPTIMIZER"]
    assert f"GPT2_OPTIMIZER_{name.upper()}" in kc.expr_str(forbidden.defaults[0][0])
