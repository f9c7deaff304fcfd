"""Verdicts on pairs, with a fixed number of seeds and with adaptive ones, against vectors, SciPy and by hand."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats

from kmatrix.records.decode import as_json, convert, replaced
from kmatrix.stats import critical
from kmatrix.verdict.family import FamilyVerdict, Method, NoMoreSeeds, PairOutcome, Rules
from kmatrix.verdict.pairs import holm, verdict_on
from kmatrix.verdict.replay import replay
from kmatrix.verdict.sequential import level

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
FIXED, TEN = Rules(), Rules(seeds=tuple(range(1, 11)))
EITHER = pytest.mark.parametrize("rules", [FIXED, TEN], ids=["fixed", "adaptive"])
BETTER, WORSE, EQUIVALENT, OPEN = PairOutcome.BETTER, PairOutcome.WORSE, PairOutcome.EQUIVALENT, PairOutcome.OPEN

any_loss = st.one_of(st.none(), st.floats(), st.floats(3.2, 3.4), st.sampled_from([3.25, 3.26]))
any_losses = st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.integers(0, 6), any_loss), min_size=1)


def numbered(values, first=1):
    return {seed: float(value) for seed, value in enumerate(values, start=first)}


def compare(a, b, rules=FIXED):
    """Return the verdict on a, compared with b."""
    return verdict_on({"a": a, "b": b}, replaced(rules, baseline="a")).pairs[0]


def ends(pair):
    return (pair.interval.low, pair.interval.high)


# The vectors


@pytest.mark.parametrize("vector", VECTORS["paired"], ids=lambda v: f"{v['n']}-{v['p_two_sided']:.2g}")
def test_a_paired_test_is_that_of_the_vectors(vector):
    found = compare(numbered(vector["a"]), numbered(vector["b"]))
    assert (found.method, len(found.seeds)) == (Method.PAIRED, vector["n"])
    assert found.difference == pytest.approx(vector["mean_difference"], rel=1e-12)
    assert found.deviation == pytest.approx(vector["sd_of_differences"], rel=1e-12)
    assert found.p == pytest.approx(vector["p_two_sided"], rel=1e-11)
    assert ends(found) == pytest.approx(tuple(vector["interval_95"]), rel=1e-10)


@pytest.mark.parametrize("vector", VECTORS["welch"], ids=lambda v: f"{v['df']:.3g}")
def test_seeds_that_do_not_match_are_compared_with_the_welch_test_of_the_vectors(vector):
    found = compare(numbered(vector["a"]), numbered(vector["b"], first=101))
    assert (found.method, found.seeds, found.deviation) == (Method.WELCH, (), None)
    assert found.p == pytest.approx(vector["p_two_sided"], rel=1e-11)
    assert ends(found) == pytest.approx(tuple(vector["interval_95"]), rel=1e-11)


@pytest.mark.parametrize("vector", VECTORS["decisions"], ids=lambda v: f"{v['baseline']}-{v['min_difference']}")
def test_adaptive_verdicts_are_those_of_the_vectors(vector):
    losses = {
        name: numbered(math.inf if loss == "diverged" else loss for loss in values)
        for name, values in vector["losses"].items()
    }
    rules = replaced(TEN, baseline=vector["baseline"], min_difference=vector["min_difference"])
    found = verdict_on(losses, rules)
    assert found.reference == vector["reference"]
    pairs = {pair.b: pair.mirrored() for pair in found.against_reference}  # the vectors are about the other one
    assert pairs.keys() == {expected["configuration"] for expected in vector["verdicts"]}
    for expected in vector["verdicts"]:
        pair = pairs[expected["configuration"]]
        assert (pair.outcome, len(pair.seeds)) == (expected["outcome"], expected["n"])
        assert (pair.more_seeds, list(pair.diverged)) == (expected["more_seeds"], expected["diverged"])
        assert pair.difference == pytest.approx(expected["difference"], rel=1e-12)
        assert ends(pair) == pytest.approx((expected["low"], expected["high"]), rel=1e-12)
        assert pair.p_holm == pytest.approx(expected["p"], rel=1e-12)
        assert pair.margin == pytest.approx(expected["margin"], rel=1e-6)
        assert (pair.outcome is not OPEN or pair.no_more is not None) is expected["finished"]


@pytest.mark.parametrize("key", ["sequential", "sequential_equivalence"])
def test_each_look_is_that_of_the_vectors(key):
    vector = VECTORS[key]
    rules = replaced(TEN, min_difference=vector.get("min_difference"))
    for look in vector["looks"]:
        n = look["n"]
        found = compare(numbered(vector["differences"][:n]), numbered([0.0] * n), rules)
        assert (found.method, len(found.seeds)) == (Method.SEQUENTIAL, n)
        assert found.difference == pytest.approx(look["mean"], rel=1e-12)
        assert found.deviation == pytest.approx(look["sd"], rel=1e-12)
        assert found.p == pytest.approx(look["sequential_p_two_sided"], rel=1e-12)
        assert ends(found) == pytest.approx(tuple(look["repeated_interval_95"]), rel=1e-12)
        if "sequential_p_equivalence" in look:
            assert (found.outcome is EQUIVALENT) is (look["sequential_p_equivalence"] <= 0.05)


def test_holms_correction_is_that_of_the_vectors():
    found, levels = holm(VECTORS["holm"]["p"], 0.05)
    assert found == pytest.approx(VECTORS["holm"]["corrected"], rel=1e-15)
    assert levels == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2, 0.05 / 4])


# SciPy


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize("matched", [True, False], ids=["paired", "Welch"])
@pytest.mark.parametrize(("k", "scale"), [(2, 1.0), (3, 1e-7), (10, 1e9)])
def test_a_fixed_verdict_is_that_of_scipy(k, scale, matched, confidence):
    dice = np.random.default_rng(k)
    losses = {}
    for place in range(k):
        row = scale * dice.normal(dice.normal(0, 0.5), 1 + place % 3, dice.integers(2, 10))
        losses[f"c{place}"] = numbered(row, 1 if matched else 1 + 100 * place)
    margin = scale * 2.0
    rules = Rules(confidence=confidence, min_difference=margin)
    pairs = verdict_on(losses, rules).pairs
    found, tests, equal = [], [], []
    for pair in pairs:
        a, b = ([*losses[name].values()] for name in (pair.a, pair.b))
        n = min(len(a), len(b))
        test = stats.ttest_rel(a[:n], b[:n]) if matched else stats.ttest_ind(a, b, equal_var=False)
        assert pair.method is (Method.PAIRED if matched else Method.WELCH)
        assert pair.p == pytest.approx(test.pvalue, rel=1e-9)
        assert ends(pair) == pytest.approx(tuple(test.confidence_interval(confidence)), rel=1e-8)
        error = abs(pair.difference / test.statistic)
        tests.append(test)
        found.append((pair, error))
        equal.append(stats.t.sf((margin - abs(pair.difference)) / error, test.df))  # the larger of two one-sided p
    p_values, same = (stats_holm(values) for values in ([test.pvalue for test in tests], equal))
    assert [pair.p_holm for pair in pairs] == pytest.approx(p_values, rel=1e-9)
    for (pair, error), p, p_equal, test in zip(found, p_values, same, tests, strict=True):
        decided = WORSE if pair.difference > 0 else BETTER
        assert pair.outcome is (EQUIVALENT if p_equal <= 1 - confidence else decided if p <= 1 - confidence else OPEN)
        # What it calls equivalent, and what the printed margin says, is the same.
        assert (pair.margin <= margin) is (pair.outcome is EQUIVALENT)
        if k == 2 and pair.detectable < 60 * error:  # beyond, SciPy's noncentral t is not reliable
            limit = stats.t.isf((1 - confidence) / 2, test.df)
            assert stats.nct.sf(limit, test.df, pair.detectable / error) == pytest.approx(0.8, abs=1e-4)


def stats_holm(p_values):
    """Return corrected p values: of the r-th smallest, the largest of (m - i) p_i over i = 0 .. r."""
    ranked = sorted(p_values)
    scaled = [min(1.0, (len(ranked) - i) * p) for i, p in enumerate(ranked)]
    return [max(scaled[: ranked.index(p) + 1]) for p in p_values]


# The family


@EITHER
@pytest.mark.parametrize("baseline", [None, "b"])
def test_the_family_is_all_pairs_or_those_with_the_baseline_and_p_is_corrected_for_it(rules, baseline):
    """A pair without a test counts, too: it was known before the first run."""
    dice = random.Random(4)
    losses = {name: numbered(dice.gauss(3.28, 0.001) for _ in range(5)) for name in "abc"} | {"d": {1: 3.2}}
    found = verdict_on(losses, replaced(rules, baseline=baseline))
    expected = [("b", name) for name in "acd"] if baseline else [*itertools.combinations("abcd", 2)]
    assert sorted((pair.a, pair.b) if baseline else tuple(sorted((pair.a, pair.b))) for pair in found.pairs) == expected
    assert found.size == len(found.pairs) == (3 if baseline else 6)
    own = sorted(pair.p for pair in found.pairs if pair.p is not None)
    assert len(own) == (2 if baseline else 3)
    assert sorted(pair.p_holm for pair in found.pairs if pair.p is not None) == pytest.approx(
        stats_holm([*own, *[1.0] * (found.size - len(own))])[: len(own)]
    )


def test_a_thousand_configurations_with_one_seed_list_the_comparisons_with_the_leader():
    losses = {f"c{number:03}": {1: 3.2 + number / 1000} for number in range(1000)}
    found = verdict_on(losses, FIXED)
    assert (found.size, found.reference) == (499_500, "c000")
    assert [pair.b for pair in found.pairs] == [f"c{number:03}" for number in range(1, 1000)]


def test_a_family_needs_a_configuration_and_its_baseline():
    with pytest.raises(ValueError, match="no configuration"):
        verdict_on({}, FIXED)
    with pytest.raises(ValueError, match="baseline 'x'"):
        verdict_on({"a": {}}, Rules(baseline="x"))
    alone = verdict_on({"a": {1: math.nan}}, FIXED)
    assert (alone.reference, alone.pairs, alone.means) == ("a", (), {"a": None})


def test_the_leader_is_the_lowest_mean_that_is_not_worse_than_another():
    """b has the lower mean by seeds that a does not have; where both ran, a is better."""
    a = {1: 3.271, 2: 3.275, 3: 3.268}
    found = verdict_on({"b": {1: 3.281, 2: 3.286, 3: 3.279, 4: 2.5}, "a": a}, FIXED)
    assert found.means["b"] < found.means["a"]
    assert (found.reference, found.pairs[0].outcome) == ("a", BETTER)
    assert verdict_on({"b": {1: 3.0}, "a": {1: 3.0}}, FIXED).reference == "a"  # equal means: by name


# What is no evidence


def test_one_seed_is_not_significant_however_large_the_difference():
    found = compare({1: 2.0}, {1: 9.0})
    assert (found.outcome, found.method, found.reason) == (OPEN, Method.NONE, "one seed: not significant")
    assert (found.difference, found.p, found.p_holm, found.interval) == (-7.0, None, None, None)


@given(st.lists(st.floats(0.1, 20), min_size=3, max_size=6), st.floats(0.01, 5), st.sampled_from([FIXED, TEN]))
@example([3.2817, 3.2823, 3.2811], 0.01, FIXED)
def test_the_same_difference_at_all_seeds_does_not_count_as_evidence(values, shift, rules):
    """Two rounded differences are equal by chance in one of ten matrices: a variance of 0 must not give p = 0."""
    assume(len(set(values)) > 1)
    found = compare(numbered(values), numbered(value + shift for value in values), rules)
    assert (found.outcome, found.p) == (OPEN, None)
    assert found.reason == "all seeds have the same difference: they count as one seed"


def test_losses_that_are_equal_on_each_side_are_copies_of_one():
    """The mean of 3.2801 three times is not 3.2801: its variance is 3e-31, and t of Welch's test would be 1e14."""
    for first in (1, 11):
        found = compare(numbered([3.2801] * 3), numbered([3.29] * 3, first))
        assert (found.method, found.p) == (Method.NONE, None)
        assert found.reason == "all seeds have the same loss: they count as one seed"


