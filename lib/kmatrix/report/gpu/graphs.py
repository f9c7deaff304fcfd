"""Draw the GPU graphs of a matrix as PNG: memory per run and per device, load balance, memory over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.report.figure import (
    ALARM,
    DARK,
    LOST,
    MAX_LEGEND,
    MAX_ROWS,
    QUIET,
    LineStyles,
    colours_of,
    draw_jobs,
    figure_grid,
    figure_with_strips,
    make_room,
    name_rows,
    new_figure,
    row_font,
    shades,
    simulated_mark,
    status_note,
    tick,
    time_unit,
    truncation_note,
)
from kmatrix.report.gpu.numbers import CPU, DeviceNumbers, GpuNumbers, RunGpus
from kmatrix.report.gpu.palette import PHASE_COLOURS, TRAINING_COLOUR
from kmatrix.stats import BALANCE, cv_text, mean
from kmatrix.text import plural, shortened_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Devices -> rows, columns of panels. With more, the grid is nearly square.
GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3), 7: (2, 4), 8: (2, 4)}
MAX_IN_PANEL = 12  # runs per panel of a device
MAX_DEVICES = 64  # panels
MAX_PEAK_COLUMNS = 4  # panels next to each other that have room for the numbers of peaks
MAX_STRIPS = 12  # runs with a strip of phases
MAX_LABEL = 58  # characters of a name in a legend
BAND_COLOURS = {"Excellent": "#DCEFE2", "Good": "#EEF4D8", "Fair": "#FBEED5", "Poor": "#F8DEDC"}
MARKERS = {"memory_used": "o", "utilization": "s", "power": "^"}  # of the CVs


def draw(name: str, runs: Sequence[RunGpus], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the graphs of a matrix into `folder`; return the files, and the reason for each that was not drawn.

    Both are empty if no run has a recording. name: of the matrix.
    """
    if not any(run.gpu and run.gpu.evidence for run in runs):
        return [], []
    jobs: list[tuple[str, Callable[[], Figure | str]]] = [
        ("gpu_memory_comparison.png", partial(memory_by_run, name, runs)),
        ("per_gpu_memory_breakdown.png", partial(memory_by_device, name, runs)),
        ("gpu_load_balance_analysis.png", partial(load_balance, name, runs)),
        ("gpu_memory_timeline.png", partial(memory_over_time, name, runs)),
    ]
    return draw_jobs(jobs, folder)


def grid(devices: int) -> tuple[int, int]:
    """Return rows and columns of panels: 1x2 for 2 GPUs, 2x2 for 4, 2x3 for 6, 2x4 for 8, nearly square for more."""
    if devices in GRIDS:
        return GRIDS[devices]
    columns = math.ceil(math.sqrt(devices))
    return math.ceil(devices / columns), columns


