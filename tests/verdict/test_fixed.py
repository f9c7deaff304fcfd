"""Verdicts with a fixed number of seeds."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kmatrix.stats import critical_t
from kmatrix.verdict.family import Method, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.pairs import OPPOSITE, holm, outcome_of, sign_flip_p

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
RULES = Rules(seeds=())
BETTER, WORSE, EQUIVALENT, OPEN = PairOutcome.BETTER, PairOutcome.WORSE, PairOutcome.EQUIVALENT, PairOutcome.OPEN

losses = st.floats(0.1, 20)
by_seed = st.dictionaries(st.integers(0, 9), losses, min_size=1, max_size=6)
any_loss = st.one_of(st.none(), st.floats(), st.sampled_from([3.25, 3.26]))
any_losses = st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.integers(0, 6), any_loss), min_size=1)


def compare(a, b, rules=RULES):
    """Return the verdict on a, compared with b."""
    return fixed_verdict({"a": a, "b": b}, replace(rules, baseline="a")).pairs[0]


def numbered(values):
    return dict(enumerate(values))


@pytest.mark.parametrize("vector", VECTORS["paired"], ids=lambda v: f"{v['n']}-{v['p_two_sided']:.2g}")
def test_a_paired_test_is_that_of_the_vectors(vector):
    found = compare(numbered(vector["a"]), numbered(vector["b"]))
    assert (found.method, len(found.seeds)) == (Method.PAIRED, vector["n"])
    assert found.difference == pytest.approx(vector["mean_difference"], rel=1e-12)
    assert found.deviation == pytest.approx(vector["sd_of_differences"], rel=1e-12)
    assert found.p == pytest.approx(vector["p_two_sided"], rel=1e-11)
    assert (found.interval.low, found.interval.high) == pytest.approx(tuple(vector["interval_95"]), rel=1e-10)
    # Below 6 seeds the sign-flip test cannot reach 0.05.
    assert found.sign_flip_p == (pytest.approx(vector["sign_flip_p"], rel=1e-15) if vector["n"] >= 6 else None)


@pytest.mark.parametrize("vector", VECTORS["welch"], ids=lambda v: f"{v['df']:.3g}")
def test_welchs_test_is_that_of_the_vectors(vector):
    found = compare(numbered(vector["a"]), {seed + 100: loss for seed, loss in numbered(vector["b"]).items()})
    assert (found.method, found.seeds, found.deviation, found.sign_flip_p) == (Method.WELCH, (), None, None)
    assert found.p == pytest.approx(vector["p_two_sided"], rel=1e-11)
    assert (found.interval.low, found.interval.high) == pytest.approx(tuple(vector["interval_95"]), rel=1e-11)


@pytest.mark.parametrize("vector", VECTORS["sign_flip"], ids=lambda v: f"{v['p_two_sided']:.2g}")
def test_a_sign_flip_test_is_that_of_the_vectors(vector):
    assert sign_flip_p(vector["differences"], 0.0) == pytest.approx(vector["p_two_sided"], rel=1e-15)


@given(st.lists(st.integers(-20, 20), min_size=6, max_size=10))
def test_a_sign_flip_test_counts_all_signs(values):
    """The sums of two halves give the same count as all sums, ties included."""
    choices = itertools.product((1, -1), repeat=len(values))
    sums = [sum(sign * value for sign, value in zip(signs, values, strict=True)) for signs in choices]
    expected = sum(abs(total) >= abs(sum(values)) for total in sums) / len(sums)
    assert sign_flip_p([0.1 * value for value in values], 0.0) == pytest.approx(expected, rel=1e-15)


def test_holms_correction_is_that_of_the_vectors():
    assert holm(VECTORS["holm"]["p"]) == pytest.approx(VECTORS["holm"]["corrected"], rel=1e-15)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holms_correction_keeps_the_order_and_never_lowers_a_p(p_values):
    found = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, found, strict=True))
    ranked = [q for _, q in sorted(zip(p_values, found, strict=True))]
    assert ranked == sorted(ranked)


def test_a_p_at_the_level_decides():
    assert outcome_of(-1.0, 0.05, 0.05, (0, 0)) == (BETTER, False)
    assert outcome_of(1.0, 0.05, 0.05, (0, 0)) == (WORSE, False)
    assert outcome_of(0.0, 0.05, 0.05, (0, 0)) == (OPEN, False)


def test_pairing_finds_a_difference_that_the_spread_of_seeds_hides():
    """Seeds differ by 0.5, the two configurations by 0.01: only the differences per seed show it."""
    a, b = {1: 3.00, 2: 3.50, 3: 4.00}, {1: 3.010, 2: 3.511, 3: 4.009}
    assert compare(a, b).outcome is BETTER
    assert compare(a, b).share_removed == pytest.approx(1, abs=1e-4)
    unmatched = compare(a, {seed + 10: loss for seed, loss in b.items()})
    assert (unmatched.outcome, unmatched.share_removed) == (OPEN, None)


def test_one_seed_is_not_significant_however_large_the_difference():
    found = compare({1: 2.0}, {1: 9.0})
    assert (found.outcome, found.method, found.reason) == (OPEN, Method.NONE, "one seed: not significant")
    assert (found.difference, found.p, found.p_holm, found.interval) == (-7.0, None, None, None)


def test_seeds_that_do_not_match_are_compared_with_welchs_test():
    """By hand: variances 1 and 4, n = 3 each, 2.94 degrees of freedom."""
    found = compare({1: 1.0, 2: 2.0, 3: 3.0}, {4: 8.0, 5: 10.0, 6: 12.0})
    assert found.method is Method.WELCH
    assert found.difference == pytest.approx(-8.0)
    half = critical_t(0.95, (5 / 3) ** 2 / ((1 / 9 + 16 / 9) / 2)) * math.sqrt(5 / 3)
    assert found.interval.high == pytest.approx(-8.0 + half)
    assert found.outcome is BETTER


def test_seeds_with_equal_losses_count_as_one():
    for b in ({1: 9.0, 2: 9.0}, {3: 9.0, 4: 9.0}):
        found = compare({1: 2.0, 2: 2.0}, b)
        assert (found.outcome, found.p, found.interval) == (OPEN, None, None)
        assert found.reason == "all seeds have the same loss: they count as one seed"


@given(st.lists(losses, min_size=2, max_size=6), st.floats(0.01, 5))
@example([3.2817, 3.2823], 0.01)
def test_the_same_difference_at_all_seeds_does_not_count_as_evidence(values, shift):
    """Two rounded differences are equal by chance in one of ten matrices: a variance of 0 must not give p = 0."""
    assume(len(set(values)) > 1)
    found = compare(numbered(values), numbered(value + shift for value in values))
    assert (found.outcome, found.p) == (OPEN, None)
    assert found.reason == "all seeds have the same difference: they count as one seed"


def test_losses_that_are_equal_on_each_side_have_no_welch_test():
    """The mean of 3.2801 three times is not 3.2801: its variance is 3e-31, and t would be 1e14."""
    found = compare(numbered([3.2801] * 3), {seed + 10: 3.29 for seed in range(3)})
    assert (found.method, found.p) == (Method.NONE, None)
    assert found.reason == "all seeds have the same loss: they count as one seed"


def test_losses_that_are_not_finite_are_counted_and_left_out():
    found = compare({1: 3.0, 2: math.nan, 3: None}, {1: 4.0, 2: 4.1, 3: math.inf, 4: 1e300})
    assert (found.seeds, found.diverged, found.outcome) == ((1,), (1, 2), OPEN)


@given(by_seed, by_seed)
def test_the_verdict_is_reversed_if_both_sides_are_swapped(a, b):
    assert compare(b, a).outcome is OPPOSITE[compare(a, b).outcome]


@given(any_losses, st.sampled_from([None, "a"]), st.sampled_from([None, 0.01]))
def test_no_losses_crash_a_verdict_or_give_a_number_that_is_not_finite(found, baseline, margin):
    assume(baseline is None or baseline in found)
    verdict = fixed_verdict(found, Rules(seeds=(), baseline=baseline, min_difference=margin))
    k = len(found)
    assert len(verdict.pairs) == (k - 1 if baseline else k * (k - 1) // 2)
    assert len(verdict.against_reference) == k - 1
    for pair in verdict.pairs:
        numbers = (pair.difference, pair.p, pair.p_holm, pair.deviation, pair.level, pair.detectable, pair.margin)
        interval = (pair.interval.low, pair.interval.high) if pair.interval else ()
        assert all(math.isfinite(number) for number in (*numbers, *interval, pair.share_removed) if number is not None)
        assert (pair.p is None) is (pair.method is Method.NONE) is bool(pair.reason)


def test_the_family_is_all_pairs_or_those_with_the_baseline():
    four = {name: numbered([x, x + 0.1, x + 0.3]) for name, x in zip("dcba", (3.0, 3.1, 3.2, 3.3), strict=True)}
    found = fixed_verdict(four, RULES)
    assert [(pair.a, pair.b) for pair in found.pairs] == [*itertools.combinations("dcba", 2)]
    found = fixed_verdict(four, Rules(seeds=(), baseline="b"))
    assert (found.reference, [(pair.a, pair.b) for pair in found.pairs]) == ("b", [("b", "d"), ("b", "c"), ("b", "a")])


def test_the_size_of_a_family_counts_pairs_that_are_not_listed():
    one_seed = {f"c{number:03}": {1: 3.2 + number / 1000} for number in range(101)}
    found = fixed_verdict(one_seed, RULES)
    assert (found.size, found.reference) == (5_050, "c000")
    assert found.pairs == found.against_reference
    assert [pair.b for pair in found.pairs] == [f"c{number:03}" for number in range(1, 101)]
    assert fixed_verdict(one_seed, Rules(seeds=(), baseline="c050")).size == 100
    del one_seed["c100"]
    assert len(fixed_verdict(one_seed, RULES).pairs) == 4_950


def test_a_pair_with_a_test_keeps_all_pairs_of_a_large_family():
    found = {f"c{number:03}": {1: 3.2 + number / 1000} for number in range(101)}
    found |= {name: {1: 3.2, 2: 3.21, 3: loss} for name, loss in (("c007", 3.22), ("c008", 3.24))}
    verdict = fixed_verdict(found, RULES)
    assert len(verdict.pairs) == verdict.size == 5_050
    (tested,) = [pair for pair in verdict.pairs if pair.p is not None]
    assert tested.p_holm == pytest.approx(min(1.0, 5_050 * tested.p))


def test_p_is_corrected_for_all_pairs_of_the_family_even_those_without_a_test():
    dice = random.Random(4)
    four = {name: {seed: dice.gauss(3.28, 0.001) for seed in range(5)} for name in "abc"} | {"d": {0: 3.2}}
    found = fixed_verdict(four, RULES)
    tested = sorted(pair.p for pair in found.pairs if pair.p is not None)
    assert len(tested) == 3
    assert sorted(pair.p_holm for pair in found.pairs if pair.p is not None) == pytest.approx(
        holm([*tested, 1, 1, 1])[:3]
    )
    assert [pair.level for pair in found.pairs if pair.p is not None] == pytest.approx([0.05 / 6] * 3)


def test_the_leader_is_the_lowest_mean_that_is_not_worse_than_another():
    """b has the lower mean by seeds that a does not have; where both ran, a is better."""
    a = {1: 3.271, 2: 3.275, 3: 3.268}
    b = {1: 3.281, 2: 3.286, 3: 3.279, 4: 2.5}
    found = fixed_verdict({"b": b, "a": a}, RULES)
    assert found.means["b"] < found.means["a"]
    assert (found.reference, found.pairs[0].outcome) == ("a", BETTER)


def test_equal_means_are_ordered_by_name():
    assert fixed_verdict({"b": {1: 3.0}, "a": {1: 3.0}}, RULES).reference == "a"


def test_equivalence_needs_the_interval_of_one_side_within_the_margin():
    """Two one-sided tests at 5 %: the interval of 90 % lies within the margin."""
    a, b = numbered([3.2801, 3.2799, 3.2803, 3.2800]), numbered([3.2800, 3.2801, 3.2800, 3.2801])
    found = compare(a, b)
    assert found.outcome is OPEN
    half = critical_t(0.90, 3) * found.deviation / 2
    assert found.margin == pytest.approx(abs(found.difference) + half, rel=1e-12)
    for factor, outcome in ((1.001, EQUIVALENT), (0.999, OPEN)):
        assert compare(a, b, Rules(seeds=(), min_difference=factor * found.margin)).outcome is outcome


def test_equivalence_is_corrected_for_the_comparisons_with_the_reference():
    """Of four configurations, each is tested at 5 % / 3 against the reference."""
    four = {
        "a": numbered([3.2801, 3.2799, 3.2803, 3.2800]),
        "b": numbered([3.2800, 3.2801, 3.2800, 3.2801]),
        "c": numbered([4.1, 4.3, 4.2, 4.0]),
        "d": numbered([5.1, 5.0, 5.2, 5.4]),
    }

    def verdict(margin):
        pairs = fixed_verdict(four, Rules(seeds=(), min_difference=margin)).pairs
        return next(pair for pair in pairs if {pair.a, pair.b} == {"a", "b"})

    found = verdict(None)
    half = critical_t(1 - 2 * 0.05 / 3, 3) * found.deviation / 2
    assert found.margin == pytest.approx(abs(found.difference) + half, rel=1e-12)
    assert verdict(1.001 * found.margin).outcome is EQUIVALENT
    assert verdict(0.999 * found.margin).outcome is OPEN


def test_more_seeds_are_those_that_would_decide_it():
    """t = 0.01 / (0.02 / sqrt n) reaches the critical t of 5 % at n = 18."""
    values = [0.01 + 0.02 * x for x in (-1, 0, 1)]
    found = compare(numbered(values), numbered([0.0] * 3))
    assert 0.5 * math.sqrt(18) > critical_t(0.95, 17)
    assert 0.5 * math.sqrt(17) < critical_t(0.95, 16)
    assert found.more_seeds == 18 - 3
    assert compare(numbered([0.001, -0.001, 0.00001]), numbered([0.0] * 3)).more_seeds is None


def test_the_detectable_difference_does_not_depend_on_the_one_found():
    shifted = [
        compare(numbered(x + shift for x in (0.01, -0.01, 0.02, 0.0)), numbered([0.0] * 4)).detectable
        for shift in (0.0, 0.005)
    ]
    assert shifted[0] == pytest.approx(shifted[1], rel=1e-9)
    expected = next(v["difference"] for v in VECTORS["smallest_detectable"] if (v["n"], v["comparisons"]) == (4, 1))
    found = compare(numbered((0.01, -0.01, 0.02, 0.0)), numbered([0.0] * 4))
    assert found.detectable == pytest.approx(expected * found.deviation, rel=1e-9)


def test_a_family_needs_a_configuration_and_its_baseline():
    with pytest.raises(ValueError, match="no configuration"):
        fixed_verdict({}, RULES)
    with pytest.raises(ValueError, match="baseline 'x'"):
        fixed_verdict({"a": {}}, Rules(seeds=(), baseline="x"))
    alone = fixed_verdict({"a": {1: math.nan}}, RULES)
    assert (alone.reference, alone.pairs, alone.means, alone.diverged) == ("a", (), {"a": None}, {"a": 1})


@pytest.mark.parametrize("baseline", [None, "c3"])
def test_pairs_that_no_report_lists_have_the_same_outcome_and_no_further_numbers(monkeypatch, baseline):
    dice = random.Random(8)
    losses = {f"c{place}": numbered(dice.gauss(place, 2) for _ in range(6)) for place in range(9)}
    rules = Rules(seeds=(), min_difference=6.0, baseline=baseline)
    every = fixed_verdict(losses, rules)
    monkeypatch.setattr("kmatrix.verdict.fixed.MOST_LISTED", 5)
    found = fixed_verdict(losses, rules)
    assert len({pair.outcome for pair in every.pairs}) > 2 or baseline
    assert found.pairs[:5] == every.pairs[:5]
    further = ("share_removed", "sign_flip_p", "detectable", "margin", "more_seeds")
    assert found.pairs[5:] == tuple(replace(pair, **dict.fromkeys(further)) for pair in every.pairs[5:])
    assert replace(found, pairs=()) == replace(every, pairs=())