@EITHER
def test_no_configuration_that_diverged_more_often_is_called_better(rules):
    dice = np.random.default_rng(9)
    seen = dict.fromkeys(PairOutcome, 0)
    for _ in range(100):
        losses = {}
        for place in range(3):
            row = dice.normal(2.0 * place, 0.5, 8)
            row[dice.uniform(size=8) < 0.2] = dice.choice([np.nan, np.inf])
            losses[f"c{place}"] = numbered(row)
        diverged = {name: sum(not math.isfinite(x) for x in row.values()) for name, row in losses.items()}
        found = verdict_on(losses, rules)
        for name, row in losses.items():
            finite = [x for x in row.values() if math.isfinite(x)]
            assert found.means[name] == (pytest.approx(statistics.fmean(finite)) if finite else None)
        for pair in found.pairs:
            more = diverged[pair.a] - diverged[pair.b]
            assert pair.diverged == (diverged[pair.a], diverged[pair.b])
            assert pair.outcome is not (BETTER if more > 0 else WORSE if more < 0 else None)
            is_barred = pair.p_holm is not None and pair.p_holm <= 0.05 and more * pair.difference < 0
            assert (pair.no_more is NoMoreSeeds.DIVERGED) is is_barred
            seen[pair.outcome] += 1
    assert min(seen[BETTER], seen[OPEN]) > 20


