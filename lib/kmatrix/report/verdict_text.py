"""The sentences about the verdict of a matrix: all that the page, the summary, report.md and the terminal print."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kmatrix.records.runs import Status
from kmatrix.report.numbers import BITS, CostDifference, GroupNumbers, MatrixNumbers, Ranking, RunNumbers
from kmatrix.report.pair_text import (
    DIGITS,
    Part,
    PartKind,
    Parts,
    amount,
    bounds,
    comparisons_of,
    corrected_p,
    digits_for,
    margin_text,
    method_text,
    name,
    number,
    number_text,
    open_parts,
    p_text,
    pair_sentence,
    percent_text,
    plain,
    sentence,
)
from kmatrix.report.target import QUANTITIES, TargetGroup, target_numbers
from kmatrix.text import UNKNOWN, duration, money, plural
from kmatrix.verdict.family import FamilyVerdict, Method, PairOutcome, PairVerdict

TO_END = (Status.PLANNED, Status.RUNNING)
MORE_SEEDS = 2  # per configuration, for a test of configurations with one seed
MOST_TARGETS = 8  # configurations with a line about the target
MOST_LISTED = 12  # seeds in a command
MOST_KINDS = 5  # of failures, listed
SHORT_HASH = 8  # characters
MOST_NAMES = 2  # configurations that a headline names
MOST_LINES = 3  # open comparisons with a line of their own
NOT_DECIDED = {True: " is open against ", False: " is not distinguishable from "}  # by whether seeds are to come
SAME = 0.005  # two costs whose ratio is closer to 1 are called the same
COST_LEVEL = 0.05  # two-sided, of Welch's test of a cost


class VerdictState(StrEnum):
    """How much a matrix has decided: a page has a mark for each."""

    DECIDED = "decided"
    PARTLY_OPEN = "partly open"
    OPEN = "open"
    NOT_EVIDENCE = "not evidence"  # one seed per configuration
    NO_COMPARISON = "no comparison"  # one configuration
    NO_RUN = "no run finished"


class LineLabel(StrEnum):
    """What a line below the headline is about."""

    BETTER = "Better"
    EVIDENCE = "Evidence"
    COST = "Cost"
    EQUIVALENT = "Equivalent"
    OPEN = "Open"
    DIVERGED = "Diverged"
    TARGET = "Target"
    RUNS = "Runs"
    SO_FAR = "So far"
    WHY = "Why"
    NEXT = "Next"
    NOTE = "Note"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLine:
    """A line below the headline."""

    label: LineLabel
    parts: Parts
    command: str = ""  # to be pasted; "" if the line has none

    @property
    def text(self) -> str:
        return plain(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictText:
    """The verdict on one ranking, or on a matrix without one."""

    state: VerdictState
    headline: Parts
    lines: tuple[VerdictLine, ...] = ()
    about: str = ""  # what tells the ranking from the others of its matrix; "" if it is the only one
    is_preliminary: bool = False  # runs that the verdict counts on have not ended

    @property
    def mark(self) -> str:
        """The state as a page shows it: `Partly open, preliminary`."""
        if self.state is VerdictState.NO_RUN and self.is_preliminary:
            return "Running"
        return str(self.state).capitalize() + (", preliminary" if self.is_preliminary else "")

    @property
    def sentence(self) -> str:
        """The headline as plain text, without a full stop."""
        return plain(self.headline)

    @property
    def report(self) -> str:
        """The headline as a report in plain text prints it, without a full stop."""
        about = f"{self.about}: " if self.about else ""
        return about + self.sentence + (" (preliminary)" if self.is_preliminary else "")

    def line(self, label: LineLabel) -> VerdictLine | None:
        """Return the first line with this label, or None."""
        return next((line for line in self.lines if line.label is label), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a verdict does not say by itself: the state of the runs that it is made of."""

    unfinished: int = 0  # runs that are wanted and have not ended
    reserve: int = 0  # runs with adaptive seeds that the verdict does not want
    reused: int = 0  # losses that were measured in another matrix
    command: str = ""  # runs more seeds; "" if there is none
    wanted: int = 0  # runs that the verdict waits for; with adaptive seeds, those that it wants now
    unused: int = 0  # losses that exist, and that no round of adaptive seeds asked for
    about: str = ""


def verdict_texts(numbers: MatrixNumbers) -> tuple[VerdictText, ...]:
    """Return the verdict on each ranking of a matrix; on a matrix without a ranking, why there is none."""
    texts = [verdict_text(ranking, _situation(numbers, ranking)) for ranking in numbers.rankings]
    texts = texts or [_no_ranking(numbers)]
    return (replace(texts[0], lines=(*texts[0].lines, *_targets(numbers))), *texts[1:])


