"""Format numbers and tables as plain text: one format for each kind of quantity, one builder of tables."""

from __future__ import annotations

import re
import shlex
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

WIDTH = 120  # columns of reports and of wrapped text
UNKNOWN = "-"  # a value that was not measured
ELLIPSIS = "…"

GIB = 2**30
GAP = 2  # spaces between two columns
NAME_LEAST = 14  # columns that a name keeps in the narrowest table
NAME_FAIR = 30  # columns that a name keeps as long as another column can be dropped
# What a terminal obeys instead of showing it (ECMA-48): control sequences, strings such as a title or the clipboard,
# other escapes, control characters except line ends and tabs, changes of the writing direction, noncharacters.
ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?"
)
CONTROLS = re.compile(
    rf"{ESCAPES.pattern}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    """Return a text without control characters. Carriage returns, which overwrite a line, end it.

    >>> printable("\\x1b[31mfailed\\x1b[0m: \\x1b]0;title\\x07a\\tb")
    'failed: a\\tb'
    """
    if CONTROLS.search(text) is None:
        return text
    return CONTROLS.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def duration(seconds: float | None) -> str:
    """Return a duration with its two largest units.

    >>> duration(4.21), duration(723), duration(3725), duration(93_600), duration(None)
    ('4.2s', '12m03s', '1h02m', '1d02h', '-')
    """
    if seconds is None:
        return UNKNOWN
    # Thresholds are those of the rounded text: 59.95 would be shown as 60.0s.
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    if (whole := round(seconds)) < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if (minutes := round(seconds / 60)) < 1440:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24:,}d{hours % 24:02d}h"


def time_of_day(unix: float, *, date: bool = True, utc: bool = False) -> str:
    """Return a Unix time as local date and time. utc: use UTC, which reads the same on every machine.

    >>> time_of_day(1_794_000_000, utc=True), time_of_day(1_794_000_000, date=False, utc=True)
    ('2026-11-06 21:20:00 UTC', '21:20:00 UTC')
    """
    form = ("%Y-%m-%d " if date else "") + "%H:%M:%S"
    return time.strftime(f"{form} UTC", time.gmtime(unix)) if utc else time.strftime(form, time.localtime(unix))


def memory_size(size: float | None, total: float | None = None) -> str:
    """Return a size in bytes in binary units, as memory is sold. total: the size that it is a part of.

    >>> memory_size(24 * 2**30), memory_size(1.5 * 2**20), memory_size(2**30, 24 * 2**30), memory_size(None)
    ('24.0 GiB', '1.5 MiB', '1.0 of 24.0 GiB', '-')
    """
    if size is None:
        return UNKNOWN
    unit, name = (GIB, "GiB") if (total or size) >= GIB else (2**20, "MiB")
    whole = "" if total is None else f" of {_sized(total / unit)}"
    return f"{_sized(size / unit)}{whole} {name}"


def disk_size(size: float | None) -> str:
    """Return a size in bytes in decimal units, as disks and downloads are measured.

    >>> disk_size(1.494e9), disk_size(20e6), disk_size(3.2e12), disk_size(None)
    ('1.49 GB', '20 MB', '3.2 TB', '-')
    """
    if size is None:
        return UNKNOWN
    for unit, length in (("B", 1), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if size < 999.5 * length:
            return f"{size / length:.3g} {unit}"
    return f"{size / 1e12:,.3g} TB"


def count(number: float | None) -> str:
    """Return a number with three digits and a letter for thousands, millions, billions or trillions.

    >>> count(512), count(1_024_000), count(10**10), count(12.34), count(None)
    ('512', '1.02M', '10.0B', '12.3', '-')
    """
    if number is None:
        return UNKNOWN
    for power, letter in ((4, "T"), (3, "B"), (2, "M"), (1, "k")):
        if (scaled := abs(number) / 1000**power) >= 0.9995:
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{number / 1000**power:.{digits}f}{letter}"
    return f"{number:.3g}"


def fixed(number: float | None, digits: int = 1, *, grouped: bool = False) -> str:
    """Return a number with this many decimals. grouped: with commas between thousands.

    >>> fixed(12800), fixed(36_000.4, 0, grouped=True), fixed(None)
    ('12800.0', '36,000', '-')
    """
    return UNKNOWN if number is None else f"{number:{',' if grouped else ''}.{digits}f}"


def short(number: float | None) -> str:
    """Return a number with three significant digits.

    >>> short(0.08789), short(11.38), short(None)
    ('0.0879', '11.4', '-')
    """
    return UNKNOWN if number is None else f"{number:.3g}"


def joules(energy: float | None) -> str:
    """Return an energy in J.

    >>> joules(36_000.4), joules(0.123), joules(None)
    ('36,000 J', '0.123 J', '-')
    """
    if energy is None:
        return UNKNOWN
    return f"{energy:,.0f} J" if energy >= 100 else f"{energy:.3g} J"


def first_names(names: Iterable[str], most: int = 6) -> str:
    """Return the first names, and how many more there are.

    >>> first_names(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def signed(difference: float, digits: int) -> str:
    """Return a difference with its sign; without a sign if it rounds to 0."""
    # Without this, "-0.0000" would suggest a direction.
    text = f"{difference:+,.{digits}f}"
    return text.lstrip("+-") if float(text.replace(",", "")) == 0 else text


def plural(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> plural(1, "run"), plural(2, "run"), plural(1200, "GPU")
    ('1 run', '2 runs', '1,200 GPUs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def money(dollars: float | None) -> str:
    """Return an amount of money, with two digits below a cent.

    >>> money(12.3456), money(0.00123), money(1200), money(None)
    ('$12.35', '$0.0012', '$1,200.00', '-')
    """
    if dollars is None:
        return UNKNOWN
    return f"${dollars:,.2f}" if dollars >= 0.01 or not dollars else f"${dollars:.2g}"


def shortened(text: str, width: int) -> str:
    """Return a name without its middle if it is too long: names of runs differ at both ends.

    >>> shortened("gpt2_adamw_seed1_4gpu", 12)
    'gpt2_…1_4gpu'
    """
    if len(text) <= width:
        return text
    head = max(0, (width - 1) // 2)
    tail = max(0, width - 1 - head)
    return (text[:head] + ELLIPSIS + text[len(text) - tail :])[:width]


def shortened_names(names: Sequence[str], width: int) -> list[str]:
    """Return the names of a list of at most `width` columns; if their middles differ, without the parts of all.

    >>> shortened_names(["gpt2_adamw_lr1_cosine_4gpu", "gpt2_adamw_lr2_cosine_4gpu"], 12)
    ['…lr1', '…lr2']
    """
    short = [shortened(name, width) for name in names]
    if len(set(short)) == len(set(names)):
        return short
    parts = [re.split("_|, ", name) for name in names]
    common = set.intersection(*map(set, parts))
    return [shortened(ELLIPSIS + "_".join(part for part in each if part not in common), width) for each in parts]


def shown(path: Path) -> str:
    """Return a path as a user would type it: relative if it is below the current directory.

    >>> shown(Path.cwd() / "a" / "b")
    'a/b'
    """
    return str(full.relative_to(Path.cwd()) if (full := path.resolve()).is_relative_to(Path.cwd()) else path)


def make_command(target: str, matrix: Path | None = None, /, **arguments: str) -> str:
    """Return a make command for the user to paste, with quotes where a shell needs them. matrix: its TARGET=.

    >>> make_command("status", Path("/my results/test_matrix_results_1"), JSON="1")
    "make status TARGET='/my results/test_matrix_results_1' JSON=1"
    """
    words = arguments if matrix is None else {"TARGET": shown(matrix), **arguments}
    return " ".join(["make", target, *(assignment(name, text) for name, text in words.items())])


def assignment(name: str, text: str) -> str:
    """Return NAME=value with quotes where a shell needs them.

    >>> assignment("PROMPT", "a b; touch c"), assignment("SEED", "1,2")
    ("PROMPT='a b; touch c'", 'SEED=1,2')
    """
    return f"{name}={shlex.quote(text)}"


class Column(NamedTuple):
    """One column of a table."""

    title: str
    worth: int | None = None  # when the table is too wide, the column of least worth is dropped first; None: never
    words: bool = False  # align to the left, as words; numbers are aligned to the right
    whole: bool = False  # first column only: put a cell that is too long on its own line instead of shortening it


def columns(titles: Sequence[str], words: Iterable[int] = (0,)) -> tuple[Column, ...]:
    """Return columns that are never dropped or shortened. words: the indices of those that hold words.

    >>> [column.words for column in columns(["run", "loss"])]
    [True, False]
    """
    left = set(words)
    return tuple(Column(title=title, words=at in left, whole=at == 0) for at, title in enumerate(titles))


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None, *, rule: bool = False
) -> list[str]:
    """Return the lines of a table: titles (unless all are empty), then rows; the first column holds names.

    width: drop columns, empty ones first, then shorten names until the lines fit; None: as wide as needed.
    rule: underline the titles.

    >>> table(columns(["run", "loss"]), [["adamw", "3.28"], ["muon", "3.2"]])
    ['run    loss', 'adamw  3.28', 'muon    3.2']
    """
    # The width that each column needs; then drop columns until the table fits.
    need = [max(map(len, texts)) for texts in zip([column.title for column in columns], *rows, strict=True)]
    kept = list(range(len(columns)))
    if width is not None:
        while _total(need, kept, NAME_FAIR) > width and (least := _least(columns, kept, rows)) is not None:
            kept.remove(least)
        # What the other columns leave is for the names.
        others = sum(need[at] + GAP for at in kept[1:])
        need[0] = min(need[0], max(NAME_LEAST, width - others))
    if not columns[0].whole and any(len(row[0]) > need[0] for row in rows):
        names = shortened_names([row[0] for row in rows], need[0])
        rows = [(name, *row[1:]) for name, row in zip(names, rows, strict=True)]
    head = [[column.title for column in columns]] if any(column.title for column in columns) else []
    if rule and head:
        head.append(["-" * length for length in need])
    # One format for all rows: a status of 10,000 runs has 120,000 cells.
    form = (" " * GAP).join(f"{{{at}:{'<' if columns[at].words else '>'}{need[at]}}}" for at in kept)
    lines = []
    for row in (*head, *rows):
        if columns[0].whole and len(row[0]) > need[0]:
            lines += [row[0], form.format("", *row[1:]).rstrip()]
        else:
            lines.append(form.format(*row).rstrip())
    return lines


def _total(need: Sequence[int], kept: Sequence[int], name: int) -> int:
    """Return the width of a table whose names may be shortened to `name` columns."""
    return min(need[0], name) + sum(need[at] + GAP for at in kept[1:])


def _least(columns: Sequence[Column], kept: Sequence[int], rows: Sequence[Sequence[str]]) -> int | None:
    """Return the column to drop next, or None if no column may be dropped."""

    def worth(at: int) -> tuple[bool, int]:
        return (any(row[at] not in ("", UNKNOWN) for row in rows), columns[at].worth or 0)

    return min((at for at in kept[1:] if columns[at].worth is not None), key=worth, default=None)


def wrap(text: str, bullet: str = "", width: int | None = WIDTH) -> list[str]:
    """Return a text as lines of at most `width` columns, the first after `bullet`, the others indented.

    >>> wrap("one two three four five six", "! ", 20)
    ['! one two three four', '  five six']
    """
    if width is None:
        return [bullet + text]
    most = max(20, width)
    # Paths and names of runs contain hyphens, and must stay whole to be copied.
    return textwrap.wrap(text, most, initial_indent=bullet, subsequent_indent="  ", break_on_hyphens=False)


def _sized(size: float) -> str:
    return f"{size:,.1f}" if size < 99.95 else f"{size:,.0f}"