def test_seeds_that_failed_or_were_skipped_leave_the_verdict_of_the_others():
    """The fourth seed of b failed twice, the second of a was skipped: as if the plan had never named them."""
    dice = np.random.default_rng(12)
    a, b = numbered(dice.normal(3.2, 0.1, 9)), numbered(dice.normal(3.3, 0.1, 9))
    left = [seed for seed in a if seed not in (2, 4)]
    found = [compare({**a, 2: None}, {**b, 4: None}, rules) for rules in (FIXED, TEN)]
    assert [pair.seeds for pair in found] == [tuple(left)] * 2
    assert found[0].p == pytest.approx(stats.ttest_rel([a[n] for n in left], [b[n] for n in left]).pvalue)
    rules = Rules(seeds=(*left, 10, 11, 12))  # ten seeds, too
    assert found[1].p == compare({n: a[n] for n in left}, {n: b[n] for n in left}, rules).p


def test_losses_are_warned_about_if_those_of_the_better_one_vary_more_than_three_times_as_much():
    quiet, noisy = numbered([9.0, 9.1, 8.9, 9.0]), numbered([3.0, 3.5, 2.5, 3.0])
    assert compare(noisy, quiet).spread_ratio == pytest.approx(5.0)
    assert (compare(noisy, quiet).outcome, compare(quiet, noisy).outcome) == (BETTER, WORSE)
    assert compare(quiet, noisy).spread_ratio == pytest.approx(5.0)
    assert compare(quiet, {seed: loss + 8 for seed, loss in noisy.items()}).spread_ratio is None  # the worse one varies
    assert compare(numbered([2.9, 3.1, 3.0, 3.0]), quiet).spread_ratio is None
    assert compare(numbered([8.9, 9.5, 8.5, 9.0]), quiet).spread_ratio is None  # not called better


