"""The values and times that a sample can have. Others are errors of a file or of a driver, never measurements."""

from __future__ import annotations

import sys
from collections.abc import Mapping

Limits = tuple[float, float]  # lowest and highest possible value; neither NaN nor an infinity is between them

# What no GPU has: percent, W, MiB, degrees C, MHz, J. Sums of squares of the largest floats overflow.
HIGHEST: Mapping[str, float] = {
    "utilization": 100.0,
    "memory_used": 1e8,
    "power": 1e5,
    "power_instant": 1e5,
    "temperature": 1e3,
    "sm_clock": 1e5,
    "energy_j": 1e14,  # the highest power for 30 years
}
LOWEST: Mapping[str, float] = {"temperature": -1e3}  # of the others: 0
RANK_UTILIZATION = 1e6  # percent: a rank has 100 per busy core
ROUNDING = 1e-6  # of the memory: a float32 can be a little above the size of a GPU
EARLIEST, LATEST = 1e8, 4_102_444_800.0  # Unix s, the years 1973 and 2100
MONOTONIC: Limits = (0.0, 1e9)  # s since the boot
ANY: Limits = (-sys.float_info.max, sys.float_info.max)


def limits_of(name: str, memory_total: float | None = None, *, is_rank: bool = False) -> Limits:
    """Return the limits of a quantity of a device. memory_total: its capacity in MiB."""
    if name not in HIGHEST:
        return ANY  # a column of a later version
    highest = RANK_UTILIZATION if is_rank and name == "utilization" else HIGHEST[name]
    if name == "memory_used" and memory_total:
        highest = min(memory_total * (1 + ROUNDING), highest)
    return LOWEST.get(name, 0.0), highest


def time_limits(started: float | None) -> Limits:
    """Return the limits of the Unix times of a recording. started: its begin in Unix s, None if that is unknown."""
    # A machine without a battery begins in 1970, until its clock is set. A time of 0 is a record of zeros there, too.
    return EARLIEST if started is None or started >= EARLIEST else sys.float_info.min, LATEST
