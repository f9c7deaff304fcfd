"""The cost of a run, its only definition: the hours of all its attempts x the price of what they hold.

An attempt lasts from the launch of its processes to the end of the last one: with set-up, evaluations, checkpoints and
lost work. A run on GPUs holds its GPUs, each at GPT2_GPU_HOUR_PRICE; one on the CPU costs GPT2_MACHINE_HOUR_PRICE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from kmatrix.records.decode import Scalar
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import budget_s, dollars_per_hour
from kmatrix.status.fold import State, spent_s
from kmatrix.status.look import Look
from kmatrix.text import money

BUDGETS = ("BUDGET_HOURS", "BUDGET_DOLLARS")  # symbols
PRICED = ("device", "num_gpus", "gpu_hour_price", "machine_hour_price", "max_time", "max_cost")  # training fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run has taken in its matrix, or what it will take."""

    wall_s: float  # s, of all attempts
    gpu_hours: float | None  # None on the CPU
    dollars: float | None  # None without a price


def spent_of(state: State, train: Mapping[str, Scalar]) -> Spent:
    """Return what a run has taken so far. train: its fields, as planned."""
    return spent_in(spent_s(state), train)


def spent_in(seconds: float, train: Mapping[str, Scalar]) -> Spent:
    """Return what a run of this wall time (s) costs."""
    known, hours = _known(*map(train.get, PRICED)), seconds / 3600
    price = dollars_per_hour(known)
    return Spent(
        wall_s=seconds,
        gpu_hours=None if known.device == "cpu" or not known.num_gpus else hours * known.num_gpus,
        dollars=None if price is None else hours * price,
    )


def limit_s(train: Mapping[str, Scalar]) -> float | None:
    """Return the time (s) that the time and cost budgets of a run allow, None without a budget."""
    return budget_s(_known(*map(train.get, PRICED)))


@lru_cache(maxsize=1024)  # of thousands of runs most are alike
def _known(*values: Scalar) -> TrainConfig:
    """Return the fields that a price or a budget depends on. values: of PRICED."""
    known = {name: value for name, value in zip(PRICED, values, strict=True) if value is not None}
    return TrainConfig(**known)  # type: ignore[arg-type]


def total_dollars(costs: Iterable[float | None]) -> float | None:
    """Return the cost of several runs; those without a price are left out. None if all are."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


def spent(look: Look) -> str:
    """Return that the runs of a matrix have taken its budget in all executions, "" if they have not. 0: no limit."""
    hours, dollars = (float(look.plan.common.symbols.get(name) or 0) for name in BUDGETS)
    if not hours and not dollars:
        return ""
    runs = [spent_of(state, look.files[name].train) for name, state in look.states.items()]
    taken, cost = sum(one.wall_s for one in runs) / 3600, total_dollars(one.dollars for one in runs) or 0.0
    if hours and taken >= hours:
        return f"the budget is spent: {taken:.3g} of {hours:g} hours (continue with a larger {BUDGETS[0]}=)"
    if dollars and cost >= dollars:
        return f"the budget is spent: {money(cost)} of {money(dollars)} (continue with a larger {BUDGETS[1]}=)"
    return ""
