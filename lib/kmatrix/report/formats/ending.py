"""The short form of the report that ends a matrix on the terminal: at most 30 lines of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmatrix.records.runs import Status
from kmatrix.report.numbers import BITS, MatrixNumbers, Ranking, RunNumbers
from kmatrix.report.sentences.rankings import no_result_text
from kmatrix.report.sentences.values import LineLabel, VerdictText
from kmatrix.report.verdict_text import verdict_texts
from kmatrix.status.cost import total_dollars
from kmatrix.text import ELLIPSIS, UNKNOWN, Column, count, duration, money, plural, printable, shortened, table, wrap

WIDTH = 80  # columns
MOST_LINES = 30
MOST_RUNS = 10  # rows of the table
MOST_GROUPS = 3  # configurations of a ranking
MOST_FAILURES = 3
COLUMNS = (
    Column(title="run", words=True),
    Column(title="val loss"),
    Column(title="ppl", worth=2),
    Column(title="tok/s", worth=3),
    Column(title="MFU", worth=1),
    Column(title="time", worth=4),
    Column(title="status", words=True),
)
NO_BREAK = "\N{NO-BREAK SPACE}"
# Which runs are shown if not all fit: first those that need attention.
URGENCY = (Status.FAILED, Status.STOPPED, Status.SKIPPED, Status.RUNNING, Status.FINISHED, Status.PLANNED)


def render_ending(numbers: MatrixNumbers, files: Sequence[str]) -> str:
    """Return the outcome of a matrix, its runs and rankings in short. files: with the whole report, as shown."""
    first = ["", *(line.replace(NO_BREAK, " ") for line in wrap(_headline(numbers), "", WIDTH)), ""]
    last: list[str] = []
    for ranking, verdict in zip(numbers.rankings[:1], verdict_texts(numbers), strict=False):
        last += ["", *_ranking(ranking, verdict)]
    if notes := [_start(line) for line in _notes(numbers)]:
        last += ["", *notes]
    last += ["", *files]  # a path is never shortened: it is there to be copied
    most = MOST_LINES - len(first) - len(last) - 2  # the title of the table, and the number of other runs
    shown = _shown(numbers.runs, min(MOST_RUNS, most))
    rows = table(COLUMNS, [_row(run, reserve=run.name in numbers.reserve) for run in shown], WIDTH)
    hidden = len(numbers.runs) - len(shown)
    return printable("\n".join([*first, *rows, *([f"and {plural(hidden, 'more run')}"] if hidden else []), *last]))


def _headline(numbers: MatrixNumbers) -> str:
    """Return `test_matrix_results_...: finished, 2 finished, took 3m12s, cost $1.20`."""
    parts = [f"{number} {state}" for state, number in numbers.states.items()]
    parts += [] if numbers.took_s is None else [f"took {duration(numbers.took_s)}"]
    cost = total_dollars(run.dollars for run in numbers.runs)
    parts += [] if cost is None else [f"cost {money(cost)}"]
    # `wrap` breaks lines at plain blanks alone: an amount stays next to its word.
    return f"{numbers.name}: {', '.join(part.replace(' ', NO_BREAK) for part in parts)}"


def _shown(runs: Sequence[RunNumbers], most: int) -> list[RunNumbers]:
    """Return at most some runs in their order: if not all fit, failed ones, then those with the lowest loss."""
    if len(runs) <= most:
        return list(runs)

    def key(run: RunNumbers) -> tuple[int, float]:
        loss = run.final_val_loss
        return URGENCY.index(run.status), float("inf") if loss is None else loss

    kept = {run.name for run in sorted(runs, key=key)[:most]}
    return [run for run in runs if run.name in kept]


def _row(run: RunNumbers, *, reserve: bool) -> tuple[str, ...]:
    return (
        run.name,
        UNKNOWN if run.final_val_loss is None else f"{run.final_val_loss:.4f}{'' if run.counts else '*'}",
        UNKNOWN if run.perplexity is None else f"{run.perplexity:.4g}",
        count(run.tokens_per_second),
        "" if run.mfu is None else f"{run.mfu:.1%}",
        duration(run.seconds),
        "reused" if run.reused_from else run.word(reserve=reserve),
    )


def _ranking(ranking: Ranking, verdict: VerdictText) -> Iterator[str]:
    """Yield the best configurations with their mean loss, and the verdict on them."""
    unit = "bits/byte" if ranking.metric == BITS else "val loss"
    for place, group in enumerate(ranking.groups[:MOST_GROUPS], start=1):
        mean = UNKNOWN if group.mean is None else f"{group.mean:.4f}"
        yield _fit(f"{place}. {group.name}  {unit} {mean} ({plural(len(group.losses), 'seed')})")
    if (hidden := len(ranking.groups) - MOST_GROUPS) > 0:
        yield f"and {plural(hidden, 'more configuration')}"
    for group in ranking.without_result[:MOST_GROUPS]:
        yield _fit(f"-  {group.name}  {no_result_text(group)}")
    # Never shortened in the middle: it could state the opposite.
    yield from wrap(f"{verdict.report}.", "", WIDTH)
    for label in (LineLabel.EVIDENCE, LineLabel.COST, LineLabel.DIVERGED):
        if line := verdict.line(label):
            yield from wrap(f"{label}: {line.text}.", "", WIDTH)


def _notes(numbers: MatrixNumbers) -> Iterator[str]:
    """Yield why runs failed, and the number of warnings and alerts."""
    failed = [run for run in numbers.runs if run.status in (Status.FAILED, Status.SKIPPED)]
    for run in failed[:MOST_FAILURES]:
        # Text of any program, on one line: it cannot look like a line of this report.
        reason = " ".join((run.reason or "no reason recorded").split())
        yield f"{run.name} {run.status}: {reason}"
    if len(failed) > MOST_FAILURES:
        yield f"and {len(failed) - MOST_FAILURES} more failed or skipped"
    retried = sum(len(run.attempts) > 1 for run in numbers.runs)
    parts = [f"{plural(retried, 'run')} with several attempts"] if retried else []
    parts += [plural(len(numbers.warnings), "warning")] if numbers.warnings else []
    alerts = sum(len(run.alerts) for run in numbers.runs)
    parts += [plural(alerts, "alert")] if alerts else []
    if parts:
        yield f"In the report: {', '.join(parts)}"


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else shortened(line, WIDTH)


def _start(sentence: str) -> str:
    """Return what fits of a sentence: unlike that of a name, its start says the most."""
    return sentence if len(sentence) <= WIDTH else sentence[: WIDTH - 1] + ELLIPSIS
