"""Tables that fit a screen: columns that do not fit are left out, the least worth first, and long names are shortened.

Pure: text in, text out. Widths are columns of the terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

GAP = 2
NAME_LEAST = 14  # columns that a name keeps when nothing else can go
NAME_FAIR = 30  # columns that a name keeps before others are left out
ELLIPSIS = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """worth: columns of little worth go first where there is no room; None never goes.

    words: set to the left, as words are; numbers stand to the right.
    """

    title: str
    worth: int | None = None
    words: bool = False


Row = tuple[str, ...]


def fitted(columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> tuple[Row, ...]:
    """Return the titles and the rows, padded, with the columns that there is room for.

    The first column holds names. width: None for as much as is needed. A column in which nothing is known is left out
    before any other.
    """
    kept = list(range(len(columns)))
    need = [max(len(text) for text in (columns[at].title, *(row[at] for row in rows))) for at in kept]
    if width is not None:
        while _total(need, kept, NAME_FAIR) > width and (last := _least(columns, kept, rows)) is not None:
            kept.remove(last)
        others = sum(need[at] + GAP for at in kept[1:])
        need[0] = min(need[0], max(NAME_LEAST, width - others))
    titles = tuple(column.title for column in columns)
    return tuple(tuple(_cell(row[at], need[at], columns[at].words) for at in kept) for row in (titles, *rows))


def joined(cells: Row) -> str:
    """Return a row as a line."""
    return (" " * GAP).join(cells).rstrip()


def shortened(text: str, width: int) -> str:
    """Return a name in so many columns: its middle is left out, since beginnings and ends tell names apart."""
    if len(text) <= width:
        return text
    head = max(0, (width - 1) // 2)
    tail = max(0, width - 1 - head)
    return (text[:head] + ELLIPSIS + text[len(text) - tail :])[:width]


def wrapped(text: str, width: int | None) -> list[str]:
    """Return a sentence as lines of a width, those behind the first indented; None: one line."""
    if width is None:
        return [text]
    return textwrap.wrap(text, max(20, width), subsequent_indent="    ") or [""]


def _total(need: Sequence[int], kept: Sequence[int], name: int) -> int:
    """The width of a table whose names may be shortened to `name` columns."""
    return min(need[0], name) + sum(need[at] + GAP for at in kept[1:])


def _least(columns: Sequence[Column], kept: Sequence[int], rows: Sequence[Row]) -> int | None:
    """The column to leave out next; None where all that are left must stay."""

    def worth(at: int) -> tuple[bool, int]:
        return (any(row[at] not in ("", "-") for row in rows), columns[at].worth or 0)

    return min((at for at in kept[1:] if columns[at].worth is not None), key=worth, default=None)


def _cell(text: str, width: int, words: bool) -> str:
    text = shortened(text, width)
    return text.ljust(width) if words else text.rjust(width)
