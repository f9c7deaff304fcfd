"""The sentences about one comparison, and the parts that all sentences about verdicts consist of.

A sentence is a tuple of parts, so that a page can mark names and numbers and a terminal prints plain text. Names of
configurations are the user's: whoever shows a part makes it safe for its format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kmatrix.stats import Interval
from kmatrix.text import UNKNOWN, plural, signed
from kmatrix.verdict.family import FamilyVerdict, Method, NoMoreSeeds, PairOutcome
from kmatrix.verdict.family import Pair as PairVerdict

DIGITS = 4  # least decimals of a loss and of a difference of losses
MOST_DIGITS = 8
MARGIN_DIGITS = 6  # significant digits of MATRIX_MIN_DIFFERENCE, which a user typed


class PartKind(StrEnum):
    """What a part of a sentence is."""

    TEXT = "text"
    NAME = "name"  # of a configuration
    NUMBER = "number"
    QUOTE = "quote"  # text of a program, such as the reason of a failure


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a sentence."""

    text: str
    kind: PartKind = PartKind.TEXT


Parts = tuple[Part, ...]


def plain(parts: Iterable[Part]) -> str:
    """Return a sentence as plain text."""
    return "".join(part.text for part in parts)


def name(text: str) -> Part:
    """Return the name of a configuration as a part."""
    return Part(text, PartKind.NAME)


def number(text: str) -> Part:
    """Return a number with its unit as a part."""
    return Part(text, PartKind.NUMBER)


def sentence(*parts: Part | str) -> Parts:
    """Return parts, with text for each str."""
    return tuple(Part(part) if isinstance(part, str) else part for part in parts if part != "")


def digits_for(interval: Interval | None) -> int:
    """Return the decimals that show an interval with two significant digits, at least DIGITS."""
    half = 0.0 if interval is None else (interval.high - interval.low) / 2
    if not (math.isfinite(half) and half > 0):
        return DIGITS
    return min(MOST_DIGITS, max(DIGITS, 1 - math.floor(math.log10(half))))


def p_text(p: float, level: float = 0.05) -> str:
    """Return "p = 0.003", or "p < 0.001"; with a fourth digit if three would hide on which side of `level` it is.

    >>> p_text(0.0004), p_text(0.0031), p_text(0.04996), p_text(0.04996, 0.01), p_text(0.04996, 1 - 0.95)
    ('p < 0.001', 'p = 0.003', 'p = 0.04996', 'p = 0.050', 'p = 0.04996')
    """
    level = round(level, 12)  # 1 - 0.95 is 0.050000000000000044
    if p < 0.001 <= level:
        return "p < 0.001"
    digits = next((n for n in range(3, MOST_DIGITS) if (float(f"{p:.{n}f}") <= level) == (p <= level)), MOST_DIGITS)
    # 0.04996 is 0.0500 with four digits, which reads as if it were the level itself.
    while digits < MOST_DIGITS and digits > 2 and p != level and float(f"{p:.{digits}f}") == level:
        digits += 1
    return f"p = {p:.{digits}f}"


def percent_text(share: float) -> str:
    """Return a share from 0 to 1 as "95 %"."""
    return f"{100 * share:.4g} %"


def margin_text(value: float) -> str:
    """Return a margin that a user typed, as typed: 0.004."""
    return f"{value:.{MARGIN_DIGITS}g}"


def amount(pair: PairVerdict) -> str:
    """Return the size of a difference: `0.0117 ± 0.0031`, without the second number if there was no test."""
    digits = digits_for(pair.interval)
    if pair.difference is None:
        return UNKNOWN
    if pair.interval is None:
        return size_text(pair.difference, digits)
    return f"{abs(pair.difference):,.{digits}f} ± {(pair.interval.high - pair.interval.low) / 2:,.{digits}f}"


def size_text(value: float, digits: int) -> str:
    """Return the size of a difference; one that is not 0 is never printed as 0.

    >>> size_text(-0.0117, 4), size_text(0.00002, 4), size_text(0.0, 4)
    ('0.0117', 'less than 0.0001', '0.0000')
    """
    text = f"{abs(value):,.{digits}f}"
    return f"less than {10**-digits:.{digits}f}" if value and not float(text.replace(",", "")) else text


def signed_text(value: float, digits: int) -> str:
    """Return a difference with its sign; one that is not 0 is never printed as 0: `+0.0117`, `< 0.0001`."""
    size = size_text(value, digits)
    return size.replace("less than", "<") if size.startswith("less") else signed(value, digits)


def bounds(pair: PairVerdict, *, mirrored: bool = False) -> str:
    """Return the interval of the difference a - b, mirrored that of b - a: `0.0086 to 0.0148`."""
    if pair.interval is None:
        return ""
    low, high = pair.interval.low, pair.interval.high
    low, high = (-high, -low) if mirrored else (low, high)
    digits = digits_for(pair.interval)
    return f"{number_text(low, digits)} to {number_text(high, digits)}"


def method_text(pair: PairVerdict) -> str:
    """Return the test of a pair: `paired over 5 seeds (Student's t)`."""
    seeds = plural(len(pair.seeds), "seed")
    match pair.method:
        case Method.PAIRED:
            return f"paired over {seeds} (Student's t)"
        case Method.SEQUENTIAL:
            return f"paired over {seeds} (group-sequential t)"
        case Method.WELCH:
            return "Welch's test, not paired"
        case Method.NONE:
            return "no test"


