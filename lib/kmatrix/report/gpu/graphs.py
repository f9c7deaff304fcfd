"""Draw the devices of runs as PNG: memory, balance, and each quantity over time. Each picture has one layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from kmatrix.errors import RecordError
from kmatrix.gpu.balance import cv_text
from kmatrix.records.paths import RunDir
from kmatrix.report.colours import colours_of
from kmatrix.report.figure import (
    ALARM,
    DARK,
    HEIGHT,
    LINES,
    LOST,
    Job,
    beside,
    draw_jobs,
    figure_of_rows,
    first_of,
    mark_of,
    name_rows,
    new_figure,
    tick,
    time_unit,
)
from kmatrix.report.gpu.folders import read_folder
from kmatrix.report.gpu.recordings import recordings_of
from kmatrix.report.gpu.results import Device, Gpu, RecordedRun
from kmatrix.report.gpu.spans import CHECKPOINT, ENDING, EVALUATION, SET_UP, Span
from kmatrix.report.gpu.timeline import Lane, Timeline, banded, timeline_of
from kmatrix.text import plural, shortened_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 30  # runs with a panel of their own
MOST_ROWS = 40  # runs with a row of their own
MOST_DEVICES = 16  # with a panel of their own
POINTS = 360  # columns of time of a panel
MIB_PER_GIB = 1024.0
CAPACITY_DASHES = (0, (5, 2))
# Those that occur together differ for readers with any kind of colour blindness. Phases are pale backgrounds.
PHASE_COLOURS = {SET_UP: "#C6E8C8", EVALUATION: "#FBE7A1", CHECKPOINT: "#A9B8F0", ENDING: "#AAAAAA"}
DEVICE_COLOURS = ("#009E73", "#332288", "#E69F00", "#B34700", "#AA4499", "#661100", "#005F56", "#222222")
METRICS = {  # quantity -> its words, its unit, recorded units per unit
    "utilization": ("utilization", "%", 1.0),
    "memory_used": ("memory", "GiB", MIB_PER_GIB),
    "power": ("power", "W", 1.0),
    "temperature": ("temperature", "°C", 1.0),
    "sm_clock": ("SM clock", "MHz", 1.0),
}
# Devices -> rows, columns of panels, as in the original project. With more, the grid is nearly square.
GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3), 7: (2, 4), 8: (2, 4)}
BAND = ("mean, lowest and highest of all", "the one farthest from the mean")  # lines of many devices
Recorded = tuple[RecordedRun, Gpu]


def draw(
    name: str,
    runs: Sequence[RecordedRun],
    root: Path,
    folder: Path,
    known_timelines: Mapping[str, Timeline | None] = MappingProxyType({}),
) -> tuple[list[Path], list[str]]:
    """Draw the pictures of the devices into `folder`; return the files, and the reason for each that was not drawn.

    name: of the matrix. root: parent directory of the runs. known_timelines: of runs by name, which are not read again.
    Both are empty if no run has a recording.
    """
    unread = [f"{run.name}: {note}" for run in runs if run.gpu and not run.gpu.gpus for note in run.gpu.notes]
    known = [(run, run.gpu) for run in runs if run.gpu and run.gpu.gpus]
    # Ranks on the CPU are not drawn next to GPUs: their memory is another quantity.
    known = [(run, gpu) for run, gpu in known if gpu.unit == "GPU"] or known
    if not known:
        return [], unread
    timelines = dict(known_timelines)
    for run, gpu in known[:MOST_PANELS]:
        if run.name not in timelines:
            found = recordings_of(RunDir(root / run.name), cpu=gpu.unit == "rank")
            timelines[run.name] = timeline_of(found, list(METRICS), POINTS, running=run.status == "running")
    jobs: list[Job] = [
        ("gpu_memory_comparison.png", partial(bars, name, known)),
        ("per_gpu_memory_breakdown.png", partial(per_gpu, name, known)),
        ("gpu_load_balance_analysis.png", partial(balance, name, known)),
    ]
    for quantity in METRICS:
        file = "gpu_memory_timeline.png" if quantity == "memory_used" else f"gpu_timeline_{quantity}.png"
        jobs.append((file, partial(over_time, name, known, timelines, quantity)))
    files, missing = draw_jobs(jobs, folder)
    return files, [*unread, *missing]


def draw_folder(folder: Path, output: Path | None) -> tuple[list[Path], list[str]]:
    """Draw the pictures of a folder into `output`, by default graphs/ in it. Raises RecordError."""
    found = read_folder(folder, POINTS)
    target = output or folder / "graphs"
    try:
        return draw(found.name, found.runs, found.root, target, found.timelines)
    except OSError as error:
        raise RecordError(
            f"the graphs of {found.name} cannot be written",
            why=f"{error.filename or target}: {error.strerror or error}",
            hint="free disk space, fix the permissions, or pass --output DIR",
        ) from None


# ---- memory and balance ------------------------------------------------------------------------------------------


def bars(name: str, known: Sequence[Recorded]) -> Figure | str:
    """Draw a row per run: the mean memory of all its devices, with a line to the peak and a mark at their capacity."""
    every = [(run, gpu) for run, gpu in known if gpu.main.memory_used_mean is not None]
    if not every:
        return "no run recorded its memory"
    rows = every[:MOST_ROWS]
    figure, (axes,) = figure_of_rows(name, "Memory per run", len(rows), len(every), "runs", mark=_mark(rows))
    colours = colours_of(run.optimizer for run, _ in rows)
    labels = []
    for y, (run, gpu) in enumerate(rows):
        mean, peak, capacity = (gpu.main.memory_used_mean, gpu.memory_used_max, gpu.memory_total)
        axes.barh(y, _gib(mean), height=0.6, color=colours[run.optimizer])
        labels.append(f"{_gib(mean):,.2f} GiB on {plural(len(gpu.gpus), gpu.unit)}")
        if peak is not None:
            axes.plot([_gib(mean), _gib(peak)], [y, y], color=DARK, linewidth=1.2, marker="|")
            labels[-1] += f", peak {_gib(peak):,.2f}"
        if capacity is not None and gpu.unit == "GPU":
            _draw_capacity(axes, y, capacity)
            labels[-1] += f" of {_gib(capacity):,.2f}"
    _name_runs(axes, rows, labels)
    axes.set_xlim(left=0)
    axes.set_xlabel(
        "memory used (GiB), sum over the devices of a run\n"
        "bar: mean over the training, if known   line: peak   dashed: capacity"
    )
    return figure


def grid(devices: int) -> tuple[int, int]:
    """Return rows and columns of panels: 1x2 for 2 GPUs, 2x2 for 4, 2x3 for 6, 2x4 for 8, nearly square for more."""
    columns = math.ceil(math.sqrt(devices))
    return GRIDS.get(devices, (math.ceil(devices / columns), columns))


def per_gpu(name: str, known: Sequence[Recorded]) -> Figure | str:
    """Draw a panel per device with a row per run: mean memory, standard deviation, peak and capacity."""
    every = [(run, gpu) for run, gpu in known if any("memory_used" in one.whole for one in gpu.gpus)]
    if not any(len(gpu.gpus) > 1 for _, gpu in every):
        return f"no run was recorded on at least two {known[0][1].unit}s"
    rows = every[:MOST_ROWS]
    # Over several nodes, GPU 0 is there several times: its rank is its name.
    by_rank = any(one.host for _, gpu in rows for one in gpu.gpus)
    named = [{_device_name(one, by_rank=by_rank): at for at, one in enumerate(gpu.gpus)} for _, gpu in rows]
    names = sorted({device for each in named for device in each}, key=lambda text: int(text.split()[1]))
    omitted = f"; the first {MOST_DEVICES} of {len(names)} devices" if len(names) > MOST_DEVICES else ""
    names = names[:MOST_DEVICES]
    shape = grid(len(names))
    height = max(7.5, 1.4 + shape[0] * (0.75 + 0.24 * len(rows)))
    note = f"{first_of(len(rows), len(every), 'runs')}{omitted}{_mark(rows)}"
    title = f"Memory per {rows[0][1].unit}"
    figure, panels = new_figure(name, title, shape, height=height, note=note, shared="both")
    colours = colours_of(run.optimizer for run, _ in rows)
    for device, axes in zip(names, panels, strict=False):
        axes.set_title(device, fontsize=11)
        for y, (run, gpu) in enumerate(rows):
            if (at := named[y].get(device)) is None or (memory := gpu.gpus[at].main.get("memory_used")) is None:
                continue
            colour = colours[run.optimizer]
            axes.barh(y, _gib(memory.mean), height=0.6, xerr=_gib(memory.deviation), color=colour)
            axes.plot(_gib(gpu.gpus[at].whole["memory_used"].max), y, ".", color=DARK, markersize=5)
            if (capacity := gpu.gpus[at].memory_total) is not None and gpu.unit == "GPU":
                _draw_capacity(axes, y, capacity)
    for axes in panels[:: shape[1]]:
        _name_runs(axes, rows)
    panels[0].set_xlim(left=0)
    for axes in panels:
        axes.locator_params(axis="x", nbins=4)
        axes.set_visible(axes in panels[: len(names)])
    marks = "bar: mean   whisker: standard deviation   dot: peak   dashed: capacity"
    figure.supxlabel(f"memory used (GiB)   {marks}", fontsize=10.5)
    return figure


def balance(name: str, known: Sequence[Recorded]) -> Figure | str:
    """Draw a row per run: the memory of each device relative to their mean, and the CVs with their classes."""
    every = [(run, gpu) for run, gpu in known if "memory_used" in gpu.main.balance]
    if not every:
        return "no run recorded the memory of at least two devices"
    rows = every[:MOST_ROWS]
    mark = _mark(rows)
    figure, panels = figure_of_rows(name, "Load balance", len(rows), len(every), "runs", columns=4, mark=mark)
    colours = colours_of(run.optimizer for run, _ in rows)
    labels, reach = [], 1.0  # %: equal devices are not drawn far apart
    for y, (run, gpu) in enumerate(rows):
        used = sorted((mean, one.label) for one in gpu.gpus if (mean := one.mean("memory_used")) is not None)
        centre = sum(mean for mean, _ in used) / len(used)
        shares = [100 * (mean / centre - 1) for mean, _ in used]
        reach = max(reach, 1.1 * max(map(abs, shares)))
        panels[0].plot(shares, [y] * len(shares), marker="o", color=colours[run.optimizer], alpha=0.7)
        labels.append(f"lowest {used[0][1]}, highest {used[-1][1]}")
        if gpu.ranks and gpu.ranks.hidden:
            labels[-1] += f", waits {100 * gpu.ranks.straggler_time_share:.0f} % for rank {gpu.ranks.slowest_rank}"
    _name_runs(panels[0], rows, labels)
    panels[0].set_xlim(-reach, reach)
    panels[0].set_xlabel("memory of each device,\ndifference from their mean (%)", fontsize=9.5)
    for axes, quantity in zip(panels[1:], ("memory_used", "utilization", "power"), strict=True):
        found = [gpu.main.balance.get(quantity) for _, gpu in rows]
        for y, one in enumerate(found):
            axes.barh(y, one.cv if one else 0.0, height=0.5, color=colours[rows[y][0].optimizer], edgecolor=DARK)
            text = f"{cv_text(one.cv)} {one.quality}" if one else "unknown"
            beside(axes, text, (one.cv if one else 0.0, y))
        axes.set_xlim(0, max(8.0, 2.5 * max((one.cv for one in found if one), default=0.0)))  # with room for the texts
        axes.set_xlabel(f"CV of {METRICS[quantity][0]} (%),\npopulation deviation / mean", fontsize=9.5)
        axes.locator_params(axis="x", nbins=4)
    return figure


def _device_name(device: Device, *, by_rank: bool) -> str:
    return f"rank {device.rank}" if by_rank and device.rank is not None else device.label.partition(" on ")[0]


# ---- over time ---------------------------------------------------------------------------------------------------


def over_time(
    name: str, known: Sequence[Recorded], timelines: Mapping[str, Timeline | None], quantity: str
) -> Figure | str:
    """Draw a panel per run with a line per device; of many their mean, lowest and highest, and the worst by name."""
    every = [(run, found) for run, _ in known if (found := timelines.get(run.name)) and banded(found, quantity)]
    word, unit, size = METRICS[quantity]
    if not every:
        return f"no run recorded its {word} over time"
    drawn = every[:MOST_PANELS]
    shape = panel_shape(len(drawn))
    mark = f"{_mark(known)}{first_of(len(drawn), len(every), 'runs')}"
    title = f"{word[0].upper()}{word[1:]} over time, each {known[0][1].unit}"
    note = f": time since the start of the recording{mark}"
    height = max(HEIGHT, 1.7 + 1.6 * shape[0])
    figure, panels = new_figure(name, title, shape, height=height, note=note, shared="both")
    names = shortened_names([run.name for run, _ in drawn], 110 // shape[1] - 12)
    time_name, seconds = time_unit(max(found.seconds for _, found in drawn))
    places: dict[str, int] = {}
    has_capacity = False
    for axes, text, (run, found) in zip(panels, names, drawn, strict=False):
        for span in found.spans:
            limits = span.begin / seconds, span.end / seconds
            axes.axvspan(*limits, color=PHASE_COLOURS[span.phase], linewidth=0, zorder=0)
        devices = banded(found, quantity)
        is_band = len(devices) < sum(quantity in one.lanes for one in found.devices)
        for place, one in enumerate(devices):
            draw_line(axes, found.centres / seconds, one.lanes[quantity], size, place=place)
            places.setdefault(BAND[place] if is_band else one.label, place)
        capacity = max(one.memory_total or 0.0 for one in found.devices) if quantity == "memory_used" else 0.0
        if capacity:
            axes.axhline(capacity / size, color=ALARM, linewidth=1.1, linestyle=CAPACITY_DASHES)
            has_capacity = True
        heading = f"{text}{_status(run)}" + (f", {devices[-1].label}" if is_band else "")
        colour = ALARM if run.status in LOST else DARK
        axes.set_title(heading, fontsize=11 if shape[1] < 3 else 8, color=colour, fontweight="normal")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    for at, axes in enumerate(panels):
        axes.set_visible(at < len(drawn))
        axes.yaxis.set_major_formatter(tick)
        axes.locator_params(axis="x", nbins=4 if shape[1] > 2 else 8)
        axes.tick_params(labelsize=9 if shape[1] <= 3 else 8)
        if at + shape[1] >= len(drawn):  # the lowest of its column
            axes.tick_params(axis="x", labelbottom=True)
            axes.set_xlabel(f"time ({time_name})", fontsize=9.5)
    figure.supylabel(f"{word} ({unit})", fontsize=10.5)
    legend(figure, places, [span for _, found in drawn for span in found.spans], has_capacity=has_capacity)
    return figure


def panel_shape(count: int) -> tuple[int, int]:
    """Return rows and columns of this many wide panels, at most five in a row."""
    columns = 1 if count <= 2 else 2 if count <= 4 else 3 if count <= 12 else 4 if count <= 16 else 5
    return math.ceil(count / columns), columns


def draw_line(axes: Axes, x: Any, lane: Lane, size: float, *, place: int) -> None:
    """Draw one line with its range; NaN is a gap. size: recorded units per unit of the axis. place: of its colour."""
    colour = DEVICE_COLOURS[place % len(DEVICE_COLOURS)]
    axes.fill_between(x, lane.low / size, lane.high / size, color=colour, alpha=0.15, linewidth=0)
    marker = "." if np.count_nonzero(~np.isnan(lane.mean)) < 3 else ""
    axes.plot(x, lane.mean / size, color=colour, linewidth=1.3, linestyle=LINES[place % len(LINES)], marker=marker)


def legend(
    figure: Figure, places: Mapping[str, int], spans: Iterable[Span] = (), *, has_capacity: bool = False
) -> None:
    """Name lines, capacity and phases outside of the panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], color=DEVICE_COLOURS[place % 8], linestyle=LINES[place % len(LINES)], label=label)
        for label, place in sorted(places.items(), key=lambda item: item[1])
    ]
    if has_capacity:
        handles.append(Line2D([], [], color=ALARM, linestyle=CAPACITY_DASHES, label="capacity"))
    present = {span.phase for span in spans}
    handles += [Patch(color=colour, label=phase) for phase, colour in PHASE_COLOURS.items() if phase in present]
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=5)