# Equivalent, and what would decide it


FOUR = {
    "a": numbered([3.2801, 3.2799, 3.2803, 3.2800]),
    "b": numbered([3.2800, 3.2801, 3.2800, 3.2801]),
    "c": numbered([4.1, 4.3, 4.2, 4.0]),
    "d": numbered([5.1, 5.0, 5.2, 5.4]),
}


@EITHER
@pytest.mark.parametrize(("names", "family"), [("ab", 1), ("abcd", 6)])
def test_equivalent_needs_a_margin_and_is_corrected_for_the_whole_family(rules, names, family):
    """Two one-sided tests at 5 % / the number of pairs, as Holm's procedure asks of the first one."""

    def verdict(margin):
        found = verdict_on({name: FOUR[name] for name in names}, replaced(rules, min_difference=margin))
        return next(pair for pair in found.pairs if {pair.a, pair.b} == {"a", "b"})

    found = verdict(None)
    assert found.outcome is OPEN
    if rules is FIXED:
        half = critical(0.05 / family, 3) * found.deviation / 2
        assert found.margin == pytest.approx(abs(found.difference) + half, rel=1e-12)
    assert verdict(1.001 * found.margin).outcome is EQUIVALENT
    assert verdict(0.999 * found.margin).outcome is OPEN


