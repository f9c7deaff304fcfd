"""Render results by templates, in three environments: plain text, Markdown and HTML.

Text of users, logs and trackers is made safe by the environment: no control sequence in text, code spans and blocks in
Markdown, autoescape in HTML.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.gpu.balance import cv_text
from kmatrix.report import tables, wording
from kmatrix.report.ranking import axis_limit, open_pairs
from kmatrix.report.results import Configuration, OptimizerSetting, Ranking, Results, Run, RunAlert
from kmatrix.report.tables import Table
from kmatrix.status.wanted import SHORT_HASH
from kmatrix.text import (
    UNKNOWN,
    WIDTH,
    columns,
    count,
    duration,
    first_names,
    fixed,
    joules,
    make_command,
    money,
    plural,
    printable,
    short,
    shortened,
    shown,
    signed,
    table,
    time_of_day,
    wrap,
)
from kmatrix.verdict.family import Pair

if TYPE_CHECKING:
    from jinja2 import Environment

TEXT, MARKDOWN, HTML = "text", "markdown", "html"
TEMPLATES = Path(__file__).resolve().parent / "templates"
MOST_NAME, MOST_TEXT = 200, 1_000  # characters of a name and of a sentence in Markdown
MOST_ROWS = 100  # of a table in Markdown: a comment at GitHub has at most 65,536 characters
# Characters that mean something inside a line of Markdown. Nothing begins with "< ": "p < 0.001" stays readable.
SPECIAL = re.compile(r"[\\`*_\[\]>#|~$&]|<(?! )")
BACKTICKS = re.compile("`+")
NO_BREAK = "\N{NO-BREAK SPACE}"
CORE_NOISE = (
    "CORE: equal runs of nanochat varied by a standard deviation of 0.005 to 0.012 (docs/evaluation.md); "
    "configurations are ranked by their losses"
)
GAP = "\N{PARAGRAPH SEPARATOR}"  # stands for an empty line of a text: all others are of the template


def render(kind: str, template: str, results: Results, **values: object) -> str:
    """Return a template over results. kind: TEXT, MARKDOWN or HTML."""
    known = {one.name: one for one in results.configurations}
    text = environment(kind).get_template(template).render(r=results, known=known, **values)
    return text if kind == HTML else plain(text)


def plain(text: str) -> str:
    """Return text without control sequences, which a terminal would obey, and with no empty lines but those of GAP."""
    lines = [line.rstrip() for line in printable(text).split("\n") if line.strip(" ")]
    return "\n".join("" if line == GAP else line for line in lines) + "\n"


def rendered(template: str, **values: object) -> str:
    """Return a template of plain text over other values."""
    return plain(environment(TEXT).get_template(template).render(**values))


def headlines(results: Results) -> tuple[str, ...]:
    """Return the verdict on each ranking in a sentence, or why there is none."""
    macros: Any = environment(TEXT).get_template("verdict.j2").module
    known = {one.name: one for one in results.configurations}
    texts = [macros.headline(one, known) for one in results.rankings] or [macros.no_ranking(results)]
    return tuple(" ".join(text.split()) for text in texts)


@cache
def environment(kind: str) -> Environment:
    """Return the templates with the filters of a kind."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # 0.1 s that other commands would wait, too

    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=kind == HTML,
        undefined=StrictUndefined,
        finalize=_without_controls if kind == HTML else None,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    found.globals.update(tables=tables, wording=wording, gap=GAP, about=_about, core_noise=CORE_NOISE)
    found.filters.update(FILTERS, **OWN_FILTERS[kind])
    return found


def _without_controls(value: object) -> object:
    """Return what a page prints; what is markup already is the page's own."""
    return printable(value) if type(value) is str else value


def quoted(text: object, most: int = MOST_NAME) -> str:
    """Return a text of a user as a code span that shows it on one line, without control characters.

    >>> quoted("a|b <b>@you</b>"), quoted("`rm`")
    ('`a|b <b>@you</b>`', '`` `rm` ``')
    """
    line = shortened(one_line(text), most) or UNKNOWN
    fence = "`" * (1 + max((len(found) for found in BACKTICKS.findall(line)), default=0))
    gap = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{gap}{line}{gap}{fence}"


