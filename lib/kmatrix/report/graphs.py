"""The numbers of a matrix -> PNG files. matplotlib is imported when something is drawn.

The same numbers give the same bytes: no clock, no random placement, and a style that no file of the user's changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.records import Status
from kmatrix.report.canvas import MAX_ROWS, left_out, name_rows, new_figure, remark, row_font, save, tick
from kmatrix.report.curves import Curve, end_view, loss_range, mean_curve, top_of_view
from kmatrix.report.ink import (
    ALARM,
    DARK,
    MAX_LEGEND,
    QUIET,
    STYLE,
    Ink,
    group_ink,
    optimizer_colours,
    shortened,
)
from kmatrix.report.layout import speed
from kmatrix.report.text import utilization
from kmatrix.report.values import GroupNumbers, MatrixNumbers, Point, RunNumbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LABEL = 48  # characters of a name in a legend
MAX_TRAIN_POINTS = 500  # of a faint training line
TIME_UNITS = (("hours", 3600.0, 3 * 3600.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))  # from so many seconds

Locate = Callable[[Point], float | None]


@dataclass(frozen=True, slots=True)
class Over:
    """One way to lay out losses: the file, its title, what the axis says, where a point lies on it."""

    file: str
    title: str
    label: str
    locate: Locate


def draw(numbers: MatrixNumbers, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw all graphs into `folder`; return the files, and a sentence for each one that has no data."""
    import matplotlib.style

    jobs: list[tuple[str, Callable[[], Figure | str]]] = [
        (over.file, partial(losses_over, numbers, over)) for over in layouts(numbers)
    ]
    jobs.append(("final_loss_by_run.png", partial(final_losses, numbers)))
    jobs.append(("throughput_by_run.png", partial(throughput, numbers)))
    files: list[Path] = []
    missing: list[str] = []
    with matplotlib.style.context(["default", STYLE]):
        for name, make in jobs:
            made = make()
            if isinstance(made, str):
                missing.append(f"{name} was not drawn: {made}")
            else:
                files.append(save(made, folder / name))
    return files, missing


def layouts(numbers: MatrixNumbers) -> tuple[Over, ...]:
    """Return the three ways to lay out losses; the unit of time suits the longest run."""
    longest = max((p.seconds for run in numbers.runs for p in (*run.val, *run.train) if p.seconds), default=0.0)
    unit, size = next((unit, size) for unit, size, least in TIME_UNITS if longest >= least)
    return (
        Over("loss_vs_steps.png", "Loss over steps", "steps (optimizer updates)", lambda p: p.step),
        Over("loss_vs_tokens.png", "Loss over tokens", "tokens seen", lambda p: p.tokens),
        Over(
            "loss_vs_time.png",
            "Loss over time",
            f"time since the start of the run ({unit})",
            lambda p: None if p.seconds is None else p.seconds / size,
        ),
    )


def losses_over(numbers: MatrixNumbers, over: Over) -> Figure | str:
    """Draw validation loss (bold) and training loss (faint); beside them the end of the finished ones, enlarged."""
    groups = [group for group in numbers.groups if any(_curve(run.val, over.locate).x for run in group.runs)]
    if not groups:
        return "no validation loss was recorded"
    ink = group_ink(numbers, groups)
    finished = [group for group in groups if group.counted]
    figure, axes = new_figure(numbers.name, over.title, columns=2 if len(finished) > 1 else 1)
    drawn = [curve for group in groups for curve in _draw_group(axes[0], group, over.locate, ink[group.name])]
    if not drawn:
        return "the seeds of no configuration measured a step in common"
    _frame(axes[0], drawn, [point.loss for group in groups for run in group.runs for point in run.train])
    axes[0].set_ylabel("loss (nats a token)")
    if len(finished) > 1:
        ends = [_draw_mean(axes[1], group, over.locate, ink[group.name]) for group in finished]
        _frame_end(axes[1], [curve for curve in ends if curve.x])
    for panel in axes:
        panel.set_xlabel(over.label)
        panel.xaxis.set_major_formatter(tick)
    handles = _legend(groups, ink)
    figure.legend(handles=handles, loc="outside lower left", ncols=3, handlelength=3.4, columnspacing=2.5)
    return figure


