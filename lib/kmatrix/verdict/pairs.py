"""What verdicts with fixed and with adaptive seeds share: the pairs of a family, Holm's correction, the reference."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from kmatrix.stats import Interval
from kmatrix.verdict.family import Losses, PairOutcome, PairVerdict

LARGEST = 1e50  # nats/token: a larger loss diverged, and powers of it would not fit a float
FEWEST_FLIPS = 6  # differences: below, no p of the sign-flip test is under 0.05
MOST_FLIPS = 40  # above, the test takes more than a second; Student's t decides in any case
FEWEST_LOOK = 2  # differences that have a variance
ROUNDING = 4  # units in the last place of a loss: differences that vary by less are equal
MOST_MORE = 99  # more seeds than that are not a plan

Pair = tuple[str, str]
OPPOSITE = {
    PairOutcome.BETTER: PairOutcome.WORSE,
    PairOutcome.WORSE: PairOutcome.BETTER,
    PairOutcome.EQUIVALENT: PairOutcome.EQUIVALENT,
    PairOutcome.OPEN: PairOutcome.OPEN,
}


def is_finite(loss: float | None) -> bool:
    """Return True for a loss that counts: neither missing nor diverged."""
    return loss is not None and abs(loss) < LARGEST  # False for NaN


def has_diverged(loss: float | None) -> bool:
    """Return True if the run ended with a loss that is not finite."""
    return loss is not None and not is_finite(loss)


def leading(known: Mapping[int, float | None], seeds: Sequence[int]) -> list[float | None]:
    """Return the outcomes of the leading seeds that are over.

    A later seed that ended earlier waits, so that the looks do not depend on the speed of the runs.
    """
    result: list[float | None] = []
    for seed in seeds:
        if seed not in known:
            break
        result.append(known[seed])
    return result


def pairs_of(losses: Losses, baseline: str | None) -> list[Pair]:
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


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm-corrected p values, in the order given.

    The i-th smallest of m is multiplied by m - i + 1; each is at least as large as the one before it.
    Source: S. Holm, Scandinavian Journal of Statistics 6 (1979); for sequential p values: Maurer, Bretz, Statistics in
    Biopharmaceutical Research 5 (2013).
    """
    corrected = [0.0] * len(p_values)
    floor = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = floor
    return corrected


def holm_levels(p_values: Sequence[float], alpha: float) -> list[float]:
    """Return the level that Holm's procedure asks of each p value: alpha / rank from the last if it is rejected.

    All that are not rejected are tested at alpha / their number.
    """
    corrected = holm(p_values)
    standing = sum(p > alpha for p in corrected)
    levels = [alpha / max(1, standing)] * len(p_values)
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if corrected[place] <= alpha:
            levels[place] = alpha / (len(p_values) - rank)
    return levels


def reference_of(
    means: Mapping[str, float | None], outcomes: Mapping[Pair, PairOutcome], baseline: str | None
) -> tuple[str, frozenset[str]]:
    """Return the reference, and the configurations that are out because they are worse than another one.

    With a baseline, none is out: each is compared with it alone. Otherwise the reference is the lowest mean among the
    configurations that are not worse than any other. Equal means are ordered by name, so that the order in which runs
    end makes no difference.
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
    """Return the configurations by their mean, lowest first, those without one last, then by name."""
    return sorted(means, key=lambda name: (known if (known := means[name]) is not None else math.inf, name))


def reported_pairs(reference: str, means: Mapping[str, float | None], family: Collection[Pair]) -> list[Pair]:
    """Return the pairs of a family as a report lists them: the reference first, then by mean, the lower one first."""
    ordered = [reference, *(name for name in by_mean(means) if name != reference)]
    return [pair for pair in itertools.combinations(ordered, 2) if pair in family or pair[::-1] in family]


def outcome_of(difference: float, p_holm: float, alpha: float, diverged: tuple[int, int]) -> tuple[PairOutcome, bool]:
    """Return the outcome about the first of a pair, and True if it is open only because the better one diverged more.

    difference: below 0 if the first has the lower loss.
    """
    if p_holm > alpha or difference == 0:
        return PairOutcome.OPEN, False
    better, worse = diverged if difference < 0 else diverged[::-1]
    if better > worse:
        return PairOutcome.OPEN, True
    return (PairOutcome.BETTER if difference < 0 else PairOutcome.WORSE), False


def reversed_pair(pair: PairVerdict) -> PairVerdict:
    """Return the same verdict about b, compared with a."""
    interval = pair.interval
    if interval is not None:
        interval = Interval(low=0.0 - interval.high, high=0.0 - interval.low, level=interval.level)
    return replace(
        pair,
        a=pair.b,
        b=pair.a,
        outcome=OPPOSITE[pair.outcome],
        difference=None if pair.difference is None else 0.0 - pair.difference,  # 0.0, never -0.0
        interval=interval,
        diverged=(pair.diverged[1], pair.diverged[0]),
    )


def fewest(decides: Callable[[int], bool]) -> int | None:
    """Return the smallest number of further seeds that decides a pair; None if MOST_MORE do not.

    decides: whether so many do; if it does for a number, then for each larger one.
    """
    return 1 + bisect_left(range(1, MOST_MORE), True, key=decides) if decides(MOST_MORE) else None


def sample_variance(values: Sequence[float]) -> float:
    """Return the sample variance (n - 1) of at least two values."""
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def running_variances(differences: Sequence[float], largest: float) -> list[float]:
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
        if n >= FEWEST_LOOK:
            result.append(squares / (n - 1) if high - low > rounding else 0.0)
    return result


def share_removed(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the share of the variance that pairing removed, 1 - s_d^2 / (s_a^2 + s_b^2); None if nothing varies.

    It is negative if the losses of equal seeds move in opposite directions. a, b: losses of the same seeds.
    """
    if len(a) < 2:
        return None
    both = sample_variance(a) + sample_variance(b)
    return 1 - sample_variance([x - y for x, y in zip(a, b, strict=True)]) / both if both > 0 else None


def sign_flip_p(differences: Sequence[float], largest: float) -> float | None:
    """Return the exact two-sided p of the sign-flip test of a mean difference; None below 6 and above 40 differences.

    largest: the largest loss. p is the share of the 2^n choices of signs whose sum is at least as far from 0; the
    smallest is 2 / 2^n. The sums of the two halves are combined by sorting, so that 40 differences take 2^20 sums
    instead of 2^40.
    Source: R. A. Fisher, The Design of Experiments (1935), section 21.
    """
    n = len(differences)
    if not FEWEST_FLIPS <= n <= MOST_FLIPS:
        return None
    import numpy as np

    scale = max(map(abs, differences))
    if scale == 0:
        return 1.0
    values = [difference / scale for difference in differences]
    halves = []
    for half in (values[: n // 2], values[n // 2 :]):
        sums = np.zeros(1)
        for value in half:
            sums = np.concatenate([sums + value, sums - value])
        halves.append(sums)
    # Sums that differ only by rounding are equal: 3.2817 - 3.2816 and 3.2803 - 3.2802 are both 0.0001.
    rounding = 1e-12 * math.fsum(map(abs, values)) + n * ROUNDING * math.ulp(largest) / scale
    reached = abs(math.fsum(values)) - rounding
    if reached <= 0:
        return 1.0
    below = np.searchsorted(np.sort(halves[0]), reached - halves[1], side="left")
    return min(1.0, 2.0 * float(np.sum(len(halves[0]) - below)) / 2.0**n)
