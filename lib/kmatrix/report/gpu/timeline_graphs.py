"""Draw the devices of each run over time as PNG: utilization, power, temperature, clock and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.records.paths import RunDir
from kmatrix.report.figure import (
    ALARM,
    DARK,
    LOST,
    draw_jobs,
    figure_grid,
    simulated_mark,
    status_note,
    tick,
    time_unit,
)
from kmatrix.report.gpu.numbers import CPU, RunGpus
from kmatrix.report.gpu.palette import DEVICE_COLOURS, PHASE_COLOURS
from kmatrix.report.gpu.timelines import DeviceTimeline, Lane, RecordingTimeline, read_timeline
from kmatrix.text import plural, shortened_names, without_common_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 30  # runs
MIB_PER_GIB = 1024.0
LARGE_MIB = 10 * MIB_PER_GIB  # memory above it is in GiB
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
TITLE_ROOM = {1: 110, 2: 64, 3: 44, 4: 36, 5: 31}  # panels in a row -> characters above one
LEGEND_ROOM, LEGEND_GAP = 160, 10  # characters of a row of the legend, and of a sample line with its space
QUIET_LINE = "#8A8A8A"  # of each device if there are too many for colours


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
    """Draw a panel per run with a line per device; all panels have the same axes."""
    known: list[tuple[RunGpus, RecordingTimeline]] = []
    total = 0
    columns = max(60, PLOT_POINTS // panels_of(min(len(runs), MAX_PANELS))[1])
    for run in runs:
        # One quantity at a time, thinned: the memory does not grow with the recordings.
        found = read_timeline(RunDir(root / run.name), run.gpu, columns, (metric.quantity,)) if run.gpu else None
        if found is not None and any(device.lanes for device in found.devices):
            total += 1
            if len(known) < MAX_PANELS:
                known.append((run, found))
    title = TITLES.get(metric.word, metric.word)
    if not known:
        return f"no run recorded its {title}"
    gpu = known[0][0].gpu
    word = "rank" if gpu is not None and gpu.device_type == CPU else "GPU"
    if word == "rank":
        known = [(run, _without_capacity(found)) for run, found in known]
    unit, divisor = _scale(metric, [found for _, found in known])
    shape = panels_of(len(known))
    note = f": time since the start of each recording{_omissions(known, total)}"
    note += simulated_mark([run for run, _ in known])
    height = max(7.5, 1.7 + 1.5 * shape[0])
    head = f"{title[0].upper()}{title[1:]} of each {word} over time"
    figure, panels = figure_grid(name, head, shape, height, note=note)
    time_name, seconds = time_unit(max(found.seconds for _, found in known))
    titles = _titles([run for run, _ in known], shape[1])
    for axes, text, (run, found) in zip(panels, titles, known, strict=False):
        _draw_run(axes, found, metric, divisor, seconds)
        font = 11 if shape[1] == 1 else 10 if shape[1] <= 3 else 8
        colour = ALARM if run.status in LOST else DARK
        axes.set_title(text, fontsize=font, color=colour, fontweight="normal", pad=4)
    _frame(panels, shape, len(known), max(found.seconds for _, found in known) / seconds, time_name)
    figure.supylabel(f"{title} ({unit})", fontsize=10.5)
    handles = _legend(known, metric, word)
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(6, LEGEND_ROOM // (longest + LEGEND_GAP)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=2.2)
    return figure


def panels_of(runs: int) -> tuple[int, int]:
    """Return rows and columns of the panels of this many runs: wide panels, at most five in a row."""
    columns = 1 if runs <= 2 else 2 if runs <= 4 else 3 if runs <= 12 else 4 if runs <= 16 else 5
    return math.ceil(runs / columns), columns


def _panel_names(names: Sequence[str], limit: int) -> list[str]:
    """Return run names of at most `limit` characters; without the parts that all have, if one is longer."""
    long = len(names) > 1 and max(map(len, names)) > limit
    return shortened_names(without_common_parts(names) if long else names, limit)


def _titles(runs: Sequence[RunGpus], columns: int) -> list[str]:
    """Return the title of each panel, name and status, short enough for this many panels in a row."""
    # If all runs are simulated, the line above all panels says so.
    is_all = all(run.gpu and run.gpu.simulated for run in runs)
    notes = [status_note(replace(run, gpu=None) if is_all else run) for run in runs]
    names = _panel_names([run.name for run in runs], TITLE_ROOM[columns] - max(map(len, notes)))
    return [f"{name}{note}" for name, note in zip(names, notes, strict=True)]


def _omissions(known: Sequence[tuple[RunGpus, RecordingTimeline]], total: int) -> str:
    """Return what the panels leave out, "" if that is nothing. total: runs with this quantity."""
    runs = f"; the first {len(known)} of {total} runs" if len(known) < total else ""
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
    totals = [device.memory_total or 0.0 for device in devices]
    peaks = [max(filter(None, lane.high), default=0.0) for device in devices for lane in device.lanes.values()]
    return ("GiB", MIB_PER_GIB) if max([*totals, *peaks], default=0.0) > LARGE_MIB else ("MiB", 1.0)


def _draw_run(axes: Axes, found: RecordingTimeline, metric: TimelineMetric, divisor: float, seconds: float) -> None:
    """Draw one run. divisor, seconds: recorded units per unit of the value axis and of the time axis."""
    import numpy as np

    for phase in found.phases:
        span = phase.begin / seconds, min(phase.end, found.seconds) / seconds
        axes.axvspan(*span, color=PHASE_COLOURS[phase.name], linewidth=0, zorder=0)
    width = found.seconds / found.columns
    times = (np.arange(found.columns) + 0.5) * width / seconds
    many = len(found.devices) > len(DEVICE_COLOURS)
    means = []
    for place, device in enumerate(found.devices):
        lane = device.lanes.get(metric.quantity)
        if lane is None:
            continue
        mean, low, high = _values(lane, divisor)
        means.append(mean)
        colour = QUIET_LINE if many else DEVICE_COLOURS[place]
        alone = _alone(mean)  # a line needs two points
        if alone.any():
            axes.plot(times[alone], mean[alone], ".", color=colour, markersize=3, zorder=3)
        if many:
            axes.plot(times, mean, color=colour, linewidth=0.5, zorder=2)
            continue
        axes.fill_between(times, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1.5)
        axes.plot(times, mean, color=colour, linewidth=1.3, zorder=3)
    if many and means:
        axes.plot(times, _mean_of(means), color=DARK, linewidth=1.6, zorder=4)
    if metric.quantity == "memory_used":
        for total in sorted({device.memory_total for device in found.devices if device.memory_total}):
            axes.axhline(total / divisor, color=ALARM, linewidth=1.1, linestyle=(0, (5, 2)), zorder=4)


def _values(lane: Lane, divisor: float) -> tuple[Any, Any, Any]:
    """Return mean, minimum and maximum per column of time; NaN, which is a gap of the line, if unknown."""
    import numpy as np

    mean, low, high = (np.array(each, dtype=float) / divisor for each in (lane.mean, lane.low, lane.high))
    return mean, low, high


def _alone(values: Any) -> Any:
    """Return which values are known but neither the one before nor the one after them."""
    import numpy as np

    known = np.concatenate([[False], np.isfinite(values), [False]])
    return known[1:-1] & ~known[:-2] & ~known[2:]


def _mean_of(lines: Sequence[Any]) -> Any:
    """Return the mean of the known values of all lines; NaN if all are unknown."""
    import numpy as np

    stacked = np.array(lines)
    number = np.isfinite(stacked).sum(axis=0)
    return np.where(number > 0, np.nansum(stacked, axis=0) / np.maximum(number, 1), np.nan)


def _frame(panels: Sequence[Axes], shape: tuple[int, int], used: int, longest: float, unit: str) -> None:
    """Set the same axes from 0 for all panels, and label the lowest panel of each column."""
    highest = max(axes.dataLim.ymax for axes in panels[:used])
    panels[0].set_ylim(0, 1.08 * max(highest, 1e-9))
    panels[0].set_xlim(0, longest)
    for at, axes in enumerate(panels):
        axes.set_visible(at < used)
        axes.yaxis.set_major_formatter(tick)
        axes.locator_params(axis="x", nbins=4 if shape[1] > 2 else 8)
        axes.locator_params(axis="y", nbins=4 if shape[0] > 2 else 6)
        axes.tick_params(labelsize=9 if shape[1] <= 3 else 8)
        # Shared axes are labelled in the last row only, which may have fewer panels.
        if at + shape[1] >= used:
            axes.tick_params(axis="x", labelbottom=True)
            axes.set_xlabel(f"time ({unit})", fontsize=9.5)


def _legend(known: Sequence[tuple[RunGpus, RecordingTimeline]], metric: TimelineMetric, word: str) -> list[Any]:
    """Return the entries of the legend: devices, capacity and phases."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    most = max((found.devices for _, found in known), key=len)
    handles: list[Any] = []
    if any(len(found.devices) <= len(DEVICE_COLOURS) for _, found in known):
        named = _named([found.devices for _, found in known if len(found.devices) <= len(DEVICE_COLOURS)], word)
        handles += [Line2D([], [], color=colour, label=text) for text, colour in named]
    if len(most) > len(DEVICE_COLOURS):
        handles.append(Line2D([], [], color=QUIET_LINE, linewidth=0.7, label=f"each of up to {len(most)} {word}s"))
        handles.append(Line2D([], [], color=DARK, linewidth=1.6, label="their mean"))
    if metric.quantity == "memory_used" and any(d.memory_total for _, found in known for d in found.devices):
        handles.append(Line2D([], [], color=ALARM, linestyle=(0, (5, 2)), label=f"capacity of a {word}"))
    present = {phase.name for _, found in known for phase in found.phases}
    return handles + [Patch(color=colour, label=each) for each, colour in PHASE_COLOURS.items() if each in present]


def _named(runs: Sequence[Sequence[DeviceTimeline]], word: str) -> list[tuple[str, str]]:
    """Return name and colour of each device; its place in the run if the runs have different devices."""
    most = max(runs, key=len)
    names = [device.name for device in most]
    same = all([device.name for device in run] == names[: len(run)] for run in runs)
    labels = names if same else [f"{word} {place + 1} of the run" for place in range(len(most))]
    return list(zip(labels, DEVICE_COLOURS, strict=False))