def memory_by_run(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw a bar per run: mean memory of all its devices, with a line up to the peak."""
    known = [(run, run.gpu) for run in runs if run.gpu and run.gpu.main.total_mean is not None]
    if not known:
        return "no run recorded its memory"
    rows = known[:MAX_ROWS]
    note = truncation_note(len(rows), len(known)) + simulated_mark(runs)
    figure, (axes,) = new_figure(name, "Memory per run", rows=len(rows), note=note)
    colours = colours_of(run.optimizer for run in runs)
    # Room for the labels next to the bars.
    axes.set_xlim(0, 1.5 * max(gpu.total_max or gpu.main.total_mean or 0.0 for _, gpu in rows) or 1.0)
    for y, (run, gpu) in enumerate(rows):
        _draw_memory(axes, y, run, gpu, colour=colours[run.optimizer], font=row_font(len(rows)))
    name_rows(axes, [run.name for run, _ in rows], [run.status in LOST for run, _ in rows])
    axes.xaxis.set_major_formatter(tick)
    axes.set_xlabel(f"memory used (MiB), sum over the devices of a run\nbar: mean over {_period(known)}   line: peak")
    make_room(axes)
    return figure


def memory_by_device(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw a panel per device: mean memory of each run, with its standard deviation and peak."""
    known = [(run, run.gpu) for run in runs if run.gpu and any(device.memory_used for device in run.gpu.devices)]
    # Ranks on the CPU are not drawn next to GPUs: their memory is another quantity.
    on_gpu = [(run, gpu) for run, gpu in known if gpu.device_type != CPU]
    of_a_kind = on_gpu or known
    several = [(run, gpu) for run, gpu in of_a_kind if len(gpu.devices) > 1]
    if not several:
        return f"no run was recorded on at least two {'GPUs' if on_gpu or not known else 'ranks'}"
    rows = of_a_kind[:MAX_IN_PANEL]
    by_rank = any(device.host for _, gpu in of_a_kind for device in gpu.devices)
    labels = _labels([gpu for _, gpu in of_a_kind], by_rank=by_rank)
    shown = labels[:MAX_DEVICES]
    shape = grid(len(shown))
    note = truncation_note(len(rows), len(of_a_kind)) + simulated_mark(runs)
    note += f": the first {MAX_DEVICES} of {len(labels)} devices" if len(labels) > MAX_DEVICES else ""
    height = max(7.5, 1.4 + shape[0] * (0.75 + 0.24 * len(rows)))
    figure, panels = figure_grid(name, f"Memory per {rows[0][1].unit}", shape, height, note=note)
    colours = colours_of(run.optimizer for run in runs)
    for label, axes in zip(shown, panels, strict=False):
        axes.set_title(label, fontsize=11)
        for y, (run, gpu) in enumerate(rows):
            device = next((each for each in gpu.main.devices if _panel(gpu, each, by_rank=by_rank) == label), None)
            _draw_device(axes, y, run, device, colour=colours[run.optimizer], named_peak=shape[1] <= MAX_PEAK_COLUMNS)
            if device and (capacity := _capacity(gpu, device)):
                axes.plot([capacity] * 2, [y - 0.5, y + 0.5], color=ALARM, linewidth=1.1, linestyle="--")
    # A grid may have more panels than there are devices.
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    _frame_devices(panels, shape, rows)
    text = f"memory used (MiB)   bar: mean over {_period(rows)}   whisker: standard deviation   dot: peak"
    has_capacity = any(_capacity(gpu, device) for _, gpu in rows for device in gpu.devices)
    figure.supxlabel(f"{text}   dashed: capacity" if has_capacity else text, fontsize=10.5)
    return figure


def load_balance(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw the memory of each device relative to the mean of its run (left), and the CVs with their classes (right)."""
    known = [(run, run.gpu) for run in runs if run.gpu and run.gpu.balance("memory_used")]
    if not known:
        return "no run recorded the memory of at least two devices"
    rows = known[:MAX_ROWS]
    note = truncation_note(len(rows), len(known)) + simulated_mark(runs)
    figure, axes = new_figure(name, "Load balance", columns=2, rows=len(rows), note=note, ratios=(1.0, 1.0))
    colours = colours_of(run.optimizer for run in runs)
    _draw_bands(axes[1], max(_cvs(gpu) for _, gpu in rows))
    for y, (run, gpu) in enumerate(rows):
        _draw_shares(axes[0], y, gpu, colours[run.optimizer])
        _draw_cvs(axes[1], y, gpu, colours[run.optimizer], row_font(len(rows)))
    # Two panels with numbers next to them leave less room for names.
    name_rows(axes[0], shortened_names([run.name for run, _ in rows], 34), [run.status in LOST for run, _ in rows])
    axes[0].locator_params(axis="x", nbins=4)
    axes[1].set_yticks([])
    axes[1].set_ylim(axes[0].get_ylim())
    # Symmetric around the mean, with room for the numbers of the devices.
    reach = 1.25 * max(abs(bound) for bound in axes[0].dataLim.intervalx) or 1.0
    axes[0].set_xlim(-reach, reach)
    axes[0].axvline(0, color=QUIET, linewidth=0.8)
    axes[0].set_xlabel(
        f"memory, mean over {_period(known)}:\ndeviation from all devices (%)\ndot: device; numbers: lowest, highest"
    )
    axes[1].set_xlabel("CV = population deviation / mean (%)\n● memory   ■ utilization   ▲ power")
    _name_bands(figure)
    make_room(axes[0], symmetric=True)
    return figure


def _period(known: Sequence[tuple[RunGpus, GpuNumbers]]) -> str:
    """Return the period of the means of these runs."""
    trained = [gpu.training is not None for _, gpu in known]
    return "the training" if all(trained) else "the run" if not any(trained) else "the training, if known"


def _draw_memory(axes: Axes, y: int, run: RunGpus, gpu: GpuNumbers, *, colour: str, font: float) -> None:
    lost = run.status in LOST
    value, peak = gpu.main.total_mean or 0.0, gpu.total_max
    style: dict[str, Any] = {"alpha": 0.3, "hatch": "///"} if lost else {"alpha": 0.9}
    axes.barh(y, value, height=0.68, color=colour, edgecolor="white", linewidth=0, **style)
    if peak is not None and peak > value:
        axes.plot([value, peak, peak, peak], [y, y, y - 0.18, y + 0.18], color=DARK, linewidth=1.2)
    count = len(gpu.devices)
    peak_text = "" if peak is None else f", peak {peak:,.0f}"
    label = f"{value:,.0f} MiB on {plural(count, gpu.unit)}{peak_text}"
    axes.annotate(
        f"{label}{status_note(run)}",
        (max(value, peak or 0.0), y),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=font,
        color=ALARM if lost else DARK,
    )


def _capacity(gpu: GpuNumbers, device: DeviceNumbers) -> float | None:
    """Return the memory of a GPU, MiB; None for a rank on the CPU: all ranks share the memory of their machine."""
    return None if gpu.device_type == CPU else device.memory_total


def _draw_device(
    axes: Axes, y: int, run: RunGpus, device: DeviceNumbers | None, *, colour: str, named_peak: bool
) -> None:
    """Draw one run in the panel of one device, with its host; a dash if the run did not use it.

    named_peak: write the peak next to its dot.
    """
    memory = device.memory_used if device else None
    if device is None or memory is None:
        axes.text(0.01, y, "–", transform=axes.get_yaxis_transform(), va="center", color=QUIET)  # noqa: RUF001
        return
    style: dict[str, Any] = {"alpha": 0.3, "hatch": "///"} if run.status in LOST else {"alpha": 0.9}
    axes.barh(y, memory.mean, height=0.68, color=colour, edgecolor="white", linewidth=0, **style)
    axes.errorbar(memory.mean, y, xerr=memory.deviation, color=DARK, elinewidth=1.2, capsize=2.5)
    axes.plot(memory.maximum, y, ".", color=DARK, markersize=5)
    place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    if named_peak:
        # On white: the line of the capacity may cross the number.
        paper = {"facecolor": "white", "linewidth": 0, "pad": 0.5}
        text = f"{memory.maximum:,.0f}"
        axes.annotate(text, (memory.maximum, y), fontsize=7.5, color=DARK, bbox=paper, zorder=5, **place)
    if device.host:
        colour = DARK if run.status in LOST else "white"
        axes.annotate(device.host, (0, y), fontsize=8, color=colour, **place)


def _frame_devices(panels: Sequence[Axes], shape: tuple[int, int], rows: Sequence[tuple[RunGpus, GpuNumbers]]) -> None:
    """Label the runs in the first column, and give all panels one scale, from 0 to above the highest peak."""
    known = [(gpu, device, device.memory_used) for _, gpu in rows for device in gpu.devices if device.memory_used]
    highest = max(max(memory.maximum, _capacity(gpu, device) or 0.0) for gpu, device, memory in known)
    limit = 26 if shape[1] > 4 else 34
    name_rows(panels[0], shortened_names([run.name for run, _ in rows], limit), [run.status in LOST for run, _ in rows])
    # Room for the number of a peak close to the end.
    panels[0].set_xlim(0, (1.22 if shape[1] <= MAX_PEAK_COLUMNS else 1.08) * highest or 1.0)
    for axes in panels:
        axes.xaxis.set_major_formatter(tick)
        axes.locator_params(axis="x", nbins=3 if shape[1] > 4 else 5)
        axes.tick_params(axis="y", length=0, labelsize=9.0 if shape[1] <= 4 else 7.5)
        axes.grid(visible=False, axis="y")
    for row in range(1, shape[0]):
        for text, (run, _) in zip(panels[row * shape[1]].get_yticklabels(), rows, strict=True):
            text.set_color(ALARM if run.status in LOST else DARK)


def _panel(gpu: GpuNumbers, device: DeviceNumbers, *, by_rank: bool) -> str:
    """Return the title of the panel of a device. by_rank: runs over several nodes have GPU 0 several times."""
    return f"rank {device.rank}" if by_rank and device.rank is not None else gpu.label(device)


def _labels(gpus: Sequence[GpuNumbers], *, by_rank: bool) -> list[str]:
    """Return the titles of the panels of all devices, sorted by number."""
    labels = {_panel(gpu, device, by_rank=by_rank) for gpu in gpus for device in gpu.devices}
    # By number: as text, GPU 10 comes before GPU 2.
    return sorted(labels, key=lambda label: int(label.split()[1]))


def _draw_bands(axes: Axes, highest: float) -> None:
    """Shade the classes of the CV up to the highest CV."""
    # At least two classes are visible, so that the first one is not the whole background.
    end = max(1.25 * highest, 6.0)
    edges = [0.0, *(bound for bound, _ in BALANCE), math.inf]
    for (low, high), quality in zip(pairwise(edges), BAND_COLOURS, strict=True):
        if low < end:
            axes.axvspan(low, min(high, end), color=BAND_COLOURS[quality], linewidth=0, zorder=0)
    axes.set_xlim(0, end)
    axes.grid(visible=False, axis="y")


def _name_bands(figure: Figure) -> None:
    """Add a legend of the classes; a bound belongs to the class above it."""
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
    return max(balance.cv for quantity in MARKERS if (balance := gpu.balance(quantity)))


def _draw_shares(axes: Axes, y: int, gpu: GpuNumbers, colour: str) -> None:
    """Draw the mean memory of each device of a run on one row, relative to their mean."""
    devices = gpu.main.devices
    named = [(device.memory_used.mean, _name(gpu, device)) for device in devices if device.memory_used]
    centre = mean([value for value, _ in named]) or 1.0
    ends = sorted((100 * (value / centre - 1), name) for value, name in named)
    axes.plot([ends[0][0], ends[-1][0]], [y, y], color=colour, linewidth=1.6, alpha=0.6)
    axes.plot([x for x, _ in ends], [y] * len(ends), "o", color=colour, markersize=8, alpha=0.8, markeredgewidth=0)
    for (x, name), side, offset in ((ends[0], "right", -7), (ends[-1], "left", 7)):
        place: dict[str, Any] = {"xytext": (offset, 0), "textcoords": "offset points", "ha": side, "va": "center"}
        axes.annotate(name, (x, y), fontsize=8.5, color=QUIET, **place)
    margin = axes.get_yaxis_transform()
    axes.text(1.04, y, f"{centre:,.0f} MiB", transform=margin, va="center", fontsize=9, color=DARK)


def _name(gpu: GpuNumbers, device: DeviceNumbers) -> str:
    """Return the number of a device; over several nodes its rank and its host."""
    number = gpu.label(device).split()[1]
    return f"{number if device.rank is None else device.rank} on {device.host}" if device.host else number


def _draw_cvs(axes: Axes, y: int, gpu: GpuNumbers, colour: str, font: float) -> None:
    """Draw the CVs of a run: a bar for memory, a marker per quantity, and the class in the margin."""
    memory = gpu.balance("memory_used")
    assert memory is not None
    axes.barh(y, memory.cv, height=0.5, color=colour, alpha=0.85, linewidth=0)
    for quantity, marker in MARKERS.items():
        if balance := gpu.balance(quantity):
            axes.plot(balance.cv, y, marker, color=DARK, markersize=6, zorder=4, clip_on=False)
    hidden = f"; straggler {100 * gpu.ranks.waiting:.0f}%" if gpu.ranks and gpu.hides_straggler else ""
    axes.text(
        1.015,
        y,
        f"{cv_text(memory.cv)} {memory.quality}{hidden}",
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=font - 1,
        color=ALARM if hidden or memory.quality == "Poor" else DARK,
    )


def memory_over_time(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw the memory of all devices of each run over time."""
    known = [(run, run.gpu) for run in runs if run.gpu and any(p.total is not None for p in run.gpu.timeline)]
    if not known:
        return "no recording has memory samples"
    longest = max(gpu.timeline[-1].seconds for _, gpu in known)
    unit, size = time_unit(longest)
    phased = [(run, gpu) for run, gpu in known if gpu.phases]
    with_phases = phased[:MAX_STRIPS]
    # A single run has its phases in the panel of its curve; several runs have a strip each.
    strips = with_phases if len(known) > 1 else []
    cut = f": phases of the first {len(strips)} of {len(phased)} runs" if 0 < len(strips) < len(phased) else ""
    note = cut + simulated_mark(runs)
    figure, panels = figure_with_strips(name, "Memory over time", strips=len(strips), note=note)
    axes = panels[0]
    styles = _run_styles([run for run, _ in known])
    for run, gpu in known:
        x = [point.seconds / size for point in gpu.timeline]
        y = [math.nan if point.total is None else point.total for point in gpu.timeline]
        colour, line = styles[run.name]
        axes.plot(x, y, color=colour, linestyle=line, linewidth=1.8)
        last = max(at for at, value in enumerate(y) if not math.isnan(value))
        if run.status in LOST:
            axes.plot(x[last], y[last], "X", color=ALARM, markersize=9, zorder=6, clip_on=False)
    # From 0: a cut axis exaggerates differences of memory.
    axes.set_ylim(0, 1.05 * max(axes.dataLim.ymax, 1.0))
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(tick)
    axes.set_ylabel("memory used (MiB), sum over the devices of a run")
    if strips:
        _draw_strips(panels[1], strips, size)
    elif with_phases:
        _shade_phases(axes, with_phases[0][1], size)
    nodes = "; nodes begin to train together" if any(gpu.nodes for _, gpu in known) else ""
    panels[-1].set_xlabel(f"time since the start of the recording ({unit}); points are means over intervals{nodes}")
    handles = _legend(known, styles) + _phase_legend([gpu for _, gpu in with_phases])
    wide = any(len(handle.get_label()) > 40 for handle in handles)
    figure.legend(handles=handles, loc="outside lower left", ncols=2 if wide else 3, handlelength=3.4)
    return figure


def _shade_phases(axes: Axes, gpu: GpuNumbers, size: float) -> None:
    """Shade the phases of a single run. size: seconds per unit of the axis."""
    for phase in gpu.phases:
        axes.axvspan(phase.begin / size, phase.end / size, color=PHASE_COLOURS[phase.name], linewidth=0, zorder=0)


def _draw_strips(axes: Axes, known: Sequence[tuple[RunGpus, GpuNumbers]], size: float) -> None:
    """Draw a strip per run with its training and its other phases."""
    for y, (_, gpu) in enumerate(known):
        axes.barh(y, gpu.timeline[-1].seconds / size, height=0.7, color=TRAINING_COLOUR, linewidth=0)
        for name, colour in PHASE_COLOURS.items():
            spans = [(p.begin / size, (p.end - p.begin) / size) for p in gpu.phases if p.name == name]
            axes.broken_barh(spans, (y - 0.35, 0.7), color=colour, linewidth=0)
    name_rows(axes, shortened_names([run.name for run, _ in known], 34), [run.status in LOST for run, _ in known])


def _phase_legend(gpus: Sequence[GpuNumbers]) -> list[Any]:
    from matplotlib.patches import Patch

    present = {phase.name for gpu in gpus for phase in gpu.phases}
    handles = [Patch(color=colour, label=name) for name, colour in PHASE_COLOURS.items() if name in present]
    if handles and len(gpus) > 1:
        handles.insert(0, Patch(color=TRAINING_COLOUR, label="training"))
    return handles


def _run_styles(runs: Sequence[RunGpus]) -> LineStyles:
    """Return colour and line style of each run: a shade of its optimizer's colour."""
    styles: LineStyles = {}
    for optimizer, colour in colours_of(run.optimizer for run in runs).items():
        styles |= shades(colour, [run.name for run in runs if run.optimizer == optimizer])
    return styles


def _legend(known: Sequence[tuple[RunGpus, GpuNumbers]], styles: LineStyles) -> list[Any]:
    """Return the lines of the legend: one per run, or per optimizer if there are too many."""
    from matplotlib.lines import Line2D

    if len(known) <= MAX_LEGEND:
        short = shortened_names([run.name for run, _ in known], MAX_LABEL)
        named = [(f"{name}{status_note(run)}", styles[run.name]) for name, (run, _) in zip(short, known, strict=True)]
    else:
        colours = colours_of(run.optimizer for run, _ in known)
        optimizers = dict.fromkeys(run.optimizer for run, _ in known)
        named = [(optimizer or "unknown", (colours[optimizer], "-")) for optimizer in optimizers]
    handles = [Line2D([], [], color=colour, linestyle=line, label=text) for text, (colour, line) in named]
    if any(run.status in LOST for run, _ in known):
        handles.append(Line2D([], [], color=ALARM, marker="X", linestyle="", markersize=8, label="did not finish"))
    return handles
