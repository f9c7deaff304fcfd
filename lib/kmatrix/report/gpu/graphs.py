"""Draw the devices of runs as PNG: memory, balance, and each quantity over time. Each picture has one layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kmatrix.errors import RecordError
from kmatrix.gpu.balance import BALANCE, cv_text
from kmatrix.records.paths import RunDir
from kmatrix.report.colours import colours_of
from kmatrix.report.figure import (
    ALARM,
    DARK,
    LINES,
    LOST,
    draw_jobs,
    figure_grid,
    mark_of,
    tick,
    time_unit,
)
from kmatrix.report.gpu.folders import read_folder
from kmatrix.report.gpu.recordings import recordings_of
from kmatrix.report.gpu.results import Gpu, MeasuredDevice, RecordedRun
from kmatrix.report.gpu.samples import QUANTITIES
from kmatrix.report.gpu.spans import CHECKPOINT, ENDING, EVALUATION, SET_UP, Span
from kmatrix.report.gpu.timeline import Lane, Timeline, banded, timeline_of
from kmatrix.text import plural, shortened_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 30  # runs with a panel of their own
MOST_ROWS = 40  # runs with a row of their own
MOST_DEVICES = 16  # with a panel of their own
POINTS = 720  # columns of time of all panels in a row
MIB_PER_GIB = 1024.0
CAPACITY_DASHES = (0, (5, 2))
LARGE_MIB = 10 * MIB_PER_GIB  # memory above it is in GiB
# Those that occur together differ for readers with any kind of colour blindness. Phases are pale backgrounds.
PHASE_COLOURS = {SET_UP: "#C6E8C8", EVALUATION: "#FBE7A1", CHECKPOINT: "#A9B8F0", ENDING: "#AAAAAA"}
DEVICE_COLOURS = ("#009E73", "#332288", "#E69F00", "#B34700", "#AA4499", "#661100", "#005F56", "#222222")
CLASS_COLOURS = {"Excellent": "#C4E3F3", "Good": "#F1F6CF", "Fair": "#FFD98F", "Poor": "#F2A59B"}  # of a balance
METRICS = {  # quantity -> its word in titles and file names, its unit
    "utilization": ("utilization", "%"),
    "power": ("power", "W"),
    "temperature": ("temperature", "°C"),
    "sm_clock": ("sm_clock", "MHz"),
    "memory_used": ("memory", "MiB"),
}
# Devices -> rows, columns of panels, as in the original project. With more, the grid is nearly square.
GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3), 7: (2, 4), 8: (2, 4)}
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
    timelines = {run.name: known_timelines.get(run.name) for run, _ in known[:MOST_PANELS]}
    for run, gpu in known[:MOST_PANELS]:
        if run.name in known_timelines:
            continue
        found = recordings_of(RunDir(root / run.name), cpu=gpu.unit == "rank")
        columns = max(60, POINTS // panel_shape(len(known[:MOST_PANELS]))[1])
        timelines[run.name] = timeline_of(found, QUANTITIES, columns, running=run.status == "running")
    jobs: list[tuple[str, Callable[[], Figure | str]]] = [
        ("gpu_memory_comparison.png", partial(bars, name, known)),
        ("per_gpu_memory_breakdown.png", partial(per_gpu, name, known)),
        ("gpu_load_balance_analysis.png", partial(balance, name, known)),
        ("gpu_memory_timeline.png", partial(over_time, name, known, timelines, "memory_used", summed=True)),
        *(
            (f"gpu_timeline_{word}.png", partial(over_time, name, known, timelines, quantity))
            for quantity, (word, _) in METRICS.items()
        ),
    ]
    files, missing = draw_jobs(jobs, folder)
    return files, [*unread, *missing]


def draw_folder(folder: Path, output: Path | None) -> tuple[list[Path], list[str]]:
    """Draw the pictures of a folder into `output`, by default graphs/ in it. Raises RecordError."""
    found = read_folder(folder, POINTS // 2)
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
    every = [(run, gpu) for run, gpu in known if _main(gpu).memory_used_mean is not None]
    if not every:
        return "no run recorded its memory"
    rows = every[:MOST_ROWS]
    figure, (axes,) = _rows(name, "Memory per run", rows, len(every))
    colours = colours_of(run.optimizer for run, _ in rows)
    unit, size = memory_unit(gpu.totals.memory_used_max or _main(gpu).memory_used_mean for _, gpu in rows)
    labels = []
    for y, (run, gpu) in enumerate(rows):
        mean, peak, capacity = (_main(gpu).memory_used_mean, gpu.totals.memory_used_max, gpu.totals.capacity)
        axes.barh(y, (mean or 0.0) / size, height=0.6, color=colours[run.optimizer], alpha=_alpha(run))
        if peak is not None:
            axes.plot([(mean or 0.0) / size, peak / size], [y, y], color=DARK, linewidth=1.2, marker="|")
        if capacity is not None:
            axes.plot([capacity / size] * 2, [y - 0.4, y + 0.4], color=ALARM, linewidth=1.3, linestyle="--")
        text = f"{_amount(mean, size)} {unit} on {plural(len(gpu.gpus), gpu.unit)}"
        text += "" if peak is None else f", peak {_amount(peak, size)}"
        labels.append(text + ("" if capacity is None else f" of {_amount(capacity, size)}"))
    _name_rows(axes, rows, labels)
    axes.set_xlim(left=0)
    axes.set_xlabel(
        f"memory used ({unit}), sum over the devices of a run\n"
        f"bar: mean over the training, if known   line: peak   dashed: capacity"
    )
    return figure


def grid(devices: int) -> tuple[int, int]:
    """Return rows and columns of panels: 1x2 for 2 GPUs, 2x2 for 4, 2x3 for 6, 2x4 for 8, nearly square for more."""
    columns = math.ceil(math.sqrt(devices))
    return GRIDS.get(devices, (math.ceil(devices / columns), columns))


def per_gpu(name: str, known: Sequence[Recorded]) -> Figure | str:
    """Draw a panel per device with a row per run: mean memory, standard deviation, peak and capacity."""
    every = [(run, gpu) for run, gpu in known if any(one.memory_used for one in gpu.gpus)]
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
    note = f"{_of_all(len(rows), len(every))}{omitted}{_mark(rows)}"
    figure, panels = figure_grid(name, f"Memory per {rows[0][1].unit}", shape, height, note=note)
    colours = colours_of(run.optimizer for run, _ in rows)
    unit, size = memory_unit(one.memory_used.max for _, gpu in rows for one in gpu.gpus if one.memory_used)
    for device, axes in zip(names, panels, strict=False):
        axes.set_title(device, fontsize=11)
        for y, (run, gpu) in enumerate(rows):
            if (at := named[y].get(device)) is None or (memory := _devices(gpu)[at].memory_used) is None:
                continue
            style: dict[str, Any] = {"color": colours[run.optimizer], "alpha": _alpha(run)}
            axes.barh(y, memory.mean / size, height=0.6, xerr=(memory.deviation or 0.0) / size, **style)
            axes.plot((gpu.gpus[at].memory_used or memory).max / size, y, ".", color=DARK, markersize=5)
            if (capacity := gpu.gpus[at].capacity) is not None:
                axes.plot([capacity / size] * 2, [y - 0.4, y + 0.4], color=ALARM, linewidth=1.1, linestyle="--")
    for axes in panels[:: shape[1]]:
        _name_rows(axes, rows)
    panels[0].set_xlim(left=0)
    for axes in panels:
        axes.locator_params(axis="x", nbins=4)
        axes.set_visible(axes in panels[: len(names)])
    marks = "bar: mean   whisker: standard deviation   dot: peak   dashed: capacity"
    figure.supxlabel(f"memory used ({unit})   {marks}", fontsize=10.5)
    return figure


def balance(name: str, known: Sequence[Recorded]) -> Figure | str:
    """Draw a row per run: the memory of each device relative to their mean, and the CVs with their classes."""
    from matplotlib.patches import Patch

    every = [(run, gpu) for run, gpu in known if _balances(gpu)[0]]
    if not every:
        return "no run recorded the memory of at least two devices"
    rows = every[:MOST_ROWS]
    figure, panels = _rows(name, "Load balance", rows, len(every), columns=4)
    colours = colours_of(run.optimizer for run, _ in rows)
    labels, reach = [], 1.0  # %: equal devices are not drawn far apart
    for y, (run, gpu) in enumerate(rows):
        used = sorted((one.memory_used.mean, one.label) for one in _devices(gpu) if one.memory_used)
        centre = sum(mean for mean, _ in used) / len(used)
        shares = [100 * (mean / centre - 1) for mean, _ in used]
        reach = max(reach, 1.1 * max(map(abs, shares)))
        panels[0].plot(shares, [y] * len(shares), marker="o", color=colours[run.optimizer], alpha=0.7)
        labels.append(f"lowest {used[0][1]}, highest {used[-1][1]}")
        if gpu.ranks and gpu.ranks.hidden:
            labels[-1] += f", waits {100 * gpu.ranks.straggler_time_share:.0f} % for rank {gpu.ranks.slowest_rank}"
    _name_rows(panels[0], rows, labels)
    panels[0].set_xlim(-reach, reach)
    panels[0].set_xlabel("memory of each device,\ndifference from their mean (%)", fontsize=9.5)
    for place, (axes, title) in enumerate(zip(panels[1:], ("memory", "utilization", "power"), strict=True)):
        found = [_balances(gpu)[place] for _, gpu in rows]
        end = max(8.0, 2.5 * max((one.cv for one in found if one), default=0.0))  # with room for the texts
        edges = [0.0, *(bound for bound, _ in BALANCE), math.inf]
        for (low, high), colour in zip(pairwise(edges), CLASS_COLOURS.values(), strict=True):
            if low < end:
                axes.axvspan(low, min(high, end), color=colour, linewidth=0, zorder=0)
        for y, one in enumerate(found):
            axes.barh(y, one.cv if one else 0.0, height=0.5, color=colours[rows[y][0].optimizer], edgecolor=DARK)
            text = f"{cv_text(one.cv)} {one.quality}" if one else "unknown"
            place_of: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(text, (one.cv if one else 0.0, y), fontsize=9, **place_of)
        axes.set_xlim(0, end)
        axes.set_xlabel(f"{title}\nCV (%)", fontsize=9.5)
        axes.locator_params(axis="x", nbins=4)
    bounds = [f"{bound:g}" for bound, _ in BALANCE]
    spans = [
        f"below {bounds[0]} %",
        *(f"{low} to {high} %" for low, high in pairwise(bounds)),
        f"{bounds[-1]} % or more",
    ]
    handles = [
        Patch(color=colour, label=f"{quality}: {span}")
        for (quality, colour), span in zip(CLASS_COLOURS.items(), spans, strict=True)
    ]
    title = "Classes of the CV, population deviation / mean"
    figure.legend(handles=handles, loc="outside lower right", ncols=4, title=title, title_fontsize=9.5)
    return figure


def _balances(gpu: Gpu) -> tuple[Any, Any, Any]:
    found = gpu.training.balance if gpu.training else gpu.balance
    return found.memory, found.utilization, found.power


def _device_name(device: MeasuredDevice, *, by_rank: bool) -> str:
    return f"rank {device.rank}" if by_rank and device.rank is not None else device.label.partition(" on ")[0]


# ---- over time ---------------------------------------------------------------------------------------------------


def over_time(
    name: str,
    known: Sequence[Recorded],
    timelines: Mapping[str, Timeline | None],
    quantity: str,
    *,
    summed: bool = False,
) -> Figure | str:
    """Draw a panel per run: a line per device (of many their mean, lowest and highest, and the worst), or their sum."""
    every = [(run, gpu, found) for run, gpu in known if (found := timelines.get(run.name))]
    lines = [_lines(found, quantity, gpu.unit, summed=summed) for _, gpu, found in every]
    drawn = [(*one, own) for one, own in zip(every, lines, strict=True) if _has_values(own)]
    word = METRICS[quantity][0].replace("sm_clock", "SM clock")
    if not drawn:
        return f"no run recorded its {word} over time"
    unit, size = METRICS[quantity][1], 1.0
    if quantity == "memory_used":
        unit, size = memory_unit(float(np.nanmax(lane.high)) for *_, own in drawn for lane in own.values())
    shape = panel_shape(len(drawn))
    mark = mark_of([gpu.simulated for _, gpu, *_ in drawn], "runs") + _of_all(len(timelines), len(known), "runs")
    what = "sum over the devices of a run" if summed else f"each {known[0][1].unit}"
    title = f"{word[0].upper()}{word[1:]} over time, {what}"
    figure, panels = panel_grid(name, title, shape, f": time since the start of the recording{mark}")
    names = shortened_names([run.name for run, *_ in drawn], 110 // shape[1] - 12)
    time_name, seconds = time_unit(max(found.seconds for _, _, found, _ in drawn))
    places: dict[str, int] = {}
    for axes, text, (run, gpu, found, own) in zip(panels, names, drawn, strict=False):
        for span in found.spans:
            limits = span.begin / seconds, span.end / seconds
            axes.axvspan(*limits, color=PHASE_COLOURS[span.phase], linewidth=0, zorder=0)
        for place, (label, lane) in enumerate(own.items()):
            draw_line(axes, found.centres / seconds, lane, size, place=place)
            places.setdefault(label.partition(":")[0], place)
        if capacity := _capacity(gpu, found, summed=summed) if quantity == "memory_used" else None:
            axes.axhline(capacity / size, color=ALARM, linewidth=1.1, linestyle=CAPACITY_DASHES)
        if run.status in LOST:
            axes.plot(found.seconds / seconds, 0, "X", color=ALARM, markersize=9, zorder=6, clip_on=False)
        worst = "".join(label.partition(":")[2] for label in own)
        heading = f"{text}{_status(run)}{worst and f',{worst}'}"
        colour = ALARM if run.status in LOST else DARK
        axes.set_title(heading, fontsize=11 if shape[1] < 3 else 8, color=colour, fontweight="normal")
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    label_times(panels, shape, len(drawn), time_name)
    figure.supylabel(f"{word} ({unit})", fontsize=10.5)
    spans = [span for _, _, found, _ in drawn for span in found.spans]
    has_capacity = quantity == "memory_used" and any(_capacity(gpu, found, summed=summed) for _, gpu, found, _ in drawn)
    legend(figure, places, spans, has_capacity=has_capacity)
    return figure


def _lines(found: Timeline, quantity: str, unit: str, *, summed: bool) -> dict[str, Lane]:
    """Return name in the legend -> line. After a colon: the device that has a line of its own among many."""
    if summed:
        total = found.total(quantity)
        return {"all devices": Lane(total, total, total)}
    devices = banded(found, quantity)
    if sum(quantity in one.lanes for one in found.devices) == len(devices):
        return {one.label: one.lanes[quantity] for one in devices}
    names = (f"mean, lowest and highest of all {unit}s", f"the {unit} farthest from the mean: {devices[-1].label}")
    return {text: one.lanes[quantity] for text, one in zip(names, devices, strict=True)}


def _has_values(lines: Mapping[str, Lane]) -> bool:
    return any(np.isfinite(lane.mean).any() for lane in lines.values())


def _capacity(gpu: Gpu, found: Timeline, *, summed: bool) -> float | None:
    """Return the memory (MiB) of all devices, or of the largest one; None for ranks."""
    return gpu.totals.capacity if summed else max((one.memory_total or 0.0 for one in found.devices), default=None)


def panel_shape(count: int) -> tuple[int, int]:
    """Return rows and columns of this many wide panels, at most five in a row."""
    columns = 1 if count <= 2 else 2 if count <= 4 else 3 if count <= 12 else 4 if count <= 16 else 5
    return math.ceil(count / columns), columns


def panel_grid(
    name: str, title: str, shape: tuple[int, int], note: str, shared: Literal["both", ""] = "both"
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of panels. shape: rows, columns. shared: axes that all have in common."""
    return figure_grid(name, title, shape, max(7.5, 1.7 + 1.6 * shape[0]), note=note, shared=shared)


