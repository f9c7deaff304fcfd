"""Rungs of successive halving: where configurations are compared, and how many go on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.verdict.halving import Rung, most_steps, rungs


def pairs(*args, **options):
    return [(rung.step, rung.keep) for rung in rungs(*args, **options)]


def test_twelve_configurations_become_four_and_two():
    found = rungs(4500, 12, 3, eval_interval=100)
    assert found == (Rung(step=500, keep=4), Rung(step=1500, keep=2))
    assert most_steps(4500, 12, found) == 12 * 500 + 4 * 1000 + 2 * 3000


@pytest.mark.parametrize(
    ("configurations", "eta", "expected"),
    [
        (27, 3, [(40, 9), (120, 3), (340, 2)]),
        (9, 3, [(120, 3), (340, 2)]),
        (8, 2, [(140, 4), (260, 2)]),
        (3, 3, [(340, 2)]),
        (2, 3, []),
        (2, 2, []),
        (1, 2, []),
        (125, 5, [(20, 25), (40, 5), (200, 2)]),
    ],
)
def test_a_rung_is_at_the_next_evaluation(configurations, eta, expected):
    assert pairs(1000, configurations, eta, eval_interval=20) == expected


def test_a_rung_is_not_inside_the_warm_up():
    assert pairs(900, 27, 3, eval_interval=10, warmup=150) == [(150, 9), (300, 3)]
    assert pairs(900, 27, 3, eval_interval=100, warmup=150) == [(200, 9), (300, 3)]


def test_a_run_without_an_evaluation_before_its_end_has_no_rung():
    assert pairs(100, 12, 3, eval_interval=100) == []
    assert pairs(100, 12, 3, eval_interval=40) == [(40, 4)]
    assert pairs(100, 12, 3, eval_interval=10, warmup=100) == []


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(2, 6), st.integers(1, 500), st.integers(0, 1000))
def test_rungs_rise_at_evaluations_and_configurations_fall(max_iters, configurations, eta, interval, warmup):
    found = rungs(max_iters, configurations, eta, eval_interval=interval, warmup=warmup)
    steps = [rung.step for rung in found]
    kept = [configurations, *(rung.keep for rung in found)]
    assert steps == sorted(set(steps))
    assert all(step % interval == 0 and warmup <= step < max_iters for step in steps)
    assert all(after < before <= after * eta for before, after in itertools.pairwise(kept))
    assert kept[-1] >= min(configurations, 2)
    assert most_steps(max_iters, configurations, found) <= max_iters * configurations


@pytest.mark.parametrize("values", [(0, 3, 3), (10, 0, 3), (10, 3, 1)])
def test_values_without_rungs_are_a_mistake_of_the_caller(values):
    with pytest.raises(ValueError, match="configurations"):
        rungs(*values, eval_interval=1)
