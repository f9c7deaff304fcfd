"""The tests of pairs of configurations: a paired t test, looked at once or after every seed from the first look on.

With a fixed number of seeds all losses count, and there is one look. With adaptive seeds (rules.seeds) the losses count
up to the first seed that is to come. docs/verdict.md has the simulations and the limits. For the pair (a, b),
d_s = a(s) - b(s) for the seeds with a loss on both sides, in seed order; m_n and s_n^2 are mean and variance of the
first n.

- Look n: t_n = m_n sqrt(n / v_n), in both directions. The p of a fixed number is Student's, that of adaptive seeds the
  sequential one of kmatrix.verdict.sequential.
- Variance: v_n = s_n^2 with n - 1 degrees of freedom. With adaptive seeds v_n = (d0 S_n + (n - 1) s_n^2) / (d0 + n - 1)
  with d0 = min(2, k - 2) degrees of freedom more for k configurations. S_n is the mean variance of all pairs of the
  family, each with its first min(n, all) differences, weighted by degrees of freedom.
  Source: Smyth, Statistical Applications in Genetics and Molecular Biology 3 (2004).
- A fixed number with fewer than two seeds in common: Welch's test, Biometrika 34 (1947). Adaptive seeds have no test.
- better, worse: two-sided p at most alpha, Holm-corrected over the family.
- equivalent: the larger one-sided p, of "below the margin" and "above minus the margin", at most alpha, Holm-corrected
  over the family by itself. It has precedence: a difference that is real and smaller than the margin is "equivalent".
  Source: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15 (1987).
- futile: from 4 seeds on, if at the favourable end of a forecast of 90 % the last look would decide it neither way.
  Stopping for it costs no error, and would not if it were ignored.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kmatrix.stats import Interval, critical, lower_tail, sample_deviation, sample_variance
from kmatrix.verdict.family import FamilyVerdict, Losses, Method, NoMoreSeeds, Pair, PairOutcome, Rules
from kmatrix.verdict.power import detectable_shift
from kmatrix.verdict.sequential import Looks

LARGEST = 1e50  # nats/token: a larger loss diverged, and powers of it would not fit a float
FEWEST = 2  # losses that have a variance
ROUNDING = 4  # units in the last place of a loss: differences that vary by less are equal
SHARED = 2  # most degrees of freedom that the variance of the family is worth
FEWEST_FUTILE = 4  # seeds of a pair before it may be called futile
FORECAST = 0.05  # one-sided: beyond the forecast of the difference at the last look
MOST_MORE = 99  # more seeds than that are not a plan
MOST_SPREAD = 3.0  # ratio of standard deviations: below, few seeds find bad runs as well
HELPED_BY_SEEDS = (None, NoMoreSeeds.MAXIMUM, NoMoreSeeds.FUTILE)  # an open pair that further seeds may decide

Names = tuple[str, str]  # of the two configurations of a pair


@dataclass(frozen=True, slots=True)
class Side:
    """The losses of a configuration that count."""

    finite: dict[int, float]  # by seed, in seed order
    diverged: int  # seeds
    over: int  # seeds, with a loss or without


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What the losses say about configuration a, compared with b. Losses and differences in nats/token."""

    names: Names
    seeds: tuple[int, ...]  # in common
    losses: tuple[list[float], list[float]]  # of these seeds; of all if fewer than two are in common
    difference: float | None
    diverged: tuple[int, int]
    over: int  # seeds that are over on both sides
    variances: list[float] = field(default_factory=list)  # of the first n differences, from 2 on
    # The last look.
    method: Method = Method.NONE
    parts: tuple[float, ...] = ()  # variance of a difference; of Welch's test, those of a and of b
    worth: int = 0  # degrees of freedom of the variance of the family
    count: int = 0  # seeds; of Welch's test, those of the side that has fewer
    error: float = 0.0  # standard error of the difference
    freedom: float = 0.0  # degrees of freedom of the variance
    low: float = 1.0  # one-sided p of "the mean difference is below 0"; sequential: valid at any look
    high: float = 1.0  # of "it is above 0"
    equal: float = 1.0  # of "it is within the margin"
    # What the family makes of it.
    p_holm: float = 1.0
    level: float = 1.0  # two-sided level that Holm's procedure asks of "better" and "worse"
    equal_level: float = 1.0  # one-sided level that it asks of "equivalent", if this one is the next
    outcome: PairOutcome = PairOutcome.OPEN
    no_more: NoMoreSeeds | None = None

    @property
    def p(self) -> float | None:
        """The two-sided p, None without a test."""
        return None if self.method is Method.NONE else min(1.0, 2 * min(self.low, self.high))

    def error_of(self, seeds: int) -> float:
        """Return the standard error with so many seeds on both sides."""
        return math.sqrt(sum(self.parts) / seeds)

    def freedom_of(self, seeds: int) -> float:
        """Return the degrees of freedom with so many seeds on both sides."""
        total = sum(self.parts)  # divided first: squares of tiny variances would be 0
        return self.worth + (seeds - 1) / sum((part / total) ** 2 for part in self.parts)


