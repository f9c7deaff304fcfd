"""Simulate matrices whose truth is known: what verdicts call different or equivalent, and what they find."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kmatrix.records.decode import replaced
from kmatrix.verdict.family import FamilyVerdict, Pair, PairOutcome, Rules
from kmatrix.verdict.pairs import verdict_on
from kmatrix.verdict.replay import replay

pytestmark = pytest.mark.nightly

MATRICES = 2000
# An exact test of 5 % is wrong in more than 100 of them every second time: 131 is the 99.9 % bound.
MOST_WRONG = 131
SEEDS = tuple(range(10))  # with adaptive seeds: 3 to 10
MARGIN = 3.0  # standard deviations of a run
SIGMA = 0.001  # nats/token
EVERY_PLAN = [
    pytest.param(configurations, seeds, baseline, id=f"{configurations}-{seeds or 'adaptive'}-{baseline or 'all'}")
    for configurations in (2, 4, 8, 12)
    for seeds in (5, None)
    for baseline in (None, "c0")
]


def matrices_that(
    is_one: Callable[[FamilyVerdict], bool], means: list[float], seeds: int | None, rules: Rules, number: int
) -> int:
    """Return how many matrices of normal losses with these true means (standard deviations of a run) are one."""
    dice, found = random.Random(number), 0
    rules = replaced(rules, seeds=() if seeds else SEEDS)
    for _ in range(MATRICES):
        losses = {
            f"c{place}": {seed: 3.28 + SIGMA * dice.gauss(mean, 1) for seed in SEEDS[:seeds]}
            for place, mean in enumerate(means)
        }
        # Losses of seeds that adaptive seeds do not want do not count.
        found += is_one(verdict_on(losses, rules) if seeds else replay(losses, rules).verdict)
    return found


# 8: the leader alone against the others, with Holm's correction for 7 comparisons, would be wrong in 10 % of them.
@pytest.mark.parametrize(("configurations", "seeds", "baseline"), EVERY_PLAN)
def test_equal_configurations_are_called_different_in_one_of_twenty_matrices(configurations, seeds, baseline):
    def is_wrong(found: FamilyVerdict) -> bool:
        return any(pair.outcome in (PairOutcome.BETTER, PairOutcome.WORSE) for pair in found.pairs)

    rules = Rules(baseline=baseline)
    wrong = matrices_that(is_wrong, [0.0] * configurations, seeds, rules, 100 + configurations)
    print(f"false better: {configurations} {seeds} {baseline}: {wrong}")
    assert wrong <= MOST_WRONG


# All pairs of two clusters; a baseline against all others.
@pytest.mark.parametrize(("configurations", "seeds", "baseline"), EVERY_PLAN)
def test_configurations_one_margin_apart_are_called_equivalent_in_one_of_twenty_matrices(
    configurations, seeds, baseline
):
    others = range(1, configurations) if baseline else range(configurations // 2, configurations)
    means = [MARGIN if place in others else 0.0 for place in range(configurations)]

    def is_wrong(found: FamilyVerdict) -> bool:
        def apart(pair: Pair) -> bool:
            return means[int(pair.a[1:])] != means[int(pair.b[1:])]

        return any(pair.outcome is PairOutcome.EQUIVALENT and apart(pair) for pair in found.pairs)

    rules = Rules(baseline=baseline, min_difference=MARGIN * SIGMA)
    wrong = matrices_that(is_wrong, means, seeds, rules, 200 + configurations)
    print(f"false equivalent: {configurations} {seeds} {baseline}: {wrong}")
    assert wrong <= MOST_WRONG


@pytest.mark.parametrize(
    ("means", "seeds"), [([-3.0, 0.0], 6), ([-3.0, 0.0, 0.0, 0.0], None)], ids=["fixed", "adaptive"]
)
def test_a_difference_of_three_standard_deviations_is_found(means, seeds):
    """In 95 % of the matrices the best one is called better than each of the others."""

    def is_right(found: FamilyVerdict) -> bool:
        return found.reference == "c0" and all(pair.outcome is PairOutcome.BETTER for pair in found.against_reference)

    assert matrices_that(is_right, means, seeds, Rules(), 3) >= 0.95 * MATRICES