def test_a_pair_exactly_one_margin_apart_is_called_equivalent_in_at_most_one_of_twenty_matrices():
    """Of 8 configurations in two clusters, 16 pairs are. Each tested at 5 % / 7, 10 % of the matrices would err."""
    dice = random.Random(1)
    wrong = 0
    for _ in range(300):
        losses = {f"c{place}": numbered(dice.gauss(3.0 * (place % 2), 1) for _ in range(5)) for place in range(8)}
        pairs = verdict_on(losses, Rules(min_difference=3.0)).pairs
        wrong += any(pair.outcome is EQUIVALENT and int(pair.a[1]) % 2 != int(pair.b[1]) % 2 for pair in pairs)
    assert 0 < wrong <= 15


@EITHER
def test_a_real_difference_that_is_smaller_than_the_margin_is_equivalent(rules):
    a, b = numbered([3.2801, 3.2799, 3.2803, 3.2800, 3.2804]), numbered([3.2811, 3.2810, 3.2812, 3.2811, 3.2813])
    assert compare(a, b, rules).outcome is BETTER
    found = compare(a, b, replaced(rules, min_difference=0.01))
    assert (found.outcome, found.p_holm < 0.05) == (EQUIVALENT, True)


def test_more_seeds_are_those_that_would_decide_it():
    """The forecast repeats mean and variance: with so many more, and no fewer, the critical value is reached."""
    found = compare(numbered(0.01 + 0.02 * x for x in (-1, 0, 1)), numbered([0.0] * 3))
    assert 0.5 * math.sqrt(18) > critical(0.025, 17)
    assert 0.5 * math.sqrt(17) < critical(0.025, 16)
    assert found.more_seeds == 18 - 3
    assert compare(numbered([0.001, -0.001, 0.00001]), numbered([0.0] * 3)).more_seeds is None
    found = compare(numbered((-1.0, -2.0, -0.5, -2.5)), numbered([0.0] * 4), TEN)
    a = level(0.025, 3, 10)
    reached = [n for n in range(5, 11) if 1.5 * math.sqrt(n) / found.deviation >= critical(a * (n - 1) / 9, n - 1)]
    assert found.more_seeds == reached[0] - 4


def test_the_detectable_difference_does_not_depend_on_the_one_found():
    expected = next(v["difference"] for v in VECTORS["smallest_detectable"] if (v["n"], v["comparisons"]) == (4, 1))
    for shift in (0.0, 0.005):
        found = compare(numbered(x + shift for x in (0.01, -0.01, 0.02, 0.0)), numbered([0.0] * 4))
        assert found.detectable == pytest.approx(expected * found.deviation, rel=1e-9)


# Adaptive seeds


def test_seeds_are_looked_at_in_their_order_up_to_the_first_that_is_to_come():
    """Seed 1 of b has not ended: its seed 7, which ended earlier, waits. Seed 9 is not part of the plan."""
    losses = {"a": {5: 3.0, 3: 3.1, 1: 3.3, 7: 3.2, 9: 0.1}, "b": {7: 3.9, 3: 3.5, 5: 3.7, 9: 0.2}}
    found = verdict_on(losses, Rules(seeds=(5, 3, 1, 7)))
    (pair,) = found.pairs
    assert (pair.seeds, pair.method, pair.reason) == ((5, 3), Method.NONE, "2 seeds: the first look is after 3")
    assert (pair.difference, found.means["b"]) == (pytest.approx(-0.55), pytest.approx(3.6))