def verdict_on(losses: Losses, rules: Rules) -> FamilyVerdict:
    """Return the verdict on one family of configurations.

    The family is known before the first run: a pair that could not be tested counts in Holm's correction.
    Raises ValueError without a configuration or if the baseline is unknown.
    """
    family = pairs_of(losses, rules.baseline)
    sides = {name: side_of(known, rules) for name, known in losses.items()}
    means = {name: _mean(list(side.finite.values())) for name, side in sides.items()}
    if sum(len(side.finite) >= FEWEST for side in sides.values()) < 2:
        # A thousand configurations with one seed each have half a million pairs, and none of them has a test.
        family = pairs_of(losses, reference_of(means, {}, rules.baseline)[0])
    tests = {(a, b): _compared((a, b), sides[a], sides[b], rules) for a, b in family}
    worth = max(0, min(SHARED, len(losses) - 2)) if rules.seeds else 0
    _look(list(tests.values()), rules, worth)
    _decide(list(tests.values()), rules)
    outcomes = {names: test.outcome for names, test in tests.items()}
    reference, beaten = reference_of(means, outcomes, rules.baseline)
    if rules.seeds:
        _end(list(tests.values()), sides, beaten, rules)
    pairs = []
    ordered = [reference, *(name for name in by_mean(means) if name != reference)]
    for a, b in itertools.combinations(ordered, 2):
        if (a, b) in tests:
            pairs.append(described(tests[a, b], rules))
        elif (b, a) in tests:
            pairs.append(described(tests[b, a], rules).mirrored())
    return FamilyVerdict(rules=rules, reference=reference, means=means, pairs=tuple(pairs))


def tested(names: Names, a: Mapping[int, float | None], b: Mapping[int, float | None], rules: Rules) -> Evidence:
    """Return the evidence of a against b, which map a seed to a loss, as if there were no other pair."""
    found = _compared(names, side_of(a, rules), side_of(b, rules), rules)
    _look([found], rules, 0)
    return found


def corrected(tests: Sequence[Evidence], rules: Rules) -> list[Pair]:
    """Return the verdicts on the pairs of a family, Holm-corrected for their number."""
    _decide(tests, rules)
    return [described(test, rules) for test in tests]


def side_of(known: Mapping[int, float | None], rules: Rules) -> Side:
    """Return the losses that count: all, or with adaptive seeds those of the leading seeds that are over.

    A later seed that ended earlier waits, so that the looks do not depend on the speed of the runs.
    """
    seeds = list(itertools.takewhile(known.__contains__, rules.seeds)) if rules.seeds else sorted(known)
    finite = {seed: loss for seed in seeds if (loss := known[seed]) is not None and abs(loss) < LARGEST}  # not NaN
    diverged = sum(known[seed] is not None for seed in seeds) - len(finite)
    return Side(finite, diverged, len(seeds))


def pairs_of(losses: Losses, baseline: str | None) -> list[Names]:
    """Return the comparisons of a family: the baseline with each other configuration, or all pairs.

    They are known before the first run. A leader that is chosen from the losses, compared with the others, is not such
    a family: it is called better too often. Raises ValueError without a configuration or if the baseline is unknown.
    """
    if not losses:
        raise ValueError("no configuration to compare")
    if baseline is None:
        return list(itertools.combinations(losses, 2))
    if baseline not in losses:
        raise ValueError(f"the baseline {baseline!r} is not one of the configurations")
    return [(baseline, name) for name in losses if name != baseline]


