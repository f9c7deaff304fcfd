"""Verdicts with a fixed number of seeds: Student's paired t test, Welch's test if the seeds do not match.

Sources: NIST/SEMATECH e-Handbook of Statistical Methods 1.3.5.3 (paired and unequal variances); B. L. Welch, Biometrika
34 (1947), for the degrees of freedom; Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15 (1987), for two
one-sided tests of equivalence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
    Pair,
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
    diverged = {name: sum(map(has_diverged, known.values())) for name, known in losses.items()}
    means = {name: math.fsum(known.values()) / len(known) if known else None for name, known in finite.items()}
    if len(family) > MOST_LISTED and all(len(known) < FEWEST for known in finite.values()):
        # A thousand configurations with one seed each have half a million pairs, and none of them has a test.
        family = pairs_of(losses, reference_of(means, {}, rules.baseline)[0])

    def test_of(pair: Pair, *, whole: bool) -> FixedTest:
        a, b = pair
        return _tested(pair, finite[a], finite[b], (diverged[a], diverged[b]), rules, whole=whole)

    # The pairs beyond those that a report lists need an outcome only: of 333 configurations, that is nine of ten.
    whole = len(family) <= MOST_LISTED
    tests = [test_of(pair, whole=whole) for pair in family]
    levels = dict(zip(family, _corrections(tests, rules), strict=True))
    found = {
        pair: _decided(test, rules, len(losses) - 1, levels[pair], whole=whole)
        for pair, test in zip(family, tests, strict=True)
    }
    reference, _ = reference_of(means, {pair: verdict.outcome for pair, verdict in found.items()}, rules.baseline)
    ordered = reported_pairs(reference, means, found.keys())
    for pair in () if whole else ordered[:MOST_LISTED]:
        known = pair if pair in found else pair[::-1]
        found[known] = _decided(test_of(known, whole=True), rules, len(losses) - 1, levels[known])
    return FamilyVerdict(
        rules=rules,
        reference=reference,
        means=means,
        pairs=tuple(found[pair] if pair in found else reversed_pair(found[pair[::-1]]) for pair in ordered),
        diverged=diverged,
    )


def tested(names: Pair, a: Mapping[int, float | None], b: Mapping[int, float | None], rules: Rules) -> FixedTest:
    """Return the test of a against b, which map a seed to a loss; losses that are missing or not finite are ignored.

    With at least two common seeds: paired t test of the differences by seed. A seed fixes the data order of both, so
    its effect cancels out. Otherwise, with at least two seeds each: Welch's test. Otherwise no test.
    """
    diverged = sum(map(has_diverged, a.values())), sum(map(has_diverged, b.values()))
    return _tested(names, _finite(a), _finite(b), diverged, rules)


def _tested(
    names: Pair,
    a: Mapping[int, float],
    b: Mapping[int, float],
    diverged: tuple[int, int],
    rules: Rules,
    *,
    whole: bool = True,
) -> FixedTest:
    """Return the test of finite losses. diverged: seeds of a and of b.  whole: with all numbers that a report lists."""
    seeds = tuple(sorted(a.keys() & b.keys()))
    open_pair = partial(PairVerdict, a=names[0], b=names[1], outcome=PairOutcome.OPEN, seeds=seeds, diverged=diverged)
    if len(seeds) >= FEWEST:
        return _paired(open_pair, [a[seed] for seed in seeds], [b[seed] for seed in seeds], rules, whole=whole)
    difference = math.fsum(a.values()) / len(a) - math.fsum(b.values()) / len(b) if a and b else None
    if len(a) >= FEWEST and len(b) >= FEWEST:
        return _welch(partial(open_pair, difference=difference), list(a.values()), list(b.values()), rules)
    counted = "one seed" if len(a) == len(b) == 1 else f"{len(a)} and {len(b)} seeds, {len(seeds)} in common"
    return FixedTest(pair=open_pair(difference=difference, method=Method.NONE, reason=f"{counted}: not significant"))


def corrected(tests: Sequence[FixedTest], rules: Rules, others: int) -> list[PairVerdict]:
    """Return the verdicts of a family, Holm-corrected for the number of its tests.

    others: configurations that the reference is compared with. "equivalent" is tested at alpha / others.
    """
    return [
        _decided(test, rules, others, correction)
        for test, correction in zip(tests, _corrections(tests, rules), strict=True)
    ]


def _corrections(tests: Sequence[FixedTest], rules: Rules) -> list[tuple[float, float]]:
    """Return for each test its Holm-corrected p and the two-sided level that Holm's procedure asks of it."""
    p_values = [1.0 if test.pair.p is None else test.pair.p for test in tests]
    return list(zip(holm(p_values), holm_levels(p_values, rules.alpha), strict=True))


