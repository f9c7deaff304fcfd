"""Simulate whole matrices: false "better" of equal ones, the runs that adaptive seeds save, and differences.

    python bench/verdict.py [--count 4000] [--sizes 2,4,8] [--seed 1]

Losses are normal with a standard deviation of 1 (sigma) and without an effect of the seed. Adaptive seeds are 3 to 10,
at 95 %, without a baseline or a margin: the family is all pairs. A configuration is decided if it is rightly called
worse than another one. The fixed plan gives each configuration as many seeds as decide the same share, with Student's
paired t test and Holm's correction. The last table is about two configurations: how much an early stop exaggerates a
difference. Losses are drawn from --seed: the tables are the same on every machine. The verdicts are those of reports.
--count: matrices per row. --sizes: configurations of a matrix.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

from common import options, table

from kmatrix.verdict.family import FamilyVerdict, PairOutcome, Rules
from kmatrix.verdict.pairs import verdict_on
from kmatrix.verdict.replay import replay

FIXED, RULES = Rules(), Rules(seeds=tuple(range(10)))
SPREADS = {2.0: 0.20, 4.0: 0.30}  # standard deviation of the true means, sigma -> goal: share of runs saved
DIFFERENCES = (1.0, 2.0, 3.0)  # true ones of two configurations, sigma
SLACK = 0.002  # of the share that is decided: fixed plans that miss it by less are of equal power

Matrix = dict[str, dict[int, float]]


def drawn(dice: random.Random, size: int, spread: float) -> tuple[Matrix, dict[str, float]]:
    """Return the losses of all seeds of a matrix, and the true mean of each configuration."""
    means = {f"c{number}": dice.gauss(0, spread) if spread else 0.0 for number in range(size)}
    return {name: {seed: dice.gauss(mean, 1) for seed in RULES.seeds} for name, mean in means.items()}, means


def decided(verdict: FamilyVerdict, means: dict[str, float]) -> int:
    """Return the number of configurations with a right verdict, without the leader."""
    found = set()
    for pair in verdict.pairs:
        if pair.outcome in (PairOutcome.BETTER, PairOutcome.WORSE):
            better, worse = (pair.a, pair.b) if pair.outcome is PairOutcome.BETTER else (pair.b, pair.a)
            if means[better] < means[worse]:
                found.add(worse)
    return len(found - {verdict.reference})


def has_false_better(verdict: FamilyVerdict) -> bool:
    """Return True if a matrix of equal configurations calls any of them better."""
    return any(pair.outcome is not PairOutcome.OPEN for pair in verdict.pairs)


def fixed_share(matrices: Sequence[tuple[Matrix, dict[str, float]]], seeds: int) -> float:
    """Return the share of configurations that a fixed plan decides."""
    right = sum(decided(verdict_on(first_seeds(losses, seeds), FIXED), means) for losses, means in matrices)
    return right / sum(len(means) - 1 for _, means in matrices)


def equal_power(matrices: Sequence[tuple[Matrix, dict[str, float]]], share: float) -> int | None:
    """Return the seeds of the fixed plan that decides this share; None if all seeds decide less."""
    return next(
        (seeds for seeds in range(2, len(RULES.seeds) + 1) if fixed_share(matrices, seeds) >= share - SLACK), None
    )


def first_seeds(losses: Matrix, seeds: int) -> Matrix:
    """Return the losses of the first seeds of a matrix."""
    return {name: {seed: row[seed] for seed in RULES.seeds[:seeds]} for name, row in losses.items()}


def percent(share: float, count: int) -> str:
    """Return a share of `count` matrices with its standard error."""
    return f"{100 * share:.1f} ± {100 * math.sqrt(share * (1 - share) / count):.1f} %"


def equal_ones(size: int, count: int, seed: int) -> list[object]:
    """Return the row of a matrix of equal configurations."""
    dice, wrong, wrong_fixed, runs = random.Random(f"equal {size} {seed}"), 0, 0, []
    for _ in range(count):
        losses, _ = drawn(dice, size, 0.0)
        found = replay(losses, RULES)
        wrong += has_false_better(found.verdict)
        wrong_fixed += has_false_better(verdict_on(first_seeds(losses, 6), FIXED))
        runs.append(size * len(RULES.seeds) - found.unused)
    shares = [percent(wrong / count, count), percent(wrong_fixed / count, count)]
    return [size, *shares, "at most 5 %", f"{statistics.fmean(runs):.1f} of {size * len(RULES.seeds)}"]


def different_ones(size: int, spread: float, count: int, seed: int) -> list[object]:
    """Return the row of a matrix of configurations whose means differ."""
    dice, right, runs = random.Random(f"{spread} {size} {seed}"), 0, []
    matrices = [drawn(dice, size, spread) for _ in range(count)]
    for losses, means in matrices:
        found = replay(losses, RULES)
        right += decided(found.verdict, means)
        runs.append(size * len(RULES.seeds) - found.unused)
    share, median = right / (count * (size - 1)), statistics.median(runs)
    seeds = equal_power(matrices, share)
    fixed = size * seeds if seeds else None
    saved = f"{100 * (1 - median / fixed):.0f} %" if fixed else "-"
    plan = f"{seeds} seeds, {fixed} runs" if fixed else "more than 10 seeds"
    row = [size, f"{spread:g} sigma", percent(share, count * (size - 1)), f"{median:g}", plan, saved]
    return [*row, f"at least {100 * SPREADS[spread]:.0f} %"]


def early_stop(difference: float, count: int, seed: int) -> list[object]:
    """Return the row of two configurations with a true difference: what a report prints."""
    dice, printed, covered, seeds = random.Random(f"stopped {difference} {seed}"), [], 0, 0
    for _ in range(count):
        means = (("a", 0.0), ("b", difference))
        losses = {name: {seed: dice.gauss(mean, 1) for seed in RULES.seeds} for name, mean in means}
        (pair,) = replay(losses, RULES).verdict.pairs
        assert pair.interval is not None
        assert pair.difference is not None
        covered += pair.interval.low <= (-difference if pair.a == "a" else difference) <= pair.interval.high
        seeds += len(pair.seeds)
        if pair.outcome is (PairOutcome.BETTER if pair.a == "a" else PairOutcome.WORSE):
            printed.append(abs(pair.difference) / difference)
    ratio, error = statistics.fmean(printed), statistics.stdev(printed) / math.sqrt(len(printed))
    row = [f"{difference:g} sigma", percent(len(printed) / count, count), f"{ratio:.3f} ± {error:.3f}"]
    return [*row, percent(covered / count, count), f"{seeds / count:.1f}"]


def main() -> None:
    """Print the tables with their Monte Carlo errors (one standard error)."""
    args = options(__doc__, count=4000, sizes="2,4,8", seed=1)
    n, seed, sizes = args.count, args.seed, [*map(int, args.sizes.split(","))]
    head = ["configurations, all equal", 'false "better", adaptive seeds', "the same, 6 fixed seeds", "goal", "runs"]
    print(table(head, [equal_ones(size, n, seed) for size in sizes]), flush=True)
    head = ["configurations", "sd of the true means", "decided", "runs, median", "fixed plan of equal power", "saved"]
    rows = [different_ones(size, spread, n, seed) for size in sizes for spread in SPREADS]
    print("\n" + table([*head, "goal"], rows), flush=True)
    head = ["true difference", "called better", "printed difference / true one", "intervals that hold it", "seeds"]
    print("\n" + table(head, [early_stop(difference, n, seed) for difference in DIFFERENCES]), flush=True)


if __name__ == "__main__":
    main()
