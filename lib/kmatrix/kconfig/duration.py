"""A length of time as people write it: 90, 90s, 15m, 1h30m, 2.5h, 2d."""

from __future__ import annotations

import re

UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
NUMBER = r"[0-9]+(?:\.[0-9]+)?"
PART = re.compile(rf"({NUMBER})([dhms])")
KNOWN_FORMS = "it is a time above zero: 90, 90s, 15m, 1h30m, 2.5h, 2d"


def seconds(text: str) -> float | None:
    """Return the seconds that a text means, or None where it is no time above zero. A number alone is in seconds."""
    if re.fullmatch(NUMBER, text):
        return float(text) or None
    parts = PART.findall(text)
    order = ["dhms".index(unit) for _, unit in parts]
    if "".join(number + unit for number, unit in parts) != text or order != sorted(set(order)):
        return None
    return sum(float(number) * UNITS[unit] for number, unit in parts) or None
