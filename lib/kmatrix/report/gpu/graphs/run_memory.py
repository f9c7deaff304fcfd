"""Draw the memory of all devices of each run: a bar per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kmatrix.report.figure import (
    ALARM,
    DARK,
    LOST,
    MAX_ROWS,
    colours_of,
    make_room,
    name_rows,
    new_figure,
    row_font,
    simulated_mark,
    status_note,
    tick,
    truncation_note,
)
from kmatrix.report.gpu.graphs.shared import MemoryUnit, devices_word, memory_unit, period
from kmatrix.report.gpu.numbers import GpuNumbers, RunGpus
from kmatrix.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TWO_LINES = 12  # rows, at most, that are high enough for two lines


def memory_by_run(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw a bar per run: mean memory of all its devices, with a line up to the peak and a mark at their capacity."""
    known = [(run, run.gpu) for run in runs if run.gpu and run.gpu.main.total_mean is not None]
    if not known:
        return "no run recorded its memory"
    rows = known[:MAX_ROWS]
    note = truncation_note(len(rows), len(known)) + simulated_mark(runs)
    figure, (axes,) = new_figure(name, "Memory per run", rows=len(rows), note=note)
    colours = colours_of(run.optimizer for run in runs)
    unit = memory_unit(amount for _, gpu in rows for amount in (gpu.main.total_mean, gpu.total_max))
    for y, (run, gpu) in enumerate(rows):
        text = _label(run, gpu, unit, "\n" if len(rows) <= TWO_LINES else "; ")
        _draw_row(axes, y, run, gpu, unit=unit, colour=colours[run.optimizer], text=text, font=row_font(len(rows)))
    axes.set_xlim(0, 1.02 * max(axes.dataLim.xmax, 1e-9))
    name_rows(axes, [run.name for run, _ in rows], [run.status in LOST for run, _ in rows])
    axes.xaxis.set_major_formatter(tick)
    devices = devices_word(gpu for _, gpu in rows)
    last = ", of the last attempt" if any(gpu.has_earlier for _, gpu in rows) else ""
    marks = f"bar: mean over {period(rows)}   line: peak{last}"
    marks += "   dashed: capacity" if any(gpu.capacity for _, gpu in rows) else ""
    axes.set_xlabel(f"memory used ({unit.name}), sum over the {devices} of a run\n{marks}")
    make_room(axes)
    return figure


def _draw_row(
    axes: Axes, y: int, run: RunGpus, gpu: GpuNumbers, *, unit: MemoryUnit, colour: str, text: str, font: float
) -> None:
    """Draw bar, peak and capacity of a run, and their numbers as text."""
    mean, capacity = (gpu.main.total_mean or 0.0) / unit.mib, gpu.capacity
    style: dict[str, Any] = {"alpha": 0.3, "hatch": "///"} if run.status in LOST else {"alpha": 0.9}
    axes.barh(y, mean, height=0.68, color=colour, edgecolor="white", linewidth=0, **style)
    end = mean
    if gpu.total_max is not None and (peak := gpu.total_max / unit.mib) > mean:
        axes.plot([mean, peak, peak, peak], [y, y, y - 0.18, y + 0.18], color=DARK, linewidth=1.2)
        end = peak
    if capacity is not None:
        axes.plot([capacity / unit.mib] * 2, [y - 0.42, y + 0.42], color=ALARM, linewidth=1.3, linestyle="--")
        end = max(end, capacity / unit.mib)  # the mark does not cross the text
    axes.annotate(
        text,
        (end, y),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=font,
        color=ALARM if run.status in LOST else DARK,
    )


def _label(run: RunGpus, gpu: GpuNumbers, unit: MemoryUnit, separator: str) -> str:
    """Return mean, peak and capacity of a run as text, and after the separator those of an earlier attempt."""
    capacity = gpu.capacity
    peak = "" if gpu.total_max is None else f", peak {unit.text(gpu.total_max)}"
    of_all = "" if capacity is None else f" of {unit.text(capacity)}"
    mean = unit.text(gpu.main.total_mean or 0.0)
    devices, earlier = plural(len(gpu.devices), gpu.unit), _earlier(gpu, unit)
    return f"{mean} {unit.name} on {devices}{peak}{of_all}{earlier and separator}{earlier}{status_note(run)}"


def _earlier(gpu: GpuNumbers, unit: MemoryUnit) -> str:
    """Return the peak of the attempt on other devices that used most of their memory, "" without such an attempt."""
    known = [(one.total_max, one) for one in gpu.earlier if one.total_max is not None]
    if not known:
        return ""
    peak, one = max(known, key=lambda pair: pair[0] / (pair[1].capacity or math.inf))
    of_all = "" if one.capacity is None else f" of {unit.text(one.capacity)}"
    return f"earlier attempt on {plural(len(one.devices), one.unit)}: peak {unit.text(peak)}{of_all}"
