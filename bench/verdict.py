"""Simulate whole matrices: false "better" of equal ones, the runs that adaptive seeds save, and what a report prints.

    python bench/verdict.py [--count 4000] [--sizes 2 4 8] [--seed 1]

Losses are normal with a standard deviation of 1 (sigma) and without an effect of the seed. Adaptive seeds are 3 to 10,
at 95 %, without a baseline or a margin: the family is all pairs. A configuration is decided if it is rightly called
worse than another one. The fixed plan gives each configuration as many seeds as decide the same share, with Student's
paired t test and Holm's correction. The last three tables are about two configurations: how much an early stop
exaggerates a difference, how often "about n more seeds would decide it" is right when it is printed after 5 seeds, and
how often equal ones get a false "better" if a fixed number of seeds is extended by what the report proposes.
Losses are drawn from --seed, so the tables are the same on every machine. All verdicts are those of `replay`,
`adaptive_verdict` and `fixed_verdict`, from which reports are made.
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

from kmatrix.verdict.adaptive import adaptive_verdict
from kmatrix.verdict.family import FamilyVerdict, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.replay import replay

RULES = Rules(seeds=tuple(range(10)))
SIZES = (2, 4, 8)  # configurations
SPREADS = {2.0: 0.20, 4.0: 0.30}  # standard deviation of the true means, sigma -> goal: share of runs saved
DIFFERENCES = (1.0, 2.0, 3.0)  # true ones of two configurations, sigma
ASKED_AFTER = 5  # seeds
SPREAD_ASKED = 4.0  # standard deviation of the true means where more seeds are forecast, sigma
MOST_PROPOSED = 10  # seeds that a report proposes to add
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
    right = sum(decided(fixed_verdict(first_seeds(losses, seeds), RULES), means) for losses, means in matrices)
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


def first_seeds(losses: Matrix, seeds: int) -> Matrix:
    """Return the losses of the first seeds of a matrix."""
    return {name: {seed: row[seed] for seed in RULES.seeds[:seeds]} for name, row in losses.items()}


def stopped(difference: float, count: int, seed: int) -> tuple[list[float], int, float]:
    """Return, of two configurations with a true difference, what is printed where the better one is called better.

    The differences that are printed, the number of intervals at the end that hold the truth, and the mean of the seeds.
    """
    dice = random.Random(f"stopped {difference} {seed}")
    printed, covered, seeds = [], 0, 0
    for _ in range(count):
        losses = {
            name: {seed: dice.gauss(mean, 1) for seed in RULES.seeds} for name, mean in (("a", 0), ("b", difference))
        }
        (pair,) = replay(losses, RULES).verdict.pairs
        assert pair.interval is not None
        assert pair.difference is not None
        truth = -difference if pair.a == "a" else difference
        covered += pair.interval.low <= truth <= pair.interval.high
        seeds += len(pair.seeds)
        if pair.outcome is (PairOutcome.BETTER if pair.a == "a" else PairOutcome.WORSE):
            printed.append(abs(pair.difference))
    return printed, covered, seeds / count


def forecasts(count: int, seed: int) -> dict[int, list[bool]]:
    """Return the numbers of further seeds that were printed, and whether as many decided the comparison."""
    dice = random.Random(f"forecasts {seed}")
    found: dict[int, list[bool]] = {}
    for _ in range(count):
        losses, _ = drawn(dice, 2, SPREAD_ASKED)
        (pair,) = adaptive_verdict(first_seeds(losses, ASKED_AFTER), RULES).pairs
        more = pair.more_seeds
        if pair.no_more is None and more is not None and ASKED_AFTER + more <= len(RULES.seeds):
            (after,) = adaptive_verdict(first_seeds(losses, ASKED_AFTER + more), RULES).pairs
            found.setdefault(more, []).append(after.outcome is not PairOutcome.OPEN)
    return found


def added(seeds: int, times: int, count: int, seed: int) -> float:
    """Return the share of false results if what is proposed is added to a fixed number of seeds, so many times."""
    dice, wrong = random.Random(f"added {seeds} {seed}"), 0
    for _ in range(count):
        losses = {name: {n: dice.gauss(0, 1) for n in range(seeds + times * MOST_PROPOSED)} for name in "ab"}
        ran = seeds
        for _ in range(times + 1):
            part = {name: {n: row[n] for n in range(ran)} for name, row in losses.items()}
            (pair,) = fixed_verdict(part, Rules(seeds=())).pairs
            if pair.outcome is not PairOutcome.OPEN:
                wrong += 1
                break
            if pair.more_seeds is None or pair.more_seeds > MOST_PROPOSED:
                break
            ran += pair.more_seeds
    return wrong / count


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
            wrong_fixed += has_false_better(fixed_verdict(first_seeds(losses, 6), RULES))
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

    print_head("true difference", "called better", "printed difference / true one", "intervals that hold it", "seeds")
    for difference in DIFFERENCES:
        printed, covered, seeds_used = stopped(difference, count, arguments.seed)
        share, held = len(printed) / count, covered / count
        ratio = statistics.fmean(printed) / difference
        error = statistics.stdev(printed) / difference / math.sqrt(len(printed))
        print_row(
            f"{difference:g} sigma",
            f"{100 * share:.1f} ± {100 * error_of(share, count):.1f} %",
            f"{ratio:.3f} ± {error:.3f}",
            f"{100 * held:.1f} ± {100 * error_of(held, count):.1f} %",
            f"{seeds_used:.1f}",
        )

    print_head("about n more", f"printed after {ASKED_AFTER} seeds", "as many or fewer decided it")
    for more, right_ones in sorted(forecasts(4 * count, arguments.seed).items()):
        share = statistics.fmean(right_ones)
        print_row(more, len(right_ones), f"{100 * share:.0f} ± {100 * error_of(share, len(right_ones)):.0f} %")

    print_head("fixed seeds, two equal ones", "added 0 times", "once, as proposed", "up to 4 times")
    for seeds in (3, 5):
        shares = [added(seeds, times, count, arguments.seed) for times in (0, 1, 4)]
        print_row(seeds, *(f"{100 * share:.1f} ± {100 * error_of(share, count):.1f} %" for share in shares))
    print(f"\n{count:,} matrices per row, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
