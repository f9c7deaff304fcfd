"""The sentences about the verdict of a matrix: all that the page, the summary, report.md and the terminal print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kmatrix.records.runs import Status
from kmatrix.report.numbers import CostDifference, GroupNumbers, MatrixNumbers, Ranking
from kmatrix.report.pair_text import (
    DIGITS,
    Part,
    PartKind,
    amount,
    bounds,
    comparisons_of,
    corrected_p,
    digits_for,
    method_text,
    name,
    number,
    number_text,
    open_parts,
    pair_sentence,
    percent_text,
    sentence,
    size_text,
)
from kmatrix.report.sentences.headlines import headline, worse_elsewhere
from kmatrix.report.sentences.next_seeds import more_seeds_command, next_line, to_end
from kmatrix.report.sentences.rankings import compared_pairs, no_result_text, open_pairs, unit_of
from kmatrix.report.sentences.targets import target_lines
from kmatrix.report.sentences.values import LineLabel, Situation, VerdictLine, VerdictState, VerdictText
from kmatrix.text import UNKNOWN, plural
from kmatrix.verdict.family import Pair as PairVerdict
from kmatrix.verdict.family import PairOutcome

MOST_KINDS = 5  # of failures, listed
SHORT_HASH = 8  # characters
MOST_LINES = 3  # open comparisons with a line of their own
SAME = 0.005  # two costs whose ratio is closer to 1 are called the same
MULTIPLE = 2.0  # from this ratio on, costs are called multiples
COST_LEVEL = 0.05  # two-sided, of Welch's test of a cost


def verdict_texts(numbers: MatrixNumbers) -> tuple[VerdictText, ...]:
    """Return the verdict on each ranking of a matrix; on a matrix without a ranking, why there is none."""
    texts = [verdict_text(ranking, _situation(numbers, ranking)) for ranking in numbers.rankings]
    texts = texts or [_no_ranking(numbers)]
    return (replace(texts[0], lines=(*texts[0].lines, *target_lines(numbers))), *texts[1:])


def _situation(numbers: MatrixNumbers, ranking: Ranking) -> Situation:
    counted = [run for group in ranking.groups for run in group.counted]
    about = ""
    if len(numbers.rankings) > 1:
        about = f"data {ranking.data_sha256[:SHORT_HASH]}" if ranking.data_sha256 else "bits per byte over tokenizers"
    return Situation(
        unfinished=len(to_end(numbers)),
        reserve=len(numbers.reserve),
        wanted=len(to_end(numbers) if ranking.replay is None else ranking.replay.wanted),
        unused=0 if ranking.replay is None else ranking.replay.unused,
        reused=sum(bool(run.reused_from) for run in counted),
        command=more_seeds_command(numbers, ranking),
        about=about,
    )


def _no_ranking(numbers: MatrixNumbers) -> VerdictText:
    counts = [(str(status), numbers.count(status)) for status in Status]
    failed = Counter(run.kind or run.reason or "no reason recorded" for run in numbers.runs if run.ended_badly)
    return no_ranking_text(counts, failed.most_common(MOST_KINDS), goes_on=bool(to_end(numbers)))


def verdict_text(ranking: Ranking, situation: Situation) -> VerdictText:
    """Return the verdict on a ranking."""
    family, main = ranking.verdict, ranking.main_pair
    about = compared_pairs(family)
    if main is None or len(ranking.groups) == 1:
        return _nothing_to_compare(ranking, situation)
    if comparisons_of(family) == 0:
        return _no_evidence(ranking, situation)
    still_open = open_pairs(family)
    state = VerdictState.DECIDED
    if still_open:
        state = VerdictState.OPEN if len(still_open) == len(about) else VerdictState.PARTLY_OPEN
    lines = [
        *_better(ranking, main, state),
        *_evidence(ranking, main),
        *_cost(ranking.costs),
        *_equivalents(ranking, main),
        *_open(still_open, unit_of(ranking)),
        *_diverged(ranking),
        *_without_result(ranking),
        *_runs(situation),
        *next_line(still_open, situation),
        *_notes(situation),
    ]
    return _finished(VerdictText(state=state, headline=headline(ranking, main), lines=tuple(lines)), situation)


def no_ranking_text(
    counts: Sequence[tuple[str, int]], kinds: Sequence[tuple[str, int]], *, goes_on: bool
) -> VerdictText:
    """Return the verdict on a matrix without a ranking.

    counts: status -> runs.  kinds: kind or reason of the failures -> runs.  goes_on: runs are still to end.
    """
    runs = ", ".join(f"{number_of:,} {status}" for status, number_of in counts if number_of)
    finished = dict(counts).get("finished", 0)
    if goes_on and not finished:
        text = "No verdict yet: no run has finished"
    elif finished:
        text = "No verdict: no finished run has a loss that can be compared"
    else:
        text = "No verdict: no run finished"
    lines = [VerdictLine(label=LineLabel.RUNS, parts=sentence(runs or "none"))]
    if kinds:
        why: list[Part] = []
        for place, (kind, number_of) in enumerate(kinds):
            why += sentence(", " if place else "", f"{number_of:,} x ", Part(kind, PartKind.QUOTE))
        lines.append(VerdictLine(label=LineLabel.WHY, parts=tuple(why)))
    state = VerdictState.NO_LOSS if finished else VerdictState.NO_RUN
    is_running = dict(counts).get("running", 0) > 0
    return VerdictText(
        state=state, headline=sentence(text), lines=tuple(lines), is_preliminary=goes_on, is_running=is_running
    )


def _finished(text: VerdictText, situation: Situation) -> VerdictText:
    return VerdictText(
        state=text.state,
        headline=text.headline,
        lines=text.lines,
        about=situation.about,
        is_preliminary=situation.unfinished > 0,
    )


def _nothing_to_compare(ranking: Ranking, situation: Situation) -> VerdictText:
    (only, *_) = ranking.groups
    lines = [
        VerdictLine(label=LineLabel.EVIDENCE, parts=sentence(f"{_mean_text(only)}; nothing to compare it with")),
        *_diverged(ranking),
        *_without_result(ranking),
        *_runs(situation),
        *_notes(situation),
    ]
    only_one = sentence(
        *("Only one configuration finished: ", name(only.name), " ends at "),
        *(number(_fixed(only.mean)), f" {unit_of(ranking)}"),
    )
    return _finished(VerdictText(state=VerdictState.NO_COMPARISON, headline=only_one, lines=tuple(lines)), situation)


def _no_evidence(ranking: Ranking, situation: Situation) -> VerdictText:
    """Return the verdict if no pair could be tested."""
    first, *others = ranking.groups
    one_seed = all(len(group.losses) == 1 for group in ranking.groups)
    baseline = ranking.verdict.rules.baseline
    why = sentence(
        "one seed per configuration is not evidence" if one_seed else "no two configurations could be tested"
    )
    if baseline is not None and not compared_pairs(ranking.verdict):
        why = sentence("the baseline ", name(baseline), " has no result", " yet" if situation.unfinished else "")
    lines = []
    if others:
        gap = (others[0].mean or 0.0) - (first.mean or 0.0)
        so_far = sentence(
            *("lowest ", name(first.name), " at ", number(_fixed(first.mean)), f" {unit_of(ranking)}, "),
            *((number(size_text(gap, DIGITS)), " below ") if gap else ("the same as ",)),
            name(others[0].name),
            "; one seed does not show how much of this is chance" if one_seed else "",
        )
        lines.append(VerdictLine(label=LineLabel.SO_FAR, parts=so_far))
    if not one_seed:
        lines += _open(compared_pairs(ranking.verdict), unit_of(ranking))
    lines += [*_cost(ranking.costs), *_diverged(ranking), *_without_result(ranking), *_runs(situation)]
    if situation.wanted:
        lines += next_line([], situation)
    elif situation.command:
        more = sentence("two more seeds per configuration allow a test")
        lines.append(VerdictLine(label=LineLabel.NEXT, parts=more, command=situation.command))
    lines += _notes(situation)
    text = VerdictText(state=VerdictState.NOT_EVIDENCE, headline=sentence("No verdict: ", *why), lines=tuple(lines))
    return _finished(text, situation)


def _better(ranking: Ranking, main: PairVerdict, state: VerdictState) -> Iterator[VerdictLine]:
    """Yield what the leader beats, if the headline is about what is open or equivalent."""
    if ranking.verdict.rules.baseline is not None or main.outcome is not PairOutcome.BETTER:
        return
    about = compared_pairs(ranking.verdict)
    beaten = [pair for pair in about if pair.outcome is PairOutcome.BETTER]
    if state is VerdictState.DECIDED and len(beaten) == len(about):
        return  # the headline has it
    by = sentence(" by ", number(amount(main)), f" {unit_of(ranking)}")
    many = (f"{len(beaten)} of {len(about)} configurations; the closest, ", name(main.b), ",")
    parts = sentence(name(main.a), " beats ", *(many if len(beaten) > 1 else (name(main.b),)), *by)
    rest = () if state is VerdictState.DECIDED else worse_elsewhere(ranking)  # else in the headline
    yield VerdictLine(label=LineLabel.BETTER, parts=(*parts, *rest))


def _evidence(ranking: Ranking, main: PairVerdict) -> Iterator[VerdictLine]:
    """Yield the test of the headline."""
    if main.interval is None:
        return
    family = ranking.verdict
    alone = len(family.against_reference) == 1
    parts = list(sentence("" if alone else "against ", *(() if alone else (name(main.b), ": "))))
    # Differences read as the winner's advantage; without a winner as a - b.
    mirrored = main.outcome is PairOutcome.BETTER  # of WORSE, b is the winner: a - b is its advantage
    interval = f"{percent_text(main.interval.level)} interval {bounds(main, mirrored=mirrored)} {unit_of(ranking)}"
    more = [interval, method_text(main), corrected_p(main, family)]
    yield VerdictLine(label=LineLabel.EVIDENCE, parts=(*parts, Part(", ".join(more))))


def cost_phrase(cost: CostDifference) -> str:
    """Return `4 % more time per step`, `the same peak memory` or `energy per token not distinguishable (+11 %)`.

    From twice as much on: `2.3 times the time per step`.
    """
    change = cost.ratio - 1
    if abs(change) < SAME:
        return f"the same {cost.quantity}"
    size = f"{100 * abs(change):.{0 if abs(change) >= 0.095 else 1}f} %"
    if cost.p is not None and cost.p > COST_LEVEL:
        return f"{cost.quantity} not distinguishable ({'+' if change > 0 else '-'}{size})"
    if cost.ratio >= MULTIPLE:
        return f"{cost.ratio:.{1 if cost.ratio < 9.95 else 0}f} times the {cost.quantity}"
    return f"{size} {'more' if change > 0 else 'less'} {cost.quantity}"


def _cost(costs: Sequence[CostDifference]) -> Iterator[VerdictLine]:
    if not costs:
        return
    first = costs[0]
    once = " (one run each)" if any(cost.fewest < 2 for cost in costs) else ""
    phrases = ", ".join(cost_phrase(cost) for cost in costs)
    parts = sentence(name(first.a), f" costs {phrases}, compared with ", name(first.b), once)
    yield VerdictLine(label=LineLabel.COST, parts=parts)


def _equivalents(ranking: Ranking, main: PairVerdict) -> Iterator[VerdictLine]:
    for pair in ranking.verdict.against_reference:
        if pair.outcome is PairOutcome.EQUIVALENT and (pair is not main or ranking.verdict.rules.baseline is None):
            yield VerdictLine(label=LineLabel.EQUIVALENT, parts=pair_sentence(pair, ranking.verdict, unit_of(ranking)))


def _open(pairs: Sequence[PairVerdict], unit: str) -> Iterator[VerdictLine]:
    for pair in pairs[:MOST_LINES]:
        parts = sentence(name(pair.a), " against ", name(pair.b), ": ", *open_parts(pair, unit))
        yield VerdictLine(label=LineLabel.OPEN, parts=parts)
    if len(pairs) > MOST_LINES:
        rest = sentence(f"and {plural(len(pairs) - MOST_LINES, 'more comparison')}, in the ranking")
        yield VerdictLine(label=LineLabel.OPEN, parts=rest)


def _diverged(ranking: Ranking) -> Iterator[VerdictLine]:
    lost = {group.name for group in ranking.without_result}
    found = [
        (configuration, number_of)
        for configuration, number_of in ranking.verdict.diverged.items()
        if number_of and configuration not in lost
    ]
    if not found:
        return
    sizes = ranking.ended_runs
    listed = [
        sentence(
            name(configuration), f" in {number_of} of {plural(max(sizes.get(configuration, 0), number_of), 'run')}"
        )
        for configuration, number_of in found
    ]
    parts = [part for index, one in enumerate(listed) for part in (*sentence(", " if index else ""), *one)]
    end = Part("; left out of the means")
    yield VerdictLine(label=LineLabel.DIVERGED, parts=(*parts, end))


def _without_result(ranking: Ranking) -> Iterator[VerdictLine]:
    """Yield the configurations that are not compared because none of their runs has a loss."""
    lost = ranking.without_result
    for group in lost[:MOST_LINES]:
        parts = sentence(name(group.name), f": {no_result_text(group).partition(': ')[2]}")
        yield VerdictLine(label=LineLabel.NO_RESULT, parts=parts)
    if len(lost) > MOST_LINES:
        rest = sentence(f"and {plural(len(lost) - MOST_LINES, 'more configuration')}, in the ranking")
        yield VerdictLine(label=LineLabel.NO_RESULT, parts=rest)
    if lost and comparisons_of(ranking.verdict):
        whose = "its comparisons" if len(lost) == 1 else f"the comparisons of these {len(lost)}"
        yield VerdictLine(label=LineLabel.NOTE, parts=sentence(f"{whose} are included in the correction of p"))


def _runs(situation: Situation) -> Iterator[VerdictLine]:
    parts = []
    if situation.unfinished:
        verb = "has" if situation.unfinished == 1 else "have"
        parts.append(f"{plural(situation.unfinished, 'run')} {verb} not ended: the verdict may change")
    if situation.reserve:
        parts.append(f"{plural(situation.reserve, 'run')} in reserve, which the verdict does not need")
    if parts:
        yield VerdictLine(label=LineLabel.RUNS, parts=sentence("; ".join(parts)))


def _notes(situation: Situation) -> Iterator[VerdictLine]:
    if situation.reused:
        includes = f"includes {plural(situation.reused, 'reused run')}"
        parts = sentence(f"{includes}: if they were the reason for this comparison, it does not count as evidence")
        yield VerdictLine(label=LineLabel.NOTE, parts=parts)
    if situation.unused:
        results, them = ("1 result is", "it") if situation.unused == 1 else (f"{situation.unused} results are", "them")
        parts = sentence(f"{results} not used: no round of adaptive seeds needed {them}")
        yield VerdictLine(label=LineLabel.NOTE, parts=parts)


def _mean_text(group: GroupNumbers) -> str:
    """Return `5 seeds, 95 % interval 3.2650 to 3.2800`."""
    seeds = plural(len(group.losses), "seed")
    if group.interval is None:
        return seeds
    digits = digits_for(group.interval)
    level = percent_text(group.interval.level)
    return f"{seeds}, {level} interval {group.interval.low:.{digits}f} to {group.interval.high:.{digits}f}"


def _fixed(value: float | None) -> str:
    return UNKNOWN if value is None else number_text(value, DIGITS)
