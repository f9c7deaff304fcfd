"""Draw the graphs of a matrix as PNG: losses, final losses, throughput. matplotlib is imported when they are drawn.

The same numbers give the same bytes: no dates, no random placement, and matplotlib's own configuration is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.records.runs import Status
from kmatrix.report.figure import (
    ALARM,
    DARK,
    MAX_LEGEND,
    MAX_ROWS,
    QUIET,
    LineStyles,
    draw_jobs,
    group_styles,
    name_rows,
    new_figure,
    optimizer_colours,
    plain_ticks,
    row_font,
    subtitle,
    tick,
    time_unit,
    truncation_note,
)
from kmatrix.report.numbers import GroupNumbers, MatrixNumbers, RunNumbers
from kmatrix.report.pair_text import digits_for
from kmatrix.report.summary import utilization
from kmatrix.stats import mean
from kmatrix.text import count, printable, shortened, shortened_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_LABEL = 48  # characters of a name in a legend
INITIAL_DROP = 0.08  # share of the x axis in which the loss drops steeply, from about ln(vocabulary size)
MAX_RISE = 1.1  # a diverging loss is drawn up to this multiple of the highest initial loss


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One measured loss."""

    step: int
    tokens: float | None  # trained on so far
    seconds: float | None  # of training
    loss: float  # nats/token


PointToX = Callable[[CurvePoint], float | None]


@dataclass(frozen=True, slots=True)
class LossGraph:
    """One graph of loss curves."""

    file: str
    title: str
    x_label: str
    to_x: PointToX  # x of a point; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line with a band around it."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]  # lowest seed
    high: tuple[float, ...]  # highest seed


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRange:
    """The part of a graph that is enlarged."""

    left: float
    right: float
    bottom: float  # loss
    top: float  # loss