def _situation(numbers: MatrixNumbers, ranking: Ranking) -> Situation:
    counted = [run for group in ranking.groups for run in group.counted]
    about = ""
    if len(numbers.rankings) > 1:
        about = f"data {ranking.data_sha256[:SHORT_HASH]}" if ranking.data_sha256 else "bits per byte over tokenizers"
    return Situation(
        unfinished=len(_to_end(numbers)),
        reserve=len(numbers.reserve),
        wanted=len(_to_end(numbers) if ranking.replay is None else ranking.replay.wanted),
        unused=0 if ranking.replay is None else ranking.replay.unused,
        reused=sum(bool(run.reused_from) for run in counted),
        command=_more_seeds_command(numbers, ranking),
        about=about,
    )


def _to_end(numbers: MatrixNumbers) -> list[RunNumbers]:
    """Return the runs that the verdict waits for."""
    return [run for run in numbers.runs if run.status in TO_END and run.name not in numbers.reserve]


def _more_seeds_command(numbers: MatrixNumbers, ranking: Ranking) -> str:
    """Return the command that runs the seeds that would decide what is open, "" if there is none."""
    if numbers.count(Status.RUNNING):
        return ""  # they run already, or what runs may decide it
    if ranking.replay is not None:
        return matrix_command("continue", TARGET=numbers.path.name) if ranking.replay.wanted else ""
    if _to_end(numbers):
        return matrix_command("continue", TARGET=numbers.path.name)  # planned seeds come before further ones
    seeds = {run.seed for run in numbers.runs if run.seed is not None}
    wanted = max((pair.more_seeds or 0 for pair in open_pairs(ranking.verdict)), default=0)
    if not comparisons_of(ranking.verdict):
        wanted = MORE_SEEDS
    if not wanted or not seeds:
        return ""
    further = range(max(seeds) + 1, max(seeds) + 1 + wanted)
    listed = ",".join(map(str, further)) if wanted <= MOST_LISTED else f"{further[0]}:{further[-1]}:1"
    return matrix_command("add", TARGET=numbers.path.name, SEED=listed)


def matrix_command(target: str, **arguments: str) -> str:
    """Return a make command for the files of a report, which are read elsewhere: without the paths of this machine."""
    return " ".join(["make", target, *(f"{name}={shlex.quote(value)}" for name, value in arguments.items())])


def _no_ranking(numbers: MatrixNumbers) -> VerdictText:
    counts = [(str(status), numbers.count(status)) for status in Status]
    failed = Counter(
        run.kind or run.reason or "no reason recorded"
        for run in numbers.runs
        if run.status in (Status.FAILED, Status.STOPPED, Status.SKIPPED)
    )
    return no_ranking_text(counts, failed.most_common(MOST_KINDS), goes_on=bool(_to_end(numbers)))


def unit_of(ranking: Ranking) -> str:
    """Return the unit of the losses of a ranking."""
    return "bits/byte" if ranking.metric == BITS else "nats/token"


def open_pairs(family: FamilyVerdict) -> list[PairVerdict]:
    """Return the open comparisons of the reference, without those of configurations that are worse than a third one."""
    beaten = set()
    if family.rules.baseline is None:
        beaten = {pair.b for pair in family.pairs if pair.outcome is PairOutcome.BETTER}
        beaten |= {pair.a for pair in family.pairs if pair.outcome is PairOutcome.WORSE}
    return [pair for pair in compared_pairs(family) if pair.outcome is PairOutcome.OPEN and pair.b not in beaten]


def compared_pairs(family: FamilyVerdict) -> list[PairVerdict]:
    """Return the comparisons of the reference with configurations that have a loss."""
    return [pair for pair in family.against_reference if pair.difference is not None]


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
        *_without_loss(family),
        *_runs(situation),
        *_next(still_open, situation),
        *_notes(ranking, situation),
    ]
    return _finished(VerdictText(state=state, headline=_headline(ranking, main), lines=tuple(lines)), situation)


