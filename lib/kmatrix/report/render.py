"""The templates of all reports: their environment, and the filters that write numbers and tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.gpu.balance import cv_text
from kmatrix.text import WIDTH, columns, count, duration, fixed, joules, money, plural, short, signed, table, wrap

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).resolve().parent / "templates"
TEXT, MARKDOWN, HTML = "text", "markdown", "html"  # kinds of environments


@cache
def environment(kind: str) -> Environment:
    """Return the environment of one kind of report. In HTML, everything but templates is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=kind == HTML,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do"],
    )
    made.filters |= {
        **{"count": count, "cv": cv_text, "duration": duration, "fixed": fixed, "joules": joules, "money": money},
        **{"plural": plural, "short": short, "signed": signed, "average": average, "table": table_text},
        "wrapped": wrapped,
    }
    return made


def average(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values, None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def table_text(
    rows: Sequence[Sequence[str]], titles: Sequence[str], words: Sequence[int] = (0,), **options: Any
) -> str:
    """Return `kmatrix.text.table` with underlined titles. words: indices of the columns that hold words."""
    return "\n".join(table(columns(titles, words), rows, rule=True, **options))


def wrapped(text: str, indent: int = 0, bullet: str = "") -> str:
    """Return a text in lines of at most the width of a report, all of them indented."""
    return "\n".join(" " * indent + line for line in wrap(text, bullet, WIDTH - indent))
