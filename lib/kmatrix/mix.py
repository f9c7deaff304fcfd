"""How a mix of datasets is written: `finewebedu:65 tinystories:34 stdlib:1`, or with + for the blanks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

MOST = 10_000  # sequences in which the shares are exact: weights finer than this are refused
PART = re.compile(r"([a-z]+)(?:=(.+))?:([0-9.]+)")


@dataclass(frozen=True, slots=True)
class MixPart:
    """One dataset of a mix. path: of a dataset that needs one.  weight: its sequences in each sum-of-weights."""

    dataset: str
    path: str
    weight: int


def parse(text: str) -> tuple[MixPart, ...]:
    """Return the parts of a mix, their weights in whole numbers without a common divisor.

    Raises ValueError with the reason where it cannot be read.
    """
    found: list[tuple[str, str, Fraction]] = []
    for word in re.split(r"[\s+]+", text.strip()):
        match = PART.fullmatch(word)
        if not match:
            raise ValueError(f"{word!r} is not DATASET:WEIGHT or DATASET=PATH:WEIGHT")
        try:
            weight = Fraction(match[3])
        except ValueError:
            raise ValueError(f"{match[3]!r} in {word!r} is no number") from None
        if not weight:
            raise ValueError(f"the weight in {word!r} must be above 0")
        found.append((match[1], match[2] or "", weight))
    names = [part[:2] for part in found]
    twice = next((name for name, _ in names if names.count((name, _)) > 1), None)
    if twice:
        raise ValueError(f"{twice} stands twice")
    scale = lcm(*(weight.denominator for _, _, weight in found))
    whole = [int(weight * scale) for _, _, weight in found]
    least = gcd(*whole)
    if sum(whole) // least > MOST:
        raise ValueError(f"the weights {' '.join(map(str, whole))} are exact in {MOST} sequences at best")
    return tuple(
        MixPart(dataset, path, weight // least) for (dataset, path, _), weight in zip(found, whole, strict=True)
    )
