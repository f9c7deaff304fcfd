"""The cost of a run, its only definition: the hours of all its attempts x the price of what they hold.

An attempt lasts from the launch of its processes to the end of the last one: its GPUs are taken for all of this time,
for set-up, evaluations, checkpoints and lost work too. The time between two attempts is not counted. The training time
in result.json (`seconds`) describes the model instead: the time that led to its weights. A run on GPUs holds its GPUs,
each at GPT2_GPU_HOUR_PRICE. A run on the CPU has no GPU-hours, and costs GPT2_MACHINE_HOUR_PRICE. A result that was
reused from another matrix costs nothing in this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kmatrix.records.runs import Status
from kmatrix.records.states import MatrixStatusFile
from kmatrix.records.train_config import TrainConfig, dollars_per_hour
from kmatrix.status.state import Attempt, RunState
from kmatrix.text import money

BUDGETS = ("BUDGET_HOURS", "BUDGET_DOLLARS")  # symbols


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run has taken in its matrix. None: unknown."""

    wall_s: float | None  # s, of all attempts
    gpu_hours: float | None  # None also on the CPU
    dollars: float | None  # None also without a price


def wall_s(attempts: Sequence[Attempt], now: float | None = None) -> float | None:
    """Return the wall time (s) of all attempts, without the time between them; None if none is known.

    now: Unix seconds, for a running attempt.
    """
    known = [seconds for attempt in attempts if (seconds := attempt.duration_s(now)) is not None]
    return sum(known) if known else None


def spent_of(state: RunState, train: TrainConfig, now: float | None = None) -> Spent:
    """Return what a run has taken so far. now: Unix seconds, for a running attempt."""
    never_ran = not state.attempts and state.status in (Status.PLANNED, Status.SKIPPED)
    return spent_in(0.0 if state.reused_from or never_ran else wall_s(state.attempts, now), train)


def spent_in(seconds: float | None, train: TrainConfig) -> Spent:
    """Return what a run of this wall time (s) costs."""
    price = dollars_per_hour(train)
    hours = None if seconds is None else seconds / 3600
    return Spent(
        wall_s=seconds,
        gpu_hours=None if hours is None or train.device == "cpu" or not train.num_gpus else hours * train.num_gpus,
        dollars=None if hours is None or price is None else hours * price,
    )


def total_dollars(costs: Iterable[float | None]) -> float | None:
    """Return the cost of several runs; those without a price, or of unknown time, are left out. None if all are."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentBudget:
    """A limit of a matrix that its runs have reached."""

    symbol: str  # BUDGET_HOURS or BUDGET_DOLLARS
    more: int  # hours or dollars, a limit that leaves as much again: for a command to continue with
    text: str  # `2.01 of 2 hours` or `$5.02 of $5.00`


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixBudget:
    """What all runs of a matrix together may take, in all executions. 0: no limit."""

    hours: float = 0.0  # wall time of all attempts of all runs
    dollars: float = 0.0

    @classmethod
    def of(cls, symbols: Mapping[str, str]) -> MatrixBudget:
        """Return the budget of a matrix, from its symbols."""
        return cls(hours=float(symbols.get("BUDGET_HOURS") or 0), dollars=float(symbols.get("BUDGET_DOLLARS") or 0))

    @classmethod
    def of_matrix(cls, status: MatrixStatusFile, symbols: Mapping[str, str]) -> MatrixBudget:
        """Return the budget of the last execution of a matrix, or that of its configuration if no file has another."""
        if status.budget is None:
            return cls.of(symbols)
        return cls(hours=status.budget.hours, dollars=status.budget.dollars)

    def __bool__(self) -> bool:
        return bool(self.hours or self.dollars)

    def spent(
        self, runs: Iterable[tuple[RunState, TrainConfig]], now: float, besides: Spent | None = None
    ) -> SpentBudget | None:
        """Return the limit that is reached, None if there is none.

        now: Unix seconds.  besides: what other runs of the matrix have taken.
        """
        return self.reached([*(spent_of(state, train, now) for state, train in runs), *([besides] if besides else [])])

    def reached(self, spent: Sequence[Spent]) -> SpentBudget | None:
        """Return the limit that is reached, None if there is none. spent: by each run."""
        hours = sum(one.wall_s or 0.0 for one in spent) / 3600
        cost = total_dollars(one.dollars for one in spent) or 0.0
        if self.hours and hours >= self.hours:
            text = f"{hours:.3g} of {self.hours:g} hours"
            return SpentBudget(symbol="BUDGET_HOURS", more=math.ceil(hours + self.hours), text=text)
        if self.dollars and cost >= self.dollars:
            text = f"{money(cost)} of {money(self.dollars)}"
            return SpentBudget(symbol="BUDGET_DOLLARS", more=math.ceil(cost + self.dollars), text=text)
        return None
