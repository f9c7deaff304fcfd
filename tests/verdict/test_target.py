"""A target loss: one-sided tests, and what it took to reach it with runs that never did."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.verdict.family import Rules
from kmatrix.verdict.target import Reach, below_target, reach

VECTOR = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))["target"]
FIXED, TEN = Rules(), Rules(seeds=tuple(range(1, 11)))


def numbered(values):
    return dict(enumerate(values, start=1))


@pytest.mark.parametrize(("rules", "key"), [(FIXED, "p_below"), (TEN, "sequential_p_below")])
def test_p_is_that_of_the_vector(rules, key):
    losses = {"a": numbered(VECTOR["losses"])}
    found = below_target(losses, VECTOR["target"], rules)["a"]
    assert found.p == pytest.approx(VECTOR[key], rel=1e-10)
    assert (found.p_holm, found.seeds, found.is_below) == (found.p, 6, True)


def test_p_is_corrected_for_the_number_of_configurations():
    losses = {"a": numbered(VECTOR["losses"]), "b": numbered([3.30, 3.31, 3.32]), "c": {}}
    found = below_target(losses, VECTOR["target"], FIXED)
    assert found["a"].p_holm == pytest.approx(3 * VECTOR["p_below"])
    assert (found["b"].is_below, found["b"].p > 0.9) == (False, True)
    assert (found["c"].p, found["c"].reason) == (None, "no loss")
    found = below_target(losses, VECTOR["target"], Rules(confidence=0.99))
    assert not found["a"].is_below


def test_a_configuration_that_diverged_has_no_p():
    found = below_target({"a": numbered([3.1, 3.11, 3.12, math.nan])}, 3.28, FIXED)["a"]
    assert (found.p, found.is_below, found.diverged) == (None, False, 1)
    assert found.reason == "diverged in 1 of 4 runs"


def test_adaptive_seeds_count_up_to_the_first_that_is_to_come():
    losses = {"a": {1: 3.1, 2: 3.11, 4: math.inf, 5: 3.0}}
    found = below_target(losses, 3.28, TEN)["a"]
    assert (found.seeds, found.diverged, found.reason) == (2, 0, "2 seeds: the first look is after 3")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([None, None], "no loss"),
        ([3.1, 3.1, 3.1], "all seeds have the same loss: they count as one seed"),
    ],
)
def test_losses_without_a_test_have_a_reason(values, reason):
    assert below_target({"a": {1: 3.1}}, 3.28, FIXED)["a"].reason == "one seed: not significant"
    for rules in (FIXED, TEN):
        found = below_target({"a": numbered(values)}, 3.28, rules)["a"]
        assert (found.p, found.p_holm, found.reason) == (None, None, reason)


def test_a_median_needs_more_than_half_of_the_runs():
    assert reach([10.0, 30.0, 20.0], [None] * 3) == Reach(runs=3, reached=3, median=20.0)
    assert reach([10.0, 30.0, None, 20.0, None], [50.0] * 5) == Reach(runs=5, reached=3, median=30.0)
    assert reach([10.0, None], [50.0, 50.0]).median is None
    assert reach([None, None], [50.0, 50.0]) == Reach(runs=2, reached=0, median=None)
    assert reach([], []) == Reach(runs=0, reached=0, median=None)
    assert reach([10.0, 30.0, None, 20.0, None], [50.0] * 5).missed == 2


def test_a_run_that_ended_before_the_median_leaves_it_unknown():
    """It might have reached the target at 11; a run that diverged would not."""
    assert reach([10.0, 20.0, None], [50.0, 50.0, 12.0]).median is None
    assert reach([10.0, 20.0, None], [50.0, 50.0, None]).median is None
    assert reach([10.0, 20.0, None], [50.0, 50.0, math.inf]).median == 20.0
    assert reach([10.0, 20.0, None], [50.0, 50.0, 20.0]).median == 20.0


@given(st.lists(st.tuples(st.floats(1, 99), st.floats(1, 99)), min_size=1, max_size=9))
def test_a_median_is_that_of_the_runs_without_an_end(runs):
    """Whatever the runs that were censored would have done, the median is the one that is printed."""
    values = [at if at <= end else None for at, end in runs]
    found = reach(values, [end for _, end in runs])
    if found.median is not None:
        every = sorted(at for at, _ in runs)
        middle = every[(len(every) - 1) // 2 : len(every) // 2 + 1]
        assert found.median == pytest.approx(sum(middle) / len(middle))
