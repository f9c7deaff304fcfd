"""Plain text of a fixed width: tables, sections, wrapped lines, and numbers in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120
UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """Return seconds as 4.2s, 12m03s or 1h02m."""
    if seconds is None:
        return UNKNOWN
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600:,}h{whole % 3600 // 60:02d}m"


def amount(number: float | None) -> str:
    """Return a count with three figures and a letter: 512, 1.02M, 10.0B."""
    if number is None:
        return UNKNOWN
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor * 0.9995:
            scaled = number / factor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{letter}"
    return f"{number:.0f}"


def speed(tokens_per_second: float | None) -> str:
    """Return tokens a second: 55,188, or 12.3 below a hundred."""
    if tokens_per_second is None:
        return UNKNOWN
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.1f}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Return lines of columns, right-aligned but for those in `left`, at most WIDTH wide.

    A first cell that is too long for its column stands on a line of its own.
    """
    flush = set(left)
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    widths[0] = max(len(titles[0]), min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)))
    lines = []
    for row in [list(titles), ["-" * width for width in widths], *map(list, rows)]:
        if len(row[0]) > widths[0]:
            lines.append(row[0])
            row = ["", *row[1:]]  # noqa: PLW2901 (the name is already on its line)
        cells = [
            cell.ljust(w) if i in flush else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return lines


def section(title: str, lines: Sequence[str]) -> list[str]:
    return [title, "-" * len(title), *lines]


def wrap(text: str, bullet: str = "", width: int = WIDTH) -> list[str]:
    """Return a text as lines of at most this width; those after the first are indented."""
    return textwrap.wrap(text, width, initial_indent=bullet, subsequent_indent="  ", break_on_hyphens=False)
