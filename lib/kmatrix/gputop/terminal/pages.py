"""The pages that cover the screen: help with every key, column and letter, and all alerts. A long page scrolls."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from kmatrix.gputop.terminal.glyphs import cut
from kmatrix.gputop.view import View
from kmatrix.status.alerts import Severity, one_line
from kmatrix.text import plural, wrap

KEYS = (
    ("up, down, k, j", "select a GPU"),
    ("page up, page down", "ten further"),
    ("0 to 9", "select this GPU"),
    ("m", "next metric of the charts"),
    ("c, l", "charts below the table; large charts instead of it"),
    ("a", "all alerts"),
    ("Ctrl+L", "paint the screen again"),
    ("h, ?", "this page"),
    ("q, Ctrl+C", "quit"),
)
REPLAY = (
    ("space", "pause, resume"),
    ("left, right", "10 s back and forward"),
    ("[ and ]", "60 s back and forward"),
    ("0, e", "to the start, to the end"),
)
COLUMNS = (
    ("util", "time in which a kernel ran: 100 % does not mean fast"),
    ("mem GiB", "used and total memory; red at the limit of the alerts"),
    ("W/limit", "watts and power limit: a GPU at its limit is healthy"),
    ("temp", "degrees Celsius; yellow near the limit of the alerts, red at it"),
    ("throt", "clocks are reduced by: P power cap, T heat, H hardware, B power brake"),
    ("SM, tensor, DRAM", "time in which multiprocessors, tensor cores, memory were active"),
    ("PCIe, NVLink", "MiB/s sent and received"),
    ("ECC", "uncorrected memory errors"),
    ("new", "time since the driver last changed a value, from 2 s on"),
)


ANY_KEY = ("Any key closes this page.", "any key closes")
TOO_LOW = ("enlarge the terminal; any key closes this page", "enlarge the terminal")
NARROW = 50  # columns: on a narrower terminal, texts are below their names


def page(view: View, width: int, height: int) -> list[Text]:
    """Return the page of help, or all alerts with their advice, and how to scroll and close it."""
    lines = _content(view, width)
    if height == 1:
        return [_first_fit(TOO_LOW, width)]
    if len(lines) < height:
        return [*lines, *[Text()] * (len(lines) + 1 < height), _first_fit(ANY_KEY, width)]
    first = min(view.page_at, len(lines) - height + 1)
    last = first + height - 1
    where = f"lines {first + 1}-{last} of {len(lines)}: up/down scrolls, any other key closes this page"
    return [*lines[first:last], _first_fit((where, "up/down scrolls, other keys close", "up/down scrolls"), width)]


def page_end(view: View, width: int, height: int) -> int:
    """Return the last line that a page can be scrolled to, 0 if it need not be scrolled."""
    lines = _content(view, width) if view.page and height > 1 else []
    return len(lines) - height + 1 if len(lines) >= height else 0


def _content(view: View, width: int) -> list[Text]:
    if view.page == "help":
        return _help(width, replay=view.mode in ("replay", "paused"))
    lines = [cut(plural(len(view.alerts), "alert"), width, "bold")]
    for alert in view.alerts:
        style = "bold red" if alert.severity is Severity.CRITICAL else "yellow"
        lines += [cut(text, width, style) for text in wrap(one_line(alert), "! ", width)]
    return lines


def _help(width: int, *, replay: bool) -> list[Text]:
    """Return the lines of the page of help. replay: with its keys."""
    keys = (*KEYS, *REPLAY) if replay else KEYS
    wide = max(len(name) for name, _ in (*keys, *COLUMNS))
    lines = []
    for title, entries in (("Keys", keys), ("Columns; - is unknown", COLUMNS)):
        lines += [cut(title, width, "bold")]
        for name, text in entries:
            if width < NARROW:
                texts = [name, *("  " + part for part in wrap(text, width=width - 4))]
            else:
                first, *more = wrap(text, width=width - wide - 4)
                texts = [f"{name:{wide}}  {first}", *(" " * (wide + 2) + part for part in more)]
            lines += [cut(f"  {part}", width) for part in texts]
    return lines


def _first_fit(texts: Sequence[str], width: int) -> Text:
    """Return the first of these texts that fits, else a part of the last one."""
    return cut(next((text for text in texts if len(text) <= width), texts[-1]), width, "bold")
