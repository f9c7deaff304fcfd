"""Verdicts with adaptive seeds."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kmatrix.verdict.adaptive import adaptive_verdict
from kmatrix.verdict.family import Method, NoMoreSeeds, PairOutcome, Rules
from kmatrix.verdict.replay import replay
from kmatrix.verdict.sequential import level
from kmatrix.verdict.student import critical

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
TEN = Rules(seeds=tuple(range(1, 11)))


def by_seed(*losses):
    return dict(enumerate(losses, start=1))


@pytest.mark.parametrize("vector", VECTORS["decisions"], ids=lambda v: f"{v['baseline']}-{v['min_difference']}")
def test_verdicts_are_those_of_the_vectors(vector):
    losses = {
        name: by_seed(*(math.inf if loss == "diverged" else loss for loss in values))
        for name, values in vector["losses"].items()
    }
    rules = Rules(seeds=TEN.seeds, baseline=vector["baseline"], min_difference=vector["min_difference"])
    found = adaptive_verdict(losses, rules)
    assert found.reference == vector["reference"]
    pairs = {pair.b: pair for pair in found.against_reference}
    assert pairs.keys() == {expected["configuration"] for expected in vector["verdicts"]}
    # The vectors are about the other configuration, a verdict is about the reference.
    opposite = {"better": "worse", "worse": "better", "equivalent": "equivalent", "open": "open"}
    for expected in vector["verdicts"]:
        pair = pairs[expected["configuration"]]
        assert pair.outcome == opposite[expected["outcome"]]
        assert -pair.difference == pytest.approx(expected["difference"], rel=1e-12)
        assert (-pair.interval.high, -pair.interval.low) == pytest.approx(
            (expected["low"], expected["high"]), rel=1e-12
        )
        assert pair.p_holm == pytest.approx(expected["p"], rel=1e-12)
        assert pair.margin == pytest.approx(expected["margin"], rel=1e-12)
        assert (len(pair.seeds), pair.more_seeds) == (expected["n"], expected["more_seeds"])
        assert pair.diverged == tuple(reversed(expected["diverged"]))
        assert (pair.outcome is not PairOutcome.OPEN or pair.no_more is not None) is expected["finished"]


@pytest.mark.parametrize("key", ["sequential", "sequential_equivalence"])
def test_each_look_is_that_of_the_vectors(key):
    vector = VECTORS[key]
    rules = Rules(seeds=TEN.seeds, min_difference=vector.get("min_difference"))
    for look in vector["looks"]:
        n = look["n"]
        losses = {"a": by_seed(*vector["differences"][:n]), "b": by_seed(*[0.0] * n)}
        (pair,) = adaptive_verdict(losses, rules).pairs
        assert (pair.a, pair.method, len(pair.looks)) == ("a", Method.SEQUENTIAL, n - 2)
        assert pair.difference == pytest.approx(look["mean"], rel=1e-12)
        assert pair.deviation == pytest.approx(look["sd"], rel=1e-12)
        assert pair.p == pytest.approx(look["sequential_p_two_sided"], rel=1e-12)
        assert (pair.interval.low, pair.interval.high) == pytest.approx(tuple(look["repeated_interval_95"]), rel=1e-12)
        if "sequential_p_equivalence" in look:
            equivalent = look["sequential_p_equivalence"] <= 0.05
            assert (pair.outcome is PairOutcome.EQUIVALENT) is equivalent
            # A margin is reached exactly where the test says "equivalent", unless an earlier look did.
            assert equivalent or pair.margin > 0.004


def test_a_baseline_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="baseline 'adamw'"):
        adaptive_verdict({"muon": {}}, Rules(seeds=(1, 2, 3), baseline="adamw"))


def test_a_configuration_without_a_loss_in_its_first_seeds_gets_no_other():
    losses = {"a": by_seed(3.1, 3.2, 3.3), "b": by_seed(math.nan, math.inf, 1e200), "c": by_seed(None, None, None)}
    found = adaptive_verdict(losses, TEN)
    assert found.means == {"a": pytest.approx(3.2), "b": None, "c": None}
    assert found.diverged == {"a": 0, "b": 3, "c": 0}
    assert {pair.no_more for pair in found.pairs} == {NoMoreSeeds.NO_LOSS}


def test_a_configuration_is_compared_up_to_the_first_seed_that_is_to_come():
    """Seed 3 of b has not ended: its seeds 4 and 5, which ended earlier, wait."""
    losses = {"a": by_seed(3.0, 3.1, 3.3, 3.2, 3.1), "b": {1: 3.5, 2: 3.7, 4: 3.9, 5: 3.4}}
    (pair,) = adaptive_verdict(losses, TEN).pairs
    assert (pair.seeds, pair.method, pair.reason) == ((1, 2), Method.NONE, "2 seeds: the first look is after 3")
    assert adaptive_verdict(losses, TEN).means["b"] == pytest.approx(3.6)


def test_seeds_without_a_loss_are_skipped():
    losses = {"a": by_seed(3.0, None, 3.1, 3.3, 3.2), "b": by_seed(3.5, 3.6, math.inf, 3.9, 3.6)}
    (pair,) = adaptive_verdict(losses, TEN).pairs
    assert (pair.seeds, pair.looks, pair.diverged) == ((1, 4, 5), (3,), (0, 1))


def test_seeds_are_looked_at_in_their_order_and_others_are_ignored():
    losses = {"a": {5: 3.0, 3: 3.1, 1: 3.3, 9: 0.1}, "b": {1: 3.9, 3: 3.5, 5: 3.7, 9: 0.2}}
    (pair,) = adaptive_verdict(losses, Rules(seeds=(5, 3, 1, 7))).pairs
    assert (pair.seeds, pair.difference) == ((5, 3, 1), pytest.approx(-1.7 / 3))


def test_a_configuration_that_a_third_one_beats_gets_no_more_seeds():
    """b leads by few seeds; c is worse than a, and out, although nothing is known of c against b."""
    a = [3.100, 3.101, 3.099, 3.102, 3.100]
    c = [x + 0.3 + 0.001 * n for n, x in enumerate(a)]
    found = adaptive_verdict({"a": by_seed(*a), "b": by_seed(3.09, 3.10), "c": by_seed(*c)}, TEN)
    verdicts = {(pair.a, pair.b): (pair.outcome, pair.no_more) for pair in found.pairs}
    assert found.reference == "b"
    assert verdicts == {
        ("b", "a"): (PairOutcome.OPEN, None),
        ("b", "c"): (PairOutcome.OPEN, NoMoreSeeds.BEATEN),
        ("a", "c"): (PairOutcome.BETTER, None),
    }


def test_with_a_baseline_a_loser_stays_open_against_nobody_else():
    """The baseline is worse than b; that does not end its comparison with c."""
    a = [3.100, 3.101, 3.099, 3.102, 3.100]
    b = [x - 0.3 + 0.001 * n for n, x in enumerate(a)]
    losses = {"a": by_seed(*a), "b": by_seed(*b), "c": by_seed(3.2, 3.1, 3.0)}
    found = adaptive_verdict(losses, Rules(seeds=TEN.seeds, baseline="a"))
    assert [(pair.b, pair.outcome, pair.no_more) for pair in found.pairs] == [
        ("b", PairOutcome.WORSE, None),
        ("c", PairOutcome.OPEN, None),
    ]


def test_a_tie_that_is_clear_gets_no_more_seeds():
    a = by_seed(3.28, 3.29, 3.27, 3.28, 3.30)
    b = by_seed(3.29, 3.28, 3.28, 3.27, 3.299)
    (pair,) = adaptive_verdict({"a": a, "b": b}, TEN).pairs
    assert (pair.outcome, pair.no_more) == (PairOutcome.OPEN, NoMoreSeeds.FUTILE)
    wide = Rules(seeds=TEN.seeds, min_difference=2 * pair.margin)
    assert adaptive_verdict({"a": a, "b": b}, wide).pairs[0].outcome is PairOutcome.EQUIVALENT
    # A margin that the seeds that are left could still show: it goes on.
    near = Rules(seeds=TEN.seeds, min_difference=0.9 * pair.margin)
    assert adaptive_verdict({"a": a, "b": b}, near).pairs[0].no_more is None


@pytest.mark.parametrize("others", [{}, {"c": by_seed(9.1, 9.0, 9.2, 9.1, 9.3), "d": by_seed(8.0, 8.1, 8.3, 8.2, 8.4)}])
def test_equivalent_is_reached_where_the_printed_margin_says(others):
    losses = {"a": by_seed(3.28, 3.29, 3.27, 3.28, 3.30), "b": by_seed(3.29, 3.28, 3.28, 3.27, 3.299), **others}

    def verdict(margin):
        pairs = adaptive_verdict(losses, Rules(seeds=TEN.seeds, min_difference=margin)).pairs
        return next(pair for pair in pairs if {pair.a, pair.b} == {"a", "b"})

    margin = verdict(None).margin
    assert verdict(1.0001 * margin).outcome is PairOutcome.EQUIVALENT
    assert verdict(0.9999 * margin).outcome is PairOutcome.OPEN


def test_a_pair_that_has_all_seeds_is_at_its_maximum():
    rules = Rules(seeds=(1, 2, 3, 4))
    losses = {"a": by_seed(3.0, 3.4, 3.2, None), "b": by_seed(3.2, 3.3, 3.5, 3.6)}
    (pair,) = adaptive_verdict(losses, rules).pairs
    assert (pair.outcome, pair.no_more) == (PairOutcome.OPEN, NoMoreSeeds.MAXIMUM)
    assert pair.more_seeds > 1


def test_more_seeds_are_those_that_would_decide_it():
    """The forecast repeats mean and variance: with so many more, and no fewer, the critical value is reached."""
    differences = (-1.0, -2.0, -0.5, -2.5)
    losses = {"a": by_seed(*differences), "b": by_seed(0.0, 0.0, 0.0, 0.0)}
    (pair,) = adaptive_verdict(losses, TEN).pairs
    a = level(0.025, 3, 10)
    reached = [n for n in range(5, 11) if 1.5 * math.sqrt(n) / pair.deviation >= critical(a * (n - 1) / 9, n - 1)]
    assert pair.more_seeds == reached[0] - 4


def test_the_variance_is_shared_by_the_family():
    """k = 3: one degree of freedom from all pairs. The t of a look by hand."""
    rows = {"a": [1.0, 1.2, 0.9], "b": [1.5, 1.4, 1.7], "c": [2.0, 2.4, 2.1]}
    found = adaptive_verdict({name: by_seed(*values) for name, values in rows.items()}, TEN)
    d = {(x, y): [p - q for p, q in zip(rows[x], rows[y], strict=True)] for x, y in ("ab", "ac", "bc")}
    shared = statistics.fmean(statistics.variance(values) for values in d.values())
    for pair in found.pairs:
        values = d[pair.a, pair.b]
        variance = (shared + 2 * statistics.variance(values)) / 3
        half = critical(level(0.025, 3, 10) * 2 / 9, 3) * math.sqrt(variance / 3)
        assert pair.interval.high - pair.difference == pytest.approx(half, rel=1e-12)
        assert pair.deviation == pytest.approx(statistics.stdev(values), rel=1e-12)


any_loss = st.one_of(st.none(), st.floats(), st.floats(3.2, 3.4), st.sampled_from([3.25, 3.26]))
any_losses = st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.integers(0, 6), any_loss), min_size=1)


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
def test_no_losses_crash_a_verdict_or_give_a_number_that_is_not_finite(losses, rules):
    assume(rules.baseline is None or rules.baseline in losses)
    for found in (adaptive_verdict(losses, rules), replay(losses, rules).verdict):
        assert len(found.against_reference) == len(losses) - 1
        for pair in found.pairs:
            numbers = [pair.difference, pair.p, pair.p_holm, pair.deviation, pair.level, pair.detectable, pair.margin]
            numbers += [pair.share_removed, pair.sign_flip_p]
            numbers += [pair.interval.low, pair.interval.high] if pair.interval else []
            assert all(math.isfinite(number) for number in numbers if number is not None)
            assert (pair.p is None) is (pair.method is Method.NONE) is bool(pair.reason)
            assert pair.p is None or pair.p <= pair.p_holm <= 1


@given(st.integers(0, 10**6), st.integers(2, 4))
def test_the_order_of_the_configurations_does_not_matter(number, k):
    dice = random.Random(number)
    losses = {name: by_seed(*(dice.gauss(0, 1) for _ in range(dice.randint(3, 10)))) for name in "abcd"[:k]}
    shuffled = dict(dice.sample(sorted(losses.items()), k))
    first, second = adaptive_verdict(losses, TEN), adaptive_verdict(shuffled, TEN)
    assert first.reference == second.reference
    assert [(x.a, x.b, x.outcome, x.no_more) for x in first.pairs] == [
        (x.a, x.b, x.outcome, x.no_more) for x in second.pairs
    ]
    assert [x.p for x in first.pairs] == pytest.approx([x.p for x in second.pairs], rel=1e-9)


@pytest.mark.parametrize(("factor", "no_more"), [(0.99, NoMoreSeeds.FUTILE), (1.01, None)])
def test_a_pair_is_futile_if_the_forecast_of_its_mean_misses_the_last_critical_value(factor, no_more):
    """Six differences of +-1 around a mean: the forecast of 90 % ends just below, or above, the critical value."""
    deviation = math.sqrt(6 / 5)
    last = critical(level(0.025, 3, 10), 9) * deviation / math.sqrt(10)
    reach = critical(0.05, 5) * deviation * math.sqrt(1 / 6 - 1 / 10)
    mean = factor * (last - reach)
    losses = {"a": by_seed(*(mean + sign for sign in (1, -1, 1, -1, 1, -1))), "b": by_seed(*[0.0] * 6)}
    (pair,) = adaptive_verdict(losses, TEN).pairs
    assert (pair.outcome, pair.no_more) == (PairOutcome.OPEN, no_more)