def reference_of(
    means: Mapping[str, float | None], outcomes: Mapping[Names, PairOutcome], baseline: str | None
) -> tuple[str, frozenset[str]]:
    """Return the reference, and the configurations that are out because they are worse than another one.

    With a baseline, none is out: each is compared with it alone. Otherwise the reference is the lowest mean among the
    configurations that are not worse than any other.
    """
    if baseline is not None:
        return baseline, frozenset()
    beaten = frozenset(
        a if outcome is PairOutcome.WORSE else b
        for (a, b), outcome in outcomes.items()
        if outcome in (PairOutcome.BETTER, PairOutcome.WORSE)
    )
    ordered = by_mean(means)
    return next((name for name in ordered if name not in beaten), ordered[0]), beaten


def by_mean(means: Mapping[str, float | None]) -> list[str]:
    """Return the configurations by their mean, lowest first, those without one last; equal ones by name."""
    return sorted(means, key=lambda name: (math.inf if (known := means[name]) is None else known, name))


def holm(p_values: Sequence[float], alpha: float) -> tuple[list[float], list[float]]:
    """Return Holm-corrected p values, and the level that the procedure asks of each, in the order given.

    The i-th smallest of m is multiplied by m - i + 1; each is at least as large as the one before it. The level of one
    that is rejected is alpha / (m - i + 1), that of the others alpha / their number.
    Source: S. Holm, Scandinavian Journal of Statistics 6 (1979); for sequential p values: Maurer, Bretz, Statistics in
    Biopharmaceutical Research 5 (2013).
    """
    size, floor = len(p_values), 0.0
    ranked = sorted(range(size), key=p_values.__getitem__)
    found = [0.0] * size
    for rank, place in enumerate(ranked):
        floor = max(floor, min(1.0, (size - rank) * p_values[place]))
        found[place] = floor
    standing = max(1, sum(p > alpha for p in found))
    levels = [alpha / standing] * size
    for rank, place in enumerate(ranked):
        if found[place] <= alpha:
            levels[place] = alpha / (size - rank)
    return found, levels


def described(test: Evidence, rules: Rules) -> Pair:
    """Return the verdict on a pair with all numbers that a report prints."""
    numbers: dict[str, Any] = {}
    if test.method is Method.NONE:
        numbers["reason"] = _why_untested(test, rules)
    else:
        looks, difference = _looks(rules), test.difference or 0.0
        half = critical(looks.level(rules.alpha / 2, test.count), test.freedom) * test.error
        one_sided = critical(looks.level(test.equal_level, test.count), test.freedom) * test.error
        shift = detectable_shift(test.freedom, looks.level(test.level / 2, test.count))
        seeds_help = test.outcome is PairOutcome.OPEN and test.no_more in HELPED_BY_SEEDS
        numbers = {
            "interval": Interval(low=difference - half, high=difference + half, level=rules.confidence),
            "p": test.p,
            "p_holm": test.p_holm,
            "detectable": test.error * shift,
            "margin": abs(difference) + one_sided,
            "more_seeds": _more_seeds(test, rules) if seeds_help else None,
            "spread_ratio": _spread_ratio(test),
        }
    return Pair(
        a=test.names[0],
        b=test.names[1],
        outcome=test.outcome,
        method=test.method,
        seeds=test.seeds,
        difference=test.difference,
        deviation=math.sqrt(test.variances[-1]) if test.variances else None,
        diverged=test.diverged,
        no_more=test.no_more,
        **numbers,
    )


def _looks(rules: Rules) -> Looks:
    return Looks(max(rules.seeds_min, FEWEST), len(rules.seeds)) if rules.seeds else Looks(FEWEST)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _compared(names: Names, a: Side, b: Side, rules: Rules) -> Evidence:
    """Return the losses of a pair, without a look unless it is Welch's."""
    seeds = tuple(seed for seed in a.finite if seed in b.finite)
    paired = len(seeds) >= FEWEST
    losses = [[side.finite[seed] for seed in seeds] if paired else [*side.finite.values()] for side in (a, b)]
    found = Evidence(
        names=names,
        seeds=seeds,
        losses=(losses[0], losses[1]),
        difference=None,
        diverged=(a.diverged, b.diverged),
        over=min(a.over, b.over),
    )
    if paired:
        differences = [x - y for x, y in zip(*losses, strict=True)]
        found.variances = _running_variances(differences, max(map(abs, [*losses[0], *losses[1]])))
        found.difference = _mean(differences)
    elif losses[0] and losses[1]:
        found.difference = math.fsum(losses[0]) / len(losses[0]) - math.fsum(losses[1]) / len(losses[1])
        if not rules.seeds and min(map(len, losses)) >= FEWEST:
            _welch(found, rules)
    return found