def label_times(panels: Sequence[Axes], shape: tuple[int, int], used: int, time_name: str) -> None:
    """Format the axes of panels over time, and hide those that the grid has too many."""
    for at, axes in enumerate(panels):
        axes.set_visible(at < used)
        axes.yaxis.set_major_formatter(tick)
        axes.locator_params(axis="x", nbins=4 if shape[1] > 2 else 8)
        axes.tick_params(labelsize=9 if shape[1] <= 3 else 8)
        if at + shape[1] >= used:  # the lowest of its column
            axes.tick_params(axis="x", labelbottom=True)
            axes.set_xlabel(f"time ({time_name})", fontsize=9.5)


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


def _main(gpu: Gpu) -> Any:
    """Return the period that pictures show: the training, or the whole recording if that is unknown."""
    return gpu.training or gpu.totals


def _devices(gpu: Gpu) -> Sequence[MeasuredDevice]:
    return gpu.training.gpus if gpu.training else gpu.gpus


def _rows(
    name: str, title: str, rows: Sequence[Recorded], total: int, *, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a row per run."""
    height = max(7.5, 1.8 + 0.4 * len(rows))
    note = f"{_of_all(len(rows), total)}{_mark(rows)}"
    return figure_grid(name, title, (1, columns), height, note=note, shared="y")


def _name_rows(axes: Axes, rows: Sequence[Recorded], numbers: Sequence[str] = ()) -> None:
    """Label the rows of a panel, the first on top: name and numbers of each run; lost runs in red."""
    names = [f"{text}{_status(run)}" for text, (run, _) in zip(_short(rows), rows, strict=True)]
    labels = [f"{one}\n{text}" for one, text in zip(names, numbers, strict=True)] if numbers else names
    axes.set_yticks(range(len(rows)), labels, fontsize=9.0 if len(rows) <= 20 else 7.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for label, (run, _) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(ALARM if run.status in LOST else DARK)


def _short(rows: Sequence[Recorded]) -> list[str]:
    return shortened_names([run.name for run, _ in rows], 44)


def _status(run: RecordedRun) -> str:
    """Return " (simulated, failed)" if a run is simulated or did not finish."""
    marks = ["simulated"] if run.gpu and run.gpu.simulated else []
    marks += [run.status] if run.status not in ("", "finished") else []
    return f" ({', '.join(marks)})" if marks else ""


def _mark(rows: Sequence[Recorded]) -> str:
    return mark_of([gpu.simulated for _, gpu in rows], "runs")


def _of_all(shown: int, total: int, what: str = "rows") -> str:
    return f": the first {shown} of {total} {what}" if shown < total else ""


def _alpha(run: RecordedRun) -> float:
    return 0.35 if run.status in LOST else 0.9


def memory_unit(amounts: Iterable[float | None]) -> tuple[str, float]:
    """Return the unit of memory, and MiB per unit: GiB if one of these amounts (MiB) is above 10 GiB."""
    is_large = max((amount for amount in amounts if amount is not None), default=0.0) > LARGE_MIB
    return ("GiB", MIB_PER_GIB) if is_large else ("MiB", 1.0)


def _amount(mib: float | None, size: float) -> str:
    return "-" if mib is None else f"{mib / size:,.1f}" if size > 1 else f"{mib:,.0f}"
