"""Verdicts with adaptive seeds: a group-sequential paired t test, looked at after every seed from the first look on.

The method, its simulations and its limits: docs/verdict.md. For the pair (a, b), d_s = a(s) - b(s) for the seeds with a
loss on both sides, in seed order; m_n and s_n^2 are mean and variance of the first n.

- Variance: v_n = (d0 S_n + (n - 1) s_n^2) / (d0 + n - 1) with d0 = min(2, k - 2) for k configurations. S_n is the mean
  variance of all pairs of the family, each with its first min(n, all) differences, weighted by degrees of freedom.
  Source: Smyth, Statistical Applications in Genetics and Molecular Biology 3 (2004).
- Look n: t_n = m_n sqrt(n / v_n) with n - 1 + d0 degrees of freedom, in both directions. Their sequential p is that of
  kmatrix.verdict.sequential.
- better, worse: Holm-corrected two-sided p at most alpha, over the family.
- equivalent: both one-sided p, of "below the margin" and "above minus the margin", at most alpha / (k - 1). It has
  precedence: a difference that is real and smaller than the margin is "equivalent".
- futile: from 4 seeds on, if at the favourable end of a forecast of 90 % the last look would decide it neither way.
  Stopping for it costs no error, and would not if it were ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kmatrix.stats import Interval
from kmatrix.verdict.family import FamilyVerdict, Losses, Method, NoMoreSeeds, PairOutcome, PairVerdict, Rules
from kmatrix.verdict.pairs import (
    FEWEST_LOOK,
    Pair,
    fewest,
    has_diverged,
    holm,
    holm_levels,
    is_finite,
    leading,
    outcome_of,
    pairs_of,
    reference_of,
    reported_pairs,
    reversed_pair,
    running_variances,
    share_removed,
    sign_flip_p,
)
from kmatrix.verdict.sequential import boundary, crossing, crossing_table, level, weight
from kmatrix.verdict.student import critical, detectable_shift, lower_tail

SHARED = 2  # most degrees of freedom that the variance of the family is worth
FEWEST_FUTILE = 4  # seeds of a pair before it may be called futile
HELPED_BY_SEEDS = (None, NoMoreSeeds.MAXIMUM, NoMoreSeeds.FUTILE)  # an open pair that further seeds may decide
FORECAST = 0.05  # one-sided: beyond the forecast of the difference at the last look


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The evidence of one pair in its first seeds."""

    seeds: int
    mean: float  # of the differences
    variance: float  # of a difference, moderated
    freedom: int


