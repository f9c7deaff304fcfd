"""Numbers and names as the page shows them: a real minus sign, an en dash for unknown, text that can do no harm."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from kmatrix.records.decode import Scalar
from kmatrix.report.pair_text import percent_text
from kmatrix.text import count, money, plural, time_of_day

UNKNOWN = "–"
MINUS = "−"
NAME = 120  # characters of a name in a table
LONG = 2_000  # characters of any other text
DIRECTIONS = dict.fromkeys((0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # lone ones, which UTF-8 cannot hold
CONTROLS = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)}
C1_CONTROLS = dict.fromkeys(range(0x80, 0xA0), "\ufffd")
VISIBLE = CONTROLS | {0x7F: "␡"} | C1_CONTROLS | DIRECTIONS | SURROGATES
ANY_DIGIT = re.compile("[1-9]")


def shown(text: object, limit: int | None = LONG) -> str:
    """Return a text that can be displayed: control characters as their Unicode pictures, not longer than `limit`.

    An escape sequence reads ␛[31m, and no override of the writing direction can reorder the page.

    >>> shown("\\x1b[31mred"), shown("x" * 2000, 12)
    ('␛[31mred', 'xxxxxxxx … xxx (2,000 characters)')
    """
    clean = str(text).translate(VISIBLE)
    if limit is None or len(clean) <= limit:
        return clean
    return f"{clean[: limit * 2 // 3]} … {clean[-(limit // 4) :]} ({len(clean):,} characters)"


def name(text: object) -> str:
    """Return a name for a table."""
    return shown(text, NAME)


def one_line(text: object, limit: int | None = LONG) -> str:
    """Return a text on one line: what is pasted into a shell must not hold a line end."""
    return " ".join(shown(text, limit).split())


def known(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fixed(value: float | None, digits: int = 4) -> str:
    """Return a number with so many decimals.

    >>> fixed(3.28), fixed(-0.5, 1), fixed(-0.00001), fixed(None)
    ('3.2800', '−0.5', '0.0000', '–')
    """
    return UNKNOWN if value is None or not known(value) else _with_sign(f"{value:,.{digits}f}")


def fine(value: float | None, digits: int = 4) -> str:
    """Return a number with so many decimals, or with two significant digits where those would show a 0 that is none.

    >>> fine(3.28), fine(0.0, 1), fine(0.00001234), fine(None)
    ('3.2800', '0.0', '0.000012', '–')
    """
    text = fixed(value, digits)
    return significant(value, 2) if value and known(value) and not ANY_DIGIT.search(text) else text


def rate(value: float | None) -> str:
    """Return a number per second: without decimals, if it is not small.

    >>> rate(41234.5), rate(3.456), rate(0)
    ('41,234', '3.46', '0')
    """
    return significant(value) if value is not None and 0 < abs(value) < 100 else whole(value)


def signed(value: float | None, digits: int = 4) -> str:
    """Return a difference with its sign; without one if it rounds to 0.

    >>> signed(0.0117), signed(-0.0117), signed(-0.00001)
    ('+0.0117', '−0.0117', '0.0000')
    """
    return UNKNOWN if value is None or not known(value) else _with_sign(f"{value:+,.{digits}f}")


def whole(value: float | None) -> str:
    """Return a number without decimals: 1,234,567."""
    return fixed(value, 0)


def significant(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits, without an exponent from 1e-5 to 1e15.

    >>> significant(0.012345), significant(1234567), significant(2), significant(0.00001234), significant(-1e-7)
    ('0.0123', '1,230,000', '2.00', '0.0000123', '−1.00e-7')
    """
    if value is None or not known(value):
        return UNKNOWN
    text = f"{value:#.{digits}g}".rstrip(".")
    if "e" in text and abs(value) < 1e15:
        number = float(text)
        if abs(number) >= 1:
            text = f"{number:,.0f}"
        elif abs(number) >= 1e-5:
            text = f"{number:.{digits - 1 - math.floor(math.log10(abs(number)))}f}"
    mantissa, e, exponent = text.partition("e")
    return mantissa.replace("-", MINUS) + (f"e{int(exponent)}" if e else "")


def level(value: float) -> str:
    """Return a level of confidence with its digits: 97.5 %."""
    return percent_text(value)


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share from 0 to 1 as 38 %."""
    return UNKNOWN if value is None or not known(value) else f"{fixed(100 * value, digits)} %"


def change(ratio: float | None) -> str:
    """Return a ratio as a change: +4.0 %, −12 %."""
    if ratio is None or not known(ratio):
        return UNKNOWN
    share = 100 * (ratio - 1)
    return f"{signed(share, 0 if abs(share) >= 9.5 else 1)} %"


def duration(seconds: float | None) -> str:
    """Return a duration as a sentence can hold it.

    >>> duration(46.12), duration(750), duration(11_100), duration(700_000), duration(0.0312), duration(1e-9)
    ('46.1 s', '12 min 30 s', '3 h 05 min', '8.1 d', '31 ms', '< 1 ms')
    """
    if seconds is None or not known(seconds):
        return UNKNOWN
    if 0 < seconds < 0.0995:
        return "< 1 ms" if seconds < 0.001 else f"{fixed(1000 * seconds, 0)} ms"
    if seconds < 99.95:
        return f"{fixed(seconds, 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours < 100 else f"{fixed(hours / 24, 1)} d"


def date_time(unix: float | None) -> str:
    """Return a Unix time as UTC, which reads the same for everybody."""
    if unix is None or not known(unix):
        return UNKNOWN
    try:
        return time_of_day(unix, utc=True)
    except (OverflowError, ValueError, OSError):  # a damaged file: no such year
        return UNKNOWN


def gib(mib: float | None) -> str:
    """Return MiB as GiB with one digit."""
    return UNKNOWN if mib is None else fixed(mib / 1024, 1)


def big(value: float | None) -> str:
    """Return a number with three digits and a letter: 1.02M."""
    return count(value) if value is not None and known(value) else UNKNOWN


def dollars(value: float | None) -> str:
    """Return an amount of money."""
    return money(value) if value is not None and known(value) else UNKNOWN


def plain(value: Scalar | None) -> str:
    """Return a setting as people type it.

    >>> plain(True), plain(0.0003), plain(1e-08), plain(None)
    ('y', '0.0003', '1e-8', '–')
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, float):
        return re.sub(r"e([+-])0*(\d)", lambda e: f"e{'-' if e[1] == '-' else ''}{e[2]}", f"{value:.12g}")
    return name(value)


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a number with its noun. several: the plural, if it is not the noun with an s."""
    return f"{number:,} {several}" if several and number != 1 else plural(number, noun)


def _with_sign(number: str) -> str:
    """Return a formatted number with a real minus sign, and without any sign if every digit is 0."""
    return number.replace("-", MINUS) if ANY_DIGIT.search(number) else number.lstrip("+-")


FILTERS: dict[str, Callable[..., str]] = {
    filter_.__name__: filter_
    for filter_ in (
        *(
            shown,
            name,
            one_line,
            fixed,
            fine,
            rate,
            signed,
            whole,
            significant,
            percent,
            level,
            change,
            duration,
            date_time,
        ),
        *(gib, big, dollars, plain, counted),
    )
}
