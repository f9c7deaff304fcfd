"""Ranges in the values of an axis: 1e-4:1e-2:log5 and 0:1:lin3 are so many values, 0.03:0.09:0.02 has a step."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from kmatrix.errors import ConfigError

MOST = 1000  # values of a range
NEAR = 1e-9  # relative: how far from an integer the value of an integer symbol may be computed
RANGE = re.compile(
    r"(N):(N):(?:(log|lin)([0-9]{1,4})|(N))".replace("N", r"[+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?")
)
FORM = "expected LOW:HIGH:logN, LOW:HIGH:linN or LOW:HIGH:STEP, such as 1e-4:1e-2:log5 or 1:5:1"


def values_of_range(text: str, *, whole: bool, where: str) -> list[str]:
    """Return the values of LOW:HIGH:logN, LOW:HIGH:linN or LOW:HIGH:STEP as texts, in ascending order.

    A value between the ends of a log or lin range is rounded to three digits, and
    the rounded value is the one that is used: what a report prints is what was trained.
    whole: the values are those of an integer symbol.  where: file and line, or the words of the command line.
    """
    match = RANGE.fullmatch(text)
    if not match:
        raise ConfigError(f"{where}: {text}", why=FORM)
    low, high, kind = Decimal(match[1]), Decimal(match[2]), match[3]
    count = int(match[4]) if kind else _steps(low, high, Decimal(match[5]))
    if low >= high or not 2 <= count <= MOST or (kind == "log" and low <= 0):
        ends = ", and ends above 0" if kind == "log" else ""
        raise ConfigError(f"{where}: {text}", why=f"a range needs LOW below HIGH and 2 to {MOST} values{ends}")
    if not kind:
        values = [low + place * Decimal(match[5]) for place in range(count)]
    else:
        first, last = float(low), float(high)
        shares = [place / (count - 1) for place in range(1, count - 1)]
        if kind == "log":
            inner = [math.pow(first, 1 - share) * math.pow(last, share) for share in shares]
        else:
            inner = [first * (1 - share) + last * share for share in shares]
        wrong = [value for value in inner if whole and abs(value - round(value)) > NEAR * abs(value)]
        if wrong:
            raise ConfigError(f"{where}: {text}", why=f"{wrong[0]:.6g} is not an integer")
        values = [low, *(Decimal(round(value) if whole else f"{value:.3g}") for value in inner), high]
    return [str(int(value)) if whole and value % 1 == 0 else _text(value) for value in values]


def _steps(low: Decimal, high: Decimal, step: Decimal) -> int:
    """Return the number of values from `low` with this step, 0 if there is no end."""
    return int((high - low) / step) + 1 if step > 0 and (high - low) / step < MOST else 0


def _text(value: Decimal) -> str:
    """Return a number as a user writes it: 3.16e-4, 0.0316, 21500."""
    mantissa, _, exponent = f"{value.normalize():e}".partition("e")
    return f"{value.normalize():f}" if -3 < int(exponent) < 6 else f"{mantissa}e{int(exponent)}"
