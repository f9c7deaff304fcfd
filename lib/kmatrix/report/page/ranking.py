"""The section of the page with the rankings: each configuration with its seeds, its mean and its difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kmatrix.report.numbers import BITS, GroupNumbers, MatrixNumbers, Ranking, RunNumbers
from kmatrix.report.page.parts.figures import Scale, Span, Tick, far_off, padded
from kmatrix.report.page.parts.groups import MOST_ROWS, PageGroup
from kmatrix.report.page.parts.text import fixed
from kmatrix.report.pair_text import (
    DIGITS,
    comparisons_of,
    digits_for,
    margin_text,
    no_more_text,
    other_side,
    outcome_word,
    p_text,
)
from kmatrix.report.sentences.rankings import CORE_NOISE, no_result_text, unit_of
from kmatrix.report.verdict_text import verdict_texts
from kmatrix.stats import Interval, mean, sample_deviation
from kmatrix.text import plural
from kmatrix.verdict.family import FamilyVerdict, Method, NoMoreSeeds, PairOutcome
from kmatrix.verdict.family import Pair as PairVerdict

ROWS_SHOWN = 15  # of a ranking, before "show all"
MOST_IN_GRID = 30  # configurations in the grid of all pairs
MOST_PAIRS = 120  # rows of the list of all pairs
MOST_DIGITS = 7  # decimals of a loss: more of them are noise of the arithmetic
TICKS = 3  # of a strip
LETTER = 5.0  # percent of a narrow strip, with a space to the next text
# What runs measure besides their losses, with the title of its column.
BENCHMARKS: tuple[tuple[str, Callable[[RunNumbers], float | None]], ...] = (
    ("HellaSwag", lambda run: run.hellaswag_accuracy),
    ("HellaSwag, normalized", lambda run: run.hellaswag_accuracy_norm),
    ("CORE", lambda run: run.core_metric),
    ("its standard error", lambda run: run.core_standard_error),
)
# How the loss of the row compares with that of the column.
SIGNS = {PairOutcome.BETTER: "<", PairOutcome.WORSE: ">", PairOutcome.EQUIVALENT: "≈", PairOutcome.OPEN: "?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Marks in percent of the width of a strip."""

    seeds: tuple[float, ...]  # one per seed; none of those beyond the strip
    mean: float | None
    interval: Span | None
    is_off: bool = False  # the mean lies beyond the strip: an arrow stands for all marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A configuration compared with the reference of its ranking. Losses in the unit of the ranking."""

    difference: float | None  # this one - the reference: above 0 it is worse
    half: float | None  # half the width of the interval of the difference
    outcome: PairOutcome  # about this configuration
    word: str
    p: str  # "" without a test
    details: tuple[str, ...]  # what else is known: margin, detectable difference, further seeds
    strip: Strip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A configuration in a ranking."""

    group: PageGroup
    rank: int | None  # None: none of its runs has a loss
    seeds: int  # that count
    diverged: int
    ended: int  # runs that ended with a loss or diverged
    mean: float | None
    half: float | None  # half the width of the interval of the mean; None for one seed
    deviation: float | None
    strip: Strip
    against: Against | None  # None: it is the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """A comparison of two configurations."""

    a: str
    b: str
    word: str  # about a
    difference: float | None  # a - b
    interval: Interval | None
    p: str
    seeds: int
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """The outcome of the row's configuration, compared with that of the column."""

    sign: str  # "" on the diagonal, and for a pair that is not compared
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsTable:
    """All comparisons of a family."""

    names: tuple[str, ...]
    grid: tuple[tuple[GridCell, ...], ...]  # a row per name; empty if there are too many
    rows: tuple[PairRow, ...]
    hidden: int  # comparisons that the list leaves out
    count: int
    decided: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingTable:
    """One ranking."""

    about: str  # what tells it from the others of the matrix; "" if it is the only one
    measure: str
    unit: str
    level: float  # of all intervals
    digits: int  # decimals of its losses
    gap_digits: int  # decimals of its differences
    reference: str  # "leader" or "baseline"
    is_tested: bool  # a pair at least
    family: int  # comparisons that p values are corrected for, also those without a test
    is_paired: bool
    is_sequential: bool
    is_partial: bool  # a difference is over some of the seeds of the means: they do not subtract
    rows: tuple[RankRow, ...]
    hidden: int  # configurations without a row
    loss_ticks: tuple[Tick, ...]
    gap_ticks: tuple[Tick, ...]
    zero: float  # place of a difference of 0
    off: int  # configurations beyond the axis
    notes: tuple[str, ...]
    pairs: PairsTable | None  # None: the rows above have all comparisons

    @property
    def has_detectable(self) -> bool:
        """True if a row, or a pair, has a detectable difference, which a note explains."""
        return any("detectable" in detail for row in self.rows if row.against for detail in row.against.details)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRow:
    """What the finished runs of a configuration measured: mean and standard deviation over them, per column."""

    group: PageGroup
    runs: int  # that have a value in any column
    values: tuple[tuple[float, float | None] | None, ...]  # None: not measured; no deviation of a single run


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarksTable:
    """HellaSwag and CORE of each configuration."""

    titles: tuple[str, ...]
    rows: tuple[BenchmarkRow, ...]
    hidden: int  # configurations without a row
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingSection:
    """All rankings of a matrix."""

    tables: tuple[RankingTable, ...]
    benchmarks: BenchmarksTable | None = None  # None: no run measured any
    rows_shown: int = ROWS_SHOWN