# ---- what they share ---------------------------------------------------------------------------------------------


def _draw_capacity(axes: Axes, row: int, capacity: float) -> None:
    axes.plot([_gib(capacity)] * 2, [row - 0.4, row + 0.4], color=ALARM, linewidth=1.2, linestyle="--")


def _name_runs(axes: Axes, rows: Sequence[Recorded], numbers: Sequence[str] = ()) -> None:
    """Label the rows of a panel with name and numbers of each run; lost runs in red."""
    short = shortened_names([run.name for run, _ in rows], 44)
    names = [f"{text}{_status(run)}" for text, (run, _) in zip(short, rows, strict=True)]
    labels = [f"{one}\n{text}" for one, text in zip(names, numbers, strict=True)] if numbers else names
    name_rows(axes, labels, [run.status in LOST for run, _ in rows])


def _status(run: RecordedRun) -> str:
    """Return " (simulated, failed)" if a run is simulated or did not finish."""
    marks = ["simulated"] if run.gpu and run.gpu.simulated else []
    marks += [run.status] if run.status not in ("", "finished") else []
    return f" ({', '.join(marks)})" if marks else ""


def _mark(rows: Sequence[Recorded]) -> str:
    return mark_of([gpu.simulated for _, gpu in rows], "runs")


def _gib(mib: float | None) -> float:
    return (mib or 0.0) / MIB_PER_GIB
