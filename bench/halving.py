"""Simulate successive halving of equal configurations: how often a survivor gets a false "better".

    python bench/halving.py [--count 4000] [--seed 1]

Final losses are normal with a standard deviation of 1, equal configurations, without an effect of the seed. The loss at
each rung has the given correlation with the final loss of the same run. The survivors are those of `replay_halving`;
they are compared by `fixed_verdict` at 95 % over all their pairs, as in reports. The last column compares all
configurations, as without halving. Losses are drawn from --seed, so the table is the same on every machine.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from kmatrix.verdict.family import FamilyVerdict, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.halving import Rung
from kmatrix.verdict.survivors import SeedAtRungs, of_survivors, replay_halving

CORRELATIONS = (0.0, 0.5, 0.9)
SEEDS = (3, 5)
# Two rungs of 9 configurations leave one, which is compared with nothing: then no error is possible.
PLANS = {
    9: (Rung(step=10, keep=3),),
    12: (Rung(step=10, keep=4), Rung(step=30, keep=2)),
}


def matrix(
    dice: random.Random, configurations: int, seeds: int, rungs: Sequence[Rung], correlation: float
) -> tuple[dict[str, dict[int, SeedAtRungs]], dict[str, dict[int, float | None]]]:
    """Return the losses of a matrix of equal configurations at its rungs, and the final ones."""
    own = math.sqrt(1 - correlation**2)
    runs: dict[str, dict[int, SeedAtRungs]] = {}
    final: dict[str, dict[int, float | None]] = {}
    for name in (f"c{number}" for number in range(configurations)):
        runs[name], final[name] = {}, {}
        for seed in range(seeds):
            end = dice.gauss(0, 1)
            early = {rung.step: correlation * end + own * dice.gauss(0, 1) for rung in rungs}
            runs[name][seed] = SeedAtRungs(losses=early, over=True, final=end)
            final[name][seed] = end
    return runs, final


def has_false_better(verdict: FamilyVerdict) -> bool:
    """Return True if any of the equal configurations is called better."""
    return any(pair.outcome is not PairOutcome.OPEN for pair in verdict.pairs)


def false_better(configurations: int, seeds: int, correlation: float, *, count: int, seed: int) -> tuple[float, float]:
    """Return the share of matrices with a false "better": among the survivors, and among all without halving."""
    dice, rungs = random.Random(f"{seed} {configurations} {seeds} {correlation}"), PLANS[configurations]
    rules, halved, whole = Rules(seeds=tuple(range(seeds))), 0, 0
    for _ in range(count):
        runs, final = matrix(dice, configurations, seeds, rungs, correlation)
        halved += has_false_better(fixed_verdict(of_survivors(final, replay_halving(runs, rungs)), rules))
        whole += has_false_better(fixed_verdict(final, rules))
    return halved / count, whole / count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000, help="matrices per row")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.count < 1:
        parser.error(f"--count {args.count} is below 1")
    error = math.sqrt(0.05 * 0.95 / args.count)
    bound = 0.05 + 3 * error
    print(f"{args.count} matrices per row; standard error at 5 %: {error:.2%}; 5 % and 3 of them: {bound:.2%}")
    print("| configurations | survivors | seeds | correlation | false better | without halving |")
    print("|---:|---:|---:|---:|---:|---:|")
    within = True
    for configurations, rungs in PLANS.items():
        for seeds in SEEDS:
            for correlation in CORRELATIONS:
                halved, whole = false_better(configurations, seeds, correlation, count=args.count, seed=args.seed)
                within &= halved <= bound
                row = (configurations, rungs[-1].keep, seeds, correlation, f"{halved:.1%}", f"{whole:.1%}")
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
