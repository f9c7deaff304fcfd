"""The numbers of devices -> four PNG files: memory by run, by device, its balance, and over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.report.canvas import MAX_ROWS, left_out, name_rows, new_figure, new_grid, row_font, save, tick
from kmatrix.report.gpu_timeline import memory_over_time
from kmatrix.report.gpu_values import CPU, GpuNumbers, RunGpus
from kmatrix.report.ink import ALARM, DARK, LOST, QUIET, STYLE, colours_of, fate, shortened, simulated_mark
from kmatrix.stats import BALANCE, cv_text, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3), 7: (2, 4), 8: (2, 4)}
MAX_IN_PANEL = 12  # runs that one panel of a device shows
MAX_DEVICES = 64
BAND_COLOURS = {"Excellent": "#DCEFE2", "Good": "#EEF4D8", "Fair": "#FBEED5", "Poor": "#F8DEDC"}
QUANTITIES = (("memory", "memory_used", "o"), ("utilization", "utilization", "s"), ("power", "power", "^"))


def draw(name: str, runs: Sequence[RunGpus], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the graphs of a matrix into `folder`; return the files, and a sentence for each one that has no data.

    Where nothing was recorded at all there is nothing to say. name: of the matrix.
    """
    import matplotlib.style

    if not any(run.gpu and run.gpu.evidence for run in runs):
        return [], []
    jobs: list[tuple[str, Callable[[], Figure | str]]] = [
        ("gpu_memory_comparison.png", partial(memory_by_run, name, runs)),
        ("per_gpu_memory_breakdown.png", partial(memory_by_device, name, runs)),
        ("gpu_load_balance_analysis.png", partial(load_balance, name, runs)),
        ("gpu_memory_timeline.png", partial(memory_over_time, name, runs)),
    ]
    files: list[Path] = []
    missing: list[str] = []
    with matplotlib.style.context(["default", STYLE]):
        for file, make in jobs:
            made = make()
            if isinstance(made, str):
                missing.append(f"{file} was not drawn: {made}")
            else:
                files.append(save(made, folder / file))
    return files, missing


def grid(devices: int) -> tuple[int, int]:
    """Return rows and columns of panels: 1x2 for 2 GPUs, 2x2 for 4, 2x3 for 6, 2x4 for 8, near-square beyond."""
    if devices in GRIDS:
        return GRIDS[devices]
    columns = math.ceil(math.sqrt(devices))
    return math.ceil(devices / columns), columns


