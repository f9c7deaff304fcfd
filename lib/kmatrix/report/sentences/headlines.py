"""The headline of a verdict: one sentence that says which configuration to use, or why that is not known."""

from __future__ import annotations

from collections.abc import Sequence

from kmatrix.report.numbers import Ranking
from kmatrix.report.pair_text import Part, Parts, amount, margin_text, name, number, sentence
from kmatrix.report.sentences.rankings import compared_pairs, open_pairs, unit_of
from kmatrix.verdict.family import Method, PairOutcome
from kmatrix.verdict.family import Pair as PairVerdict

MOST_NAMES = 2  # configurations that a headline names


def headline(ranking: Ranking, main: PairVerdict) -> Parts:
    """Return the headline of a ranking in which pairs were tested. main: its main pair."""
    if ranking.verdict.rules.baseline is not None:
        return _of_baseline(ranking, main)
    about, still_open = compared_pairs(ranking.verdict), open_pairs(ranking.verdict)
    if len(still_open) == len(about):
        start = "No winner yet: " if goes_on(still_open) else "No winner: "
        return sentence(start, name(main.a), " is not distinguishable ", *either([pair.b for pair in still_open]))
    if still_open:
        verb = "is" if len(still_open) == 1 else "are"
        end = "still open" if goes_on(still_open) else "not distinguishable from it"
        names = listed([pair.b for pair in still_open], len(about))
        rest = () if main.outcome is PairOutcome.BETTER else worse_elsewhere(ranking)  # else next to what it beats
        return sentence(name(main.a), " leads, but ", *names, f" {verb} {end}", *rest)
    if any(pair.outcome is PairOutcome.EQUIVALENT for pair in about):
        return _of_equals(ranking)
    return _of_winner(ranking, main)


def _of_winner(ranking: Ranking, main: PairVerdict) -> Parts:
    """Return the headline if the leader beats each other configuration, or one that is better than that."""
    about = compared_pairs(ranking.verdict)
    by = sentence(" by ", number(amount(main)), f" {unit_of(ranking)}")
    beaten = sum(pair.outcome is PairOutcome.BETTER for pair in about)
    if beaten == 1:
        return sentence(name(main.a), " beats ", name(main.b), *by, *worse_elsewhere(ranking))
    others = f"{beaten} of {len(about)}"
    if beaten == len(about):
        others = "both" if beaten == 2 else f"all {beaten}"
    closest = sentence("; the closest, ", name(main.b), ",", *by)
    return sentence(name(main.a), f" beats {others} other configurations", *closest, *worse_elsewhere(ranking))


def listed(names: Sequence[str], of: int = 0) -> Parts:
    """Return at most MOST_NAMES names as parts, or their number.

    of: the number of configurations from which they come; 0: not reported.
    """
    if len(names) <= MOST_NAMES:
        return _joined(names, " and ")
    if not of:
        return sentence(f"{len(names)} configurations")
    return sentence(f"all {of} others" if of == len(names) else f"{len(names)} of {of} others")


def either(names: Sequence[str]) -> Parts:
    """Return `from adamw`, `from adamw or soap`, `from any of the 7 others`."""
    if len(names) > MOST_NAMES:
        return sentence(f"from any of the {len(names)} others")
    return sentence("from ", *_joined(names, " or "))


def goes_on(pairs: Sequence[PairVerdict]) -> bool:
    """Return whether one of these open comparisons gets further seeds."""
    return any(pair.method is Method.SEQUENTIAL and pair.no_more is None for pair in pairs)


def _joined(names: Sequence[str], word: str) -> Parts:
    parts: list[Part] = []
    for index, one in enumerate(names):
        parts += [*sentence(word if index else ""), name(one)]
    return tuple(parts)


def _undecided(pairs: Sequence[PairVerdict]) -> str:
    return "not yet distinguishable" if goes_on(pairs) else "not distinguishable"


def worse_elsewhere(ranking: Ranking) -> Parts:
    """Return the end of a sentence on what the leader does not beat, though another configuration does."""
    family = ranking.verdict
    asked = {pair.b for pair in open_pairs(family)}
    rest = [pair.b for pair in compared_pairs(family) if pair.outcome is PairOutcome.OPEN and pair.b not in asked]
    if not rest or family.rules.baseline is not None:
        return ()
    verb = "is" if len(rest) == 1 else "are"
    return sentence("; ", *listed(rest), f" {verb} worse than another configuration")


def _of_equals(ranking: Ranking) -> Parts:
    """Return the headline if nothing is open and configurations are equivalent to the leader."""
    about = compared_pairs(ranking.verdict)
    equal = [pair.b for pair in about if pair.outcome is PairOutcome.EQUIVALENT]
    beaten = [pair.b for pair in about if pair.outcome is PairOutcome.BETTER]
    leader, within = name(ranking.verdict.reference), _within(ranking)
    rest = worse_elsewhere(ranking)
    verb = "is" if len(equal) == 1 else "are"
    if not beaten and len(about) == 1:
        return sentence(leader, " and ", *listed(equal), " are equivalent", *within)
    if not beaten:
        # Each of them is equivalent to the leader, which tells nothing about two of them.
        return sentence(*listed(equal, len(about)), f" {verb} equivalent to ", leader, *within, *rest)
    them = listed(beaten) if len(beaten) <= MOST_NAMES else sentence(f"{len(beaten)} of {len(about)} others")
    to_it = sentence("; ", *listed(equal), f" {verb} equivalent to it")
    return sentence(leader, " beats ", *them, *to_it, *within, *rest)


def _within(ranking: Ranking) -> Parts:
    margin = margin_text(ranking.verdict.rules.min_difference or 0.0)
    return sentence(" within ", number(margin), f" {unit_of(ranking)}")


def _of_baseline(ranking: Ranking, main: PairVerdict) -> Parts:
    about = compared_pairs(ranking.verdict)
    baseline, unit = name(ranking.verdict.reference), unit_of(ranking)
    winners = [pair for pair in about if pair.outcome is PairOutcome.WORSE]
    if len(winners) == 1:
        parts = sentence(name(main.b), " beats the baseline ", baseline, " by ", number(amount(main)), f" {unit}")
    elif winners:
        best = sentence("; the best, ", name(main.b), ", by ", number(amount(main)), f" {unit}")
        parts = sentence(f"{len(winners)} of {len(about)} configurations beat the baseline ", baseline, *best)
    elif len(about) == 1:
        return sentence("The baseline ", baseline, *_of_one(ranking, main))
    elif len(about) == 2:
        neither = _joined([pair.b for pair in about], " nor ")
        parts = sentence("Neither ", *neither, " beats the baseline ", baseline)
    else:
        parts = sentence(f"None of the {len(about)} other configurations beats the baseline ", baseline)
    still_open = [pair for pair in about if pair.outcome is PairOutcome.OPEN]
    if not still_open:
        return parts
    verb = "is" if len(still_open) == 1 else "are"
    return (*parts, *sentence(f"; {len(still_open)} of {len(about)} {verb} {_undecided(still_open)} from it"))


def _of_one(ranking: Ranking, main: PairVerdict) -> Parts:
    """Return the end of a sentence on a baseline that the one configuration compared with it does not beat."""
    match main.outcome:
        case PairOutcome.BETTER:
            return sentence(" beats ", name(main.b), " by ", number(amount(main)), f" {unit_of(ranking)}")
        case PairOutcome.EQUIVALENT:
            return sentence(" is equivalent to ", name(main.b), *_within(ranking))
        case _:
            return sentence(f" is {_undecided([main])} from ", name(main.b))
