"""Ranges in the values of an axis: 1e-4:1e-2:log5 and 0:1:lin3 are so many values, 0.03:0.09:0.02 has a step."""

from __future__ import annotations

import itertools
import math
import re
from decimal import Decimal

from kmatrix.errors import ConfigError

DIGITS = 3  # significant digits of a value between the ends; more only if two values would be the same
MOST = 1000  # values of a range
NEAR = 1e-6  # of a step: an end that is so close is hit; of a value: how far a whole number may be off
FORM = "expected LOW:HIGH:logN, LOW:HIGH:linN or LOW:HIGH:STEP"
EXAMPLE = "for example 1e-4:1e-2:log5, or 0.03:0.09:0.02 with a step"
EXAMPLE_WHOLE = "for example 1:5:1, every integer from 1 to 5"
COUNTED = re.compile(r"(log|lin)([0-9]{1,9})")
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def values_of_range(text: str, *, whole: bool, where: str) -> list[str]:
    """Return the values of LOW:HIGH:logN, LOW:HIGH:linN or LOW:HIGH:STEP as texts, in ascending order.

    The ends stay as they are written. A value between the ends of a log or lin range is rounded to few digits, and the
    rounded value is the one that is used: what a report prints is what was trained.
    whole: the values must be integers; then none is rounded.  where: file and line, or the words of the command line.
    """
    parts = text.split(":")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(f"{where}: {text}", why=FORM, hint=EXAMPLE_WHOLE if whole else EXAMPLE)
    low, high = (_number(part, text, where) for part in parts[:2])
    if low > high:
        raise ConfigError(f"{where}: {text}", why="the ends are reversed", hint="the lower end comes first")
    if low == high:
        raise ConfigError(f"{where}: {text}", why="the ends are equal", hint=f"pass one value: {parts[0]}")
    if counted := COUNTED.fullmatch(parts[2]):
        count = int(counted[2])
        if not 2 <= count <= MOST:
            raise ConfigError(f"{where}: {text}", why=f"expected 2 to {MOST} values, got {count}")
        if counted[1] == "log" and low <= 0:
            raise ConfigError(f"{where}: {text}", why="a logarithmic range needs ends above 0")
        inner = _spaced(low, high, count, logarithmic=counted[1] == "log")
        middle = [_whole(value, text, where) for value in inner] if whole else _rounded(low, inner, high)
        found = [parts[0], *middle, parts[1]]
    else:
        found = _stepped(parts, _number(parts[2], text, where), text, where)
    # 1e3 is a whole number that a symbol does not accept; 1.5 is refused with its name by the check of the values.
    return [str(int(Decimal(value))) if whole and float(value).is_integer() else value for value in found]


def _spaced(low: float, high: float, count: int, *, logarithmic: bool) -> list[float]:
    """Return the values between the ends, evenly spaced."""
    shares = [index / (count - 1) for index in range(1, count - 1)]
    if logarithmic:
        return [math.exp(math.log(low) * (1 - share) + math.log(high) * share) for share in shares]
    return [low * (1 - share) + high * share for share in shares]


def _rounded(low: float, inner: list[float], high: float) -> list[str]:
    """Return the values between two ends with as few digits as keep all of them distinct and in order."""
    for digits in range(DIGITS, 17):
        texts = [_text(value, digits) for value in inner]
        values = [low, *map(float, texts), high]
        if all(a < b for a, b in itertools.pairwise(values)):
            return texts
    return [repr(value) for value in inner]


def _text(value: float | Decimal, digits: int) -> str:
    """Return a number with so many digits, as a user writes it: 3.16e-4, 0.0316, 21500."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if -3 < int(exponent) < 6:
        return f"{Decimal(mantissa).scaleb(int(exponent)).normalize():f}"
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def _whole(value: float, text: str, where: str) -> str:
    if abs(value - round(value)) > NEAR * max(1.0, abs(value)):
        hint = "choose a step, or a number of values that gives integers"
        raise ConfigError(f"{where}: {text}", why=f"{value:.6g} is not an integer", hint=hint)
    return str(round(value))


def _stepped(parts: list[str], step: float, text: str, where: str) -> list[str]:
    """Return LOW, LOW + STEP and so on, exactly; HIGH is the last one if a step hits it."""
    low, high = float(parts[0]), float(parts[1])
    if step <= 0:
        raise ConfigError(f"{where}: {text}", why="the step must be above 0")
    steps = (high - low) / step + NEAR
    if not steps < MOST:  # also infinite: of a tiny step
        raise ConfigError(f"{where}: {text}", why=f"more than {MOST} values")
    if steps < 1:
        raise ConfigError(f"{where}: {text}", why="the step is larger than the range")
    first, width = Decimal(parts[0]), Decimal(parts[2])
    values = [(first + index * width).normalize() for index in range(1, int(steps) + 1)]
    found = [parts[0], *(_text(value, len(value.as_tuple().digits)) for value in values)]
    if abs(float(found[-1]) - high) <= NEAR * step:
        found[-1] = parts[1]
    return found


def _number(word: str, text: str, where: str) -> float:
    number = float(word) if NUMBER.fullmatch(word) else math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where}: {text}", why=f"{word!r} is not a number", hint=FORM)
    return number
