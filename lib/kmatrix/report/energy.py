"""Joules and hours of devices -> kWh, money and CO2, at the factors that the run's configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What things cost; None: nobody said. energy_price: $ per kWh.  co2: g per kWh.  gpu_hour_price: $."""

    energy_price: float | None = None
    co2: float | None = None
    gpu_hour_price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a run came to; None is unknown. kwh.  energy_cost, gpu_cost: $.  co2_g: grams.  gpu_hours: GPUs x hours."""

    kwh: float | None = None
    energy_cost: float | None = None
    co2_g: float | None = None
    gpu_hours: float | None = None
    gpu_cost: float | None = None


def factors_of(run: Mapping[str, Any]) -> Factors:
    """Return the factors in a run.json."""
    symbols, train = run.get("symbols") or {}, run.get("train") or {}
    return Factors(
        energy_price=_number(symbols.get("ENERGY_PRICE")),
        co2=_number(symbols.get("CO2_FACTOR")),
        gpu_hour_price=_number(train.get("gpu_hour_price")),
    )


def cost_of(joules: float | None, gpu_seconds: float | None, factors: Factors) -> Cost:
    """Return what these joules, and so many seconds of one GPU, cost. gpu_seconds: None on the CPU."""
    kwh = None if joules is None else joules / JOULES_PER_KWH
    hours = None if gpu_seconds is None else gpu_seconds / 3600
    return Cost(
        kwh=kwh,
        energy_cost=_times(kwh, factors.energy_price),
        co2_g=_times(kwh, factors.co2),
        gpu_hours=hours,
        gpu_cost=_times(hours, factors.gpu_hour_price),
    )


def cost_parts(cost: Cost, factors: Factors) -> Iterator[str]:
    """Say what the energy and the hours cost, each figure beside its factor."""
    if cost.energy_cost is not None:
        yield f"energy {money(cost.energy_cost)} at ${factors.energy_price:g}/kWh"
    if cost.co2_g is not None:
        weight = f"{cost.co2_g / 1000:.3g} kg" if cost.co2_g >= 1000 else f"{cost.co2_g:.3g} g"
        yield f"{weight} CO2 at {factors.co2:g} g/kWh"
    if cost.gpu_cost is not None and cost.gpu_hours is not None:
        yield f"{cost.gpu_hours:.3g} GPU-hours {money(cost.gpu_cost)} at ${factors.gpu_hour_price:g}"


def money(dollars: float) -> str:
    """Return $12.34, or $0.0012 below a cent."""
    return f"${dollars:,.2f}" if dollars >= 0.01 or not dollars else f"${dollars:.2g}"


def _times(amount: float | None, factor: float | None) -> float | None:
    return None if amount is None or factor is None else amount * factor


def _number(value: object) -> float | None:
    """Return a factor that is a number, or a text that holds one; an empty text says nothing."""
    try:
        return None if value is None or isinstance(value, bool) else float(str(value).strip().strip('"'))
    except ValueError:
        return None