@dataclass(slots=True, kw_only=True)
class PairEvidence:
    """The evidence of one pair at all looks so far."""

    seeds: tuple[int, ...]  # that count
    a: list[float]
    b: list[float]
    over: int  # seeds that are over on both sides
    variances: list[float]  # of the first n differences, from 2 on
    looks: list[Look]
    low: float = 1.0  # sequential one-sided p of "the mean difference is below 0"
    high: float = 1.0  # of "it is above 0"
    equal: float = 1.0  # of "it is within the margin"

    @property
    def differences(self) -> list[float]:
        return [x - y for x, y in zip(self.a, self.b, strict=True)]

    @property
    def largest(self) -> float:
        """The largest loss, whose rounding is that of the differences."""
        return max(map(abs, [*self.a, *self.b]), default=0.0)

    @property
    def p(self) -> float:
        """The two-sided sequential p."""
        return min(1.0, 2 * min(self.low, self.high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome of each pair, and which pairs get no further seed."""

    rules: Rules
    reference: str
    means: Mapping[str, float | None]
    diverged: Mapping[str, int]
    evidence: Mapping[Pair, PairEvidence]
    p_holm: Mapping[Pair, float]
    outcomes: Mapping[Pair, PairOutcome]
    no_more: Mapping[Pair, NoMoreSeeds | None]
    standing: int  # hypotheses that Holm's procedure has not rejected, at least 1

    def pair(self, name: str) -> Pair:
        """Return the key of the pair of the reference with this configuration."""
        pair = (self.reference, name)
        return pair if pair in self.evidence else (name, self.reference)


def adaptive_verdict(losses: Losses, rules: Rules) -> FamilyVerdict:
    """Return the verdict on all losses that are given, up to the first seed of a configuration that is to come.

    Losses of seeds that rules.seeds does not name are ignored.
    Raises ValueError without a configuration or if the baseline is unknown.
    """
    return described(decided(losses, rules))


def decided(losses: Losses, rules: Rules) -> Decision:
    """Return the outcomes of a family without the numbers that only a report needs. Raises ValueError as above."""
    family = pairs_of(losses, rules.baseline)
    over = {name: leading(losses[name], rules.seeds) for name in losses}
    finite = {name: [loss for loss in known if loss is not None and is_finite(loss)] for name, known in over.items()}
    means = {name: math.fsum(known) / len(known) if known else None for name, known in finite.items()}
    diverged = {name: sum(map(has_diverged, known)) for name, known in over.items()}
    evidence = {(a, b): _evidence(over[a], over[b], rules) for a, b in family}
    _look(list(evidence.values()), rules, len(losses))

    p_holm = dict(zip(family, holm([evidence[pair].p for pair in family]), strict=True))
    standing = max(1, sum(p > rules.alpha for p in p_holm.values()))
    outcomes: dict[Pair, PairOutcome] = {}
    no_more: dict[Pair, NoMoreSeeds | None] = {}
    for pair, found in evidence.items():
        both = diverged[pair[0]], diverged[pair[1]]
        outcome, unstable = outcome_of(found.low - found.high, p_holm[pair], rules.alpha, both)
        if found.equal <= rules.alpha / (len(losses) - 1):
            outcome, unstable = PairOutcome.EQUIVALENT, False
        outcomes[pair], no_more[pair] = outcome, NoMoreSeeds.DIVERGED if unstable else None
    reference, beaten = reference_of(means, outcomes, rules.baseline)
    # Without a loss in its first seeds, a configuration gets no other seed, and costs the reference none.
    silent = {name for name, known in over.items() if len(known) >= _first(rules) and not finite[name]}
    for pair, found in evidence.items():
        if outcomes[pair] is PairOutcome.OPEN and no_more[pair] is None:
            if silent.intersection(pair):
                no_more[pair] = NoMoreSeeds.NO_LOSS
            elif beaten.intersection(pair):
                no_more[pair] = NoMoreSeeds.BEATEN
            elif found.over >= len(rules.seeds):
                no_more[pair] = NoMoreSeeds.MAXIMUM
            elif found.looks and _is_futile(found.looks[-1], rules, len(losses), standing):
                no_more[pair] = NoMoreSeeds.FUTILE
    return Decision(
        rules=rules,
        reference=reference,
        means=means,
        diverged=diverged,
        evidence=evidence,
        p_holm=p_holm,
        outcomes=outcomes,
        no_more=no_more,
        standing=standing,
    )


def described(decision: Decision) -> FamilyVerdict:
    """Return the outcomes of a family with all numbers that a report prints."""
    family = list(decision.evidence)
    asked = holm_levels([decision.evidence[pair].p for pair in family], decision.rules.alpha)
    levels = dict(zip(family, asked, strict=True))
    return FamilyVerdict(
        rules=decision.rules,
        reference=decision.reference,
        means=decision.means,
        pairs=tuple(
            _pair_verdict(decision, pair, levels[pair])
            if pair in levels
            else reversed_pair(_pair_verdict(decision, pair[::-1], levels[pair[::-1]]))
            for pair in reported_pairs(decision.reference, decision.means, levels.keys())
        ),
        diverged=decision.diverged,
    )


def error_spent(maxima: Sequence[int], seeds_min: int = 3, confidence: float = 0.95) -> float:
    """Return the probability of a false "better" of two configurations if MATRIX_SEEDS_MAX was raised after looks.

    maxima: all values that it had, the current one last. Each look decides at the most lenient of their boundaries.
    """
    first, last = max(seeds_min, FEWEST_LOOK), max(maxima)
    plans = [most for most in dict.fromkeys(maxima) if most >= first]
    if len(plans) < 2:
        return 1 - confidence
    limits = [math.inf] * (last - first + 1)
    for most in plans:
        a = level((1 - confidence) / 2, first, most)
        for place, limit in enumerate(boundary(a, first, most)):
            limits[place] = min(limits[place], limit)
    return min(1.0, 2 * crossing(limits, first)[-1])


def _first(rules: Rules) -> int:
    """Return the seeds of the first look, or all seeds if there are fewer."""
    return min(max(rules.seeds_min, FEWEST_LOOK), len(rules.seeds))


def _evidence(a: Sequence[float | None], b: Sequence[float | None], rules: Rules) -> PairEvidence:
    """Return the differences of a pair, seed by seed, without a look."""
    both = [
        (seed, x, y)
        for seed, x, y in zip(rules.seeds, a, b, strict=False)
        if x is not None and y is not None and is_finite(x) and is_finite(y)
    ]
    found = PairEvidence(
        seeds=tuple(seed for seed, _, _ in both),
        a=[x for _, x, _ in both],
        b=[y for _, _, y in both],
        over=min(len(a), len(b)),
        variances=[],
        looks=[],
    )
    found.variances = running_variances(found.differences, found.largest)
    return found


def _look(family: Sequence[PairEvidence], rules: Rules, configurations: int) -> None:
    """Fill in the looks of each pair and its sequential p values."""
    first, most = max(rules.seeds_min, FEWEST_LOOK), len(rules.seeds)
    longest = max((len(found.seeds) for found in family), default=0)
    if longest < first:
        return
    worth = max(0, min(SHARED, configurations - 2))
    shared = {n: _shared_variance(n, family) for n in range(first, longest + 1)} if worth else {}
    plan = crossing_table(first, most)
    margin = rules.min_difference
    for found in family:
        smallest = [math.inf] * 4
        differences = found.differences
        for n in range(first, len(differences) + 1):
            own = found.variances[n - FEWEST_LOOK]
            freedom = n - 1 + worth
            variance = (worth * shared[n] + (n - 1) * own) / freedom if worth else own
            if variance == 0:  # all seeds gave the same difference: they count as one
                continue
            mean = math.fsum(differences[:n]) / n
            found.looks.append(Look(seeds=n, mean=mean, variance=variance, freedom=freedom))
            error = math.sqrt(variance / n)
            tails = [lower_tail(mean / error, freedom), lower_tail(-mean / error, freedom)]
            if margin is not None:
                tails += [lower_tail((mean - margin) / error, freedom), lower_tail(-(mean + margin) / error, freedom)]
            share = weight(n, most)
            smallest = [min(old, new / share) for old, new in zip(smallest, [*tails, 1.0, 1.0], strict=False)]
        if found.looks:
            found.low, found.high = plan.p(smallest[0]), plan.p(smallest[1])
            if margin is not None:
                found.equal = plan.p(max(smallest[2], smallest[3]))


def _shared_variance(n: int, family: Sequence[PairEvidence]) -> float:
    """Return the mean variance of a difference over the family, each pair with its first n seeds or all it has.

    Pairs that are decided stay in: what is still open has, by selection, a small variance.
    """
    parts = [
        (used - 1, found.variances[used - FEWEST_LOOK])
        for found in family
        if (used := min(n, len(found.seeds))) >= FEWEST_LOOK
    ]
    return math.fsum(freedom * variance for freedom, variance in parts) / sum(freedom for freedom, _ in parts)


def _is_futile(look: Look, rules: Rules, configurations: int, standing: int) -> bool:
    """Return True if the seeds that are left would decide a pair neither way."""
    if look.seeds < FEWEST_FUTILE:
        return False
    first, most = max(rules.seeds_min, FEWEST_LOOK), len(rules.seeds)
    deviation = math.sqrt(look.variance)
    reach = critical(FORECAST, look.freedom) * deviation * math.sqrt(max(0.0, 1 / look.seeds - 1 / most))
    freedom = most - look.seeds + look.freedom
    error = deviation / math.sqrt(most)
    if abs(look.mean) + reach >= critical(level(rules.alpha / 2 / standing, first, most), freedom) * error:
        return False
    if rules.min_difference is None:
        return True
    half = critical(level(rules.alpha / (configurations - 1), first, most), freedom) * error
    return max(abs(look.mean) - reach, 0.0) + half > rules.min_difference


def _more_seeds(look: Look, rules: Rules, configurations: int, standing: int) -> int | None:
    """Return how many more seeds would decide a pair if mean and variance stay as they are; None: too many."""
    first, most = max(rules.seeds_min, FEWEST_LOOK), len(rules.seeds)
    different = level(rules.alpha / 2 / standing, first, most)
    equal = level(rules.alpha / (configurations - 1), first, most)
    margin = rules.min_difference

    def decides(more: int) -> bool:
        seeds, freedom = look.seeds + more, look.freedom + more
        share, error = weight(seeds, most), math.sqrt(look.variance / seeds)
        if abs(look.mean) >= critical(different * share, freedom) * error:
            return True
        return margin is not None and abs(look.mean) + critical(equal * share, freedom) * error <= margin

    return fewest(decides)


def _pair_verdict(decision: Decision, pair: Pair, asked: float) -> PairVerdict:
    """Return all numbers of a pair. asked: the two-sided level that Holm's procedure asks of it."""
    found = decision.evidence[pair]
    result = PairVerdict(
        a=pair[0],
        b=pair[1],
        outcome=decision.outcomes[pair],
        method=Method.SEQUENTIAL if found.looks else Method.NONE,
        seeds=found.seeds,
        difference=math.fsum(found.differences) / len(found.seeds) if found.seeds else None,
        deviation=math.sqrt(found.variances[-1]) if found.variances else None,
        sign_flip_p=sign_flip_p(found.differences, found.largest),
        share_removed=share_removed(found.a, found.b),
        diverged=(decision.diverged[pair[0]], decision.diverged[pair[1]]),
        no_more=decision.no_more[pair],
        looks=tuple(look.seeds for look in found.looks),
        reason="" if found.looks else _why_no_look(found, decision.rules),
    )
    return _with_evidence(result, decision, asked) if found.looks else result


def _with_evidence(result: PairVerdict, decision: Decision, asked: float) -> PairVerdict:
    """Return a pair with the numbers of its last look."""
    rules, configurations = decision.rules, len(decision.means)
    first, most = max(rules.seeds_min, FEWEST_LOOK), len(rules.seeds)
    pair = result.a, result.b
    look = decision.evidence[pair].looks[-1]
    share, error = weight(look.seeds, most), math.sqrt(look.variance / look.seeds)
    half = critical(level(rules.alpha / 2, first, most) * share, look.freedom) * error
    one_sided = critical(level(rules.alpha / (configurations - 1), first, most) * share, look.freedom) * error
    seeds_help = result.outcome is PairOutcome.OPEN and result.no_more in HELPED_BY_SEEDS
    return replace(
        result,
        interval=Interval(low=look.mean - half, high=look.mean + half, level=rules.confidence),
        p=decision.evidence[pair].p,
        p_holm=decision.p_holm[pair],
        level=asked,
        detectable=error * detectable_shift(look.freedom, level(asked / 2, first, most) * share),
        margin=abs(look.mean) + one_sided,
        more_seeds=_more_seeds(look, rules, configurations, decision.standing) if seeds_help else None,
    )


def _why_no_look(found: PairEvidence, rules: Rules) -> str:
    """Return one sentence on why a pair was not tested."""
    seeds, first = len(found.seeds), max(rules.seeds_min, FEWEST_LOOK)
    if not seeds:
        return "no seed with a loss on both sides: not significant"
    if seeds < first:
        counted = "one seed" if seeds == 1 else f"{seeds} seeds"
        return f"{counted}: the first look is after {first}"
    return "all seeds have the same difference: they count as one seed"
