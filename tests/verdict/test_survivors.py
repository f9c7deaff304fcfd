"""Successive halving as a function of the losses at the rungs: what is wanted, who survives, and no inflated error."""

from __future__ import annotations

import math
import random

import pytest

from bench.halving import has_false_better, matrix
from kmatrix.verdict.family import Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.halving import Rung
from kmatrix.verdict.survivors import SeedAtRungs, of_survivors, replay_halving, survivors

RUNGS = (Rung(step=10, keep=3), Rung(step=30, keep=1))


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ({"a": 3.0, "b": 2.0, "c": 1.0}, ("c", "b")),
        ({"b": 1.0, "a": 1.0, "c": 1.0}, ("a", "b")),  # equal: by name
        ({"a": math.inf, "b": None, "c": 1.0}, ("c",)),  # diverged and failed ones never survive
        ({"a": math.nan, "b": None}, ()),
    ],
)
def test_the_best_survive(losses, kept):
    assert survivors(losses, 2) == kept


def at(*losses, **more):
    return SeedAtRungs(losses=dict(zip((10, 30), losses, strict=False)), **more)


def test_a_rung_waits_for_all_seeds_of_all_configurations():
    runs = {name: {1: at(3.0 + place), 2: at(3.0 + place)} for place, name in enumerate("abcd")}
    assert replay_halving(runs, RUNGS).wanted == {(name, seed): 30 for name in "abc" for seed in (1, 2)}
    runs["d"][2] = SeedAtRungs()
    now = replay_halving(runs, RUNGS)
    assert (now.wanted, now.waits_at, now.rungs) == ({("d", 2): 10}, 10, ())
    runs["d"][2] = SeedAtRungs(over=True)  # it failed: the other seed of d counts alone
    assert replay_halving(runs, RUNGS).rungs[0].losses["d"] == 6.0


def test_a_diverged_seed_puts_its_configuration_last_and_a_later_loss_does_not_count():
    runs = {"a": {1: at(1.0), 2: at(math.inf, over=True, final=math.inf)}}
    runs |= {name: {1: at(2.0), 2: at(2.0)} for name in "bcd"}
    # Reused, without an evaluation at the rung: its final loss is that of more steps.
    runs["d"][1] = SeedAtRungs(over=True, final=0.5, final_step=90)
    runs["d"][2] = SeedAtRungs(over=True, final=4.0, final_step=5)  # it ended early by itself
    (rung,) = replay_halving(runs, RUNGS).rungs
    assert rung.losses == {"a": math.inf, "b": 2.0, "c": 2.0, "d": 4.0}
    assert rung.kept == ("b", "c", "d")


def test_a_run_that_ended_at_the_rung_counts_with_its_final_loss_and_one_that_diverged_at_any_step():
    assert [SeedAtRungs(over=True, final=4.0, final_step=step).at(10) for step in (9, 10, 11)] == [4.0, 4.0, None]
    assert [SeedAtRungs(over=True, final=math.inf, final_step=step).at(10) for step in (None, 90)] == [math.inf] * 2


def test_the_order_of_ends_changes_nothing():
    """A process that starts what is wanted, one run after the other in any order, ends with the same survivors."""
    dice, ends = random.Random(3), set()
    final = {(name, seed): dice.gauss(3, 1) for name in "abcdefghi" for seed in (1, 2, 3)}
    early = {key: (loss + dice.gauss(0, 1), loss + dice.gauss(0, 0.5)) for key, loss in final.items()}
    for _ in range(20):
        runs = {name: {seed: SeedAtRungs() for seed in (1, 2, 3)} for name in "abcdefghi"}
        steps = dict.fromkeys(final, 0)
        while wanted := replay_halving(runs, RUNGS).wanted:
            (name, seed), until = dice.choice(sorted(wanted.items()))
            steps[name, seed] = until or 90
            known = early[name, seed][: 1 + (until != 10)]
            runs[name][seed] = at(*known, over=until is None, final=final[name, seed] if until is None else None)
        ends.add(tuple(steps.items()))
    (steps_of_all,) = ends
    assert sum(step == 90 for _, step in steps_of_all) == 3  # the seeds of one configuration


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_the_survivors_of_equal_configurations_are_seldom_called_better(correlation):
    dice, rules, found = random.Random(14), Rules(seeds=(0, 1, 2)), 0
    for _ in range(400):
        runs, final = matrix(dice, 9, 3, RUNGS[:1], correlation)
        found += has_false_better(fixed_verdict(of_survivors(final, replay_halving(runs, RUNGS[:1])), rules))
    assert found <= 36  # 5 % and its 99.9 % bound
