"""How often a device really gives a new value, and what asking costs: measured in a recording's first seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

SECONDS = 2.0
INTERVAL_S = 0.005  # between two looks at the first device
CLOCKED = ("power", "power_instant", "energy_j", "utilization")  # values that the driver renews at a fixed pace
TOLERANCE = 1.1  # of the warning: a period is measured to a few milliseconds


class Calibration:
    """Takes in what was read and how long it took; says the update period and the cost of each metric."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float | None]] = {}  # column -> value, when it last changed
        self._periods: dict[str, list[float]] = {}
        self._costs: dict[str, list[float]] = {}

    def add(self, now: float, taken: Mapping[str, tuple[float, float]]) -> None:
        """now: monotonic seconds.  taken: column -> (value, seconds of the call)."""
        for name, (value, seconds) in taken.items():
            self._costs.setdefault(name, []).append(seconds)
            if math.isnan(value):
                continue
            before = self._last.get(name)
            if before is None:
                self._last[name] = (value, None)
            elif value != before[0]:
                if before[1] is not None:
                    self._periods.setdefault(name, []).append(now - before[1])
                self._last[name] = (value, now)

    def result(self) -> dict[str, dict[str, float | None]]:
        """Return column -> period_ms and call_us. No period: it changed too seldom to tell, or at every look."""
        return {
            name: {
                "period_ms": self._period(name),
                "call_us": _median(costs, 1e6, least=1),
            }
            for name, costs in self._costs.items()
        }

    def _period(self, name: str) -> float | None:
        """Return the median time between two changes. One as short as the looks themselves is none of the device."""
        period = _median(self._periods.get(name, []), 1e3, least=3)
        return period if period is not None and period >= 2 * INTERVAL_S * 1e3 else None


def warning(calibration: Mapping[str, Mapping[str, Any]], hz: float) -> str | None:
    """Return a sentence when the rate asked for is more than twice what the hardware gives."""
    periods = [calibration.get(name, {}).get("period_ms") for name in CLOCKED]
    known = [period for period in periods if period]
    if not known or hz * min(known) / 1000 <= 2 * TOLERANCE:
        return None
    rate = 1000 / min(known)
    return (
        f"asked for {hz:g} samples a second, but the fastest value changes {rate:.1f} times a second: "
        f"{rate * 2:.0f} are enough"
    )


def _median(values: list[float], scale: float, *, least: int) -> float | None:
    return round(statistics.median(values) * scale, 2) if len(values) >= least else None
