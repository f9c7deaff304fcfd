"""Render results by templates, in three environments: plain text, Markdown and HTML.

Text of users, logs and trackers is made safe by the environment: no control sequence in text, code spans and blocks in
Markdown, autoescape in HTML.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import kmatrix.text
from kmatrix.gpu.balance import cv_text
from kmatrix.report import tables, wording
from kmatrix.report.results import Configuration, Results
from kmatrix.report.tables import Table
from kmatrix.text import UNKNOWN, WIDTH, columns, plural, printable, shortened, table, time_of_day, wrap

if TYPE_CHECKING:
    from jinja2 import Environment

TEXT, MARKDOWN, HTML = "text", "markdown", "html"
TEMPLATES = Path(__file__).resolve().parent / "templates"
MOST_NAME, MOST_TEXT = 200, 1_000  # characters of a name and of a sentence in Markdown
MOST_ROWS = 100  # of a table in Markdown: a comment at GitHub has at most 65,536 characters
# Characters that mean something inside a line of Markdown. Nothing begins with "< ": "p < 0.001" stays readable.
SPECIAL = re.compile(r"[\\`*_\[\]>#|~$&]|<(?! )")
BACKTICKS = re.compile("`+")
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
    found.globals.update(tables=tables, wording=wording, gap=GAP)
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


def one_line(text: object) -> str:
    """Return a text on one line, without control characters: nothing in it can look like a second line."""
    return " ".join(printable(str(text)).split())


def text_table(found: Table, width: int | None = WIDTH) -> str:
    """Return a table of fixed width."""
    return "\n".join(table(columns(found.titles, found.words), found.rows, width, rule=True))


def average(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values, None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def markdown_table(found: Table) -> str:
    """Return a table of Markdown; the first column has names."""
    left = set(found.words)
    rule = ["---" if place in left else "--:" for place in range(len(found.titles))]
    # A table takes the backslash away, also inside code.
    rows = [[quoted(row[0]).replace("|", "\\|"), *map(escaped, row[1:])] for row in found.rows[:MOST_ROWS]]
    lines = [f"| {' | '.join(cells)} |" for cells in (list(map(escaped, found.titles)), rule, *rows)]
    hidden = len(found.rows) - len(rows)
    return "\n".join([*lines, *(["", f"and {plural(hidden, 'more row')}, in results.json"] if hidden else [])])


def _wrap(text: str, bullet: str = "", width: int = WIDTH, indent: int = 0, hang: int | None = None) -> str:
    """Return a text in lines of at most `width` columns. indent: of all lines.  hang: of all but the first."""
    if hang is None:
        return "\n".join(" " * indent + line for line in wrap(text, bullet, width - indent))
    return "\n".join(textwrap.wrap(text, width, subsequent_indent=" " * hang, break_on_hyphens=False))


def _strong(text: object, kind: str = "name") -> Any:
    from markupsafe import Markup

    return Markup('<strong class="{}">{}</strong>').format(kind, one_line(text))


def _among(names: Iterable[str], known: Mapping[str, Configuration]) -> list[Configuration]:
    return [known[name] for name in names]


def _functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {name: one for name, one in vars(module).items() if isfunction(one) and one.__module__ == module.__name__}


FILTERS: dict[str, Callable[..., Any]] = {
    **_functions(kmatrix.text),
    **_functions(wording),
    "among": _among,
    "cv": cv_text,
    "one_line": one_line,
    "tail": lambda lines: printable("\n".join(lines)).splitlines(),
    "time": lambda unix: time_of_day(unix, utc=True),
    "wrap": _wrap,
}
OWN_FILTERS: dict[str, dict[str, Callable[..., Any]]] = {
    TEXT: {"name": str, "num": str, "quote": one_line, "table": text_table},
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
