"""Draw the devices of each run over time as PNG: utilization, power, temperature, clock and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kmatrix.records.paths import RunDir
from kmatrix.report.figure import ALARM, draw_jobs, figure_grid, simulated_mark
from kmatrix.report.gpu.graphs.heat_maps import draw_heat_maps
from kmatrix.report.gpu.graphs.palette import DEVICE_COLOURS
from kmatrix.report.gpu.graphs.shared import (
    CAPACITY_DASHES,
    MAX_PANELS,
    draw_capacity,
    draw_line,
    frame_panels,
    memory_unit,
    name_panel,
    panel_titles,
    panels_height,
    panels_of,
    phase_handles,
    shade_phases,
    time_axes,
)
from kmatrix.report.gpu.numbers import CPU, RunGpus
from kmatrix.report.gpu.timelines import DeviceTimeline, Lane, RecordingTimeline, read_timeline
from kmatrix.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_POINTS = 720  # columns of time of all panels in a row; a panel is drawn about as many pixels wide


@dataclass(frozen=True, slots=True)
class TimelineMetric:
    """One quantity of a recording. word: in titles and file names."""

    quantity: str
    word: str
    unit: str


METRICS = (
    TimelineMetric("utilization", "utilization", "%"),
    TimelineMetric("power", "power", "W"),
    TimelineMetric("temperature", "temperature", "°C"),
    TimelineMetric("sm_clock", "sm_clock", "MHz"),
    TimelineMetric("memory_used", "memory", "MiB"),
)
TITLES = {"sm_clock": "SM clock"}
LEGEND_ROOM, LEGEND_GAP = 160, 10  # characters of a row of the legend, and of a sample line with its space
Recorded = tuple[RunGpus, RecordingTimeline]


def draw(name: str, runs: Sequence[RunGpus], root: Path, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw gpu_timeline_<metric>.png into `folder`; return the files, and the reason for each that was not drawn.

    Both are empty if no run has a binary recording. name: of the matrix. root: parent directory of the runs.
    """
    recorded = [run for run in runs if run.gpu and RunDir(root / run.name).gpu_samples.is_file()]
    # Ranks on the CPU are not drawn next to GPUs: their values are other quantities.
    recorded = [run for run in recorded if run.gpu and run.gpu.device_type != CPU] or recorded
    if not recorded:
        return [], []
    jobs: list[tuple[str, Callable[[], Figure | str]]] = [
        (f"gpu_timeline_{metric.word}.png", partial(over_time, name, recorded, root, metric)) for metric in METRICS
    ]
    return draw_jobs(jobs, folder)


