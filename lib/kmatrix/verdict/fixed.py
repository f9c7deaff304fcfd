"""Verdicts with a fixed number of seeds: Student's paired t test, Welch's test if the seeds do not match.

Sources: NIST/SEMATECH e-Handbook of Statistical Methods 1.3.5.3 (paired and unequal variances); B. L. Welch, Biometrika
34 (1947), for the degrees of freedom; Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15 (1987), for two
one-sided tests of equivalence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kmatrix.stats import Interval
from kmatrix.verdict.family import (
    MOST_LISTED,
    FamilyVerdict,
    Losses,
    Method,
    NoMoreSeeds,
    PairOutcome,
    PairVerdict,
    Rules,
)
from kmatrix.verdict.pairs import (
    fewest,
    has_diverged,
    holm,
    holm_levels,
    is_finite,
    outcome_of,
    pairs_of,
    reference_of,
    reported_pairs,
    reversed_pair,
    running_variances,
    sample_variance,
    share_removed,
    sign_flip_p,
)
from kmatrix.verdict.student import critical, detectable_shift, lower_tail

FEWEST = 2  # seeds that a test needs


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTest:
    """The test of one pair, before the correction for the number of comparisons."""

    pair: PairVerdict  # outcome and corrected numbers are not set
    variances: tuple[float, ...] = ()  # of a difference; of Welch's test, of a and of b; empty without a test
    freedom: float = 0.0
    error: float = 0.0  # standard error of the difference
    fewer: int = 0  # seeds of the side that has fewer

    def error_of(self, seeds: int) -> float:
        """Return the standard error with so many seeds on both sides."""
        return math.sqrt(sum(self.variances) / seeds)

    def freedom_of(self, seeds: int) -> float:
        """Return the degrees of freedom with so many seeds on both sides."""
        total = sum(self.variances)  # divided first: squares of tiny variances would be 0
        return (seeds - 1) / sum((variance / total) ** 2 for variance in self.variances)


def fixed_verdict(losses: Losses, rules: Rules) -> FamilyVerdict:
    """Return the verdict on all losses that are given, whatever rules.seeds says.

    The family is known before the first run: a pair that could not be tested counts in Holm's correction.
    Raises ValueError without a configuration or if the baseline is unknown.
    """
    family = pairs_of(losses, rules.baseline)
    finite = {name: _finite(known) for name, known in losses.items()}
    means = {name: math.fsum(known.values()) / len(known) if known else None for name, known in finite.items()}
    if len(family) > MOST_LISTED and all(len(known) < FEWEST for known in finite.values()):
        # A thousand configurations with one seed each have half a million pairs, and none of them has a test.
        family = pairs_of(losses, reference_of(means, {}, rules.baseline)[0])
    tests = [tested(pair, losses[pair[0]], losses[pair[1]], rules) for pair in family]
    found = dict(zip(family, corrected(tests, rules, len(losses) - 1), strict=True))
    reference, _ = reference_of(means, {pair: verdict.outcome for pair, verdict in found.items()}, rules.baseline)
    return FamilyVerdict(
        rules=rules,
        reference=reference,
        means=means,
        pairs=tuple(
            found[pair] if pair in found else reversed_pair(found[pair[::-1]])
            for pair in reported_pairs(reference, means, found.keys())
        ),
        diverged={name: sum(map(has_diverged, known.values())) for name, known in losses.items()},
    )


def tested(
    names: tuple[str, str], a: Mapping[int, float | None], b: Mapping[int, float | None], rules: Rules
) -> FixedTest:
    """Return the test of a against b, which map a seed to a loss; losses that are missing or not finite are ignored.

    With at least two common seeds: paired t test of the differences by seed. A seed fixes the data order of both, so
    its effect cancels out. Otherwise, with at least two seeds each: Welch's test. Otherwise no test.
    """
    diverged = sum(map(has_diverged, a.values())), sum(map(has_diverged, b.values()))
    a, b = _finite(a), _finite(b)
    seeds = tuple(sorted(a.keys() & b.keys()))
    pair = PairVerdict(
        a=names[0],
        b=names[1],
        outcome=PairOutcome.OPEN,
        method=Method.NONE,
        seeds=seeds,
        difference=math.fsum(a.values()) / len(a) - math.fsum(b.values()) / len(b) if a and b else None,
        diverged=diverged,
    )
    if len(seeds) >= FEWEST:
        return _paired(pair, [a[seed] for seed in seeds], [b[seed] for seed in seeds], rules)
    if len(a) >= FEWEST and len(b) >= FEWEST:
        return _welch(pair, list(a.values()), list(b.values()), rules)
    counted = "one seed" if len(a) == len(b) == 1 else f"{len(a)} and {len(b)} seeds, {len(seeds)} in common"
    return FixedTest(pair=replace(pair, reason=f"{counted}: not significant"))


def corrected(tests: Sequence[FixedTest], rules: Rules, others: int) -> list[PairVerdict]:
    """Return the verdicts of a family, Holm-corrected for the number of its tests.

    others: configurations that the reference is compared with. "equivalent" is tested at alpha / others.
    """
    p_values = [1.0 if test.pair.p is None else test.pair.p for test in tests]
    return [
        _decided(test, rules, others, p_holm=p, level=level)
        for test, p, level in zip(tests, holm(p_values), holm_levels(p_values, rules.alpha), strict=True)
    ]


def _finite(known: Mapping[int, float | None]) -> dict[int, float]:
    return {seed: loss for seed, loss in known.items() if loss is not None and is_finite(loss)}


def _paired(pair: PairVerdict, a: Sequence[float], b: Sequence[float], rules: Rules) -> FixedTest:
    differences = [x - y for x, y in zip(a, b, strict=True)]
    largest = max(map(abs, [*a, *b]))
    variance = running_variances(differences, largest)[-1]
    pair = replace(
        pair,
        difference=math.fsum(differences) / len(differences),
        deviation=math.sqrt(variance),
        sign_flip_p=sign_flip_p(differences, largest),
        share_removed=share_removed(a, b),
    )
    if variance == 0:
        return _untested(pair, a, b)
    n = len(differences)
    return _with_test(
        FixedTest(pair=pair, variances=(variance,), freedom=n - 1, error=math.sqrt(variance / n), fewer=n),
        Method.PAIRED,
        rules,
    )


def _welch(pair: PairVerdict, a: Sequence[float], b: Sequence[float], rules: Rules) -> FixedTest:
    variances = tuple(map(sample_variance, (a, b)))
    shares = [variance / len(side) for variance, side in zip(variances, (a, b), strict=True)]
    total = sum(shares)
    if _is_copied(a, b) or total == 0:
        return _untested(pair, a, b)
    # The Welch-Satterthwaite equation for the degrees of freedom.
    below = sum((share / total) ** 2 / (len(side) - 1) for share, side in zip(shares, (a, b), strict=True))
    test = FixedTest(
        pair=pair,
        variances=variances,
        freedom=1 / below,
        error=math.sqrt(total),
        fewer=min(len(a), len(b)),
    )
    return _with_test(test, Method.WELCH, rules)


def _is_copied(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return True if the seeds of each side have the same loss: they are copies of one measurement."""
    return len(set(a)) == len(set(b)) == 1


