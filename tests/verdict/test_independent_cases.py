"""Small and damaged samples against computations of their own: NumPy, SciPy, and counting all possibilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kmatrix.verdict.adaptive import adaptive_verdict
from kmatrix.verdict.family import NoMoreSeeds, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.target import reach

FIXED = Rules(seeds=())
TEN = Rules(seeds=tuple(range(1, 11)))


def numbered(values, first=1):
    return {seed: float(value) for seed, value in enumerate(values, start=first)}


def test_a_censored_median_is_known_if_it_is_the_same_whatever_the_censored_runs_would_have_taken():
    dice = np.random.default_rng(4)
    known = 0
    for _ in range(2000):
        n = int(dice.integers(1, 9))
        at, end = dice.uniform(0, 1, n), dice.uniform(0.3, 1.2, n)
        end[dice.uniform(size=n) < 0.1] = np.inf  # trained for ever: it never reaches the target
        misses = (at > end) | (dice.uniform(size=n) < 0.2)
        soonest, latest = np.where(misses, end, at), np.where(misses, np.inf, at)
        low, high = np.median(soonest), np.median(latest)
        found = reach([None if miss else x for miss, x in zip(misses, at, strict=True)], end.tolist())
        assert (found.runs, found.missed) == (n, misses.sum())
        if math.isfinite(high) and low == high:
            known += 1
            assert found.median == pytest.approx(high, rel=1e-12)
        else:
            assert found.median is None
    assert 200 < known < 1800


@pytest.mark.parametrize("k", [2, 3, 6])
def test_with_a_baseline_only_its_comparisons_are_corrected_for(k):
    dice = np.random.default_rng(k)
    table = dice.normal(np.arange(k)[:, None] * 0.7, 1, (k, 5))
    losses = {f"c{place}": numbered(row) for place, row in enumerate(table)}
    p = {f"c{i}": stats.ttest_rel(table[1], table[i]).pvalue for i in range(k) if i != 1}
    ranked = sorted(p.values())
    verdict = fixed_verdict(losses, Rules(seeds=(), baseline="c1"))
    assert verdict.reference == "c1"
    assert {(pair.a, pair.b) for pair in verdict.pairs} == {("c1", name) for name in p}
    for pair in verdict.pairs:
        place = ranked.index(p[pair.b])
        expected = max(min(1.0, (k - 1 - i) * ranked[i]) for i in range(place + 1))
        assert (pair.p, pair.p_holm) == (pytest.approx(p[pair.b], rel=1e-9), pytest.approx(expected, rel=1e-9))
    adaptive = adaptive_verdict(losses, Rules(seeds=TEN.seeds, baseline="c1"))
    own = sorted(pair.p for pair in adaptive.pairs)
    assert len(own) == k - 1
    assert min(pair.p_holm for pair in adaptive.pairs) == pytest.approx(min(1.0, (k - 1) * own[0]))


@pytest.mark.parametrize("verdict_of", [fixed_verdict, adaptive_verdict], ids=["fixed", "adaptive"])
def test_no_configuration_that_diverged_more_often_is_called_better(verdict_of):
    dice = np.random.default_rng(9)
    seen = dict.fromkeys(PairOutcome, 0)
    for _ in range(150):
        losses = {}
        for place in range(3):
            row = dice.normal(2.0 * place, 0.5, 8)
            row[dice.uniform(size=8) < 0.2] = dice.choice([np.nan, np.inf])
            losses[f"c{place}"] = numbered(row)
        diverged = {name: sum(not math.isfinite(x) for x in row.values()) for name, row in losses.items()}
        for pair in verdict_of(losses, TEN).pairs:
            more = diverged[pair.a] - diverged[pair.b]
            assert pair.diverged == (diverged[pair.a], diverged[pair.b])
            assert not (pair.outcome is PairOutcome.BETTER and more > 0)
            assert not (pair.outcome is PairOutcome.WORSE and more < 0)
            is_barred = pair.p_holm is not None and pair.p_holm <= 0.05 and more * pair.difference < 0
            assert (pair.no_more is NoMoreSeeds.DIVERGED) is is_barred
            seen[pair.outcome] += 1
    assert min(seen[PairOutcome.BETTER], seen[PairOutcome.OPEN]) > 20


def test_seeds_that_failed_or_were_skipped_leave_the_verdict_of_the_others():
    """The fourth seed of b failed twice, the second of a was skipped: as if the plan had never named them."""
    dice = np.random.default_rng(12)
    a, b = numbered(dice.normal(3.2, 0.1, 9)), numbered(dice.normal(3.3, 0.1, 9))
    missing = {"a": {**a, 2: None}, "b": {**b, 4: None}}
    left = [seed for seed in a if seed not in (2, 4)]
    for found in (fixed_verdict(missing, FIXED).pairs[0], adaptive_verdict(missing, TEN).pairs[0]):
        assert (found.seeds, found.diverged) == (tuple(left), (0, 0))
    expected = stats.ttest_rel([a[seed] for seed in left], [b[seed] for seed in left])
    assert fixed_verdict(missing, FIXED).pairs[0].p == pytest.approx(expected.pvalue)
    rules = Rules(seeds=(*left, 10, 11, 12))  # ten seeds, too
    others = {name: {seed: known[seed] for seed in left} for name, known in (("a", a), ("b", b))}
    assert adaptive_verdict(missing, TEN).pairs[0].p == adaptive_verdict(others, rules).pairs[0].p