def test_an_open_pair_says_why_it_gets_no_further_seed():
    a = [3.100, 3.101, 3.099, 3.102, 3.100]
    losses = {
        "a": numbered(a),
        "leads by few seeds": numbered([3.09, 3.10]),
        "beaten by a": numbered(x + 0.3 + 0.001 * n for n, x in enumerate(a)),
        "diverged": numbered([math.nan, math.inf, 1e200]),
        "failed": dict.fromkeys((1, 2, 3)),
    }
    found = verdict_on(losses, TEN)
    assert found.reference == "leads by few seeds"
    reasons = {pair.b: (pair.outcome, pair.no_more) for pair in found.against_reference}
    assert reasons == {
        "a": (OPEN, None),
        "beaten by a": (OPEN, NoMoreSeeds.BEATEN),
        "diverged": (OPEN, NoMoreSeeds.NO_LOSS),
        "failed": (OPEN, NoMoreSeeds.NO_LOSS),
    }
    # Each is compared with a baseline alone.
    found = verdict_on(losses | {"open": numbered([3.2, 3.1, 3.0])}, replaced(TEN, baseline="a"))
    assert [pair.no_more for pair in found.pairs if pair.b in ("open", "leads by few seeds")] == [None, None]
    rules = Rules(seeds=(1, 2, 3, 4))
    pair = compare({**numbered([3.0, 3.4, 3.2]), 4: None}, numbered([3.2, 3.3, 3.5, 3.6]), rules)
    assert (pair.outcome, pair.no_more, pair.more_seeds > 1) == (OPEN, NoMoreSeeds.MAXIMUM, True)


@pytest.mark.parametrize(("factor", "no_more"), [(0.99, NoMoreSeeds.FUTILE), (1.01, None)])
def test_a_pair_is_futile_if_the_forecast_of_its_mean_misses_the_last_critical_value(factor, no_more):
    """Six differences of +-1 around a mean: the forecast of 90 % ends just below, or above, the critical value."""
    deviation = math.sqrt(6 / 5)
    last = critical(level(0.025, 3, 10), 9) * deviation / math.sqrt(10)
    mean = factor * (last - critical(0.05, 5) * deviation * math.sqrt(1 / 6 - 1 / 10))
    found = compare(numbered(mean + sign for sign in (1, -1, 1, -1, 1, -1)), numbered([0.0] * 6), TEN)
    assert (found.outcome, found.no_more) == (OPEN, no_more)


def test_a_tie_is_futile_from_four_seeds_on_unless_a_margin_can_still_be_shown():
    a, b = numbered([3.28] * 4), numbered([3.281, 3.279, 3.2811, 3.2789])
    rules = replaced(TEN, seeds=TEN.seeds[:5])
    first = [compare({seed: a[seed] for seed in range(1, n)}, b, rules).no_more for n in (4, 5)]
    assert first == [None, NoMoreSeeds.FUTILE]
    near = replaced(rules, min_difference=0.95 * compare(a, b, rules).margin)
    assert compare(a, b, near).no_more is None


# All of it


@given(
    any_losses,
    st.builds(
        Rules,
        seeds=st.sampled_from([(), (1,), (0, 1, 2, 3, 4, 5), (3, 1, 2, 0)]),
        seeds_min=st.sampled_from([0, 2, 3, 9]),
        baseline=st.sampled_from([None, "a"]),
        min_difference=st.sampled_from([None, 0.01]),
    ),
)
def test_no_losses_crash_a_verdict_and_it_can_be_written_as_json(losses, rules):
    assume(rules.baseline is None or rules.baseline in losses)
    for found in (verdict_on(losses, rules), replay(losses, rules).verdict):
        assert len(found.against_reference) == len(losses) - 1
        written = as_json(found)
        assert convert(json.loads(json.dumps(written, allow_nan=False)), FamilyVerdict, "verdict") == found
        for pair in found.pairs:
            assert (pair.p is None) is (pair.method is Method.NONE) is bool(pair.reason)
            assert pair.p is None or pair.p <= pair.p_holm <= 1


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([FIXED, TEN]))
def test_the_order_of_the_configurations_does_not_matter(number, k, rules):
    dice = random.Random(number)
    losses = {name: numbered(dice.gauss(0, 1) for _ in range(dice.randint(3, 10))) for name in "abcd"[:k]}
    first, second = (verdict_on(one, rules) for one in (losses, dict(dice.sample(sorted(losses.items()), k))))
    assert first.reference == second.reference
    assert [(x.a, x.b, x.outcome, x.no_more) for x in first.pairs] == [
        (x.a, x.b, x.outcome, x.no_more) for x in second.pairs
    ]
    assert [x.p for x in first.pairs] == pytest.approx([x.p for x in second.pairs], rel=1e-9)