def _untested(pair: PairVerdict, a: Sequence[float], b: Sequence[float]) -> FixedTest:
    """Return a pair whose variance of 0 says nothing about the error of its difference."""
    same = "loss" if _is_copied(a, b) else "difference"
    return FixedTest(pair=replace(pair, reason=f"all seeds have the same {same}: they count as one seed"))


def _with_test(test: FixedTest, method: Method, rules: Rules) -> FixedTest:
    """Return a test with its p value and interval."""
    difference = test.pair.difference or 0.0
    half = critical(rules.alpha / 2, test.freedom) * test.error
    pair = replace(
        test.pair,
        method=method,
        interval=Interval(low=difference - half, high=difference + half, level=rules.confidence),
        p=min(1.0, 2 * lower_tail(-abs(difference) / test.error, test.freedom)),
    )
    return replace(test, pair=pair)


def _decided(test: FixedTest, rules: Rules, others: int, *, p_holm: float, level: float) -> PairVerdict:
    """Return the verdict of a pair. level: two-sided, that Holm's procedure asks of it."""
    pair = test.pair
    if pair.p is None:
        return pair
    difference = pair.difference or 0.0
    outcome, unstable = outcome_of(difference, p_holm, rules.alpha, pair.diverged)
    if _is_equivalent(test, rules, others):
        outcome, unstable = PairOutcome.EQUIVALENT, False
    is_open = outcome is PairOutcome.OPEN and not unstable
    return replace(
        pair,
        outcome=outcome,
        p_holm=p_holm,
        level=level,
        detectable=test.error * detectable_shift(test.freedom, level / 2),
        margin=abs(difference) + critical(rules.alpha / others, test.freedom) * test.error,
        more_seeds=_more_seeds(test, rules, others, level) if is_open else None,
        no_more=NoMoreSeeds.DIVERGED if unstable else None,
    )


def _is_equivalent(test: FixedTest, rules: Rules, others: int) -> bool:
    """Return True if two one-sided tests find that the difference is smaller than the margin on both sides."""
    if rules.min_difference is None:
        return False
    nearest = rules.min_difference - abs(test.pair.difference or 0.0)
    return lower_tail(-nearest / test.error, test.freedom) <= rules.alpha / others


def _more_seeds(test: FixedTest, rules: Rules, others: int, level: float) -> int | None:
    """Return how many more seeds would decide a pair if mean and variance stay as they are; None: too many."""
    difference, margin = abs(test.pair.difference or 0.0), rules.min_difference

    def decides(more: int) -> bool:
        error, freedom = test.error_of(test.fewer + more), test.freedom_of(test.fewer + more)
        if difference >= critical(level / 2, freedom) * error:
            return True
        return margin is not None and difference + critical(rules.alpha / others, freedom) * error <= margin

    return fewest(decides)
