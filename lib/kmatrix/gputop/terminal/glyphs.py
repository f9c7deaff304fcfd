"""Draw numbers as text of a given width: bars, sparklines, charts, table cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kmatrix.text import UNKNOWN


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The drawing characters of a terminal."""

    levels: str  # 9 characters of increasing height, from empty to full
    bar: str  # 9 characters of increasing width, from empty to full


UNICODE = Glyphs(" ▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█")
ASCII = Glyphs(" .:-=+*#@", "     ||||")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return the glyphs that an encoding can represent."""
    # Tried, not looked up in a list of names: many encodings contain some of these characters.
    try:
        (UNICODE.levels + UNICODE.bar).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def printable(text: str) -> str:
    """Replace control characters in a text, because names come from drivers and files."""
    return "".join(char if char.isprintable() else "?" for char in text)


def cell(text: str, width: int, style: str = "", *, right: bool = False) -> Text:
    """Return exactly `width` columns: truncated, or padded with spaces."""
    if width <= 0:
        return Text()
    # By cells, not characters: a name may contain characters that are two columns wide.
    text = printable(text)
    if right and cell_len(text) < width:
        text = " " * (width - cell_len(text)) + text
    return Text(set_cell_size(text, width), style=style)


def styled(text: str, style: str = "") -> Text:
    """Return a printable text in its own width."""
    return cell(text, cell_len(printable(text)), style)


def cut(text: str, width: int, style: str = "") -> Text:
    """Return at most `width` columns of a printable text."""
    line = styled(text, style)
    line.truncate(max(0, width))
    return line


def number(value: float | None, unit: str = "", digits: int = 0) -> str:
    """Return a value with its unit, `-` if unknown."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.{digits}f}{unit}"


def share(value: float | None, ceiling: float | None) -> float | None:
    """Return value / ceiling clamped to 0..1, or None if either is unknown."""
    if value is None or ceiling is None or ceiling <= 0 or not math.isfinite(value / ceiling):
        return None
    return min(1.0, max(0.0, value / ceiling))


def bar(part: float | None, width: int, glyphs: Glyphs) -> str:
    """Return a horizontal bar of `width` columns, blank if the fraction is unknown."""
    if part is None or width <= 0:
        return " " * max(0, width)
    eighths = round(part * width * 8)
    full, rest = divmod(eighths, 8)
    return (glyphs.bar[8] * full + (glyphs.bar[rest] if rest else "")).ljust(width)


def resample(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return `width` means of adjacent values. Fewer values than that are right-aligned, with unknown values before."""
    if width <= 0:
        return []
    if len(values) <= width:
        return [None] * (width - len(values)) + list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [_mean(values[low:high]) for low, high in itertools.pairwise(edges)]


def sparkline(values: Sequence[float | None], ceiling: float | None, width: int, glyphs: Glyphs) -> str:
    """Return a one-line chart: a gap is unknown, the lowest glyph is 0."""
    shares = (share(value, ceiling) for value in resample(values, width))
    # At least the lowest glyph: a measured 0 must look different from a gap.
    return "".join(" " if part is None else glyphs.levels[max(1, round(part * 8))] for part in shares)


def chart(values: Sequence[float | None], ceiling: float | None, width: int, height: int, glyphs: Glyphs) -> list[str]:
    """Return a chart of `height` lines, top line first: a gap is unknown, the lowest glyph is 0."""
    heights = [share(value, ceiling) for value in resample(values, width)]
    eighths = [None if part is None else max(1, round(part * 8 * height)) for part in heights]
    lines = []
    for line in range(height - 1, -1, -1):
        lines.append("".join(" " if e is None else glyphs.levels[min(8, max(0, e - 8 * line))] for e in eighths))
    return lines


def flow(parts: Iterable[Text], width: int, lines: int) -> list[Text]:
    """Join parts with two spaces and wrap them into at most `lines` lines."""
    made: list[Text] = []
    for part in parts:
        if made and made[-1].cell_len + 2 + part.cell_len <= width:
            made[-1].append("  ").append_text(part)
        else:
            made.append(part.copy())
    for line in made:
        line.truncate(max(0, width))
    return made[:lines] if width > 0 else []


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