def final_losses(numbers: MatrixNumbers) -> Figure | str:
    """Draw a row for each configuration: a dot for each seed, the mean, its 95 % interval. No bars from 0."""
    counted = sorted((g for g in numbers.groups if g.losses), key=lambda g: (g.mean, g.name))
    if not counted:
        return "no run finished with a validation loss"
    lost = [g for g in numbers.groups if not g.losses and any(_is_lost(run) for run in g.runs)]
    rows = [*counted, *lost][:MAX_ROWS]
    note = left_out(len(rows), len(counted) + len(lost))
    figure, (axes,) = new_figure(numbers.name, "Final validation loss", rows=len(rows), note=note)
    colours = optimizer_colours(numbers)
    losses = [list(group.losses.values()) for group in counted]
    axes.set_xlim(*loss_range([group.mean or 0.0 for group in counted], losses))
    for y, group in enumerate(rows):
        _draw_losses(axes, y, group, colours[group.runs[0].optimizer])
    name_rows(axes, [group.name for group in rows], [not group.losses for group in rows])
    legend = "dot: a seed   diamond: mean   line: 95 % interval   arrow: beyond the end"
    axes.set_xlabel(f"final validation loss (nats a token)\n{legend}")
    return figure


def throughput(numbers: MatrixNumbers) -> Figure | str:
    """Draw a bar from 0 for each run: tokens a second, with MFU where it is known."""
    timed = [run for run in numbers.runs if run.tokens_per_second is not None]
    if not timed:
        return "no run recorded its tokens a second"
    rows = timed[:MAX_ROWS]
    note = left_out(len(rows), len(timed))
    figure, (axes,) = new_figure(numbers.name, "Throughput", rows=len(rows), note=note)
    colours = optimizer_colours(numbers)
    axes.set_xlim(0, 1.3 * max(run.tokens_per_second or 0.0 for run in rows) or 1.0)
    for y, run in enumerate(rows):
        _draw_bar(axes, y, run, colours[run.optimizer], row_font(len(rows)))
    name_rows(axes, [run.name for run in rows], [_is_lost(run) for run in rows])
    axes.xaxis.set_major_formatter(tick)
    axes.set_xlabel("tokens a second (steady: evaluations and the first steps left out)")
    return figure


def _curve(points: Sequence[Point], locate: Locate) -> Curve:
    """Return the line of one run; it has no band."""
    placed = [(x, point.loss) for point in points if (x := locate(point)) is not None]
    y = tuple(loss for _, loss in placed)
    return Curve(x=tuple(x for x, _ in placed), y=y, low=y, high=y)


