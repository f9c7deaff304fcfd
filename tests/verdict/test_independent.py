"""Verdicts against computations of their own: SciPy's tests, and simulated sequences of t tests."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats

from kmatrix.verdict.adaptive import adaptive_verdict, error_spent
from kmatrix.verdict.family import Method, NoMoreSeeds, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.target import below_target

PATHS = 50_000
CONFIDENCES = (0.5, 0.8, 0.95, 0.999)


def holm(p_values):
    """Return corrected p values: of the r-th smallest, the largest of (m - i) p_i over i = 0 .. r."""
    ranked = sorted(p_values)
    scaled = [min(1.0, (len(ranked) - i) * p) for i, p in enumerate(ranked)]
    return [max(scaled[: ranked.index(p) + 1]) for p in p_values]


def family(dice, k, *, scale=1.0, spread=0.5, matched=True):
    """Return losses of k configurations with 2 to 9 seeds each, some of them missing."""
    found = {}
    for place in range(k):
        first = 1 if matched else 100 * place
        seeds = range(first, first + int(dice.integers(2, 10)))
        mean = dice.normal(0, spread)
        found[f"c{place:02}"] = {seed: float(scale * dice.normal(mean, 1 + place % 3)) for seed in seeds}
    return found


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("matched", [True, False], ids=["paired", "Welch"])
@pytest.mark.parametrize(("k", "scale"), [(2, 1.0), (3, 1e-7), (10, 1e9)])
def test_a_fixed_verdict_is_that_of_scipy(k, scale, matched, confidence):
    losses = family(np.random.default_rng(k), k, scale=scale, matched=matched)
    verdict = fixed_verdict(losses, Rules(seeds=(), confidence=confidence))
    found = {}
    for pair in verdict.pairs:
        common = sorted(losses[pair.a].keys() & losses[pair.b].keys())
        if matched:
            a, b = ([losses[name][seed] for seed in common] for name in (pair.a, pair.b))
            test = stats.ttest_rel(a, b)
        else:
            a, b = (list(losses[name].values()) for name in (pair.a, pair.b))
            test = stats.ttest_ind(a, b, equal_var=False)
        assert pair.method is (Method.PAIRED if matched else Method.WELCH)
        interval = test.confidence_interval(confidence)
        assert pair.p == pytest.approx(test.pvalue, rel=1e-9)
        assert pair.difference == pytest.approx(np.mean(a) - np.mean(b), rel=1e-9)
        assert (pair.interval.low, pair.interval.high) == pytest.approx((interval.low, interval.high), rel=1e-8)
        found[pair] = test
    assert [pair.p_holm for pair in found] == pytest.approx(holm([test.pvalue for test in found.values()]), rel=1e-9)
    for pair, test in found.items():
        assert (pair.outcome is not PairOutcome.OPEN) is (pair.p_holm <= 1 - confidence)
        assert pair.outcome is not (PairOutcome.WORSE if pair.difference < 0 else PairOutcome.BETTER)
        if k < 5:  # the power of the test at the level that Holm's procedure asks
            error = abs(pair.difference / test.statistic)
            limit = stats.t.isf(pair.level / 2, test.df)
            if limit > 0.1 and pair.detectable < 60 * error:  # beyond, SciPy's noncentral t is not reliable
                assert stats.nct.sf(limit, test.df, pair.detectable / error) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_equivalence_is_that_of_two_one_sided_tests(confidence):
    dice = np.random.default_rng(5)
    outcomes = []
    for _ in range(60):
        a, b = dice.normal(0, 1, 6), dice.normal(0, 1, 6)
        margin = float(dice.uniform(0.2, 3))
        rules = Rules(seeds=(), confidence=confidence, min_difference=margin)
        (pair,) = fixed_verdict({"a": dict(enumerate(a)), "b": dict(enumerate(b))}, rules).pairs
        above = stats.ttest_rel(a - b, np.full(6, -margin), alternative="greater").pvalue
        below = stats.ttest_rel(a - b, np.full(6, margin), alternative="less").pvalue
        outcomes.append(pair.outcome is PairOutcome.EQUIVALENT)
        assert outcomes[-1] is bool(max(above, below) <= 1 - confidence)
    assert {*outcomes} == {True, False}


@cache
def evidence(first, most):
    """Return, of simulated sequences without a difference, the smallest p_n / w_n after each look."""
    x = np.random.default_rng(11).normal(size=(PATHS, most))
    smallest = np.full(PATHS, np.inf)
    found = {}
    for n in range(first, most + 1):
        t = stats.ttest_1samp(x[:, :n], 0, axis=1, alternative="greater")
        smallest = np.minimum(smallest, t.pvalue / ((n - 1) / (most - 1)))
        found[n] = smallest
    return found


def is_about(p, share, errors=4.5):
    return abs(p - share) <= errors * math.sqrt(max(share * (1 - share), 1e-5) / PATHS)


@pytest.mark.parametrize(
    ("k", "first", "most"),
    [
        (2, 2, 6),
        (5, 3, 6),
        *(pytest.param(*more, marks=pytest.mark.nightly) for more in ((2, 3, 10), (3, 3, 10), (4, 4, 8))),
    ],
)
def test_a_sequential_p_is_the_share_of_simulated_sequences_with_as_much_evidence(k, first, most):
    dice = np.random.default_rng(100 * k + most)
    null = evidence(first, most)[most]
    for n in range(first, most + 1):
        table = np.stack([dice.normal(0.6 * place, 1, n) for place in range(k)])
        names = "abcde"[:k]
        losses = {name: dict(enumerate(row.tolist())) for name, row in zip(names, table, strict=True)}
        verdict = adaptive_verdict(losses, Rules(seeds=tuple(range(most)), seeds_min=first))
        smallest = {}
        pairs = list(itertools.combinations(range(k), 2))
        for i, j in pairs:
            found = [np.inf, np.inf]
            for m in range(first, n + 1):
                own = np.var(table[i, :m] - table[j, :m], ddof=1)
                shared = np.mean([np.var(table[a, :m] - table[b, :m], ddof=1) for a, b in pairs])
                worth = min(2, k - 2)
                variance = (worth * shared + (m - 1) * own) / (m - 1 + worth)
                t = np.mean(table[i, :m] - table[j, :m]) / math.sqrt(variance / m)
                for side, sign in enumerate((1, -1)):
                    p = stats.t.cdf(sign * t, m - 1 + worth)
                    found[side] = min(found[side], p / ((m - 1) / (most - 1)))
            smallest[names[i], names[j]] = min(found)
        for pair in verdict.pairs:
            share = np.mean(null <= smallest.get((pair.a, pair.b), smallest.get((pair.b, pair.a))))
            assert pair.p == 1 or is_about(pair.p / 2, share)
            assert pair.p < 1 or share > 0.49


def test_the_sequential_p_of_a_target_is_that_of_simulated_sequences():
    null = evidence(3, 10)[10]
    dice = np.random.default_rng(8)
    losses = {name: dict(enumerate(dice.normal(3.28 - shift, 0.01, 7))) for name, shift in (("a", 0.007), ("b", 0.0))}
    found = below_target(losses, 3.28, Rules(seeds=tuple(range(10))), adaptive=True)
    for name, known in losses.items():
        values = np.array([*known.values()])
        smallest = min(
            stats.ttest_1samp(values[:n], 3.28, alternative="less").pvalue / ((n - 1) / 9) for n in range(3, 8)
        )
        assert is_about(found[name].p, np.mean(null <= smallest))
    assert [test.p_holm for test in found.values()] == pytest.approx(holm([test.p for test in found.values()]))
    plain = below_target(losses, 3.28, Rules(seeds=()), adaptive=False)
    for name, known in losses.items():
        assert plain[name].p == pytest.approx(
            stats.ttest_1samp([*known.values()], 3.28, alternative="less").pvalue, rel=1e-9
        )


@pytest.mark.parametrize(
    ("before", "after", "confidence"), [(5, 8, 0.9), pytest.param(6, 10, 0.95, marks=pytest.mark.nightly)]
)
def test_the_error_spent_by_a_raised_maximum_is_that_of_simulated_sequences(before, after, confidence):
    """Each plan has its own boundary, here found by simulation; a sequence is called different at either of them."""
    x = np.random.default_rng(3).normal(size=(PATHS, after))
    crossed = np.full(PATHS, False)
    p = {n: stats.ttest_1samp(x[:, :n], 0, axis=1).pvalue for n in range(3, after + 1)}
    for most in (before, after):
        null = evidence(3, most)[most]
        a = optimize.brentq(lambda a, null=null: np.mean(null <= a) - (1 - confidence) / 2, 1e-6, 0.4, xtol=1e-9)
        for n in range(3, most + 1):
            crossed |= p[n] / 2 <= a * (n - 1) / (most - 1)
    # The boundaries are simulated, too: twice the error.
    assert is_about(error_spent([before, after], 3, confidence), np.mean(crossed), errors=8)


def test_a_tie_is_futile_from_four_seeds_on():
    a = dict.fromkeys(range(4), 3.28)
    b = {0: 3.281, 1: 3.279, 2: 3.2811, 3: 3.2789}
    rules = Rules(seeds=tuple(range(5)))
    found = [adaptive_verdict({"a": a, "b": dict([*b.items()][:n])}, rules).pairs[0].no_more for n in (3, 4)]
    assert found == [None, NoMoreSeeds.FUTILE]
