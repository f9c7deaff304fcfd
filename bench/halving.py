"""Simulate successive halving of equal configurations: how often a survivor gets a false "better", or "below".

    python bench/halving.py [--count 4000] [--seed 1]

Final losses are normal with a standard deviation of 1, equal configurations, without an effect of the seed. The loss at
each rung has the given correlation with the final loss of the same run. The survivors are those of `replay_halving`;
they are compared by `fixed_verdict` at 95 % over all their pairs, as in reports. The next column compares all
configurations, as without halving. The last ones test whether a survivor is below a target at which all configurations
are: corrected for all of them, as in reports, and for the survivors alone. Losses are drawn from --seed, so the table
is the same on every machine.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from kmatrix.verdict.family import FamilyVerdict, Losses, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict
from kmatrix.verdict.halving import Rung
from kmatrix.verdict.survivors import SeedAtRungs, of_survivors, replay_halving
from kmatrix.verdict.target import below_target

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


def is_called_below(losses: Losses, rules: Rules) -> bool:
    """Return True if any of the configurations, whose means are 0, is called below a target of 0."""
    return any(test.is_below for test in below_target(losses, 0.0, rules, adaptive=False).values())


def false_results(configurations: int, seeds: int, correlation: float, *, count: int, seed: int) -> list[float]:
    """Return the shares of matrices with a false result: the columns of the table.

    "better" among the survivors, and among all without halving; "below a target" of a survivor, corrected for all
    configurations, and for the survivors alone.
    """
    dice, rungs = random.Random(f"{seed} {configurations} {seeds} {correlation}"), PLANS[configurations]
    rules, found = Rules(seeds=tuple(range(seeds))), [0, 0, 0, 0]
    for _ in range(count):
        runs, final = matrix(dice, configurations, seeds, rungs, correlation)
        survivors = of_survivors(final, replay_halving(runs, rungs))
        found[0] += has_false_better(fixed_verdict(survivors, rules))
        found[1] += has_false_better(fixed_verdict(final, rules))
        found[2] += is_called_below({name: survivors.get(name, {}) for name in final}, rules)
        found[3] += is_called_below(survivors, rules)
    return [number / count for number in found]


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
    heads = ("configurations", "survivors", "seeds", "correlation", "false better", "without halving")
    print(f"| {' | '.join((*heads, 'false below', 'corrected for the survivors alone'))} |")
    print(f"|{'---:|' * 8}")
    within = True
    for configurations, rungs in PLANS.items():
        for seeds in SEEDS:
            for correlation in CORRELATIONS:
                found = false_results(configurations, seeds, correlation, count=args.count, seed=args.seed)
                within &= max(found[0], found[2]) <= bound
                row = (configurations, rungs[-1].keep, seeds, correlation, *(f"{share:.1%}" for share in found))
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