def _welch(found: Evidence, rules: Rules) -> None:
    """Fill in Welch's test, with the Welch-Satterthwaite equation for the degrees of freedom."""
    found.parts = tuple(map(sample_variance, found.losses))
    shares = [part / len(side) for part, side in zip(found.parts, found.losses, strict=True)]
    total = math.fsum(shares)
    if total > 0 and not _is_copied(found):
        below = sum((share / total) ** 2 / (len(side) - 1) for share, side in zip(shares, found.losses, strict=True))
        found.method, found.count = Method.WELCH, min(map(len, found.losses))
        found.error, found.freedom = math.sqrt(total), 1 / below
        tails = _tails(found.difference or 0.0, found.error, found.freedom, rules.min_difference)
        found.low, found.high, found.equal = tails[0], tails[1], max(tails[2:])


def _look(family: Sequence[Evidence], rules: Rules, worth: int) -> None:
    """Fill in the looks of the paired tests. worth: degrees of freedom of the variance of the family."""
    looks = _looks(rules)
    longest = max((len(found.seeds) for found in family), default=0)
    shared = {n: _shared_variance(n, family) for n in looks.after(longest)} if worth else {}
    for found in family:
        smallest = [math.inf] * 4
        differences = [x - y for x, y in zip(*found.losses, strict=True)] if found.variances else []
        for n in looks.after(len(differences)):
            found.worth = worth
            variance, freedom = found.variances[n - FEWEST], worth + n - 1
            if worth:
                variance = (worth * shared[n] + (n - 1) * variance) / freedom
            if variance > 0:  # else all seeds gave the same difference: they count as one
                found.method = Method.SEQUENTIAL if rules.seeds else Method.PAIRED
                found.parts, found.count = (variance,), n
                found.error, found.freedom = math.sqrt(variance / n), freedom
                mean = math.fsum(differences[:n]) / n
                tails = _tails(mean, found.error, freedom, rules.min_difference)
                smallest = [min(old, new / looks.weight(n)) for old, new in zip(smallest, tails, strict=True)]
        if found.method in (Method.PAIRED, Method.SEQUENTIAL):
            found.low, found.high = looks.p(smallest[0]), looks.p(smallest[1])
            found.equal = 1.0 if rules.min_difference is None else looks.p(max(smallest[2:]))


def _shared_variance(n: int, family: Sequence[Evidence]) -> float:
    """Return the mean variance of a difference over the family, each pair with its first n seeds or all it has.

    Pairs that are decided stay in: what is still open has, by selection, a small variance.
    """
    parts = [
        (used - 1, found.variances[used - FEWEST]) for found in family if (used := min(n, len(found.seeds))) >= FEWEST
    ]
    return math.fsum(freedom * variance for freedom, variance in parts) / sum(freedom for freedom, _ in parts)


def _tails(mean: float, error: float, freedom: float, margin: float | None) -> list[float]:
    """Return the one-sided p of a mean below 0, above 0, below the margin, and above minus the margin."""
    found = [lower_tail(mean / error, freedom), lower_tail(-mean / error, freedom)]
    if margin is None:
        return [*found, 1.0, 1.0]
    return [*found, lower_tail((mean - margin) / error, freedom), lower_tail(-(mean + margin) / error, freedom)]


def _decide(tests: Sequence[Evidence], rules: Rules) -> None:
    """Fill in what the family makes of each test: its outcome, its corrected p and the levels."""
    p_holm, levels = holm([1.0 if test.p is None else test.p for test in tests], rules.alpha)
    equal, _ = holm([test.equal for test in tests], rules.alpha)
    standing = max(1, sum(p > rules.alpha for p in equal))
    for test, p, level, p_equal in zip(tests, p_holm, levels, equal, strict=True):
        test.p_holm, test.level, test.equal_level = p, level, rules.alpha / standing
        a_leads = test.low < test.high
        better, worse = test.diverged if a_leads else test.diverged[::-1]
        if p_equal <= rules.alpha:
            test.outcome = PairOutcome.EQUIVALENT
        elif p <= rules.alpha and better > worse:
            test.no_more = NoMoreSeeds.DIVERGED
        elif p <= rules.alpha and test.low != test.high:
            test.outcome = PairOutcome.BETTER if a_leads else PairOutcome.WORSE


