"""Simulate whole matrices: how often equal ones get a false "better", and how many runs adaptive seeds save.

    python bench/verdict.py [--count 4000] [--sizes 2 4 8] [--seed 1]

Losses are normal with a standard deviation of 1 (sigma) and without an effect of the seed. Adaptive seeds are 3 to 10,
at 95 %, without a baseline or a margin: the family is all pairs. A configuration is decided if it is rightly called
worse than another one. The fixed plan gives each configuration as many seeds as decide the same share, with Student's
paired t test and Holm's correction. Losses are drawn from --seed, so the table is the same on every machine. All
verdicts are those of `replay` and `fixed_verdict`, from which reports are made.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from kmatrix.verdict.family import FamilyVerdict, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.replay import replay

RULES = Rules(seeds=tuple(range(10)))
SIZES = (2, 4, 8)  # configurations
SPREADS = {2.0: 0.20, 4.0: 0.30}  # standard deviation of the true means, sigma -> goal: share of runs saved
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


def error_of(share: float, count: int) -> float:
    """Return the standard error of a share of `count` matrices."""
    return math.sqrt(share * (1 - share) / count)


def median_error(values: Sequence[int]) -> float:
    """Return the standard error of a median, from the order statistics half a binomial deviation around it."""
    ordered, half = sorted(values), math.sqrt(len(values)) / 2
    low, high = (ordered[round(len(values) / 2 + side * half)] for side in (-1, 1))
    return (high - low) / 2


def fixed_share(matrices: Sequence[tuple[Matrix, dict[str, float]]], seeds: int) -> float:
    """Return the share of configurations that a fixed plan decides."""
    right = sum(
        decided(fixed_verdict({name: {s: row[s] for s in range(seeds)} for name, row in losses.items()}, RULES), means)
        for losses, means in matrices
    )
    return right / sum(len(means) - 1 for _, means in matrices)


def equal_power(matrices: Sequence[tuple[Matrix, dict[str, float]]], share: float) -> int | None:
    """Return the seeds of the fixed plan that decides this share; None if all seeds decide less."""
    if fixed_share(matrices, len(RULES.seeds)) < share - SLACK:
        return None
    low, high = 1, len(RULES.seeds)  # the share grows with the seeds: bisection
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fixed_share(matrices, middle) < share - SLACK else (low, middle)
    return high


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_head(*cells: str) -> None:
    print()
    print_row(*cells)
    print_row(*["---"] * len(cells))


def main() -> None:
    """Print the two tables with their Monte Carlo errors (one standard error)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=4000, help="matrices per row (default: 4000)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="configurations (default: 2 4 8)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: 1)")
    arguments = parser.parse_args()
    count, begin = arguments.count, time.monotonic()

    print_head("configurations, all equal", 'false "better", adaptive seeds', "the same, 6 fixed seeds", "goal", "runs")
    for size in arguments.sizes:
        dice = random.Random(f"equal {size} {arguments.seed}")
        wrong, wrong_fixed, runs = 0, 0, []
        for _ in range(count):
            losses, _ = drawn(dice, size, 0.0)
            found = replay(losses, RULES)
            wrong += has_false_better(found.verdict)
            six = {name: {seed: row[seed] for seed in range(6)} for name, row in losses.items()}
            wrong_fixed += has_false_better(fixed_verdict(six, RULES))
            runs.append(size * len(RULES.seeds) - found.unused)
        shares = [
            f"{100 * share:.1f} ± {100 * error_of(share, count):.1f} %"
            for share in (wrong / count, wrong_fixed / count)
        ]
        print_row(size, *shares, "at most 5 %", f"{statistics.fmean(runs):.1f} of {size * len(RULES.seeds)}")

    print_head(
        *("configurations", "sd of the true means", "decided", "runs, median", "fixed plan of equal power"),
        *("saved", "goal"),
    )
    for size in arguments.sizes:
        for spread, goal in SPREADS.items():
            dice = random.Random(f"{spread} {size} {arguments.seed}")
            matrices = [drawn(dice, size, spread) for _ in range(count)]
            right, runs = 0, []
            for losses, means in matrices:
                found = replay(losses, RULES)
                right += decided(found.verdict, means)
                runs.append(size * len(RULES.seeds) - found.unused)
            share, median = right / (count * (size - 1)), statistics.median(runs)
            seeds = equal_power(matrices, share)
            fixed = size * seeds if seeds else None
            print_row(
                size,
                f"{spread:g} sigma",
                f"{100 * share:.1f} ± {100 * error_of(share, count * (size - 1)):.1f} %",
                f"{median:g} ± {median_error(runs):.2g}",
                f"{seeds} seeds, {fixed} runs" if fixed else "more than 10 seeds",
                f"{100 * (1 - median / fixed):.0f} ± {100 * median_error(runs) / fixed:.0f} %" if fixed else "-",
                f"at least {100 * goal:.0f} %",
            )
    print(f"\n{count:,} matrices per row, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
