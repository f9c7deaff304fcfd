"""The units in which tables and axes show a quantity: the largest one that keeps numbers readable."""

from __future__ import annotations

from collections.abc import Sequence

Unit = tuple[float, str]  # size in the recorded unit, and name

TIME: tuple[Unit, ...] = ((1.0, "s"), (60.0, "min"), (3600.0, "h"))
MEMORY: tuple[Unit, ...] = ((1.0, "MiB"), (1024.0, "GiB"))
ENERGY: tuple[Unit, ...] = ((1.0, "J"), (1e3, "kJ"), (3.6e6, "kWh"))
TOKEN_ENERGY: tuple[Unit, ...] = ((1e-12, "pJ"), (1e-9, "nJ"), (1e-6, "µJ"), (1e-3, "mJ"), (1.0, "J"))  # per token


def unit_of(units: Sequence[Unit], most: float) -> Unit:
    """Return the largest unit in which the largest value is 10 or more, else the smallest unit. units: ascending."""
    return next((unit for unit in reversed(units) if abs(most) >= 10 * unit[0]), units[0])
