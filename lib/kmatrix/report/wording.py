"""Losses, comparisons and costs in words: what every text, table and page prints in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kmatrix.records.attempts import Attempt
from kmatrix.records.decode import Scalar
from kmatrix.records.runs import Status
from kmatrix.report.results import Configuration, Cost, Ranking, Results, Run
from kmatrix.stats import Interval
from kmatrix.status.alerts import Alert
from kmatrix.status.wanted import SHORT_HASH
from kmatrix.text import (
    UNKNOWN,
    count,
    duration,
    joules,
    make_command,
    money,
    plural,
    shortened,
    shown,
    signed,
    time_of_day,
)
from kmatrix.verdict.family import Method, NoMoreSeeds, Pair, PairOutcome

DIGITS = 4  # least decimals of a loss and of a difference of losses
MOST_DIGITS = 8
MOST_VALUE = 40  # characters of a setting
SAME = 0.005  # two costs whose ratio is closer to 1 are called the same
COST_LEVEL = 0.05  # two-sided, of Welch's test of a cost
COST_NAMES = {"step_ms": "time per step", "peak_memory_mib": "peak memory", "joules_per_token": "energy per token"}
NO_MORE = {
    NoMoreSeeds.FUTILE: "the seeds that are left would not decide it",
    NoMoreSeeds.BUDGET: "the budget is spent",
    NoMoreSeeds.DIVERGED: "the one with the lower loss diverged more often, which more seeds do not change",
    NoMoreSeeds.NO_LOSS: "one of the two has no loss in any of its seeds",
    NoMoreSeeds.BEATEN: "one of the two is worse than a third configuration",
}


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
    texts = [f"{p:.{digits}f}" for digits in range(3, MOST_DIGITS + 1)]
    # 0.04996 is 0.0500 with four digits, which reads as if it were the level itself.
    shown = (text for text in texts if np.sign(float(text) - level) == np.sign(p - level))
    return f"p = {next(shown, texts[-1])}"


def percent(share: float) -> str:
    """Return a share from 0 to 1 as "95 %"."""
    return f"{100 * share:.4g} %"


def loss(value: float | None, digits: int = DIGITS) -> str:
    """Return a loss: 3.2811."""
    if value is None:
        return UNKNOWN
    return f"{value:z.{digits}f}" if abs(value) < 10000 else f"{value:.3g}"


def mean_of(one: Configuration) -> str:
    """Return the mean loss of a configuration with the digits of its interval."""
    return loss(one.mean, digits_for(one.interval))


def perplexity(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 1e6 else f"{value:.1e}"


def size(value: float, digits: int = DIGITS) -> str:
    """Return the size of a difference; one that is not 0 is never printed as 0.

    >>> size(-0.0117), size(0.00002), size(0.0)
    ('0.0117', 'less than 0.0001', '0.0000')
    """
    text = f"{abs(value):,.{digits}f}"
    return f"less than {10**-digits:.{digits}f}" if value and not float(text.replace(",", "")) else text


def difference(value: float, digits: int = DIGITS) -> str:
    """Return a difference with its sign; one that is not 0 is never printed as 0: `+0.0117`, `< 0.0001`."""
    text = size(value, digits)
    return text.replace("less than", "<") if text.startswith("less") else signed(value, digits)


def amount(pair: Pair) -> str:
    """Return a difference: `0.0117 ± 0.0031`, without the second number if there was no test."""
    if pair.difference is None:
        return UNKNOWN
    text = size(pair.difference, digits_for(pair.interval))
    return text if pair.interval is None else f"{text} ± {half(pair.interval)}"


def half(interval: Interval) -> str:
    """Return half of the width of an interval."""
    return f"{(interval.high - interval.low) / 2:,.{digits_for(interval)}f}"


def bounds(interval: Interval) -> str:
    """Return `0.0086 to 0.0148`."""
    low, high = (signed(value, digits_for(interval)).removeprefix("+") for value in (interval.low, interval.high))
    return f"{low} to {high}"


def outcome(pair: Pair) -> str:
    """Return the word for an outcome. An open pair without further looks is "not distinguishable"."""
    is_last = pair.outcome is PairOutcome.OPEN and pair.method is not Method.SEQUENTIAL
    return "not distinguishable" if is_last else str(pair.outcome)


def evidence(pair: Pair, ranking: Ranking) -> str:
    """Return what is known about a pair: its difference, the test, and of an open one what would decide it."""
    unit = ranking.unit
    if pair.interval is None:
        apart = "" if pair.difference is None else f"{size(pair.difference)} {unit} apart, "
        return f"{apart}{pair.reason or 'no test'}"
    digits, seeds = digits_for(pair.interval), plural(len(pair.seeds), "seed")
    shown = signed(pair.difference or 0.0, digits).removeprefix("+")
    how = f"{pair.method}, {seeds}" if pair.seeds else str(pair.method)
    interval = f"{percent(ranking.confidence)} CI {bounds(pair.interval)}"
    parts = [f"{shown} ({interval}) {unit}, {how}, {corrected(pair, ranking)}"]
    if pair.outcome is not PairOutcome.OPEN:
        return parts[0]
    if pair.no_more is not None:
        parts.append(NO_MORE.get(pair.no_more) or f"all {seeds} ran")
    if pair.margin is not None:
        parts.append(f"equal within {pair.margin:.{digits}f}")
    if pair.detectable is not None:
        parts.append(f"smallest detectable difference {pair.detectable:.{digits}f} (power 80 %)")
    if pair.more_seeds is not None:
        parts.append(f"about {plural(pair.more_seeds, 'more seed')} would decide it")
    return "; ".join(parts)


def corrected(pair: Pair, ranking: Ranking) -> str:
    """Return `p = 0.003 (Holm, 6 comparisons)`. Their number is known before: a pair without a test counts, too."""
    many = f" (Holm, {ranking.family_size} comparisons)" if ranking.family_size > 1 else ""
    return "no test" if pair.p_holm is None else p_text(pair.p_holm, 1 - ranking.confidence) + many


def cost(one: Cost) -> str:
    """Return `4 % more time per step`, `the same peak memory` or `energy per token not distinguishable (+11 %)`."""
    quantity, change = COST_NAMES[one.quantity], one.ratio - 1
    if abs(change) < SAME:
        return f"the same {quantity}"
    share = f"{100 * abs(change):.{0 if abs(change) >= 0.095 else 1}f} %"
    if one.p is not None and one.p > COST_LEVEL:
        return f"{quantity} not distinguishable ({'+' if change > 0 else '-'}{share})"
    return f"{share} {'more' if change > 0 else 'less'} {quantity}"


def endings(one: Configuration) -> str:
    """Return how runs ended that are in no mean: `2 of 3 runs diverged, 1 failed`."""
    parts = [f"{number} {word}" for word, number in one.ends.items()] or ["0 ended"]
    head, _, rest = parts[0].partition(" ")
    return ", ".join([f"{head} of {plural(len(one.runs), 'run')} {rest}", *parts[1:]])


def unfinished(run: Run) -> str:
    """Return the mark of a loss that is not ranked."""
    return "" if run.counts or run.final_val_loss is None else "*"


def about(one: Ranking, results: Results) -> str:
    """Return what tells a ranking from the others of its matrix, "" if there is no other."""
    if len(results.rankings) < 2:
        return ""
    return f"data {one.data_sha256[:SHORT_HASH]}" if one.data_sha256 else "bits per byte over tokenizers"


def mark(one: Ranking) -> str:
    """Return the state of a ranking: `Partly open, preliminary`."""
    return str(one.state).capitalize() + (", preliminary" if one.preliminary else "")


def against(one: Ranking) -> list[Pair]:
    """Return the comparisons of the reference with configurations that have a loss."""
    return [pair for pair in one.pairs if pair.a == one.reference and pair.difference is not None]


def open_pairs(one: Ranking) -> list[Pair]:
    return [pair for pair in against(one) if pair.b in one.still_open]


def value_text(value: Scalar) -> str:
    """Return the value of a training field."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return shortened(" ".join(value.split()), MOST_VALUE)
    return UNKNOWN if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def attempt(one: Attempt) -> str:
    """Return an attempt: `1: oom on n1, out of memory`."""
    kind = f"{one.number}: {one.end.kind if one.end else 'running'}{one.host and f' on {one.host}'}"
    batch = f"micro-batch {one.micro_batch}" if one.micro_batch else ""
    return ", ".join(filter(None, [kind, batch, one.end.reason if one.end else ""]))