def _end(tests: Sequence[Evidence], sides: Mapping[str, Side], beaten: frozenset[str], rules: Rules) -> None:
    """Fill in why open pairs get no further seed."""
    first = min(_looks(rules).first, len(rules.seeds))
    # Without a loss in its first seeds, a configuration gets no other seed, and costs the reference none.
    silent = {name for name, side in sides.items() if side.over >= first and not side.finite}
    for test in tests:
        if test.outcome is PairOutcome.OPEN and test.no_more is None:
            if silent.intersection(test.names):
                test.no_more = NoMoreSeeds.NO_LOSS
            elif beaten.intersection(test.names):
                test.no_more = NoMoreSeeds.BEATEN
            elif test.over >= len(rules.seeds):
                test.no_more = NoMoreSeeds.MAXIMUM
            elif test.count >= FEWEST_FUTILE and _is_futile(test, rules):
                test.no_more = NoMoreSeeds.FUTILE


def _is_futile(test: Evidence, rules: Rules) -> bool:
    """Return True if the seeds that are left would decide a pair neither way."""
    most, looks, difference = len(rules.seeds), _looks(rules), abs(test.difference or 0.0)
    left = math.sqrt(sum(test.parts) * max(0.0, 1 / test.count - 1 / most))
    reach = critical(FORECAST, test.freedom) * left
    freedom, error = test.freedom_of(most), test.error_of(most)
    if difference + reach >= critical(looks.level(test.level / 2, most), freedom) * error:
        return False
    if rules.min_difference is None:
        return True
    half = critical(looks.level(test.equal_level, most), freedom) * error
    return max(difference - reach, 0.0) + half > rules.min_difference


def _more_seeds(test: Evidence, rules: Rules) -> int | None:
    """Return how many more seeds would decide a pair if mean and variance stay as they are; None: too many."""
    looks, difference, margin = _looks(rules), abs(test.difference or 0.0), rules.min_difference

    def decides(more: int) -> bool:
        seeds = test.count + more
        freedom, error = test.freedom_of(seeds), test.error_of(seeds)
        if difference >= critical(looks.level(test.level / 2, seeds), freedom) * error:
            return True
        return margin is not None and (
            difference + critical(looks.level(test.equal_level, seeds), freedom) * error <= margin
        )

    # If a number of seeds decides it, each larger one does.
    return 1 + bisect_left(range(1, MOST_MORE), True, key=decides) if decides(MOST_MORE) else None


def _spread_ratio(test: Evidence) -> float | None:
    """Return how much more the losses of the better one vary than those of the worse one, if that is a warning."""
    if test.outcome not in (PairOutcome.BETTER, PairOutcome.WORSE):
        return None
    better, worse = test.losses if test.outcome is PairOutcome.BETTER else test.losses[::-1]
    spreads = sample_deviation(better), sample_deviation(worse)
    ratio = spreads[0] / spreads[1] if spreads[0] and spreads[1] else 0.0
    return ratio if ratio > MOST_SPREAD else None


def _is_copied(test: Evidence) -> bool:
    """Return True if the seeds of each side have the same loss: they are copies of one measurement."""
    return all(len(set(side)) == 1 for side in test.losses)


def _why_untested(test: Evidence, rules: Rules) -> str:
    """Return one sentence on why a pair was not tested."""
    seeds, first = len(test.seeds), _looks(rules).first
    if rules.seeds and seeds < first:
        return f"{'one seed' if seeds == 1 else f'{seeds} seeds'}: the first look is after {first}"
    a, b = sorted(map(len, test.losses))
    if min(a, b) >= FEWEST:
        return f"all seeds have the same {'loss' if _is_copied(test) else 'difference'}: they count as one seed"
    return f"{'one seed' if a == b == 1 else f'{a} and {b} seeds, {seeds} in common'}: not significant"


def _running_variances(differences: Sequence[float], largest: float) -> list[float]:
    """Return the variance of the first n differences, n from 2 on. largest: the largest loss.

    The squares are updated as in Welford, Technometrics 4 (1962), which keeps the digits of small differences.
    """
    rounding = ROUNDING * math.ulp(largest)
    result: list[float] = []
    mean = squares = 0.0
    low, high = math.inf, -math.inf
    for n, difference in enumerate(differences, start=1):
        step = difference - mean
        mean += step / n
        squares += step * (difference - mean)
        low, high = min(low, difference), max(high, difference)
        if n >= FEWEST:
            result.append(squares / (n - 1) if high - low > rounding else 0.0)
    return result
