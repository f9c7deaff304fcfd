"""Write the verdict of a matrix as report.md, to be pasted into a pull request.

Tables are GitHub's extension of CommonMark. Text of users stands in code spans and blocks: it shows as it is, and
makes no link, no mention, no formula and no HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kmatrix.records.files import write_text
from kmatrix.report.formats import facts
from kmatrix.report.numbers import GroupNumbers, MatrixNumbers, Ranking, RunNumbers
from kmatrix.report.pair_text import (
    Part,
    PartKind,
    digits_for,
    number_text,
    outcome_word,
    p_text,
    percent_text,
    signed_text,
)
from kmatrix.report.sentences.next_seeds import matrix_command
from kmatrix.report.sentences.rankings import no_result_text, unit_of
from kmatrix.report.sentences.values import VerdictText
from kmatrix.report.verdict_text import verdict_texts
from kmatrix.stats import mean
from kmatrix.status.cost import total_dollars
from kmatrix.text import UNKNOWN, count, duration, money, plural, printable, shortened, time_of_day
from kmatrix.verdict.family import Pair as PairVerdict

MOST_NAME = 200  # characters
MOST_TEXT = 1_000  # characters of a reason
MOST_RUNS = 20  # failures listed
MOST_ROWS = 100  # configurations in a table: a comment at GitHub has at most 65,536 characters
TAIL_LINES = 6  # of a failed run's log
MOST_LINE = 200  # characters of a line of a log
# Characters that mean something inside a line of Markdown. Nothing begins with "< ": "p < 0.001" stays readable.
SPECIAL = re.compile(r"[\\`*_\[\]>#|~$&]|<(?! )")
BACKTICKS = re.compile("`+")


def write_markdown(path: Path, numbers: MatrixNumbers) -> None:
    """Write report.md."""
    write_text(path, markdown(numbers))


def markdown(numbers: MatrixNumbers) -> str:
    """Return the content of report.md."""
    blocks = [f"# {quoted(numbers.name)}"]
    texts = verdict_texts(numbers)
    for place, text in enumerate(texts):
        blocks += _verdict(text)
        if numbers.rankings:
            blocks += _ranking(numbers.rankings[place])
    return "\n\n".join([*blocks, *_cost(numbers), *_failures(numbers), *_provenance(numbers)]) + "\n"


def escaped(text: str) -> str:
    """Return a text of ours as Markdown that shows it on one line.

    >>> escaped("a|b * c"), escaped("p < 0.001 <b>")
    ('a\\\\|b \\\\* c', 'p < 0.001 \\\\<b\\\\>')
    """
    return SPECIAL.sub(lambda found: f"\\{found[0]}", text)


def quoted(text: str, most: int = MOST_NAME, *, in_table: bool = False) -> str:
    """Return a text of a user as a code span that shows it on one line, without control characters.

    >>> quoted("a|b <b>@you</b>", in_table=True), quoted("`rm`")
    ('`a\\\\|b <b>@you</b>`', '`` `rm` ``')
    """
    line = shortened(" ".join(printable(text).split()), most) or UNKNOWN
    if in_table:
        line = line.replace("|", "\\|")  # a table takes the backslash away, also inside code
    fence = "`" * (1 + max((len(found) for found in BACKTICKS.findall(line)), default=0))
    gap = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{gap}{line}{gap}{fence}"


def code_block(lines: Iterable[str]) -> str:
    """Return lines as a block of code, whatever they contain."""
    text = "\n".join(lines)
    fence = "`" * max([3, *(len(found) + 1 for found in BACKTICKS.findall(text))])
    return f"{fence}text\n{text}\n{fence}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[int] = (0,)) -> str:
    """Return a table of escaped cells. words: the columns that are aligned to the left."""
    left = set(words)
    rule = ["---" if place in left else "--:" for place in range(len(titles))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))


def _verdict(text: VerdictText) -> Iterator[str]:
    about = f" ({escaped(text.about)})" if text.about else ""
    yield f"## {text.mark}{about}"
    yield f"**{_parts(text.headline)}**"
    items = []
    for line in text.lines:
        items.append(f"- {line.label}: {_parts(line.parts)}")
        if line.command:
            items += ["", *(f"  {row}" for row in code_block([_one_line(line.command)]).splitlines())]
    if items:
        yield "\n".join(items)


def _parts(parts: Iterable[Part]) -> str:
    return "".join(
        escaped(part.text) if part.kind in (PartKind.TEXT, PartKind.NUMBER) else quoted(part.text, MOST_TEXT)
        for part in parts
    )


def _ranking(ranking: Ranking) -> Iterator[str]:
    level = percent_text(ranking.verdict.rules.confidence)
    titles = ["", "configuration", f"mean loss, {unit_of(ranking)}", f"{level} interval", "sd", "seeds", "difference"]
    pairs = ranking.pairs_by_name
    rows = [
        _ranking_row(place, group, pairs.get(group.name), ranking)
        for place, group in enumerate(ranking.groups[:MOST_ROWS], start=1)
    ]
    for group in ranking.without_result[: MOST_ROWS - len(rows)]:
        rows.append(["", quoted(group.name, in_table=True), *[UNKNOWN] * 3, "0", *[UNKNOWN] * 2, no_result_text(group)])
    yield _table([*titles, "p", "it is"], rows, words=(0, 1, 8))
    yield from _more(len(ranking.groups) + len(ranking.without_result) - len(rows))
    if any(pair.p_holm is not None for pair in ranking.verdict.pairs):
        tests = ranking.verdict.size
        correction = f"; p is corrected for {tests} comparisons (Holm)" if tests > 1 else ""
        yield f"Differences are to {quoted(ranking.verdict.reference)}{correction}."


def _more(hidden: int) -> Iterator[str]:
    if hidden:
        yield f"and {plural(hidden, 'more configuration')}, in results.json"


def _ranking_row(place: int, group: GroupNumbers, row_pair: PairVerdict | None, ranking: Ranking) -> list[str]:
    """Return the row of a configuration. row_pair: the reference compared with it, None for the reference itself."""
    interval, digits = group.interval, digits_for(group.interval)
    row = [
        str(place),
        quoted(group.name, in_table=True),
        UNKNOWN if group.mean is None else number_text(group.mean, digits),
        UNKNOWN if interval is None else f"± {(interval.high - interval.low) / 2:.{digits}f}",
        UNKNOWN if group.deviation is None else f"{group.deviation:.{digits}f}",
        str(len(group.losses)),
    ]
    if row_pair is None:
        return [*row, UNKNOWN, UNKNOWN, "the reference"]
    pair = row_pair.mirrored()
    if pair.difference is None:
        return [*row, UNKNOWN, UNKNOWN, escaped(pair.reason)]
    digits = digits_for(pair.interval)
    half = "" if pair.interval is None else f" ± {(pair.interval.high - pair.interval.low) / 2:.{digits}f}"
    return [
        *row,
        f"{number_text(pair.difference, digits)}{half}" if half else escaped(_untested(pair.difference, digits)),
        UNKNOWN if pair.p_holm is None else p_text(pair.p_holm, ranking.verdict.rules.alpha).removeprefix("p = "),
        "not tested" if pair.p_holm is None else outcome_word(pair.outcome, pair.method),
    ]


def _untested(difference: float, digits: int) -> str:
    """Return a difference without an interval; one that is not 0 is never printed as 0."""
    return signed_text(difference, digits).removeprefix("+")


def _cost(numbers: MatrixNumbers) -> Iterator[str]:
    """Yield what each configuration takes, as means over its finished runs."""
    groups = [group for group in numbers.groups if group.counted]
    if not groups:
        return
    yield "## Cost"
    titles = ["configuration", "time per step", "tokens/s", "time", "peak memory", "energy per token", "dollars, all"]
    if len(groups) > MOST_ROWS:  # the best of them
        places = {group.name: place for ranking in numbers.rankings for place, group in enumerate(ranking.groups)}
        groups.sort(key=lambda group: places.get(group.name, len(groups)))
    yield _table(titles, [_cost_row(group) for group in groups[:MOST_ROWS]])
    yield from _more(len(groups[MOST_ROWS:]))


def _cost_row(group: GroupNumbers) -> list[str]:
    def shown(of: Callable[[RunNumbers], float | None], text: Callable[[float], str]) -> str:
        values = [value for run in group.counted if (value := of(run)) is not None]
        return text(mean(values)) if values else UNKNOWN

    return [
        quoted(group.name, in_table=True),
        shown(lambda run: run.step_ms, lambda value: f"{value:,.1f} ms"),
        shown(lambda run: run.tokens_per_second, count),
        shown(lambda run: run.seconds, duration),
        shown(lambda run: run.peak_memory_mib, lambda value: f"{value:,.0f} MiB"),
        shown(lambda run: run.measured_joules_per_token, lambda value: f"{1000 * value:.4g} mJ"),
        escaped(money(total_dollars(run.dollars for run in group.runs))),
    ]


def _failures(numbers: MatrixNumbers) -> Iterator[str]:
    failed = [run for run in numbers.runs if run.ended_badly]
    if not failed:
        return
    yield "## Failed, stopped and skipped"
    for run in failed[:MOST_RUNS]:
        kind = f" ({quoted(run.kind)})" if run.kind else ""
        yield f"- {quoted(run.name)} {run.status}{kind}: {quoted(run.reason or 'no reason recorded', MOST_TEXT)}"
        if run.log_tail:
            lines = [shortened(printable(line), MOST_LINE) for line in run.log_tail[-TAIL_LINES:]]
            yield "\n".join(f"  {row}" for row in code_block(lines).splitlines())
    if len(failed) > MOST_RUNS:
        yield f"and {plural(len(failed) - MOST_RUNS, 'more run')}"


def _provenance(numbers: MatrixNumbers) -> Iterator[str]:
    yield "## Provenance"
    runs = ", ".join(f"{number} {state}" for state, number in numbers.states.items())
    created = "" if numbers.created is None else time_of_day(numbers.created, utc=True)
    known = {
        "Runs": runs,
        "Created": created,
        "Machine": facts.machines(numbers),
        "Devices": facts.devices(numbers),
        "Software": facts.software(numbers),
        "Code": facts.code(numbers),
        "Model": facts.models(numbers),
        "Command": numbers.command,
    }
    yield "\n".join(f"- {name}: {quoted(text, MOST_TEXT)}" for name, text in known.items() if text)
    if links := facts.wandb_groups(numbers):
        yield "\n".join(f"- W&B: <{link}>" for link in links)
    best = next((run for ranking in numbers.rankings for run in ranking.groups[0].counted), None)
    if best is not None:
        yield "The first run of the best configuration is repeated by"
        yield code_block([_one_line(matrix_command("reproduce", RUN=f"{numbers.path.name}/{best.name}"))])


def _one_line(command: str) -> str:
    """Return a command as one line: nothing in it can begin a second one when it is pasted."""
    return " ".join(printable(command).split())
