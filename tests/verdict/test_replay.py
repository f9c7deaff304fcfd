"""The rounds of adaptive seeds: what a process wants next depends on the losses alone."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmatrix.verdict.family import NoMoreSeeds, PairOutcome, Rules
from kmatrix.verdict.pairs import verdict_on
from kmatrix.verdict.replay import replay

TEN = Rules(seeds=tuple(range(1, 11)))


def matrix(dice, k, seeds=10, spread=2.0):
    """Return the losses that the runs of a matrix would have, a few of them diverged, failed or missing."""
    found = {}
    for name in "abcd"[:k]:
        mean = dice.gauss(0, spread)
        found[name] = {
            seed: dice.choices([dice.gauss(mean, 1), math.nan, None], [94, 3, 3])[0] for seed in range(1, seeds + 1)
        }
    return found


def run_to_the_end(losses, rules, dice, known=None):
    """Return what a runner knows at the end that ends some of the wanted runs at a time, in any order."""
    known = {name: dict((known or {}).get(name, {})) for name in losses}
    while wanted := replay(known, rules).wanted:
        for name, seed in dice.sample(sorted(wanted), dice.randint(1, len(wanted))):
            known[name][seed] = losses[name][seed]
    return known


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([None, 2.0]), st.booleans())
def test_kills_order_and_reuse_do_not_change_a_verdict(number, k, margin, against_baseline):
    dice = random.Random(number)
    losses = matrix(dice, k)
    rules = Rules(seeds=TEN.seeds, min_difference=margin, baseline="a" if against_baseline else None)
    undisturbed = replay(losses, rules)  # as if all losses had been there from the start
    assert not undisturbed.wanted

    known = run_to_the_end(losses, rules, dice)
    found = replay(known, rules)
    assert found.unused == 0
    assert repr(found.verdict) == repr(undisturbed.verdict)
    assert found.rounds == undisturbed.rounds

    # Losses of another matrix are there before: some are needed, some are not.
    reused = {name: {seed: row[seed] for seed in dice.sample(sorted(row), 4)} for name, row in losses.items()}
    again = replay(run_to_the_end(losses, rules, dice, reused), rules)
    assert repr(again.verdict) == repr(undisturbed.verdict)
    ended = sum(loss is not None for row in losses.values() for loss in row.values())
    assert undisturbed.unused == ended - sum(loss is not None for row in known.values() for loss in row.values())


@pytest.mark.parametrize("margin", [None, 2.0])
@pytest.mark.parametrize("number", range(15))
def test_a_runner_that_only_asks_for_verdicts_spends_the_same_seeds(number, margin):
    """An independent loop: after each round, each open pair with the reference gives a seed to the side with fewer."""
    losses = matrix(random.Random(number), 4, spread=0.5)  # close ones: leaders change, and have fewer seeds
    rules = Rules(seeds=TEN.seeds, min_difference=margin)
    seeds = dict.fromkeys(losses, 3)
    while True:
        table = {name: {seed: losses[name][seed] for seed in range(1, seeds[name] + 1)} for name in losses}
        verdict = verdict_on(table, rules)
        more = set()
        for pair in verdict.pairs[:3]:
            if pair.outcome is PairOutcome.OPEN and pair.no_more is None:
                more |= {pair.b} if seeds[pair.b] <= seeds[pair.a] else set()
                more |= {pair.a} if seeds[pair.a] <= seeds[pair.b] else set()
        if not more:
            break
        for name in more:
            seeds[name] += 1
    found = replay(losses, rules)
    assert repr(found.verdict) == repr(verdict)
    assert found.unused == sum(
        row[seed] is not None for name, row in losses.items() for seed in range(seeds[name] + 1, 11)
    )


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([None, 2.0]))
def test_further_seeds_and_an_added_configuration_give_the_verdict_of_a_matrix_that_had_them(number, k, margin):
    """6 seeds of k - 1 configurations were run first, in any order; then come the other one and further seeds."""
    dice = random.Random(number)
    losses = matrix(dice, k)
    before = {name: losses[name] for name in list(losses)[:-1]}
    known = run_to_the_end(before, Rules(seeds=TEN.seeds[:6], min_difference=margin), dice)
    rules = Rules(seeds=TEN.seeds, min_difference=margin)
    found = replay(run_to_the_end(losses, rules, dice, known), rules)
    undisturbed = replay(losses, rules)
    assert (repr(found.verdict), found.rounds) == (repr(undisturbed.verdict), undisturbed.rounds)


def test_a_round_that_has_not_ended_is_not_looked_at():
    rows = {"a": (3.10, 3.12, 3.11, 3.10), "b": (3.12, 3.11, 3.14)}
    found = replay({name: dict(enumerate(row, start=1)) for name, row in rows.items()}, TEN)
    assert (found.wanted, found.rounds) == ((("b", 4),), (3,))
    assert found.verdict.pairs[0].seeds == (1, 2, 3)


def test_fewer_seeds_than_the_first_look_are_all_run_and_never_looked_at():
    rules = Rules(seeds=(1, 2), seeds_min=3)
    assert len(replay({"a": {}, "b": {}}, rules).wanted) == 4
    found = replay({"a": {1: 1.0, 2: 1.1}, "b": {1: 9.0, 2: 9.2}}, rules)
    assert (found.wanted, found.rounds) == ((), (2,))
    assert found.verdict.pairs[0].no_more is NoMoreSeeds.MAXIMUM
