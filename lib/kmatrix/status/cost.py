"""The cost of a run, its only definition: the wall time of all its attempts x ranks x the price of a GPU hour.

An attempt lasts from the start of its processes to the end of the last one: the GPUs are taken for all of this time,
for set-up, evaluations, checkpoints and lost work too. The time between two attempts is not counted. The training time
in result.json (`seconds`) describes the model instead: the time that led to its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kmatrix.records.train_config import TrainFields
from kmatrix.status.state import Attempt
from kmatrix.text import money


def wall_s(attempts: Sequence[Attempt], now: float | None = None) -> float | None:
    """Return the wall time (s) of all attempts, without the time between them; None if none is known.

    now: Unix seconds, for a running attempt.
    """
    known = [seconds for attempt in attempts if (seconds := attempt.duration_s(now)) is not None]
    return sum(known) if known else None


def dollars(seconds: float | None, ranks: int | None, gpu_hour_price: float | None) -> float | None:
    """Return the cost of this wall time; None without a price, or if a factor is unknown."""
    if seconds is None or ranks is None or not gpu_hour_price:
        return None
    return seconds * ranks * gpu_hour_price / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixBudget:
    """What all runs of a matrix together may take, in all executions. 0: no limit."""

    hours: float = 0.0  # wall time of all attempts of all runs
    dollars: float = 0.0

    @classmethod
    def of(cls, symbols: Mapping[str, str]) -> MatrixBudget:
        """Return the budget of a matrix. A matrix of an old version has none."""
        return cls(hours=float(symbols.get("BUDGET_HOURS") or 0), dollars=float(symbols.get("BUDGET_DOLLARS") or 0))

    def __bool__(self) -> bool:
        return bool(self.hours or self.dollars)

    def spent(self, runs: Iterable[tuple[Sequence[Attempt], TrainFields]], now: float) -> str:
        """Return `2.01 of 2 hours` or `$5.02 of $5.00` if a limit is reached, else "". now: Unix seconds."""
        seconds = cost = 0.0
        for attempts, train in runs:
            wall = wall_s(attempts, now) or 0.0
            seconds += wall
            cost += dollars(wall, train.num_gpus, train.gpu_hour_price) or 0.0
        if self.hours and seconds >= 3600 * self.hours:
            return f"{seconds / 3600:.3g} of {self.hours:g} hours"
        return f"{money(cost)} of {money(self.dollars)}" if self.dollars and cost >= self.dollars else ""
