"""The memory of runs over time, with what was no training shaded: one figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kmatrix.report.canvas import name_rows, new_stack, tick
from kmatrix.report.gpu_values import GpuNumbers, RunGpus
from kmatrix.report.ink import ALARM, LINES, LOST, MAX_LEGEND, colours_of, fate, mixed, shortened, simulated_mark

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASE_COLOURS = {  # light: lines lie on them
    "set-up": "#DDDDDD",
    "evaluation": "#F2D9A6",
    "checkpoint": "#C9B2D9",
    "ending": "#C4C4C4",
}
MAX_STRIPS = 12
TRAINING_COLOUR = "#BFD8E8"
TIME_UNITS = (("hours", 3600.0, 3 * 3600.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))  # from so many seconds
Looks = dict[str, tuple[str, Any]]  # name of a run -> its colour and its kind of line


def memory_over_time(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw the memory of all devices of a run together, over the time of its recording."""
    known = [(run, run.gpu) for run in runs if run.gpu and any(m.total is not None for m in run.gpu.timeline)]
    if not known:
        return "no recording has the memory over time"
    longest = max(gpu.timeline[-1].seconds for _, gpu in known)
    unit, size = next((unit, size) for unit, size, least in TIME_UNITS if longest >= least)
    with_phases = [(run, gpu) for run, gpu in known if gpu.phases][:MAX_STRIPS]
    strips = with_phases if len(known) > 1 else []
    figure, panels = new_stack(name, "Memory over time", strips=len(strips), note=simulated_mark(runs))
    axes = panels[0]
    looks = _looks([run for run, _ in known])
    for run, gpu in known:
        moments = [(moment.seconds / size, moment.total) for moment in gpu.timeline]
        x, y = [x for x, _ in moments], [math.nan if total is None else total for _, total in moments]
        colour, line = looks[run.name]
        axes.plot(x, y, color=colour, linestyle=line, linewidth=1.8)
        last = max(at for at, value in enumerate(y) if not math.isnan(value))
        if run.status in LOST:
            axes.plot(x[last], y[last], "X", color=ALARM, markersize=9, zorder=6, clip_on=False)
    axes.set_ylim(0, 1.05 * max(axes.dataLim.ymax, 1.0))
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(tick)
    axes.set_ylabel("memory used, MiB, of all devices of a run together")
    if strips:
        _draw_strips(panels[1], strips, size)
    elif with_phases:
        _shade_phases(axes, with_phases[0][1], size)
    panels[-1].set_xlabel(f"time since the recording began ({unit}); each point is the mean of a stretch")
    handles = _legend(known, looks) + _phase_legend([gpu for _, gpu in with_phases])
    figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=3.4)
    return figure


def _shade_phases(axes: Axes, gpu: GpuNumbers, size: float) -> None:
    """Shade behind the only run what was no training. size: seconds of a unit of the axis."""
    for phase in gpu.phases:
        axes.axvspan(phase.begin / size, phase.end / size, color=PHASE_COLOURS[phase.name], linewidth=0, zorder=0)


def _draw_strips(axes: Axes, known: Sequence[tuple[RunGpus, GpuNumbers]], size: float) -> None:
    """Draw a strip for each run: training, and on it what was none."""
    for y, (_, gpu) in enumerate(known):
        axes.barh(y, gpu.timeline[-1].seconds / size, height=0.7, color=TRAINING_COLOUR, linewidth=0)
        for name, colour in PHASE_COLOURS.items():
            spans = [(p.begin / size, (p.end - p.begin) / size) for p in gpu.phases if p.name == name]
            axes.broken_barh(spans, (y - 0.35, 0.7), color=colour, linewidth=0)
    name_rows(axes, [shortened(run.name, 34) for run, _ in known], [run.status in LOST for run, _ in known])


def _phase_legend(gpus: Sequence[GpuNumbers]) -> list[Any]:
    from matplotlib.patches import Patch

    there = {phase.name for gpu in gpus for phase in gpu.phases}
    handles = [Patch(color=colour, label=name) for name, colour in PHASE_COLOURS.items() if name in there]
    if handles and len(gpus) > 1:
        handles.insert(0, Patch(color=TRAINING_COLOUR, label="training"))
    return handles


def _looks(runs: Sequence[RunGpus]) -> Looks:
    """Return colour and line of each run: the colour is its optimizer's, shaded where that has several."""
    looks: Looks = {}
    for optimizer, colour in colours_of(run.optimizer for run in runs).items():
        mine = [run.name for run in runs if run.optimizer == optimizer]
        for place, name in enumerate(mine):
            shade = 0.0 if len(mine) == 1 else -0.25 + 0.7 * place / (len(mine) - 1)
            looks[name] = (mixed(colour, shade), LINES[place % len(LINES)])
    return looks


def _legend(known: Sequence[tuple[RunGpus, GpuNumbers]], looks: Looks) -> list[Any]:
    """Return the lines of the legend: a run each, or with too many of them an optimizer each."""
    from matplotlib.lines import Line2D

    if len(known) <= MAX_LEGEND:
        named = [(f"{shortened(run.name, 58)}{fate(run)}", looks[run.name]) for run, _ in known]
    else:
        colours = colours_of(run.optimizer for run, _ in known)
        optimizers = dict.fromkeys(run.optimizer for run, _ in known)
        named = [(optimizer or "unknown", (colours[optimizer], "-")) for optimizer in optimizers]
    handles = [Line2D([], [], color=colour, linestyle=line, label=text) for text, (colour, line) in named]
    if any(run.status in LOST for run, _ in known):
        handles.append(Line2D([], [], color=ALARM, marker="X", linestyle="", markersize=8, label="did not finish"))
    return handles