def escaped(text: object) -> str:
    r"""Return a text of ours as Markdown that shows it on one line.

    >>> escaped("a|b * c"), escaped("p < 0.001 <b>")
    ('a\\|b \\* c', 'p < 0.001 \\<b\\>')
    """
    return SPECIAL.sub(lambda found: f"\\{found[0]}", str(text))


def code_block(lines: Iterable[str], indent: str = "") -> str:
    """Return lines as a block of code in Markdown, whatever they contain."""
    text = "\n".join(lines)
    fence = "`" * max([3, *(len(found) + 1 for found in BACKTICKS.findall(text))])
    return "\n".join(f"{indent}{line}" for line in f"{fence}text\n{text}\n{fence}".splitlines())


def one_line(text: object) -> str:
    """Return a text on one line, without control characters: nothing in it can look like a second line."""
    return " ".join(printable(str(text)).split())


def text_table(found: Table, width: int | None = WIDTH) -> str:
    """Return a table of fixed width."""
    return "\n".join(table(columns(found.titles, found.words), found.rows, width, rule=True))


def rows_table(rows: Sequence[Sequence[str]], titles: Sequence[str], words: Sequence[int] = (0,)) -> str:
    """Return rows that a template made as a table that is as wide as needed."""
    return text_table(Table(titles=titles, rows=rows, words=words), None)


def average(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values, None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _indented(text: str, indent: int = 0, bullet: str = "") -> str:
    """Return a text in lines of at most the width of a report, all of them indented."""
    return "\n".join(" " * indent + line for line in wrap(text, bullet, WIDTH - indent))


def markdown_table(found: Table) -> str:
    """Return a table of Markdown; the first column has names."""
    left = set(found.words)
    rule = ["---" if place in left else "--:" for place in range(len(found.titles))]
    # A table takes the backslash away, also inside code.
    rows = [[quoted(row[0]).replace("|", "\\|"), *map(escaped, row[1:])] for row in found.rows[:MOST_ROWS]]
    lines = [f"| {' | '.join(cells)} |" for cells in (list(map(escaped, found.titles)), rule, *rows)]
    hidden = len(found.rows) - len(rows)
    return "\n".join([*lines, *(["", f"and {plural(hidden, 'more row')}, in results.json"] if hidden else [])])


def _wrapped(text: str, bullet: str = "", width: int = WIDTH) -> str:
    return "\n".join(wrap(text, bullet, width))


def _hanging(text: str, indent: int, width: int = WIDTH) -> str:
    """Return a text whose further lines are indented."""
    return "\n".join(textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False))


def _against(one: Ranking) -> list[Any]:
    """Return the comparisons of the reference with configurations that have a loss."""
    return [pair for pair in one.pairs if pair.a == one.reference and pair.difference is not None]


def _open(one: Ranking) -> list[Any]:
    return open_pairs(one.reference, one.pairs, has_baseline=one.baseline is not None)


def _strong(text: object, kind: str = "name") -> Any:
    from markupsafe import Markup

    return Markup('<strong class="{}">{}</strong>').format(kind, one_line(text))


def _about(results: Results, one: Ranking) -> str:
    """Return what tells a ranking from the others of its matrix."""
    if len(results.rankings) < 2:
        return ""
    return f"data {one.data_sha256[:SHORT_HASH]}: " if one.data_sha256 else "bits per byte over tokenizers: "


def _mark(one: Ranking) -> str:
    """Return the state of a ranking: `Partly open, preliminary`."""
    return str(one.state).capitalize() + (", preliminary" if one.preliminary else "")


def _setting(one: OptimizerSetting) -> str:
    """Return `learning_rate 0.001 0.002 (swept)`; its spaces do not break."""
    values = " ".join(f"{value:g}" if isinstance(value, float) else str(value).lower() for value in one.values)
    mark = "" if one.origin == "default" else f" ({one.origin})"
    return f"{one.name} {values}{mark}".replace(" ", NO_BREAK)