NO_MORE = {
    NoMoreSeeds.FUTILE: "the seeds that are left would not decide it",
    NoMoreSeeds.BUDGET: "the budget is spent",
    NoMoreSeeds.DIVERGED: "the one with the lower loss diverged more often, which more seeds do not change",
    NoMoreSeeds.NO_LOSS: "one of the two has no loss in any of its seeds",
    NoMoreSeeds.BEATEN: "one of the two is worse than a third configuration",
    NoMoreSeeds.OTHER_RANKING: "further seeds run only where a ranking by loss is open",
}


def no_more_text(pair: PairVerdict) -> str:
    """Return why an open pair gets no further seed, "" if it gets one or is decided."""
    if pair.no_more is None:
        return ""
    return NO_MORE.get(pair.no_more) or f"all {plural(len(pair.seeds), 'seed')} ran"


def outcome_word(outcome: PairOutcome, method: Method) -> str:
    """Return the word for an outcome. An open pair without further looks is "not distinguishable"."""
    if outcome is PairOutcome.OPEN and method is not Method.SEQUENTIAL:
        return "not distinguishable"
    return str(outcome)


def other_side(outcome: PairOutcome) -> PairOutcome:
    """Return what an outcome about a says about b."""
    return {PairOutcome.BETTER: PairOutcome.WORSE, PairOutcome.WORSE: PairOutcome.BETTER}.get(outcome, outcome)


def pair_sentence(pair: PairVerdict, family: FamilyVerdict, unit: str) -> Parts:
    """Return everything about one pair in a sentence, without a full stop."""
    if pair.outcome is PairOutcome.EQUIVALENT:
        return equivalent_sentence(pair, family, unit)
    if pair.outcome is PairOutcome.OPEN:
        opening = sentence(name(pair.a), " against ", name(pair.b))
        return (*opening, *sentence(f" is {outcome_word(pair.outcome, pair.method)}: ", *open_parts(pair, unit)))
    wins = pair.outcome is PairOutcome.BETTER
    first, second = (pair.a, pair.b) if wins else (pair.b, pair.a)
    return sentence(
        *(name(first), " beats ", name(second), " by ", number(amount(pair)), f" {unit} "),
        f"({bounds(pair, mirrored=wins)}), {method_text(pair)}, {corrected_p(pair, family)}",
    )


def open_parts(pair: PairVerdict, unit: str) -> Parts:
    """Return what is known about an open pair: its difference, what could have been found, and what would decide it."""
    if pair.method is Method.NONE or pair.interval is None:
        apart = "" if pair.difference is None else f"{size_text(pair.difference, DIGITS)} {unit} apart, "
        return sentence(f"{apart}{pair.reason or 'no test'}")
    digits = digits_for(pair.interval)
    difference = f"{number_text(pair.difference or 0.0, digits)} ({bounds(pair)})"
    parts = [f"{difference} {unit} after {plural(len(pair.seeds), 'seed')}"]
    if pair.method is Method.WELCH:
        parts = [f"{difference} {unit}, {method_text(pair)}"]
    if why := no_more_text(pair):
        parts.append(why)
    if pair.margin is not None:
        parts.append(f"equal within {pair.margin:.{digits}f}")
    if pair.detectable is not None:
        parts.append(f"smallest detectable difference {pair.detectable:.{digits}f} (power 80 %)")
    if pair.more_seeds is not None and pair.no_more in (None, NoMoreSeeds.BUDGET, NoMoreSeeds.MAXIMUM):
        parts.append(f"about {plural(pair.more_seeds, 'more seed')} would decide it")
    return sentence("; ".join(parts))


def equivalent_sentence(pair: PairVerdict, family: FamilyVerdict, unit: str) -> Parts:
    digits = digits_for(pair.interval)
    real = ""
    if pair.p_holm is not None and pair.p_holm <= family.rules.alpha:
        real = f"; there is a difference ({p_text(pair.p_holm, family.rules.alpha)}), smaller than that"
    test = method_text(pair) if pair.method is Method.WELCH else f"paired over {plural(len(pair.seeds), 'seed')}"
    return sentence(
        *(name(pair.a), " and ", name(pair.b), " are equivalent within "),
        *(number(margin_text(family.rules.min_difference or 0.0)), f" {unit}: difference "),
        f"{number_text(pair.difference or 0.0, digits)} ({bounds(pair)}), {test}{real}",
    )


def corrected_p(pair: PairVerdict, family: FamilyVerdict) -> str:
    """Return `p = 0.003 (Holm, 6 comparisons)`."""
    if pair.p_holm is None:
        return "no test"
    # Their number is known before the first run: a pair without a test counts, too.
    return p_text(pair.p_holm, family.rules.alpha) + (f" (Holm, {family.size} comparisons)" if family.size > 1 else "")


def comparisons_of(family: FamilyVerdict) -> int:
    """Return the number of comparisons that could be tested."""
    return sum(pair.p_holm is not None for pair in family.pairs)


def number_text(value: float, digits: int) -> str:
    """Return a number without a plus sign; 0 has no sign at all."""
    return signed(value, digits).removeprefix("+")
