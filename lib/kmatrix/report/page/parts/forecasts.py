"""Forecasts of the final losses of runs that are still going, for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.text import name, shown

MOST_RUNNING = 24  # runs with a forecast: each reads its own log
SENTENCE = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRun:
    """A run that is still going."""

    name: str
    group: PageGroup
    steps: int | None  # completed
    max_iters: int | None  # planned
    loss: float | None  # the newest validation loss, nats/token
    at_the_end: str  # the forecast with its interval and where that was tested, or why there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRuns:
    """The runs that are still going."""

    rows: tuple[RunningRun, ...]
    hidden: int  # further ones, without a row


def running_runs(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> RunningRuns | None:
    """Return the runs that are still going with their forecasts; None if there is none."""
    running = [(group, run) for group in groups for run in group.runs if run.status is Status.RUNNING]
    if not running:
        return None
    # Here: only the page of a matrix that still runs needs it.
    from kmatrix.status.view.forecasts import forecast_text, forecasts

    shown_ = running[:MOST_RUNNING]
    found = forecasts(MatrixDir(numbers.path), [run.name for _, run in shown_])
    rows = tuple(_row(group, run, forecast_text(found[run.name])) for group, run in shown_)
    return RunningRuns(rows=rows, hidden=len(running) - len(rows))


def _row(group: PageGroup, run: RunNumbers, forecast: str) -> RunningRun:
    return RunningRun(
        name=name(run.name),
        group=group,
        steps=run.steps,
        max_iters=run.max_iters,
        loss=run.final_val_loss,
        at_the_end=shown(forecast.replace("+-", "±"), SENTENCE),
    )
