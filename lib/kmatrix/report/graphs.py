"""Draw the graphs of a matrix as PNG: losses, final losses, throughput. matplotlib is imported when they are drawn.

The same numbers give the same bytes: no dates, no random placement, and matplotlib's own configuration is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kmatrix.records.runs import Status
from kmatrix.report import wording
from kmatrix.report.colours import PALETTE, marks_of
from kmatrix.report.figure import (
    ALARM,
    DARK,
    LINES,
    Job,
    beside,
    draw_jobs,
    figure_of_rows,
    first_of,
    name_rows,
    new_figure,
    subtitle,
    tick,
    time_unit,
)
from kmatrix.report.ranking import axis_limit
from kmatrix.report.results import Results, Run
from kmatrix.report.tables import utilization
from kmatrix.text import count, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 40  # of a graph with a row per run
MOST_LINES = 12  # configurations with a curve: those with the lowest losses
MOST_NAME = 48  # characters
FALL = 0.08  # share of the x axis in which the loss drops steeply, from about ln(vocabulary size)


def draw(results: Results, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw all graphs of losses and speed into `folder`; return the files, and why others were not drawn."""
    longest = max((run.val.seconds[-1] or 0.0 for run in results.runs if run.val.seconds), default=0.0)
    unit, size = time_unit(longest)
    jobs: list[Job] = [
        ("loss_vs_steps.png", partial(_losses, results, "step", "steps (optimizer updates)")),
        ("loss_vs_tokens.png", partial(_losses, results, "tokens", "training tokens")),
        ("loss_vs_time.png", partial(_losses, results, "seconds", f"time since the start of the run ({unit})", size)),
        ("final_loss_by_run.png", partial(_final_losses, results)),
        ("throughput_by_run.png", partial(_throughput, results)),
    ]
    return draw_jobs(jobs, folder)


def mean_curve(runs: Sequence[Run], kind: str) -> dict[str, Any]:
    """Return the mean over runs at their common steps as arrays: each column of their curves, and `low` and `high`."""
    curves = [curve for run in runs if (curve := getattr(run, kind)).step]
    tables = [{step: at for at, step in enumerate(curve.step)} for curve in curves]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    found: dict[str, Any] = {}
    for name in curves[0].__struct_fields__ if steps else ():
        rows = [[getattr(one, name)[at[step]] for step in steps] for one, at in zip(curves, tables, strict=True)]
        values = np.array(rows, dtype=float)
        found[name] = values.mean(axis=0)
        if name == "loss":
            found["low"], found["high"] = values.min(axis=0), values.max(axis=0)
    return found


def _losses(results: Results, axis: str, label: str, scale: float = 1.0) -> Figure | str:
    """Return the mean validation losses, whole and after their fall; crosses where runs ended early."""
    by_name = {run.name: run for run in results.runs}
    curves = {
        one.name: curve
        for one in results.configurations
        if (curve := mean_curve([by_name[name] for name in one.counted or one.runs], "val"))
        and len(curve["step"]) > 1
        and not np.isnan(curve[axis]).all()
    }
    shown = dict(list(curves.items())[:MOST_LINES])
    if not shown:
        return "no configuration has two evaluations"
    marks = marks_of(results.configurations)
    hidden = first_of(len(shown), len(curves), "configurations")
    figure, panels = new_figure(results.name, f"Loss over {label.partition(' ')[0]}", (1, 2), note=hidden)
    end = max(np.nanmax(curve[axis]) for curve in shown.values())
    for panel, begin in zip(panels, (0.0, FALL * end), strict=True):
        for name, curve in shown.items():
            colour, dash = PALETTE[marks[name][0]][0], LINES[marks[name][1]]
            late = curve[axis] >= begin
            x, loss, low, high = (curve[each][late] for each in (axis, "loss", "low", "high"))
            panel.plot(x / scale, loss, color=colour, linestyle=dash, lw=2, label=shortened(name, MOST_NAME))
            panel.fill_between(x / scale, low, high, color=colour, alpha=0.15, lw=0)
        panel.set_xlabel(label)
        panel.xaxis.set_major_formatter(tick)
    for run in results.runs:
        if run.status in (Status.FAILED, Status.STOPPED) and run.configuration in shown and run.val.loss:
            x = getattr(run.val, axis)[-1]
            if x is not None:
                panels[0].plot(x / scale, run.val.loss[-1], "x", color=ALARM, ms=9, mew=2)
    panels[0].set_ylabel("validation loss (nats/token)")
    subtitle(panels[1], "after the fall")
    panels[0].legend(loc="upper right")
    return figure


def _final_losses(results: Results) -> Figure | str:
    """Return the losses of each configuration with their mean and its interval, and how runs ended that have none."""
    by_name = {run.name: run for run in results.runs}
    measures = {name: one.measure for one in results.rankings for name in one.order}
    known = [one for one in results.configurations if one.name in measures or one.ends]
    if not any(one.name in measures for one in known):
        return "no run finished with a validation loss"
    shown, marks = known[:MOST_ROWS], marks_of(results.configurations)
    figure, (panel,) = figure_of_rows(results.name, "Final validation loss", len(shown), len(known), "configurations")
    limit = axis_limit([one.mean for one in shown if one.mean is not None])
    for row, one in enumerate(shown):
        colour, text, end = PALETTE[marks[one.name][0]][0], wording.endings(one) if one.ends else "", limit
        if one.mean is not None:
            losses = [getattr(by_name[name], measures[one.name]) for name in one.counted]
            text = ", ".join(filter(None, [f"{wording.loss(one.mean)}  n={len(losses)}", text]))
            if one.mean > limit:
                panel.plot(limit, row, ">", color=colour, ms=9)
            else:
                panel.plot(losses, [row] * len(losses), "o", mfc="none", color=colour, ms=7)
                panel.plot(one.mean, row, "o", color=colour, ms=8)
                end = max([*losses, one.mean])
                if one.interval and one.interval.high <= limit + (limit - one.interval.low):
                    panel.hlines(row, one.interval.low, one.interval.high, color=colour, lw=2)
        beside(panel, text, (end, row), ALARM if one.mean is None else DARK)
    panel.set_xlabel("validation loss, lower is better; ○ a seed, ● the mean, line: its interval")
    name_rows(panel, [shortened(one.name, MOST_NAME) for one in shown])
    panel.margins(x=0.12)
    return figure


def _throughput(results: Results) -> Figure | str:
    """Return the tokens per second of each run, with its MFU."""
    timed = [run for run in results.runs if run.tokens_per_second]
    if not timed:
        return "no run has a throughput"
    shown = timed[:MOST_ROWS]
    figure, (panel,) = figure_of_rows(results.name, "Throughput", len(shown), len(timed), "runs")
    marks = marks_of(results.configurations)
    for row, run in enumerate(shown):
        speed, mark = run.tokens_per_second or 0.0, "" if run.mfu is None else f", MFU {utilization(run)}"
        panel.barh(row, speed, color=PALETTE[marks[run.configuration][0]][0], height=0.6)
        beside(panel, f"{count(speed)}{mark}", (speed, row))
    panel.set_xlabel("tokens per second, steady state")
    name_rows(panel, [shortened(run.name, MOST_NAME) for run in shown])
    panel.margins(x=0.15)
    return figure