def _draw_group(axes: Axes, group: GroupNumbers, locate: Locate, ink: tuple[str, Any]) -> list[Curve]:
    """Draw the finished seeds of a group as one line, every other run for itself; return what was drawn."""
    colour, line = ink
    for run in group.runs:
        stride = -(-len(run.train) // MAX_TRAIN_POINTS) or 1
        faint = _curve(run.train[::stride], locate)
        axes.plot(faint.x, faint.y, color=colour, alpha=0.22, linewidth=0.9, zorder=2)
    drawn = [_draw_mean(axes, group, locate, ink)]
    for run in group.runs:
        curve = _curve(run.val, locate)
        if not run.counts and curve.x:
            axes.plot(curve.x, curve.y, color=colour, linestyle=line, linewidth=1.5, alpha=0.8, zorder=4)
            if _is_lost(run):
                axes.plot(curve.x[-1], curve.y[-1], "X", color=ALARM, markersize=9, zorder=6, clip_on=False)
            drawn.append(curve)
    return [curve for curve in drawn if curve.x]


def _draw_mean(axes: Axes, group: GroupNumbers, locate: Locate, ink: tuple[str, Any]) -> Curve:
    """Draw the mean of the finished seeds, with a band from the lowest to the highest."""
    seeds = [run.val for run in group.counted if run.val]
    curve = mean_curve(seeds, locate) if seeds else Curve(x=(), y=(), low=(), high=())
    axes.plot(curve.x, curve.y, color=ink[0], linestyle=ink[1], linewidth=2.2, zorder=4)
    if len(seeds) > 1:
        axes.fill_between(curve.x, curve.low, curve.high, color=ink[0], alpha=0.18, linewidth=0, zorder=3)
    return curve


def _frame(axes: Axes, curves: Sequence[Curve], train: Sequence[float]) -> None:
    """Show where losses differ: the first fall may begin above the picture, and the picture says so."""
    start = max(curve.y[0] for curve in curves)
    top = top_of_view(curves)
    low = min([*train, *(loss for curve in curves for loss in curve.low)])
    room = 0.05 * (top - low) or 0.05 * abs(top) or 1.0
    axes.set_ylim(low - room, top + room)
    axes.set_xlim(left=0)
    if start > top + room:
        axes.annotate(
            f"losses start at {start:.2f}, above the picture",
            (0.985, 0.985),
            xycoords="axes fraction",
            ha="right",
            va="top",
            color=QUIET,
            fontsize=9.5,
        )


def _frame_end(axes: Axes, curves: Sequence[Curve]) -> None:
    if not curves:
        return
    view = end_view(curves)
    margin = 0.03 * (view.right - view.left) or 1.0
    axes.set_xlim(view.left, view.right + margin)
    axes.set_ylim(view.bottom, view.top)
    axes.locator_params(axis="x", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    remark(axes, "the end, enlarged (validation, finished runs)")


def _legend(groups: Sequence[GroupNumbers], ink: Ink) -> list[Any]:
    """Return the lines of the legend: a configuration each, or with too many of them an optimizer each."""
    from matplotlib.lines import Line2D

    if len(groups) <= MAX_LEGEND:
        named = [(f"{shortened(group.name, MAX_LABEL)}{_fate(group)}", ink[group.name]) for group in groups]
    else:
        optimizers = [group.runs[0].optimizer for group in groups]
        first = {group.runs[0].optimizer: ink[group.name] for group in reversed(groups)}
        counts = {name: optimizers.count(name) for name in dict.fromkeys(optimizers)}
        named = [(f"{name or 'unknown'} ({count} configurations)", first[name]) for name, count in counts.items()]
    handles = [Line2D([], [], color=c, linestyle=line, linewidth=2.2, label=text) for text, (c, line) in named]
    handles.append(Line2D([], [], color=QUIET, alpha=0.5, linewidth=0.9, label="thin, faint: training loss"))
    if any(len(group.counted) > 1 for group in groups):
        handles.append(Line2D([], [], color=QUIET, alpha=0.3, linewidth=7, label="band: lowest to highest seed"))
    if any(_is_lost(run) for group in groups for run in group.runs):
        handles.append(Line2D([], [], color=ALARM, marker="X", linestyle="", markersize=8, label="did not finish"))
    return handles


def _fate(group: GroupNumbers) -> str:
    """Return what a reader must know beside the name: how many seeds, how many of them finished."""
    if len(group.runs) == 1:
        return "" if group.runs[0].counts else f" ({group.runs[0].status})"
    missing = f" of {len(group.runs)}" if len(group.counted) < len(group.runs) else ""
    return f" ({len(group.counted)}{missing} seeds)"


def _draw_losses(axes: Axes, y: int, group: GroupNumbers, colour: str) -> None:
    """Draw one row of final losses, with its numbers in the margin."""
    margin = axes.get_yaxis_transform()
    if group.mean is None:
        lost = next(run for run in group.runs if _is_lost(run))
        text = shortened(f"{lost.status}: {lost.reason or 'no reason recorded'}", 80)
        axes.plot(0.015, y, "X", color=ALARM, markersize=8, transform=margin)
        axes.text(0.035, y, text, transform=margin, va="center", color=ALARM, fontsize=9.5)
        return
    losses, interval, end = list(group.losses.values()), group.interval, axes.get_xlim()[1]
    if group.mean > end:
        axes.plot(1, y, ">", color=colour, markersize=9, transform=margin, clip_on=False)
    if interval is not None:
        axes.plot([interval.low, interval.high], [y, y], color=colour, linewidth=2.2, alpha=0.75, zorder=3)
    axes.plot(losses, [y] * len(losses), "o", color=colour, alpha=0.5, markersize=7, markeredgewidth=0, zorder=5)
    axes.plot(group.mean, y, "D", color=colour, markeredgecolor="white", markersize=8, zorder=4)
    spread = "" if interval is None else f" ± {(interval.high - interval.low) / 2:.4f}"
    count = f"n={len(losses)}" + (f" of {len(group.runs)}" if len(losses) < len(group.runs) else "")
    axes.text(1.02, y, f"{group.mean:.4f}{spread}  {count}", transform=margin, va="center", fontsize=9.5, color=DARK)


def _draw_bar(axes: Axes, y: int, run: RunNumbers, colour: str, font: float) -> None:
    lost = _is_lost(run)
    value = run.tokens_per_second or 0.0
    looks: dict[str, Any] = {"alpha": 0.3, "hatch": "///"} if lost else {"alpha": 0.9}
    axes.barh(y, value, height=0.68, color=colour, edgecolor="white", linewidth=0, **looks)
    mfu = f"   MFU {utilization(run)}" if run.mfu is not None else ""
    fate = "" if run.status is Status.FINISHED else f"   {run.status}"
    axes.annotate(
        f"{speed(value)} tok/s{mfu}{fate}",
        (value, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=font,
        color=ALARM if lost else DARK,
    )


def _is_lost(run: RunNumbers) -> bool:
    return run.status in (Status.FAILED, Status.STOPPED, Status.SKIPPED)
