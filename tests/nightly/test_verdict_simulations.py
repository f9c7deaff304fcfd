"""Simulate matrices whose truth is known: what verdicts call different, and what they find."""

from __future__ import annotations

import random

import pytest

from kmatrix.verdict.family import FamilyVerdict, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.replay import replay

pytestmark = pytest.mark.nightly

MATRICES = 2000
# An exact test of 5 % is wrong in more than 100 of them every second time: 131 is the 99.9 % bound.
MOST_WRONG = 131
SEEDS = tuple(range(10))  # with adaptive seeds: 3 to 10


def matrices(number: int, means: tuple[float, ...]) -> list[dict[str, dict[int, float]]]:
    """Return matrices of normal losses with these true means, in standard deviations of a run."""
    dice = random.Random(number)
    return [
        {f"c{place}": {seed: 3.28 + 0.001 * dice.gauss(mean, 1) for seed in SEEDS} for place, mean in enumerate(means)}
        for _ in range(MATRICES)
    ]


def fixed(losses: dict[str, dict[int, float]], seeds: int) -> FamilyVerdict:
    first = {name: {seed: row[seed] for seed in SEEDS[:seeds]} for name, row in losses.items()}
    return fixed_verdict(first, Rules(seeds=SEEDS[:seeds]))


def adaptive(losses: dict[str, dict[int, float]]) -> FamilyVerdict:
    """Return the verdict of a matrix that runs only the seeds that it wants: other losses do not count."""
    return replay(losses, Rules(seeds=SEEDS)).verdict


# 8: the leader alone against the others, with Holm's correction for 7 comparisons, would be wrong in 10 % of them.
@pytest.mark.parametrize(
    ("configurations", "seeds"),
    [(2, 6), (4, 6), (8, 6), (2, None), (4, None)],
    ids=["2-fixed", "4-fixed", "8-fixed", "2-adaptive", "4-adaptive"],
)
def test_equal_configurations_are_called_different_in_one_of_twenty_matrices(configurations, seeds):
    wrong = 0
    for losses in matrices(100 + configurations, (0.0,) * configurations):
        found = fixed(losses, seeds) if seeds else adaptive(losses)
        wrong += any(pair.outcome is not PairOutcome.OPEN for pair in found.pairs)
    assert 10 <= wrong <= MOST_WRONG  # none at all would be a test that finds nothing


@pytest.mark.parametrize(
    ("means", "seeds"), [((-3.0, 0.0), 6), ((-3.0, 0.0, 0.0, 0.0), None)], ids=["fixed", "adaptive"]
)
def test_a_difference_of_three_standard_deviations_is_found(means, seeds):
    """In 95 % of the matrices the best one is called better than each of the others."""
    right = 0
    for losses in matrices(3, means):
        found = fixed(losses, seeds) if seeds else adaptive(losses)
        right += found.reference == "c0" and all(pair.outcome is PairOutcome.BETTER for pair in found.against_reference)
    assert right >= 0.95 * MATRICES