def draw(numbers: MatrixNumbers, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw all graphs into `folder`; return the files, and the reason for each graph that was not drawn."""
    jobs: list[tuple[str, Callable[[], Figure | str]]] = [
        (graph.file, partial(loss_graph, numbers, graph)) for graph in loss_graphs(numbers)
    ]
    jobs.append(("final_loss_by_run.png", partial(final_losses, numbers)))
    jobs.append(("throughput_by_run.png", partial(throughput, numbers)))
    return draw_jobs(jobs, folder)


def loss_graphs(numbers: MatrixNumbers) -> tuple[LossGraph, ...]:
    """Return the graphs of the loss over steps, tokens and time. The unit of time fits the longest run."""
    longest = max((run.val.seconds[-1] or 0.0 for run in numbers.runs if run.val.seconds), default=0.0)
    unit, size = time_unit(longest)
    return (
        LossGraph("loss_vs_steps.png", "Loss over steps", "steps (optimizer updates)", lambda p: p.step),
        LossGraph("loss_vs_tokens.png", "Loss over tokens", "training tokens", lambda p: p.tokens),
        LossGraph(
            "loss_vs_time.png",
            "Loss over time",
            f"time since the start of the run ({unit})",
            lambda p: None if p.seconds is None else p.seconds / size,
        ),
    )


def loss_graph(numbers: MatrixNumbers, graph: LossGraph) -> Figure | str:
    """Draw validation loss (bold) and training loss (faint); on the right, the end of finished runs, enlarged."""
    groups = [group for group in numbers.groups if any(_curve(evaluated(run), graph.to_x).x for run in group.runs)]
    if not groups:
        return "no validation loss was recorded"
    styles = group_styles(numbers, groups)
    finished = [group for group in groups if group.counted]
    figure, axes = new_figure(numbers.name, graph.title, columns=2 if len(finished) > 1 else 1)
    drawn = [curve for group in groups for curve in _draw_group(axes[0], group, graph.to_x, styles[group.name])]
    if not drawn:
        return "the seeds of a configuration have no validation step in common"
    _limit_axes(axes[0], drawn, [loss for group in groups for run in group.runs for loss in run.metrics.train.loss])
    axes[0].set_ylabel("loss (nats/token)")
    axes[0].ticklabel_format(axis="y", style="plain", useOffset=False)
    if len(finished) > 1:
        ends = [_draw_mean(axes[1], group, graph.to_x, styles[group.name]) for group in finished]
        _limit_enlarged_axes(axes[1], [curve for curve in ends if curve.x])
    for panel in axes:
        panel.set_xlabel(graph.x_label)
        panel.xaxis.set_major_formatter(tick)
    _add_legend(figure, _legend(groups, styles))
    return figure


def final_losses(numbers: MatrixNumbers) -> Figure | str:
    """Draw a row per configuration: a dot per seed, the mean and its interval. The axis does not start at 0."""
    counted = sorted((g for g in numbers.groups if g.losses), key=lambda g: (g.mean, g.name))
    if not counted:
        return "no run finished with a validation loss"
    lost = [g for g in numbers.groups if not g.losses and any(_is_lost(run) for run in g.runs)]
    rows = [*counted, *lost][:MAX_ROWS]
    note = truncation_note(len(rows), len(counted) + len(lost))
    figure, (axes,) = new_figure(numbers.name, "Final validation loss", rows=len(rows), note=note)
    colours = optimizer_colours(numbers)
    losses = [list(group.losses.values()) for group in counted]
    axes.set_xlim(*loss_range([group.mean or 0.0 for group in counted], losses))
    plain_ticks(axes, "x")
    for y, group in enumerate(rows):
        _draw_losses(axes, y, group, colours[group.runs[0].optimizer])
    name_rows(axes, [group.name for group in rows], [not group.losses for group in rows])
    legend = f"dot: seed   diamond: mean   line: {100 * numbers.confidence:.4g} % CI   arrow: outside the range"
    axes.set_xlabel(f"final validation loss (nats/token)\n{legend}")
    return figure


def throughput(numbers: MatrixNumbers) -> Figure | str:
    """Draw a bar per run: tokens/s, with MFU if it is known."""
    timed = [run for run in numbers.runs if run.tokens_per_second is not None]
    if not timed:
        return "no run recorded its throughput"
    rows = timed[:MAX_ROWS]
    note = truncation_note(len(rows), len(timed))
    figure, (axes,) = new_figure(numbers.name, "Throughput", rows=len(rows), note=note)
    colours = optimizer_colours(numbers)
    # Room for the labels next to the bars.
    axes.set_xlim(0, 1.3 * max(run.tokens_per_second or 0.0 for run in rows) or 1.0)
    for y, run in enumerate(rows):
        _draw_bar(axes, y, run, colours[run.optimizer], row_font(len(rows)))
    name_rows(axes, [run.name for run in rows], [_is_lost(run) for run in rows])
    axes.xaxis.set_major_formatter(tick)
    axes.set_xlabel("tokens/s (steady state: without evaluations and the first steps)")
    return figure


def evaluated(run: RunNumbers) -> list[CurvePoint]:
    """Return the validation losses of a run."""
    val = run.val
    return list(starmap(CurvePoint, zip(val.step, val.tokens, val.seconds, val.loss, strict=True)))


def trained(run: RunNumbers) -> list[CurvePoint]:
    """Return the training losses of a run. Tokens and seconds are known between two evaluations."""
    import numpy as np

    val, train = run.val, run.metrics.train
    if not val.step:
        return [CurvePoint(step, None, None, loss) for step, loss in zip(train.step, train.loss, strict=True)]
    tokens, seconds = (
        [None if np.isnan(value) else float(value) for value in np.interp(train.step, val.step, column, right=np.nan)]
        for column in (np.array(val.tokens, np.float64), np.array(val.seconds, np.float64))
    )
    return list(starmap(CurvePoint, zip(train.step, tokens, seconds, train.loss, strict=True)))


def mean_curve(seeds: Sequence[Sequence[CurvePoint]], to_x: PointToX) -> Curve:
    """Return the mean over seeds at the steps that all of them measured; x is the mean of their x."""
    by_step = [{point.step: point for point in points} for points in seeds]
    # A mean over some of the seeds would jump where one of them ends.
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))
    columns = []
    for step in common:
        points = [known[step] for known in by_step]
        places = [place for point in points if (place := to_x(point)) is not None]
        if len(places) == len(points):
            losses = [point.loss for point in points]
            columns.append((mean(places), mean(losses), min(losses), max(losses)))
    x, y, low, high = (tuple(column[i] for column in columns) for i in range(4))
    return Curve(x=x, y=y, low=low, high=high)


def top_of_view(curves: Sequence[Curve]) -> float:
    """Return the highest loss to show: the maximum after the steep initial drop.

    A curve that ends within the drop is shown from its start; a diverging curve is cropped.
    """
    drop = INITIAL_DROP * max(x for curve in curves for x in curve.x)
    starts = [curve.high[0] for curve in curves]
    # One diverging run must not flatten all others.
    return min(max(max(values_from(curve.x, curve.high, drop)) for curve in curves), MAX_RISE * max(starts))


def values_from(x: Sequence[float], y: Sequence[float], start: float) -> list[float]:
    """Return the values of a line from x = start on, interpolated at start; all if it ends before."""
    after = [height for place, height in zip(x, y, strict=True) if place >= start]
    before = len(x) - len(after)
    if not after or not before:
        return list(y)
    share = (start - x[before - 1]) / (x[before] - x[before - 1])
    return [y[before - 1] + share * (y[before] - y[before - 1]), *after]


def end_view(curves: Sequence[Curve]) -> CurveRange:
    """Return the range of the last quarter of the curves, without outliers."""
    lows = [values_from(curve.x, curve.low, 0.75 * curve.x[-1]) for curve in curves]
    highs = [values_from(curve.x, curve.high, 0.75 * curve.x[-1]) for curve in curves]
    limit = outlier_limit([curve.y[-1] for curve in curves])
    bottom = min(min(low) for low in lows)
    top = max(max(high) for curve, high in zip(curves, highs, strict=True) if curve.y[-1] <= limit)
    margin = 0.08 * (top - bottom) or 0.01 * abs(top) or 1.0
    ends = [curve.x[-1] for curve in curves]
    return CurveRange(left=0.75 * min(ends), right=max(ends), bottom=bottom - margin, top=top + margin)


def loss_range(means: Sequence[float], groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the limits of an axis of final losses: every loss of the groups that are not outliers.

    groups: losses of each configuration.  means: their means.
    """
    limit = outlier_limit(means)
    shown = [loss for centre, losses in zip(means, groups, strict=True) if centre <= limit for loss in losses]
    # All losses may be equal, or 0: the axis still needs a length.
    margin = 0.25 * (max(shown) - min(shown)) or 0.01 * abs(max(shown)) or 1.0
    return min(shown) - margin, max(shown) + margin


def outlier_limit(losses: Sequence[float]) -> float:
    """Return the loss above which a curve would compress the others.

    Lowest loss + 3 * median distance to it; the highest loss if that median is 0.
    """
    ordered = sorted(losses)
    median = ordered[len(ordered) // 2] - ordered[0]
    return ordered[0] + 3 * median if median > 0 else ordered[-1]


def _curve(points: Sequence[CurvePoint], to_x: PointToX) -> Curve:
    """Return the curve of one run, without a band."""
    placed = [(x, point.loss) for point in points if (x := to_x(point)) is not None]
    y = tuple(loss for _, loss in placed)
    return Curve(x=tuple(x for x, _ in placed), y=y, low=y, high=y)


def _draw_group(axes: Axes, group: GroupNumbers, to_x: PointToX, style: tuple[str, Any]) -> list[Curve]:
    """Draw the finished seeds of a group as one curve, and every other run as its own; return the curves."""
    colour, line = style
    for run in group.runs:
        faint = _curve(trained(run), to_x)
        axes.plot(faint.x, faint.y, color=colour, alpha=0.22, linewidth=0.9, zorder=2)
    drawn = [_draw_mean(axes, group, to_x, style)]
    for run in group.runs:
        curve = _curve(evaluated(run), to_x)
        if not run.counts and curve.x:
            axes.plot(curve.x, curve.y, color=colour, linestyle=line, linewidth=1.5, alpha=0.8, zorder=4)
            if _is_lost(run):
                axes.plot(curve.x[-1], curve.y[-1], "X", color=ALARM, markersize=9, zorder=6, clip_on=False)
            drawn.append(curve)
    return [curve for curve in drawn if curve.x]


def _draw_mean(axes: Axes, group: GroupNumbers, to_x: PointToX, style: tuple[str, Any]) -> Curve:
    """Draw the mean of the finished seeds, with a band from the lowest to the highest."""
    seeds = [evaluated(run) for run in group.counted if run.val.step]
    curve = mean_curve(seeds, to_x) if seeds else Curve(x=(), y=(), low=(), high=())
    axes.plot(curve.x, curve.y, color=style[0], linestyle=style[1], linewidth=2.2, zorder=4)
    if len(seeds) > 1:
        axes.fill_between(curve.x, curve.low, curve.high, color=style[0], alpha=0.18, linewidth=0, zorder=3)
    return curve


def _limit_axes(axes: Axes, curves: Sequence[Curve], train: Sequence[float]) -> None:
    """Limit the axes to the range in which losses differ; note if the initial loss is above it."""
    start = max(curve.y[0] for curve in curves)
    top = top_of_view(curves)
    low = min([*train, *(loss for curve in curves for loss in curve.low)])
    margin = 0.05 * (top - low) or 0.05 * abs(top) or 1.0
    axes.set_ylim(low - margin, top + margin)
    axes.set_xlim(left=0)
    if start > top + margin:
        axes.annotate(
            f"initial loss {start:.2f} (not shown)",
            (0.985, 0.985),
            xycoords="axes fraction",
            ha="right",
            va="top",
            color=QUIET,
            fontsize=9.5,
        )


def _limit_enlarged_axes(axes: Axes, curves: Sequence[Curve]) -> None:
    if not curves:
        return
    view = end_view(curves)
    margin = 0.03 * (view.right - view.left) or 1.0
    axes.set_xlim(view.left, view.right + margin)
    axes.set_ylim(view.bottom, view.top)
    axes.locator_params(axis="x", nbins=5)
    plain_ticks(axes, "y")
    subtitle(axes, "last quarter (validation, finished runs)")


def _add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Add the legend below the panels, in as many columns, up to 3, as fit in the width of the figure."""
    for columns in (3, 2, 1):
        legend = figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, handlelength=3.4, columnspacing=2.5
        )
        if legend.get_window_extent().width <= figure.bbox.width:
            return
        if columns > 1:
            legend.remove()


def _legend(groups: Sequence[GroupNumbers], styles: LineStyles) -> list[Any]:
    """Return the lines of the legend: one per configuration, or per optimizer if there are too many."""
    from matplotlib.lines import Line2D

    if len(groups) <= MAX_LEGEND:
        short = shortened_names([group.name for group in groups], MAX_LABEL)
        named = [
            (f"{name}{_status_note(group)}", styles[group.name]) for name, group in zip(short, groups, strict=True)
        ]
    else:
        optimizers = [group.runs[0].optimizer for group in groups]
        # Reversed, so that the first group of an optimizer is the one that stays.
        first = {group.runs[0].optimizer: styles[group.name] for group in reversed(groups)}
        counts = {name: optimizers.count(name) for name in dict.fromkeys(optimizers)}
        named = [(f"{name or 'unknown'} ({number} configurations)", first[name]) for name, number in counts.items()]
    handles = [Line2D([], [], color=c, linestyle=line, linewidth=2.2, label=text) for text, (c, line) in named]
    handles.append(Line2D([], [], color=QUIET, alpha=0.5, linewidth=0.9, label="thin line: training loss"))
    if any(len(group.counted) > 1 for group in groups):
        handles.append(Line2D([], [], color=QUIET, alpha=0.3, linewidth=7, label="band: lowest to highest seed"))
    if any(_is_lost(run) for group in groups for run in group.runs):
        handles.append(Line2D([], [], color=ALARM, marker="X", linestyle="", markersize=8, label="did not finish"))
    return handles


def _status_note(group: GroupNumbers) -> str:
    """Return the number of finished seeds, or the status of a single run that did not finish."""
    if len(group.runs) == 1:
        return "" if group.runs[0].counts else f" ({group.runs[0].status})"
    total = f" of {len(group.runs)}" if len(group.counted) < len(group.runs) else ""
    return f" ({len(group.counted)}{total} seeds)"


def _draw_losses(axes: Axes, y: int, group: GroupNumbers, colour: str) -> None:
    """Draw one row of final losses, with its numbers in the margin."""
    margin = axes.get_yaxis_transform()
    if group.mean is None:
        lost = next(run for run in group.runs if _is_lost(run))
        text = shortened(f"{lost.status}: {printable(lost.reason or 'no reason recorded')}", 80)
        axes.plot(0.015, y, "X", color=ALARM, markersize=8, transform=margin)
        axes.text(0.035, y, text, transform=margin, va="center", color=ALARM, fontsize=9.5)
        return
    losses, interval, (start, end) = list(group.losses.values()), group.interval, axes.get_xlim()
    if group.mean > end:
        axes.plot(1, y, ">", color=colour, markersize=9, transform=margin, clip_on=False)
    if interval is not None:
        axes.plot([interval.low, interval.high], [y, y], color=colour, linewidth=2.2, alpha=0.75, zorder=3)
        # With two seeds the interval is nine times as long as their distance: its end may be outside the axis.
        for at, marker, is_outside in ((0, "<", interval.low < start), (1, ">", interval.high > end >= group.mean)):
            if is_outside:
                axes.plot(at, y, marker, color=colour, markersize=6, transform=margin, clip_on=False)
    axes.plot(losses, [y] * len(losses), "o", color=colour, alpha=0.5, markersize=7, markeredgewidth=0, zorder=5)
    axes.plot(group.mean, y, "D", color=colour, markeredgecolor="white", markersize=8, zorder=4)
    digits = digits_for(interval)
    half_width = "" if interval is None else f" ± {(interval.high - interval.low) / 2:.{digits}f}"
    seeds = f"n={len(losses)}" + (f" of {len(group.runs)}" if len(losses) < len(group.runs) else "")
    label = f"{group.mean:.{digits}f}{half_width}  {seeds}"
    axes.text(1.02, y, label, transform=margin, va="center", fontsize=9.5, color=DARK)


def _draw_bar(axes: Axes, y: int, run: RunNumbers, colour: str, font: float) -> None:
    lost = _is_lost(run)
    value = run.tokens_per_second or 0.0
    style: dict[str, Any] = {"alpha": 0.3, "hatch": "///"} if lost else {"alpha": 0.9}
    axes.barh(y, value, height=0.68, color=colour, edgecolor="white", linewidth=0, **style)
    mfu = f"   MFU {utilization(run)}" if run.mfu is not None else ""
    status = "" if run.status is Status.FINISHED else f"   {run.status}"
    axes.annotate(
        f"{count(value)} tok/s{mfu}{status}",
        (value, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=font,
        color=ALARM if lost else DARK,
    )


def _is_lost(run: RunNumbers) -> bool:
    return run.ended_badly