def memory_by_run(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw a bar from 0 for each run: the mean memory of all its devices together, and a line up to the peak."""
    known = [(run, run.gpu) for run in runs if run.gpu and run.gpu.total_mean is not None]
    if not known:
        return "the memory of no run is known"
    rows = known[:MAX_ROWS]
    note = left_out(len(rows), len(known)) + simulated_mark(runs)
    figure, (axes,) = new_figure(name, "Memory of all GPUs of a run", rows=len(rows), note=note)
    colours = colours_of(run.optimizer for run in runs)
    axes.set_xlim(0, 1.5 * max(gpu.total_high or gpu.total_mean or 0.0 for _, gpu in rows) or 1.0)
    for y, (run, gpu) in enumerate(rows):
        _draw_memory(axes, y, run, gpu, colour=colours[run.optimizer], font=row_font(len(rows)))
    name_rows(axes, [run.name for run, _ in rows], [run.status in LOST for run, _ in rows])
    axes.xaxis.set_major_formatter(tick)
    axes.set_xlabel("memory used, MiB, of all devices of a run together\nbar: mean over the run   line: the peak")
    return figure


def memory_by_device(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw a panel for each GPU, with the mean memory of each run on it, its deviation and its peak."""
    known = [(run, run.gpu) for run in runs if run.gpu and any(device.memory_used for device in run.gpu.devices)]
    on_gpu = [(run, gpu) for run, gpu in known if gpu.device_type != CPU]
    of_a_kind = on_gpu or known
    several = [(run, gpu) for run, gpu in of_a_kind if len(gpu.devices) > 1]
    if not several:
        return f"no run was recorded on two {'GPUs' if on_gpu or not known else 'ranks'} or more"
    rows = of_a_kind[:MAX_IN_PANEL]
    labels = _labels([gpu for _, gpu in of_a_kind])
    shown = labels[:MAX_DEVICES]
    shape = grid(len(shown))
    note = left_out(len(rows), len(of_a_kind)) + simulated_mark(runs)
    note += f": the first {MAX_DEVICES} of {len(labels)} devices" if len(labels) > MAX_DEVICES else ""
    height = max(7.5, 1.4 + shape[0] * (0.75 + 0.24 * len(rows)))
    figure, panels = new_grid(name, f"Memory of each {rows[0][1].word}", shape, height, note=note)
    colours = colours_of(run.optimizer for run in runs)
    for label, axes in zip(shown, panels, strict=False):
        axes.set_title(label, fontsize=11)
        for y, (run, gpu) in enumerate(rows):
            _draw_device(axes, y, run, gpu, label=label, colour=colours[run.optimizer])
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    _frame_devices(panels, shape, rows)
    figure.supxlabel("memory used, MiB   bar: mean   whisker: its deviation   dot: the peak", fontsize=10.5)
    return figure


def load_balance(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw on the left how far each device's memory lies from the mean of its run, on the right the CVs and classes."""
    known = [(run, run.gpu) for run in runs if run.gpu and run.gpu.balance("memory_used")]
    if not known:
        return "no run has the memory of two devices or more"
    rows = known[:MAX_ROWS]
    note = left_out(len(rows), len(known)) + simulated_mark(runs)
    figure, axes = new_figure(name, "Load balance", columns=2, rows=len(rows), note=note, ratios=(1.0, 1.0))
    colours = colours_of(run.optimizer for run in runs)
    _draw_bands(axes[1], max(_cvs(gpu) for _, gpu in rows))
    for y, (run, gpu) in enumerate(rows):
        _draw_shares(axes[0], y, gpu, colours[run.optimizer])
        _draw_cvs(axes[1], y, gpu, colours[run.optimizer], row_font(len(rows)))
    name_rows(axes[0], [run.name for run, _ in rows], [run.status in LOST for run, _ in rows])
    axes[1].set_yticks([])
    axes[1].set_ylim(axes[0].get_ylim())
    reach = 1.25 * max(abs(bound) for bound in axes[0].dataLim.intervalx) or 1.0
    axes[0].set_xlim(-reach, reach)
    axes[0].axvline(0, color=QUIET, linewidth=0.8)
    axes[0].set_xlabel("memory of a device beside the mean of its run, %\ndot: a device; numbers: those at the ends")
    axes[1].set_xlabel("CV = population deviation / mean, %\nof memory (●), utilization (■), power (▲)")
    _name_bands(figure)
    return figure


def _draw_memory(axes: Axes, y: int, run: RunGpus, gpu: GpuNumbers, *, colour: str, font: float) -> None:
    lost = run.status in LOST
    value, peak = gpu.total_mean or 0.0, gpu.total_high
    looks: dict[str, Any] = {"alpha": 0.3, "hatch": "///"} if lost else {"alpha": 0.9}
    axes.barh(y, value, height=0.68, color=colour, edgecolor="white", linewidth=0, **looks)
    if peak is not None and peak > value:
        axes.plot([value, peak, peak, peak], [y, y, y - 0.18, y + 0.18], color=DARK, linewidth=1.2)
    count = len(gpu.devices)
    peak_text = "" if peak is None else f", peak {peak:,.0f}"
    words = f"{value:,.0f} MiB on {count} {gpu.word}{'s' if count > 1 else ''}{peak_text}"
    axes.annotate(
        f"{words}  {fate(run)}".rstrip(),
        (max(value, peak or 0.0), y),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=font,
        color=ALARM if lost else DARK,
    )


def _draw_device(axes: Axes, y: int, run: RunGpus, gpu: GpuNumbers, *, label: str, colour: str) -> None:
    """Draw one run in the panel of one device; a dash where the run did not use it."""
    spread = next((device.memory_used for device in gpu.devices if gpu.label(device) == label), None)
    if spread is None:
        axes.text(0.01, y, "–", transform=axes.get_yaxis_transform(), va="center", color=QUIET)  # noqa: RUF001
        return
    looks: dict[str, Any] = {"alpha": 0.3, "hatch": "///"} if run.status in LOST else {"alpha": 0.9}
    axes.barh(y, spread.mean, height=0.68, color=colour, edgecolor="white", linewidth=0, **looks)
    axes.errorbar(spread.mean, y, xerr=spread.deviation, color=DARK, elinewidth=1.2, capsize=2.5)
    axes.plot(spread.high, y, ".", color=DARK, markersize=5)


def _frame_devices(panels: Sequence[Axes], shape: tuple[int, int], rows: Sequence[tuple[RunGpus, GpuNumbers]]) -> None:
    """Name the runs beside the first column; all panels share one scale from 0, with room beyond the highest peak."""
    highest = max(device.memory_used.high for _, gpu in rows for device in gpu.devices if device.memory_used)
    limit = 26 if shape[1] > 4 else 34
    name_rows(panels[0], [shortened(run.name, limit) for run, _ in rows], [run.status in LOST for run, _ in rows])
    panels[0].set_xlim(0, 1.08 * highest or 1.0)
    for axes in panels:
        axes.xaxis.set_major_formatter(tick)
        axes.locator_params(axis="x", nbins=3 if shape[1] > 4 else 5)
        axes.tick_params(axis="y", length=0, labelsize=9.0 if shape[1] <= 4 else 7.5)
        axes.grid(visible=False, axis="y")
    for row in range(1, shape[0]):
        for text, (run, _) in zip(panels[row * shape[1]].get_yticklabels(), rows, strict=True):
            text.set_color(ALARM if run.status in LOST else DARK)


def _labels(gpus: Sequence[GpuNumbers]) -> list[str]:
    """Return the devices that any run used, by number."""
    labels = {gpu.label(device) for gpu in gpus for device in gpu.devices}
    return sorted(labels, key=lambda label: int(label.split()[1]))


def _draw_bands(axes: Axes, highest: float) -> None:
    """Draw the classes behind the CVs, as far as the highest of them reaches."""
    end = max(1.25 * highest, 6.0)
    edges = [0.0, *(bound for bound, _ in BALANCE), math.inf]
    for (low, high), quality in zip(pairwise(edges), BAND_COLOURS, strict=True):
        if low < end:
            axes.axvspan(low, min(high, end), color=BAND_COLOURS[quality], linewidth=0, zorder=0)
    axes.set_xlim(0, end)
    axes.grid(visible=False, axis="y")


def _name_bands(figure: Figure) -> None:
    """Say below the panels which colour is which class; a bound belongs to the class above it."""
    from matplotlib.patches import Patch

    bounds = [f"{bound:g}" for bound, _ in BALANCE]
    spans = [
        f"below {bounds[0]} %",
        *(f"{low} to {high} %" for low, high in pairwise(bounds)),
        f"{bounds[-1]} % or more",
    ]
    pairs = zip(BAND_COLOURS.items(), spans, strict=True)
    handles = [Patch(color=colour, label=f"{quality}: {span}") for (quality, colour), span in pairs]
    figure.legend(handles=handles, loc="outside lower right", ncols=4)


def _cvs(gpu: GpuNumbers) -> float:
    return max(balance.cv for _, quantity, _ in QUANTITIES if (balance := gpu.balance(quantity)))


def _draw_shares(axes: Axes, y: int, gpu: GpuNumbers, colour: str) -> None:
    """Draw the mean memory of each device of a run on one row, beside the mean of them all."""
    named = [(device.memory_used.mean, gpu.label(device).split()[1]) for device in gpu.devices if device.memory_used]
    centre = mean([value for value, _ in named]) or 1.0
    ends = sorted((100 * (value / centre - 1), name) for value, name in named)
    axes.plot([ends[0][0], ends[-1][0]], [y, y], color=colour, linewidth=1.6, alpha=0.6)
    axes.plot([x for x, _ in ends], [y] * len(ends), "o", color=colour, markersize=8, alpha=0.8, markeredgewidth=0)
    for (x, name), side, offset in ((ends[0], "right", -7), (ends[-1], "left", 7)):
        place: dict[str, Any] = {"xytext": (offset, 0), "textcoords": "offset points", "ha": side, "va": "center"}
        axes.annotate(name, (x, y), fontsize=8.5, color=QUIET, **place)
    margin = axes.get_yaxis_transform()
    axes.text(1.015, y, f"{centre:,.0f} MiB", transform=margin, va="center", fontsize=9, color=DARK)


def _draw_cvs(axes: Axes, y: int, gpu: GpuNumbers, colour: str, font: float) -> None:
    """Draw the CVs of a run: a bar for memory, marks for the rest; the class stands beside."""
    memory = gpu.balance("memory_used")
    assert memory is not None
    axes.barh(y, memory.cv, height=0.5, color=colour, alpha=0.85, linewidth=0)
    for _, quantity, mark in QUANTITIES:
        if balance := gpu.balance(quantity):
            axes.plot(balance.cv, y, mark, color=DARK, markersize=6, zorder=4, clip_on=False)
    hidden = f"; straggler {100 * gpu.ranks.waiting:.0f}%" if gpu.ranks and gpu.hides_a_straggler else ""
    axes.text(
        1.015,
        y,
        f"{cv_text(memory.cv)} {memory.quality}{hidden}",
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=font - 1,
        color=ALARM if hidden or memory.quality == "Poor" else DARK,
    )