def no_ranking_text(
    counts: Sequence[tuple[str, int]], kinds: Sequence[tuple[str, int]], *, goes_on: bool
) -> VerdictText:
    """Return the verdict on a matrix without a ranking.

    counts: status -> runs.  kinds: kind or reason of the failures -> runs.  goes_on: runs are still to end.
    """
    runs = ", ".join(f"{number_of:,} {status}" for status, number_of in counts if number_of)
    finished = dict(counts).get("finished", 0)
    if goes_on and not finished:
        headline = "No verdict yet: no run has finished"
    elif finished:
        headline = "No verdict: no finished run has a loss on known data"
    else:
        headline = "No verdict: no run finished"
    lines = [VerdictLine(label=LineLabel.RUNS, parts=sentence(runs or "none"))]
    if kinds:
        why: list[Part] = []
        for place, (kind, number_of) in enumerate(kinds):
            why += sentence(", " if place else "", f"{number_of:,} x ", Part(kind, PartKind.QUOTE))
        lines.append(VerdictLine(label=LineLabel.WHY, parts=tuple(why)))
    return VerdictText(
        state=VerdictState.NO_RUN, headline=sentence(headline), lines=tuple(lines), is_preliminary=goes_on
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
        *_runs(situation),
        *_notes(ranking, situation),
    ]
    headline = sentence(
        *("Only one configuration finished: ", name(only.name), " ends at "),
        *(number(_fixed(only.mean)), f" {unit_of(ranking)}"),
    )
    return _finished(VerdictText(state=VerdictState.NO_COMPARISON, headline=headline, lines=tuple(lines)), situation)


def _no_evidence(ranking: Ranking, situation: Situation) -> VerdictText:
    """Return the verdict if no pair could be tested."""
    first, *others = ranking.groups
    one_seed = all(len(group.losses) == 1 for group in ranking.groups)
    why = "one seed per configuration is not evidence" if one_seed else "no two configurations could be tested"
    lines = []
    if others:
        gap = _fixed((others[0].mean or 0.0) - (first.mean or 0.0))
        so_far = sentence(
            *("lowest ", name(first.name), " at ", number(_fixed(first.mean)), f" {unit_of(ranking)}, "),
            *(number(gap), " below ", name(others[0].name)),
            "; one seed does not show how much of this is chance" if one_seed else "",
        )
        lines.append(VerdictLine(label=LineLabel.SO_FAR, parts=so_far))
    if not one_seed:
        lines += _open(compared_pairs(ranking.verdict), unit_of(ranking))
    lines += [*_cost(ranking.costs), *_diverged(ranking), *_runs(situation)]
    if situation.wanted:
        lines += _next([], situation)
    elif situation.command:
        more = sentence("two more seeds per configuration allow a test")
        lines.append(VerdictLine(label=LineLabel.NEXT, parts=more, command=situation.command))
    lines += _notes(ranking, situation)
    text = VerdictText(state=VerdictState.NOT_EVIDENCE, headline=sentence(f"No verdict: {why}"), lines=tuple(lines))
    return _finished(text, situation)


def _headline(ranking: Ranking, main: PairVerdict) -> Parts:
    if ranking.verdict.rules.baseline is not None:
        return _headline_of_baseline(ranking, main)
    about, still_open = compared_pairs(ranking.verdict), open_pairs(ranking.verdict)
    if len(still_open) == len(about):
        return _headline_without_winner(ranking, main)
    if still_open:
        verb = "is" if len(still_open) == 1 else "are"
        goes_on = any(pair.method is Method.SEQUENTIAL and pair.no_more is None for pair in still_open)
        end = f" {verb} still open" if goes_on else f" {verb} not distinguishable from it"
        return sentence(name(main.a), " leads, but ", *_names([pair.b for pair in still_open]), end)
    if any(pair.outcome is PairOutcome.EQUIVALENT for pair in about):
        return _headline_of_equals(ranking)
    by = sentence(" by ", number(amount(main)), f" {unit_of(ranking)}")
    if len(about) == 1:
        return sentence(name(main.a), " beats ", name(main.b), *by)
    beaten = sum(pair.outcome is PairOutcome.BETTER for pair in about)
    others = f"{beaten} of {len(about)} other configurations, and the rest is worse than another one"
    if beaten == len(about):
        others = f"{'both' if beaten == 2 else f'all {beaten}'} other configurations"
    return sentence(name(main.a), f" beats {others}; the closest, ", name(main.b), ",", *by)


def _headline_without_winner(ranking: Ranking, main: PairVerdict) -> Parts:
    about = compared_pairs(ranking.verdict)
    rest = sentence(name(main.b)) if len(about) == 1 else sentence(f"any of {len(about)} others")
    goes_on = main.method is Method.SEQUENTIAL and main.no_more is None
    return sentence("No winner yet: " if goes_on else "No winner: ", name(main.a), NOT_DECIDED[goes_on], *rest)