def when(alert: Alert) -> str:
    """Return when an alert was active."""
    begin, end = (time_of_day(unix, date=False, utc=True) if unix else "the end" for unix in (alert.since, alert.until))
    return f"from {begin} to {end}"


def reproduce(run: str, matrix: Path) -> str:
    """Return the command that repeats a run."""
    return make_command("reproduce", RUN=f"{shown(matrix)}/{run}")


UNITS: dict[str, Callable[[float], str]] = {  # number of a run -> its text
    **dict.fromkeys(("seconds", "wall_s"), duration),
    **dict.fromkeys(("tokens_per_second", "tokens"), count),
    **dict.fromkeys(("peak_memory_mib", "optimizer_state_mib"), lambda value: f"{value:,.0f} MiB"),
    **dict.fromkeys(("mfu", "sparsity"), lambda value: f"{100 * value:.1f}%"),
    "dollars": money,
    "step_ms": lambda value: f"{value:,.1f} ms",
    "joules": joules,
    "joules_per_token": lambda value: f"{1000 * value:.4g} mJ",
    "step": lambda value: f"{value:,.0f}",
}


def known(name: str, value: float | None) -> str | None:
    """Return an amount with its unit, by its name in a run; None if it is unknown."""
    return None if value is None else UNITS[name](value) if name in UNITS else f"{value:.4f}"


def quantity(name: str, value: float | None) -> str:
    """Return an amount with its unit, by its name in a run."""
    return known(name, value) or UNKNOWN


def counts(results: Results) -> str:
    """Return how many runs are in each state: `4 finished, 1 failed`."""
    return ", ".join(f"{number} {state}" for state, number in results.counts.items())


def lost(results: Results) -> list[Run]:
    """Return the runs that failed, were stopped, or were skipped."""
    return [run for run in results.runs if run.status in (Status.FAILED, Status.STOPPED, Status.SKIPPED)]


def why(run: Run) -> str:
    """Return how a run ended, and how far it came: `failed: loss is nan (after 47 of 100 steps)`."""
    steps = f" (after {run.step:,} of {run.max_iters:,} steps)" if run.step is not None and run.max_iters else ""
    return f"{run.status}: {run.reason or 'no reason recorded'}{steps}"
