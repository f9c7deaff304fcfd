"""Means, intervals, comparisons: against published tables, and by what must always hold."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kmatrix.stats import (
    Word,
    balance_quality,
    coefficient_of_variation,
    compare,
    critical_t,
    cv_text,
    holm,
    mean,
    mean_interval,
    sample_deviation,
    two_sided_p,
)

losses = st.floats(0.1, 20)
by_seed = st.dictionaries(st.integers(0, 20), losses, min_size=0, max_size=8)


@pytest.mark.parametrize(("cv", "quality"), [(4.99, "Excellent"), (5.0, "Good"), (10.0, "Fair"), (20.0, "Poor")])
def test_each_bound_belongs_to_the_class_above_it(cv, quality):
    assert balance_quality(cv) == quality


def test_the_coefficient_of_variation_uses_the_population_deviation():
    assert coefficient_of_variation([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx(40.0)


@pytest.mark.parametrize("values", [[7.0], [0.0, 0.0]])
def test_nothing_varies_in_one_value_or_in_zeros(values):
    assert coefficient_of_variation(values) == 0.0


@pytest.mark.parametrize("function", [mean, coefficient_of_variation])
def test_no_values_are_refused(function):
    with pytest.raises(ValueError, match="no values"):
        function([])


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=16), st.floats(0.5, 8))
def test_balance_does_not_depend_on_the_unit_of_memory(values, factor):
    scaled = [value * factor for value in values]
    assert coefficient_of_variation(scaled) == pytest.approx(coefficient_of_variation(values), abs=1e-6)


def test_one_value_has_no_deviation_and_no_interval():
    assert sample_deviation([3.28]) is None
    assert mean_interval([3.28]) is None


# NIST/SEMATECH e-Handbook, table 1.3.6.7.2, two-sided 95 % and 99 %.
@pytest.mark.parametrize(
    ("freedom", "t95", "t99"),
    [
        *((1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (4, 2.776, 4.604), (5, 2.571, 4.032)),
        *((9, 2.262, 3.250), (10, 2.228, 3.169), (30, 2.042, 2.750), (100, 1.984, 2.626)),
    ],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, t95, t99):
    assert critical_t(0.95, freedom) == pytest.approx(t95, abs=5.1e-4)
    assert critical_t(0.99, freedom) == pytest.approx(t99, abs=5.1e-4)


@given(st.floats(0, 1e6))
def test_with_one_degree_of_freedom_t_is_cauchys(t):
    assert two_sided_p(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-6, abs=1e-12)


@given(st.floats(0, 1e6))
def test_with_two_degrees_of_freedom_t_has_a_closed_form(t):
    assert two_sided_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-3, abs=1e-12)


def test_with_many_degrees_of_freedom_t_is_normal():
    assert critical_t(0.95, 1e7) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-6)


@given(st.floats(0.5, 0.999), st.floats(1, 500))
def test_the_quantile_undoes_the_probability(level, freedom):
    assert two_sided_p(critical_t(level, freedom), freedom) == pytest.approx(1 - level, rel=1e-9)


def test_an_interval_worked_by_hand():
    # mean 3, s = 1, n = 3, t = 4.30265: 3 -+ 4.30265 / sqrt 3
    interval = mean_interval([2.0, 3.0, 4.0])
    assert (interval.low, interval.high) == pytest.approx((0.51586, 5.48414), abs=1e-5)


@given(st.lists(losses, min_size=2, max_size=10))
def test_an_interval_holds_its_mean(values):
    interval = mean_interval(values)
    assert interval.low <= mean(values) + 1e-9
    assert interval.high >= mean(values) - 1e-9


def test_a_paired_test_worked_by_hand():
    """Differences -0.1, -0.2, -0.3: mean -0.2, s 0.1, t = -3.4641 with 2 degrees of freedom, p = 0.0742."""
    verdict = compare({1: 3.0, 2: 3.0, 3: 3.0}, {1: 3.1, 2: 3.2, 3: 3.3})
    assert verdict.method == "paired by seed"
    assert verdict.difference == pytest.approx(-0.2)
    assert verdict.p == pytest.approx(0.0742, abs=5e-5)
    assert verdict.word is Word.NOT_DISTINGUISHABLE


def test_three_seeds_with_a_steady_difference_are_distinguishable():
    assert compare({1: 3.271, 2: 3.275, 3: 3.268}, {1: 3.281, 2: 3.286, 3: 3.279}).word is Word.BETTER
    assert compare({1: 3.281, 2: 3.286, 3: 3.279}, {1: 3.271, 2: 3.275, 3: 3.268}).word is Word.WORSE


def test_three_seeds_that_disagree_are_not_distinguishable():
    verdict = compare({1: 3.271, 2: 3.290, 3: 3.268}, {1: 3.281, 2: 3.276, 3: 3.279})
    assert verdict.word is Word.NOT_DISTINGUISHABLE
    assert verdict.interval.low < 0 < verdict.interval.high


def test_pairing_sees_what_the_spread_over_seeds_hides():
    """Seeds differ by 0.5, the two by 0.01: only the differences by seed show it."""
    a, b = {1: 3.00, 2: 3.50, 3: 4.00}, {1: 3.010, 2: 3.511, 3: 4.009}
    assert compare(a, b).word is Word.BETTER
    assert compare(a, {seed + 10: loss for seed, loss in b.items()}).word is Word.NOT_DISTINGUISHABLE


def test_one_seed_is_no_evidence_however_large_the_difference():
    verdict = compare({1: 2.0}, {1: 9.0})
    assert verdict.word is Word.NOT_DISTINGUISHABLE
    assert verdict.reason == "one seed: the order is not evidence"
    assert verdict.p is None
    assert verdict.interval is None


def test_seeds_that_do_not_match_are_compared_by_welch():
    """Worked by hand: variances 1 and 4, n = 3 each, freedom 2.94."""
    verdict = compare({1: 1.0, 2: 2.0, 3: 3.0}, {4: 8.0, 5: 10.0, 6: 12.0})
    assert verdict.method == "Welch"
    assert verdict.difference == pytest.approx(-8.0)
    half = critical_t(0.95, (5 / 3) ** 2 / ((1 / 9 + 16 / 9) / 2)) * math.sqrt(5 / 3)
    assert verdict.interval.high == pytest.approx(-8.0 + half)
    assert verdict.word is Word.BETTER


def test_one_seed_in_common_of_one_and_many_is_no_evidence():
    verdict = compare({1: 2.0}, {1: 9.0, 2: 9.1, 3: 9.05})
    assert verdict.word is Word.NOT_DISTINGUISHABLE
    assert "not evidence" in verdict.reason


def test_seeds_that_change_nothing_count_as_one():
    verdict = compare({1: 2.0, 2: 2.0}, {1: 9.0, 2: 9.0})
    assert verdict.word is Word.NOT_DISTINGUISHABLE
    assert "every seed gave the same loss" in verdict.reason


def test_losses_that_are_not_finite_do_not_count():
    verdict = compare({1: 3.0, 2: math.nan}, {1: 4.0, 2: 4.1})
    assert verdict.seeds == (1,)
    assert verdict.word is Word.NOT_DISTINGUISHABLE


@given(by_seed, by_seed)
def test_the_verdict_turns_round_when_the_two_change_places(a, b):
    opposite = {Word.BETTER: Word.WORSE, Word.WORSE: Word.BETTER, Word.NOT_DISTINGUISHABLE: Word.NOT_DISTINGUISHABLE}
    assert compare(b, a).word is opposite[compare(a, b).word]


@given(by_seed, by_seed)
def test_a_word_needs_an_interval_without_zero_and_a_small_p(a, b):
    verdict = compare(a, b)
    if verdict.word is not Word.NOT_DISTINGUISHABLE:
        assert verdict.interval.low * verdict.interval.high > 0
        assert verdict.p < 0.05 + 1e-9


@given(by_seed)
def test_nothing_is_better_than_itself(a):
    assert compare(a, a).word is Word.NOT_DISTINGUISHABLE


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_the_order_and_never_lowers_a_p(p_values):
    corrected = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, corrected, strict=True))
    ranked = [q for _, q in sorted(zip(p_values, corrected, strict=True))]
    assert ranked == sorted(ranked)


def test_holm_worked_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_chance_alone_is_called_better_or_worse_about_one_time_in_twenty():
    """Two thousand pairs of three equal seeds: a 95 % interval misses 0 in 5 %, give or take 2."""
    dice = random.Random(1)
    wrong = 0
    for _ in range(2000):
        a, b = ({seed: dice.gauss(3.28, 0.0013) for seed in range(3)} for _ in range(2))
        wrong += compare(a, b).word is not Word.NOT_DISTINGUISHABLE
    assert 0.03 < wrong / 2000 < 0.07


@given(st.lists(losses, min_size=2, max_size=6), st.floats(0.01, 5))
def test_an_equal_shift_of_every_seed_is_seen(values, shift):
    assume(len(set(values)) > 1)
    a = dict(enumerate(values))
    b = {seed: loss + shift for seed, loss in a.items()}
    assert compare(a, b).word is Word.BETTER


@pytest.mark.parametrize(
    ("cv", "text"),
    [(0.0, "0.0%"), (5.21, "5.2%"), (4.96, "4.96%"), (9.996, "9.996%"), (20.0, "20.0%"), (27.35, "27.4%")],
)
def test_a_cv_is_written_so_that_its_class_is_right(cv, text):
    assert cv_text(cv) == text
    assert balance_quality(float(cv_text(cv)[:-1])) == balance_quality(cv)