def _headline_of_equals(ranking: Ranking) -> Parts:
    """Return the headline if nothing is open and configurations are equivalent to the leader."""
    about = compared_pairs(ranking.verdict)
    equal = [pair.b for pair in about if pair.outcome is PairOutcome.EQUIVALENT]
    leader = name(ranking.verdict.reference)
    beaten = sum(pair.outcome is PairOutcome.BETTER for pair in about)
    within = sentence(number(margin_text(ranking.verdict.rules.min_difference or 0.0)), f" {unit_of(ranking)}")
    if not beaten:
        return sentence(leader, " and ", *_names(equal), " are equivalent within ", *within)
    rest = "the other configuration" if beaten == 1 else f"the other {beaten} configurations"
    verb = "is" if len(equal) == 1 else "are"
    return sentence(leader, f" beats {rest}; ", *_names(equal), f" {verb} equivalent to it within ", *within)


def _headline_of_baseline(ranking: Ranking, main: PairVerdict) -> Parts:
    about = compared_pairs(ranking.verdict)
    baseline, unit = name(ranking.verdict.reference), unit_of(ranking)
    winners = [pair for pair in about if pair.outcome is PairOutcome.WORSE]
    if len(winners) == 1:
        parts = sentence(name(main.b), " beats the baseline ", baseline, " by ", number(amount(main)), f" {unit}")
    elif winners:
        best = sentence("; the best, ", name(main.b), ", by ", number(amount(main)), f" {unit}")
        parts = sentence(f"{len(winners)} of {len(about)} configurations beat the baseline ", baseline, *best)
    elif len(about) == 1:
        words = {
            PairOutcome.BETTER: (" beats ", f" by {amount(main)} {unit}"),
            PairOutcome.EQUIVALENT: (
                " is equivalent to ",
                f" within {margin_text(ranking.verdict.rules.min_difference or 0.0)} {unit}",
            ),
            PairOutcome.OPEN: (NOT_DECIDED[main.method is Method.SEQUENTIAL and main.no_more is None], ""),
        }[main.outcome]
        return sentence("The baseline ", baseline, words[0], name(main.b), words[1])
    else:
        parts = sentence(f"None of {len(about)} configurations beats the baseline ", baseline)
    still_open = sum(pair.outcome is PairOutcome.OPEN for pair in about)
    return (*parts, *sentence(f"; {still_open} of {len(about)} are open" if still_open else ""))


def _better(ranking: Ranking, main: PairVerdict, state: VerdictState) -> Iterator[VerdictLine]:
    """Yield what the leader beats, if the headline is about what is open or equivalent."""
    if ranking.verdict.rules.baseline is not None or main.outcome is not PairOutcome.BETTER:
        return
    about = compared_pairs(ranking.verdict)
    beaten = [pair for pair in about if pair.outcome is PairOutcome.BETTER]
    if state is VerdictState.DECIDED and len(beaten) == len(about):
        return  # the headline has it
    many = f"than {len(beaten)} of {len(about)} configurations; the closest, " if len(beaten) > 1 else "than "
    parts = sentence(many, name(main.b), ", by ", number(amount(main)), f" {unit_of(ranking)}")
    yield VerdictLine(label=LineLabel.BETTER, parts=parts)


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
    if main.share_removed is not None:
        share = main.share_removed
        more.append(
            f"pairing removed {percent_text(round(share, 2))} of the variance"
            if share > 0
            else "pairing removed nothing of the variance"
        )
    if main.sign_flip_p is not None:
        more.append(f"exact sign-flip {p_text(main.sign_flip_p, family.rules.alpha)}")
    yield VerdictLine(label=LineLabel.EVIDENCE, parts=(*parts, Part(", ".join(more))))


def cost_phrase(cost: CostDifference) -> str:
    """Return `4 % more time per step`, `the same peak memory` or `energy per token not distinguishable (+11 %)`."""
    change = cost.ratio - 1
    if abs(change) < SAME:
        return f"the same {cost.quantity}"
    size = f"{100 * abs(change):.{0 if abs(change) >= 0.095 else 1}f} %"
    if cost.p is not None and cost.p > COST_LEVEL:
        return f"{cost.quantity} not distinguishable ({'+' if change > 0 else '-'}{size})"
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
    found = [(configuration, number_of) for configuration, number_of in ranking.verdict.diverged.items() if number_of]
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


def _without_loss(family: FamilyVerdict) -> Iterator[VerdictLine]:
    """Yield the configurations that are not compared, and did not diverge."""
    names = [one for one, mean in family.means.items() if mean is None and not family.diverged.get(one)]
    if names:
        verb = "has" if len(names) == 1 else "have"
        parts = sentence(*_names(names), f" {verb} no loss, and count as comparisons in the correction of p")
        yield VerdictLine(label=LineLabel.NOTE, parts=parts)


