"""Load balance: how evenly devices are used, as the coefficient of variation (CV) of their means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated

from kmatrix.records.decode import Meta, Record

BALANCE = ((5.0, "Excellent"), (10.0, "Good"), (20.0, "Fair"))  # upper bound in percent, exclusive


class Balance(Record, frozen=True, kw_only=True):
    """How evenly devices are used."""

    cv: Annotated[float, Meta(description="population deviation / mean of the means of all devices, %")]
    quality: Annotated[str, Meta(description="Excellent below 5 %, Good below 10 %, Fair below 20 %, else Poor")]


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Return 100 * population deviation / mean, in percent.

    Zero for a single value or an all-zero list: nothing varies.
    Source: docs/gpus.md, "Load balance metrics".
    Raises ValueError if `values` is empty.
    """
    if not values:
        raise ValueError("no values: pass at least one GPU's memory")
    centre = statistics.fmean(values)
    # Not statistics.pstdev, which computes with fractions: a report needs thousands of these. No square overflows.
    deviation = math.dist(values, [centre] * len(values)) / math.sqrt(len(values))
    return 100.0 * deviation / centre if centre else 0.0


def balance_of(values: Sequence[float]) -> Balance | None:
    """Return the balance of one value per device; None for fewer than two devices."""
    if len(values) < 2:
        return None
    cv = coefficient_of_variation(values)
    return Balance(cv=cv, quality=balance_quality(cv))


def balance_quality(cv: float) -> str:
    """Return the class of a coefficient of variation in percent; a bound belongs to the class above it."""
    for bound, quality in BALANCE:
        if cv < bound:
            return quality
    return "Poor"


def cv_text(cv: float) -> str:
    """Return a CV in percent, e.g. "5.2%"; extra decimals if rounding would change its class, e.g. "4.96%"."""
    digits = next((d for d in (1, 2, 3) if balance_quality(float(f"{cv:.{d}f}")) == balance_quality(cv)), 6)
    return f"{cv:.{digits}f}%"
