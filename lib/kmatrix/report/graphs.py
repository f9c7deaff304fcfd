"""Draw the losses of a matrix as PNG. The same numbers give the same bytes: no dates, no random placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kmatrix.records.runs import Status
from kmatrix.report import figure, wording
from kmatrix.report.figure import MOST_NAME, PALETTE
from kmatrix.report.ranking import axis_limit
from kmatrix.report.results import Results, Run
from kmatrix.text import count, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 12  # configurations with a curve: those with the lowest losses
FALL = 0.08  # share of the x axis in which the loss drops steeply, from about ln(vocabulary size)


def draw(results: Results, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw all graphs of losses into `folder`; return the files, and why others were not drawn."""
    longest = max((run.val.seconds[-1] or 0.0 for run in results.runs if run.val.seconds), default=0.0)
    unit, size = figure.time_unit(longest)
    jobs: list[figure.Job] = [
        ("loss_vs_steps.png", partial(_losses, results, "step", "steps (optimizer updates)")),
        ("loss_vs_tokens.png", partial(_losses, results, "tokens", "tokens of the training")),
        ("loss_vs_time.png", partial(_losses, results, "seconds", f"time since the start of the run ({unit})", size)),
        ("final_loss_by_run.png", partial(_final_losses, results)),
    ]
    return figure.draw_jobs(jobs, folder)


def mean_curve(runs: Sequence[Run], kind: str) -> dict[str, Any]:
    """Return the mean over runs at their common steps as arrays: each column of their curves, and `low` and `high`."""
    curves = [curve for run in runs if (curve := getattr(run, kind)).step]
    steps = reduce(np.intersect1d, [one.step for one in curves]) if curves else ()
    if not len(steps):
        return {}
    tables = {
        name: np.array([np.array(getattr(one, name), dtype=float)[np.isin(one.step, steps)] for one in curves])
        for name in curves[0].__struct_fields__
    }
    means = {name: rows.mean(axis=0) for name, rows in tables.items()}
    return {**means, "low": tables["loss"].min(axis=0), "high": tables["loss"].max(axis=0)}


def _losses(results: Results, axis: str, label: str, scale: float = 1.0) -> Figure | str:
    """Return the mean validation losses, whole and after their fall; crosses where runs ended early."""
    by_name = {run.name: run for run in results.runs}
    curves = [
        (one.name, curve)
        for one in results.configurations
        if (curve := mean_curve([by_name[name] for name in one.counted or one.runs], "val"))
        and len(curve["step"]) > 1
        and not np.isnan(curve[axis]).all()
    ]
    if not curves:
        return "no configuration has two evaluations"
    about, shown = figure.first_of(results.name, curves, "configurations", MOST_LINES)
    marks = figure.marks_of(results.configurations)
    drawn, (whole, late) = figure.new_figure(about, f"Loss over {label.partition(' ')[0]}", 2, 2)
    end = max(np.nanmax(curve[axis]) for _, curve in shown)
    for panel, begin in ((whole, 0.0), (late, FALL * end)):
        for name, curve in shown:
            colour, dash = PALETTE[marks[name][0]][0], figure.DASHES[marks[name][1]]
            x, loss, low, high = (curve[each][curve[axis] >= begin] for each in (axis, "loss", "low", "high"))
            panel.plot(x / scale, loss, color=colour, linestyle=dash, lw=2, label=shortened(name, MOST_NAME))
            panel.fill_between(x / scale, low, high, color=colour, alpha=0.15, lw=0)
        panel.set_xlabel(label)
        panel.xaxis.set_major_formatter(lambda value, _: count(value))
    for run in results.runs:
        if run.status in (Status.FAILED, Status.STOPPED) and run.configuration in dict(shown) and run.val.loss:
            x = getattr(run.val, axis)[-1]
            whole.plot(math.nan if x is None else x / scale, run.val.loss[-1], "x", color=figure.ALARM, ms=9, mew=2)
    whole.set_ylabel("validation loss (nats/token)")
    whole.legend(loc="upper right")
    late.set_title("after the fall")
    return drawn


def _final_losses(results: Results) -> Figure | str:
    """Return the losses of each configuration with their mean and its interval, and how runs ended that have none."""
    by_name = {run.name: run for run in results.runs}
    measures = {name: one.measure for one in results.rankings for name in one.order}
    if not measures:
        return "no run finished with a validation loss"
    known = [one for one in results.configurations if one.name in measures or one.ends]
    about, shown = figure.first_of(results.name, known, "configurations")
    limit = axis_limit([one.mean for one in shown if one.mean is not None])
    marks = figure.marks_of(results.configurations)
    labels = []
    for one in shown:
        ends = f", {wording.endings(one)}" if one.ends else ""
        labels.append(f"{shortened(one.name, MOST_NAME)}\n{wording.loss(one.mean)}  n={len(one.counted)}{ends}")
    drawn, (panel,) = figure.new_figure(about, "Final validation loss", labels=labels)
    for row, one in enumerate(shown):
        style: dict[str, Any] = {"color": PALETTE[marks[one.name][0]][0], "markersize": 8}
        if one.mean is not None and one.mean > limit:
            panel.plot(limit, row, ">", **style)
        elif one.mean is not None:
            losses = [getattr(by_name[name], measures[one.name]) for name in one.counted]
            panel.plot(losses, [row] * len(losses), "o", mfc="none", **style)
            if one.interval:
                panel.plot([one.interval.low, one.interval.high], [row, row], **style)
            panel.plot(one.mean, row, "o", **style)
    panel.set_xlabel("validation loss, lower is better; ○ a seed, ● the mean, line: its interval")
    return drawn