def _targets(numbers: MatrixNumbers) -> Iterator[VerdictLine]:
    """Yield how surely each configuration is below TARGET_LOSS, and in how many runs it was reached."""
    target = target_numbers(numbers)
    if target is None or not target.is_set:
        return
    alpha = numbers.rankings[0].verdict.rules.alpha if numbers.rankings else COST_LEVEL
    for one in target.groups[:MOST_TARGETS]:
        parts = sentence(name(one.name), f": {target_text(one, target.value, alpha)}")
        yield VerdictLine(label=LineLabel.TARGET, parts=parts)
    if len(target.groups) > MOST_TARGETS:
        rest = sentence(f"and {plural(len(target.groups) - MOST_TARGETS, 'more configuration')}, in results.json")
        yield VerdictLine(label=LineLabel.TARGET, parts=rest)


def target_text(one: TargetGroup, target: float, alpha: float) -> str:
    """Return `below 3.28 (p = 0.003), reached in 5 of 5 runs, median 3,250 steps, 12m03s`."""
    test, loss, step = one.test, margin_text(target), one.reached("step")
    if test is None or test.p_holm is None:
        reason = "" if test is None else test.reason.partition(":")[0]
        parts = [f"no test against {loss} ({reason or 'no loss'})"]
    else:
        parts = [f"{'below' if test.is_below else 'not shown to be below'} {loss} ({p_text(test.p_holm, alpha)})"]
    if not step.runs:
        return ", ".join([*parts, "no run has ended"])
    missed = f"not reached in {step.missed} of {plural(step.runs, 'run')}"
    parts.append(missed if step.missed else f"reached in {step.reached} of {plural(step.runs, 'run')}")
    medians = {quantity: one.reached(quantity).median for quantity in QUANTITIES}
    texts = {
        "step": lambda value: f"median {value:,.0f} steps",
        "seconds": duration,
        "joules": lambda value: f"{value:,.0f} J",
        "dollars": money,
    }
    return ", ".join([*parts, *(text(value) for unit, text in texts.items() if (value := medians[unit]) is not None)])


def _runs(situation: Situation) -> Iterator[VerdictLine]:
    parts = []
    if situation.unfinished:
        verb = "has" if situation.unfinished == 1 else "have"
        parts.append(f"{plural(situation.unfinished, 'run')} {verb} not ended: the verdict may change")
    if situation.reserve:
        parts.append(f"{plural(situation.reserve, 'run')} in reserve, which the verdict does not need")
    if parts:
        yield VerdictLine(label=LineLabel.RUNS, parts=sentence("; ".join(parts)))


def _next(still_open: Sequence[PairVerdict], situation: Situation) -> Iterator[VerdictLine]:
    """Yield the command that runs more seeds, if they could decide something."""
    if not situation.command:
        return
    wanted = max((pair.more_seeds or 0 for pair in still_open), default=0)
    parts = sentence(f"about {plural(wanted, 'more seed')} per configuration; finished runs are kept")
    if situation.wanted:
        parts = sentence(f"{plural(situation.wanted, 'run')} that the verdict wants now")
    yield VerdictLine(label=LineLabel.NEXT, parts=parts, command=situation.command)


def _notes(ranking: Ranking, situation: Situation) -> Iterator[VerdictLine]:
    if situation.reused:
        includes = f"includes {plural(situation.reused, 'reused run')}"
        parts = sentence(f"{includes}: if they were the reason for this comparison, it does not count as evidence")
        yield VerdictLine(label=LineLabel.NOTE, parts=parts)
    if situation.unused:
        results = "1 result is" if situation.unused == 1 else f"{situation.unused} results are"
        parts = sentence(f"{results} not in the verdict: no round of it asked for them")
        yield VerdictLine(label=LineLabel.NOTE, parts=parts)
    family = ranking.verdict
    if ranking.spent_error is not None:
        raised = " to ".join(map(str, [*ranking.raised, len(family.rules.seeds)]))
        error = f'the probability of a false "better" is {percent_text(round(ranking.spent_error, 4))}'
        allowed = f"not {percent_text(round(family.rules.alpha, 6))}"
        parts = sentence(f"MATRIX_SEEDS_MAX was raised from {raised} after runs had started: {error}, {allowed}")
        yield VerdictLine(label=LineLabel.NOTE, parts=parts)


def _names(names: Sequence[str]) -> Parts:
    """Return at most MOST_NAMES names as parts, or their number."""
    if len(names) > MOST_NAMES:
        return sentence(f"{len(names)} configurations")
    parts: list[Part] = []
    for index, one in enumerate(names):
        parts += [*sentence(" and " if index else ""), name(one)]
    return tuple(parts)


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