def _when(alert: RunAlert) -> str:
    """Return when alerts of one kind were active, and for how long in total."""
    begin = f"from {time_of_day(alert.since, date=False, utc=True)}"
    if alert.until is None:
        return f"{begin} to the end"
    total = duration(alert.seconds)
    return f"{begin} for {total}" if alert.times == 1 else f"{alert.times} times {begin}, {total} in total"


def _span(one: Ranking, known: Mapping[str, Configuration], runs: Mapping[str, Run]) -> tuple[float, float]:
    """Return the ends of the axis of the losses of a ranking."""
    means = [known[name].mean or 0.0 for name in one.order] or [0.0]
    limit = axis_limit(means)
    near = [known[name] for name in one.order if (known[name].mean or 0.0) <= limit]
    losses = [getattr(runs[run], one.measure) for each in near for run in each.counted] or [0.0]
    room = 0.05 * (max(losses) - min(losses)) or 0.001
    return min(losses) - room, max(losses) + room


def _gap_span(one: Ranking) -> tuple[float, float]:
    """Return the ends of the axis of the differences to the reference."""
    found = [pair.mirrored() for pair in _against(one)]
    ends = [0.0, *(pair.difference for pair in found)]
    limit = axis_limit(list(map(abs, ends)))
    for pair in found:
        if pair.interval is not None and abs(pair.difference) <= limit:
            ends += [pair.interval.low, pair.interval.high]
    near = [end for end in ends if abs(end) <= 2 * limit] or [0.0]
    room = 0.05 * (max(near) - min(near)) or 0.001
    return min(near) - room, max(near) + room


def _signed_amount(pair: Pair) -> str:
    """Return a difference with half of its interval: `+0.0117 ± 0.0031`."""
    if pair.difference is None:
        return UNKNOWN
    digits = wording.digits_for(pair.interval)
    text = wording.difference(pair.difference, digits)
    return text if pair.interval is None else f"{text} ± {wording.half(pair.interval, digits)}"


FILTERS: dict[str, Callable[..., Any]] = {
    "against": _against,
    "among": lambda names, known: [known[name] for name in names],
    "open_pairs": _open,
    "count": count,
    "duration": duration,
    "first_names": first_names,
    "money": money,
    "plural": plural,
    "hanging": _hanging,
    "mark": _mark,
    "setting": _setting,
    **{"average": average, "cv": cv_text, "fixed": fixed, "joules": joules, "short": short, "signed": signed},
    **{"shortened": shortened, "wrapped": _indented},
    "tail": lambda lines: printable("\n".join(lines)).splitlines(),
    "when": _when,
    # Of the page.
    "gap_span": _gap_span,
    "half": wording.half,
    "losses": lambda names, runs, measure: [getattr(runs[name], measure) for name in names],
    "of": lambda pairs, name: next((pair.mirrored() for pair in pairs if pair.b == name), None),
    "outcome": wording.outcome,
    "p": lambda pair, one: wording.p_text(pair.p_holm, 1 - one.confidence),
    "quantity": lambda value, name: wording.quantity(name, value),
    "reproduce": lambda run, matrix: make_command("reproduce", RUN=f"{shown(matrix)}/{run}"),
    "signed_amount": _signed_amount,
    "span": _span,
    "thousands": lambda value: f"{value:,}",
    "time": lambda unix: time_of_day(unix, utc=True),
    "clock": lambda unix: time_of_day(unix, utc=True, date=False),
    "wrap": _wrapped,
    "one_line": one_line,
    "code_block": code_block,
    **{name: getattr(wording, name) for name in ("amount", "bounds", "cost", "endings", "loss", "mean_of", "method")},
    **{name: getattr(wording, name) for name in ("corrected", "percent", "size", "still_open", "won")},
}
OWN_FILTERS: dict[str, dict[str, Callable[..., Any]]] = {
    TEXT: {"name": str, "num": str, "quote": one_line, "table": text_table, "rows_table": rows_table},
    MARKDOWN: {
        "name": quoted,
        "num": escaped,
        "quote": lambda text: quoted(text, MOST_TEXT),
        "table": markdown_table,
    },
    HTML: {
        "name": _strong,
        "num": lambda text: _strong(text, "num"),
        "quote": lambda text: shortened(one_line(text), MOST_TEXT),
    },
}
