"""Exact probabilities of repeated t tests: stored vectors, and a simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kmatrix.stats import critical, lower_tail
from kmatrix.verdict import sequential
from kmatrix.verdict.power import detectable_shift, power
from kmatrix.verdict.sequential import boundary, crossing, crossing_table, level, weight

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("vector", VECTORS["levels"], ids=lambda v: f"{v['seeds_min']}-{v['seeds_max']}-{v['a']:.2g}")
def test_a_boundary_is_crossed_with_the_probability_of_the_vectors(vector):
    first, most, a = vector["seeds_min"], vector["seeds_max"], vector["a"]
    assert boundary(a, first, most) == pytest.approx(vector["critical_t"], rel=1e-12)
    assert crossing(vector["critical_t"], first)[-1] == pytest.approx(vector["G_of_a"], rel=1e-9)
    assert level(vector["G_of_a"], first, most) == pytest.approx(a, rel=2e-6)  # from the table


def test_a_sequential_p_is_that_of_the_vectors():
    for look in VECTORS["sequential"]["looks"]:
        found = crossing_table(3, 10).p(look["min_p_over_w"])
        assert found == pytest.approx(look["sequential_p_low"], rel=1e-12)
        assert weight(look["n"], 10) == pytest.approx(look["weight"], rel=1e-15)


@pytest.mark.parametrize(("first", "most", "one_sided"), [(3, 10, 0.025), (2, 6, 0.025), (3, 12, 0.005)])
def test_the_recursion_agrees_with_simulated_sequences(first, most, one_sided):
    """200,000 sequences: each look within 4.5 standard errors."""
    import numpy as np

    limits = boundary(level(one_sided, first, most), first, most)
    exact = np.array(crossing(limits, first))
    x = np.random.default_rng(2).normal(size=(200_000, most))
    n = np.arange(1, most + 1)
    mean = x.cumsum(1) / n
    with np.errstate(invalid="ignore", divide="ignore"):
        t = mean * np.sqrt(n) / np.sqrt(((x * x).cumsum(1) - n * mean**2) / (n - 1))
    crossed = np.maximum.accumulate(t[:, first - 1 :] >= limits, axis=1).mean(0)
    assert exact[-1] == pytest.approx(one_sided, rel=2e-6)
    assert np.all(np.abs(crossed - exact) < 4.5 * np.sqrt(exact * (1 - exact) / len(x)))


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "most"), [(2, 6), (3, 10), (3, 16)])
@pytest.mark.parametrize(("a", "error"), [(0.1, 4e-7), (0.022, 4e-7), (0.01, 4e-7), (1e-5, 2e-5)])
def test_more_points_change_a_probability_by_less_than_the_stated_error(first, most, a, error, monkeypatch):
    limits = boundary(a, first, most)
    found = crossing(limits, first)[-1]
    monkeypatch.setattr(sequential, "PER_PANEL", 250)
    monkeypatch.setattr(sequential, "PER_INTEGRAL", 96)
    assert found == pytest.approx(crossing(limits, first)[-1], rel=error)


def test_one_look_is_an_ordinary_t_test():
    assert crossing([critical(0.025, 4)], 5) == pytest.approx([0.025], rel=1e-12)
    assert level(0.025, 5, 5) == pytest.approx(0.025, rel=1e-9)


@pytest.mark.parametrize("vector", VECTORS["smallest_detectable"], ids=lambda v: f"{v['n']}-{v['comparisons']}")
def test_the_smallest_detectable_difference_is_that_of_the_vectors(vector):
    shift = detectable_shift(vector["n"] - 1, 0.05 / 2 / vector["comparisons"])
    assert shift / math.sqrt(vector["n"]) == pytest.approx(vector["difference"], rel=1e-12)


def test_power_agrees_with_scipy_where_scipy_is_right():
    from scipy.stats import nct

    for freedom, t, shift in ((2, 4.3, 5.6), (1, 12.7, 10.0), (9, 2.26, 3.2), (99, 1.98, 2.8), (9, 0.5, 0.1)):
        assert power(shift, freedom, t) == pytest.approx(float(nct.sf(t, freedom, shift)), rel=1e-10)


def test_the_distribution_of_t_has_its_closed_form_with_two_degrees_of_freedom():
    assert lower_tail(-3.0, 2) == pytest.approx(0.5 - 3 / (2 * math.sqrt(11)), rel=1e-12)
