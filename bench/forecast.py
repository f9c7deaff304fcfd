"""Check forecasts of the final validation loss on the recorded runs: coverage of the 90 % intervals, and their width.

    python bench/forecast.py

Each run is forecast at 25, 50 and 75 % of its steps from the other runs, once with those that differ in the seed alone
and once without them, and by each of the two ways alone. The table is arithmetic on
lib/kmatrix/verdict/recorded_curves.json, so it is the same on every machine. Goal: 80 to 100 % hold the final loss.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "lib")]
from kmatrix.verdict.forecast import ForecastBasis, Forecaster, LossCurve, LossForecast
from kmatrix.verdict.recorded import recorded_curves

SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The forecasts of the recorded runs at one share of their steps."""

    share: float
    runs: int  # that could be forecast
    held: int  # whose interval holds the final loss
    error: float  # nats/token, median of |forecast - final loss|
    half: float  # nats/token, median half-width of the interval
    bases: dict[str, int]  # way -> runs


def same_but_seed(run: LossCurve, other: LossCurve) -> bool:
    """Return whether two recorded runs differ in the seed alone."""
    return run.name.rpartition(" seed")[0] == other.name.rpartition(" seed")[0]


def tried(curves: Sequence[LossCurve], share: float, others: Callable[[LossCurve], list[LossCurve]]) -> Tried:
    """Forecast each run at a share of its steps. others: the finished runs that its forecast may use."""
    made = []
    for run in curves:
        forecast = Forecaster(others(run)).forecast(run.until(share))
        if isinstance(forecast, LossForecast):
            made.append((run.losses[-1], forecast))
    assert made, "no run can be forecast"
    return Tried(
        share=share,
        runs=len(made),
        held=sum(abs(loss - forecast.loss) <= forecast.half for loss, forecast in made),
        error=statistics.median(abs(loss - forecast.loss) for loss, forecast in made),
        half=statistics.median(forecast.half for _, forecast in made),
        bases={basis: sum(forecast.basis is basis for _, forecast in made) for basis in ForecastBasis},
    )


def cases(curves: Sequence[LossCurve]) -> dict[str, Callable[[LossCurve], list[LossCurve]]]:
    """Return title -> the finished runs that the forecast of a run may use."""
    return {
        "all other runs": lambda run: [other for other in curves if other is not run],
        "none of the same configuration": lambda run: [other for other in curves if not same_but_seed(run, other)],
        "none of its length and schedule": lambda run: [other for other in curves if other.course != run.course],
    }


def main() -> None:
    curves = recorded_curves()
    print(f"{len(curves)} recorded runs; 90 % intervals")
    print("| finished runs | steps done | runs | held | median error | interval | by siblings / law |")
    print("|---|---|---|---|---|---|---|")
    for title, others in cases(curves).items():
        for share in SHARES:
            row = tried(curves, share, others)
            ways = " / ".join(str(row.bases[basis]) for basis in ForecastBasis)
            held = f"{row.held} ({row.held / row.runs:.0%})"
            print(f"| {title} | {share:.0%} | {row.runs} | {held} | {row.error:.3f} | +- {row.half:.3f} | {ways} |")


if __name__ == "__main__":
    main()