def over_time(name: str, runs: Sequence[RunGpus], root: Path, metric: TimelineMetric) -> Figure | str:
    """Draw a panel per run with a line per device; all panels have the same axes. With many devices, heat maps."""
    known: list[Recorded] = []
    missing: list[str] = []
    total = 0
    title = TITLES.get(metric.word, metric.word)
    columns = max(60, PLOT_POINTS // panels_of(min(len(runs), MAX_PANELS))[1])
    for run in runs:
        # One quantity at a time, thinned: the memory does not grow with the recordings.
        found = read_timeline(RunDir(root / run.name), run.gpu, columns, (metric.quantity,)) if run.gpu else None
        if found is not None and any(device.lanes for device in found.devices):
            total += 1
            if len(known) < MAX_PANELS:
                known.append((run, found))
        elif run.gpu:
            missing.append(f"{title} unknown" if found else "one sample" if run.gpu.samples == 1 else "unreadable")
    if not known:
        return f"no run recorded its {title}"
    gpu = known[0][0].gpu
    word = "rank" if gpu is not None and gpu.device_type == CPU else "GPU"
    if word == "rank":
        known = [(run, _without_capacity(found)) for run, found in known]
    unit, divisor = _scale(metric, [found for _, found in known])
    shape = panels_of(len(known))
    lengths = [found.seconds for _, found in known]
    units, own = time_axes(lengths)
    note = f": time since the start of each recording{', on an axis of its own' if own else ''}"
    note += _omissions(known, total, missing)
    note += simulated_mark([run for run, _ in known])
    head = f"{title[0].upper()}{title[1:]} of each {word} over time"
    # The rows of heat maps are the devices of a run: each has its own.
    maps = any(len(found.devices) > len(DEVICE_COLOURS) for _, found in known)
    shared: Literal["both", "x", "y", ""] = ("" if own else "x") if maps else "y" if own else "both"
    figure, panels = figure_grid(name, head, shape, panels_height(shape, own=own), note=note, shared=shared)
    used = panels[: len(known)]
    for axes, text, (run, _) in zip(used, panel_titles([run for run, _ in known], shape[1]), known, strict=True):
        name_panel(axes, run, text, shape[1])
    for axes, length, (_, seconds) in zip(used, lengths, units, strict=True):
        axes.set_xlim(0, (length if own else max(lengths)) / seconds)
    labels = [f"time ({unit_name})" for unit_name, _ in units]
    frame_panels(panels, shape, len(known), labels if own else labels[0])
    label = f"{title} ({unit})"
    extra: list[Any] = []
    if maps:
        scale: dict[str, Any] = {"divisor": divisor, "seconds": [seconds for _, seconds in units], "label": label}
        extra = draw_heat_maps(figure, used, [found for _, found in known], metric.quantity, **scale)
        figure.supylabel(word, fontsize=10.5)
    else:
        for axes, (_, found), (_, seconds) in zip(used, known, units, strict=True):
            _draw_run(axes, found, metric, divisor, seconds)
        highest = max(axes.dataLim.ymax for axes in used)
        panels[0].set_ylim(0, 1.08 * max(highest, 1e-9))
        figure.supylabel(label, fontsize=10.5)
    if handles := [*_legend(known, metric, word, maps=maps), *extra]:
        longest = max(len(handle.get_label()) for handle in handles)
        columns = max(1, min(6, LEGEND_ROOM // (longest + LEGEND_GAP)))
        figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=2.2)
    return figure


def _omissions(known: Sequence[tuple[RunGpus, RecordingTimeline]], total: int, missing: Sequence[str]) -> str:
    """Return what the panels leave out, "" if that is nothing.

    total: runs with this quantity.  missing: the reason of each run without it.
    """
    runs = f"; the first {len(known)} of {total} runs" if len(known) < total else ""
    reasons = ", ".join(dict.fromkeys(missing))
    runs += f"; without {plural(len(missing), 'run')} ({reasons})" if missing else ""
    nodes = sum(found.left_out for _, found in known)
    return f"{runs}; without {plural(nodes, 'node')} of unknown time" if nodes else runs


def _without_capacity(found: RecordingTimeline) -> RecordingTimeline:
    """Return a timeline of ranks without the memory of their machine, which they share: no rank can use all of it."""
    return replace(found, devices=tuple(replace(device, memory_total=None) for device in found.devices))


def _scale(metric: TimelineMetric, found: Sequence[RecordingTimeline]) -> tuple[str, float]:
    """Return the unit of the axis and the number of recorded units in it."""
    if metric.quantity != "memory_used":
        return metric.unit, 1.0
    devices = [device for each in found for device in each.devices]
    peaks = [max(filter(None, lane.high), default=0.0) for device in devices for lane in device.lanes.values()]
    unit = memory_unit([*(device.memory_total for device in devices), *peaks])
    return unit.name, unit.mib


def _draw_run(axes: Axes, found: RecordingTimeline, metric: TimelineMetric, divisor: float, seconds: float) -> None:
    """Draw one run. divisor, seconds: recorded units per unit of the value axis and of the time axis."""
    import numpy as np

    shade_phases(axes, found.phases, seconds, found.seconds)
    width = found.seconds / found.columns
    times = (np.arange(found.columns) + 0.5) * width / seconds
    for place, device in enumerate(found.devices):
        lane = device.lanes.get(metric.quantity)
        if lane is None:
            continue
        mean, low, high = _values(lane, divisor)
        colour = DEVICE_COLOURS[place]
        axes.fill_between(times, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1.5)
        draw_line(axes, times, mean, colour, place=place, count=len(found.devices))
    if metric.quantity == "memory_used":
        for total in sorted({device.memory_total for device in found.devices if device.memory_total}):
            draw_capacity(axes, total / divisor)


def _values(lane: Lane, divisor: float) -> tuple[Any, Any, Any]:
    """Return mean, minimum and maximum per column of time; NaN, which is a gap of the line, if unknown."""
    import numpy as np

    mean, low, high = (np.array(each, dtype=float) / divisor for each in (lane.mean, lane.low, lane.high))
    return mean, low, high


def _legend(known: Sequence[Recorded], metric: TimelineMetric, word: str, *, maps: bool) -> list[Any]:
    """Return the entries of the legend: devices and capacity, but for heat maps, and phases."""
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    if not maps:
        named = _named([found.devices for _, found in known], word)
        handles += [Line2D([], [], color=colour, linewidth=2.0, label=text) for text, colour in named]
        if metric.quantity == "memory_used" and any(d.memory_total for _, found in known for d in found.devices):
            handles.append(Line2D([], [], color=ALARM, linestyle=CAPACITY_DASHES, label=f"capacity of a {word}"))
    return handles + phase_handles(phase for _, found in known for phase in found.phases)


def _named(runs: Sequence[Sequence[DeviceTimeline]], word: str) -> list[tuple[str, str]]:
    """Return name and colour of each device; its place in the run if the runs have different devices."""
    most = max(runs, key=len)
    names = [device.name for device in most]
    same = all([device.name for device in run] == names[: len(run)] for run in runs)
    labels = names if same else [f"{word} {place + 1} of the run" for place in range(len(most))]
    return list(zip(labels, DEVICE_COLOURS, strict=False))