def _finite(known: Mapping[int, float | None]) -> dict[int, float]:
    return {seed: loss for seed, loss in known.items() if loss is not None and is_finite(loss)}


def _paired(
    open_pair: Callable[..., PairVerdict], a: Sequence[float], b: Sequence[float], rules: Rules, *, whole: bool
) -> FixedTest:
    differences = [x - y for x, y in zip(a, b, strict=True)]
    n, largest = len(differences), max(map(abs, [*a, *b]))
    difference, variance = math.fsum(differences) / n, running_variances(differences, largest)[-1]
    open_pair = partial(
        open_pair,
        difference=difference,
        deviation=math.sqrt(variance),
        sign_flip_p=sign_flip_p(differences, largest) if whole else None,
        share_removed=share_removed(a, b) if whole else None,
    )
    if variance == 0:
        return _untested(open_pair, a, b)
    error = math.sqrt(variance / n)
    interval, p = _evidence(difference, error, n - 1, rules)
    return FixedTest(
        pair=open_pair(method=Method.PAIRED, interval=interval, p=p),
        variances=(variance,),
        freedom=n - 1,
        error=error,
        fewer=n,
    )


def _welch(open_pair: Callable[..., PairVerdict], a: Sequence[float], b: Sequence[float], rules: Rules) -> FixedTest:
    variances = tuple(map(sample_variance, (a, b)))
    shares = [variance / len(side) for variance, side in zip(variances, (a, b), strict=True)]
    total = sum(shares)
    if _is_copied(a, b) or total == 0:
        return _untested(open_pair, a, b)
    # The Welch-Satterthwaite equation for the degrees of freedom.
    below = sum((share / total) ** 2 / (len(side) - 1) for share, side in zip(shares, (a, b), strict=True))
    error = math.sqrt(total)
    interval, p = _evidence(math.fsum(a) / len(a) - math.fsum(b) / len(b), error, 1 / below, rules)
    return FixedTest(
        pair=open_pair(method=Method.WELCH, interval=interval, p=p),
        variances=variances,
        freedom=1 / below,
        error=error,
        fewer=min(len(a), len(b)),
    )


def _is_copied(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return True if the seeds of each side have the same loss: they are copies of one measurement."""
    return len(set(a)) == len(set(b)) == 1


def _untested(open_pair: Callable[..., PairVerdict], a: Sequence[float], b: Sequence[float]) -> FixedTest:
    """Return a pair whose variance of 0 says nothing about the error of its difference."""
    same = "loss" if _is_copied(a, b) else "difference"
    return FixedTest(
        pair=open_pair(method=Method.NONE, reason=f"all seeds have the same {same}: they count as one seed")
    )


def _evidence(difference: float, error: float, freedom: float, rules: Rules) -> tuple[Interval, float]:
    """Return the interval and the two-sided p of a difference with this standard error."""
    half = critical(rules.alpha / 2, freedom) * error
    interval = Interval(low=difference - half, high=difference + half, level=rules.confidence)
    return interval, min(1.0, 2 * lower_tail(-abs(difference) / error, freedom))


def _decided(
    test: FixedTest, rules: Rules, others: int, correction: tuple[float, float], *, whole: bool = True
) -> PairVerdict:
    """Return the verdict of a pair. correction: its corrected p, and the two-sided level that is asked of it."""
    pair, (p_holm, level) = test.pair, correction
    if pair.p is None:
        return pair
    difference = pair.difference or 0.0
    outcome, unstable = outcome_of(difference, p_holm, rules.alpha, pair.diverged)
    if _is_equivalent(test, rules, others):
        outcome, unstable = PairOutcome.EQUIVALENT, False
    is_open = outcome is PairOutcome.OPEN and not unstable
    pair = replace(
        pair, outcome=outcome, p_holm=p_holm, level=level, no_more=NoMoreSeeds.DIVERGED if unstable else None
    )
    if not whole:
        return pair
    return replace(
        pair,
        detectable=test.error * detectable_shift(test.freedom, level / 2),
        margin=abs(difference) + critical(rules.alpha / others, test.freedom) * test.error,
        more_seeds=_more_seeds(test, rules, others, level) if is_open else None,
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