def ranking(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> RankingSection | None:
    """Return the section, or None if there is nothing to rank."""
    pages = {group.numbers.name: group for group in groups}
    if not numbers.rankings:
        return None
    texts = verdict_texts(numbers)
    tables = [_table(one, text.about, pages) for one, text in zip(numbers.rankings, texts, strict=False)]
    return RankingSection(tables=tuple(tables), benchmarks=_benchmarks(groups))


def _benchmarks(groups: Sequence[PageGroup]) -> BenchmarksTable | None:
    """Return the table, in the order of the rankings; None if no finished run measured a benchmark."""
    columns = [(title, pick) for title, pick in BENCHMARKS if any(group.values(pick) for group in groups)]
    rows = []
    for group in groups:
        found = [group.values(pick) for _, pick in columns]
        if any(found):
            values = tuple((mean(each), sample_deviation(each)) if each else None for each in found)
            rows.append(BenchmarkRow(group=group, runs=max(map(len, found)), values=values))
    if not rows:
        return None
    titles = tuple(title for title, _ in columns)
    note = f"{CORE_NOISE}." if "CORE" in titles else "Configurations are ranked by their losses."
    return BenchmarksTable(titles=titles, rows=tuple(rows[:MOST_ROWS]), hidden=len(rows[MOST_ROWS:]), note=note)


def _table(one: Ranking, about: str, pages: Mapping[str, PageGroup]) -> RankingTable:
    family = one.verdict
    against, ended_runs, means = one.pairs_by_name, one.ended_runs, {group.name: group.mean for group in one.groups}
    limit = far_off([group.mean or 0.0 for group in one.groups], list(_half_widths(one.groups)))
    near = [group for group in one.groups if group.mean is not None and group.mean <= limit]
    first = near[:ROWS_SHOWN]  # what is seen at once has the whole width: further rows may be beyond the edge
    losses = Scale(*padded(_loss_marks(first)))
    gaps = Scale(*padded(_gap_marks([against[group.name] for group in first if group.name in against]), zero=True))
    in_view = {group.name for group in near if not losses.beyond(group.mean or 0.0)}
    reference = next((group for group in one.groups if group.name == family.reference), one.groups[0])
    rows = [
        RankRow(
            group=pages[group.name],
            rank=rank,
            seeds=len(group.losses),
            diverged=len(group.diverged),
            ended=ended_runs[group.name],
            mean=group.mean,
            half=_half(group.interval),
            deviation=group.deviation,
            strip=_loss_strip(group, losses, is_off=group.name not in in_view),
            against=_against(against[group.name], family, reference, group, gaps, is_off=group.name not in in_view)
            if group.name in against
            else None,
        )
        for rank, group in enumerate(one.groups, 1)
        if rank <= MOST_ROWS or group is reference
    ]
    lost = one.without_result[: max(0, MOST_ROWS - len(rows))]
    rows += [_row_without_result(pages[group.name], group, ended_runs[group.name]) for group in lost]
    return RankingTable(
        about=about,
        measure="bits per byte" if one.metric == BITS else "final validation loss",
        unit=unit_of(one),
        level=family.rules.confidence,
        digits=_digits([group.interval for group in one.groups]),
        gap_digits=_digits([pair.interval for pair in family.against_reference]),
        reference="leader" if family.rules.baseline is None else "baseline",
        is_tested=comparisons_of(family) > 0,
        family=family.size,
        is_paired=any(pair.method in (Method.PAIRED, Method.SEQUENTIAL) for pair in family.pairs),
        is_sequential=any(pair.method is Method.SEQUENTIAL for pair in family.pairs),
        is_partial=any(_is_partial(pair, means) for pair in family.against_reference),
        rows=tuple(rows),
        hidden=len(one.groups) + len(one.without_result) - len(rows),
        loss_ticks=_ticks(losses),
        gap_ticks=_ticks(gaps),
        zero=gaps.at(0.0),
        off=len(one.groups) - len(in_view),
        notes=one.notes,
        pairs=_pairs(family, [row.group for row in rows]) if len(family.pairs) > len(against) else None,
    )


def _digits(intervals: Sequence[Interval | None]) -> int:
    """Return the decimals of a column, so that every interval in it has two significant digits."""
    return min(MOST_DIGITS, max(map(digits_for, intervals), default=DIGITS))


def _half(interval: Interval | None) -> float | None:
    return None if interval is None else (interval.high - interval.low) / 2


def _half_widths(groups: Sequence[GroupNumbers]) -> Iterator[float]:
    for group in groups:
        if (half := _half(group.interval)) is not None:
            yield half


def _loss_marks(groups: Sequence[GroupNumbers]) -> Iterator[float]:
    """Yield the losses that a strip must hold. An interval of two seeds may be enormous: it is cut at the edge."""
    for group in groups:
        yield from group.losses.values()
        if group.interval is not None and len(group.losses) > 2:
            yield from (group.interval.low, group.interval.high)


def _gap_marks(pairs: Sequence[PairVerdict]) -> Iterator[float]:
    for pair in pairs:
        yield -(pair.difference or 0.0)
        if pair.interval is not None and len(pair.seeds) != 2:
            yield from (-pair.interval.low, -pair.interval.high)


def _ticks(scale: Scale) -> tuple[Tick, ...]:
    """Return the ticks of a strip: of three or more, every second one if their texts would touch."""
    ticks = scale.ticks(TICKS)
    room = LETTER * max(len(text) for _, text in ticks)
    return ticks[::2] if len(ticks) > 2 and any(after - at < room for (at, _), (after, _) in pairwise(ticks)) else ticks


def _loss_strip(group: GroupNumbers, scale: Scale, *, is_off: bool) -> Strip:
    interval = group.interval
    return Strip(
        seeds=tuple(scale.at(loss) for loss in group.losses.values() if not scale.beyond(loss)),
        mean=None if group.mean is None else scale.at(group.mean),
        interval=None if interval is None else scale.span(interval.low, interval.high),
        is_off=is_off,
    )


def _against(
    pair: PairVerdict,
    family: FamilyVerdict,
    reference: GroupNumbers,
    group: GroupNumbers,
    scale: Scale,
    *,
    is_off: bool,
) -> Against:
    interval, difference = pair.interval, None if pair.difference is None else -pair.difference
    mine, theirs = group.losses, reference.losses
    paired = pair.method in (Method.PAIRED, Method.SEQUENTIAL)
    gaps = [mine[seed] - theirs[seed] for seed in pair.seeds if seed in mine and seed in theirs] if paired else []
    strip = Strip(
        seeds=tuple(scale.at(gap) for gap in gaps if not scale.beyond(gap)),
        mean=None if difference is None else scale.at(difference),
        interval=None if interval is None else scale.span(-interval.high, -interval.low),
        is_off=is_off,
    )
    outcome = other_side(pair.outcome)
    return Against(
        difference=difference,
        half=_half(interval),
        outcome=outcome,
        word=_word(outcome, pair, family),
        p=_p(pair, family),
        details=tuple(_details(pair, family)),
        strip=strip,
    )


def _word(outcome: PairOutcome, pair: PairVerdict, family: FamilyVerdict) -> str:
    if pair.p_holm is None:
        return "not tested"
    if outcome is PairOutcome.EQUIVALENT:
        return f"equivalent within {margin_text(family.rules.min_difference or 0.0)}"
    return outcome_word(outcome, pair.method)


def _p(pair: PairVerdict, family: FamilyVerdict) -> str:
    """Return the p value of a difference; "" for a pair that is equivalent, whatever the p of its difference."""
    if pair.p_holm is None or pair.outcome is PairOutcome.EQUIVALENT:
        return ""
    return p_text(pair.p_holm, family.rules.alpha)


def _details(pair: PairVerdict, family: FamilyVerdict) -> Iterator[str]:
    """Yield what is known about a pair besides its difference and p."""
    if pair.method is Method.NONE or pair.p_holm is None:
        if pair.reason:
            yield pair.reason
        return
    digits = digits_for(pair.interval)
    if pair.outcome is PairOutcome.EQUIVALENT and pair.p_holm <= family.rules.alpha:
        yield f"there is a difference: {p_text(pair.p_holm, family.rules.alpha)}"
    if pair.outcome is PairOutcome.OPEN:
        if why := no_more_text(pair):
            yield why
        if pair.margin is not None:
            yield f"equal within {fixed(pair.margin, digits)}"
        if pair.detectable is not None:
            yield f"detectable {fixed(pair.detectable, digits)}"
        if pair.more_seeds is not None and pair.no_more in (None, NoMoreSeeds.BUDGET, NoMoreSeeds.MAXIMUM):
            yield f"about {plural(pair.more_seeds, 'more seed')}"


def _is_partial(pair: PairVerdict, means: Mapping[str, float | None]) -> bool:
    """Return whether the difference of a pair is not that of the two means: it is over the seeds that both have."""
    a, b = means.get(pair.a), means.get(pair.b)
    if a is None or b is None or pair.difference is None:
        return False
    return not math.isclose(a - b, pair.difference, abs_tol=10**-MOST_DIGITS)


def _row_without_result(page: PageGroup, group: GroupNumbers, ended: int) -> RankRow:
    """Return the row of a configuration of which no run has a loss."""
    nothing = Strip(seeds=(), mean=None, interval=None)
    return RankRow(
        group=page,
        rank=None,
        seeds=0,
        diverged=len(group.diverged),
        ended=ended,
        mean=None,
        half=None,
        deviation=None,
        strip=nothing,
        against=Against(
            difference=None,
            half=None,
            outcome=PairOutcome.OPEN,
            word=no_result_text(group),
            p="",
            details=(),
            strip=nothing,
        ),
    )


def _pairs(family: FamilyVerdict, groups: Sequence[PageGroup]) -> PairsTable:
    names = {group.numbers.name: group.short for group in groups}
    found: dict[tuple[str, str], PairVerdict] = {(pair.a, pair.b): pair for pair in family.pairs}
    grid = [[_grid_cell(found, a, b) for b in names] for a in names] if len(names) <= MOST_IN_GRID else []
    listed = [pair for pair in family.pairs if pair.a != family.reference]
    rows = [
        PairRow(
            a=names.get(pair.a, pair.a),
            b=names.get(pair.b, pair.b),
            word=_word(pair.outcome, pair, family),
            difference=pair.difference,
            interval=pair.interval,
            p=_p(pair, family),
            seeds=len(pair.seeds),
            details=tuple(_details(pair, family)),
        )
        for pair in listed[:MOST_PAIRS]
    ]
    return PairsTable(
        names=tuple(names.values()),
        grid=tuple(map(tuple, grid)),
        rows=tuple(rows),
        hidden=len(listed) - len(rows),
        count=len(family.pairs),
        decided=sum(pair.outcome is not PairOutcome.OPEN for pair in family.pairs),
    )


def _grid_cell(pairs: Mapping[tuple[str, str], PairVerdict], a: str, b: str) -> GridCell:
    if (pair := pairs.get((a, b))) is not None:
        outcome = pair.outcome
    elif (pair := pairs.get((b, a))) is not None:
        outcome = other_side(pair.outcome)
    else:
        return GridCell(sign="", word="")
    word = "not tested" if pair.p_holm is None else outcome_word(outcome, pair.method)
    return GridCell(sign=SIGNS[outcome], word=word)
