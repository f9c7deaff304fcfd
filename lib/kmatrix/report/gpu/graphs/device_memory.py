"""Draw the memory of each device: a panel per device with a bar per run, or with many devices a panel per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kmatrix.report.figure import (
    ALARM,
    DARK,
    LOST,
    MAX_ROWS,
    QUIET,
    colours_of,
    figure_grid,
    name_rows,
    simulated_mark,
    tick,
    truncation_note,
)
from kmatrix.report.gpu.graphs.shared import (
    CAPACITY_DASHES,
    MAX_PANELS,
    MemoryUnit,
    device_number,
    frame_panels,
    memory_unit,
    name_panel,
    panel_titles,
    panels_height,
    panels_of,
    period,
    some_places,
)
from kmatrix.report.gpu.numbers import CPU, DeviceNumbers, GpuNumbers, RunGpus
from kmatrix.text import shortened_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Devices -> rows, columns of panels. With more, the grid is nearly square.
GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3), 7: (2, 4), 8: (2, 4)}
MAX_DEVICES = 16  # with a panel of their own; of more, each run has a panel
FEW_ROWS = 12  # rows of a panel with room for larger text


def grid(devices: int) -> tuple[int, int]:
    """Return rows and columns of panels: 1x2 for 2 GPUs, 2x2 for 4, 2x3 for 6, 2x4 for 8, nearly square for more."""
    if devices in GRIDS:
        return GRIDS[devices]
    columns = math.ceil(math.sqrt(devices))
    return math.ceil(devices / columns), columns


def memory_by_device(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw mean memory, standard deviation and peak of each device of each run, with its capacity."""
    known = [(run, run.gpu) for run in runs if run.gpu and any(device.memory_used for device in run.gpu.devices)]
    # Ranks on the CPU are not drawn next to GPUs: their memory is another quantity.
    on_gpu = [(run, gpu) for run, gpu in known if gpu.device_type != CPU]
    of_a_kind = on_gpu or known
    if not any(len(gpu.devices) > 1 for _, gpu in of_a_kind):
        return f"no run was recorded on at least two {'GPUs' if on_gpu or not known else 'ranks'}"
    by_rank = any(device.host for _, gpu in of_a_kind for device in gpu.devices)
    labels = _labels([gpu for _, gpu in of_a_kind], by_rank=by_rank)
    if len(labels) > MAX_DEVICES:
        return _panel_per_run(name, of_a_kind)
    rows = of_a_kind[:MAX_ROWS]
    unit = _unit(rows)
    shape = grid(len(labels))
    note = truncation_note(len(rows), len(of_a_kind)) + simulated_mark([run for run, _ in rows])
    # Inches: 0.75 of a panel for its title and axis.
    of_row = 0.24 if len(rows) <= FEW_ROWS else 0.17
    height = max(7.5, 1.4 + shape[0] * (0.75 + of_row * len(rows)))
    figure, panels = figure_grid(name, f"Memory per {rows[0][1].unit}", shape, height, note=note)
    colours = colours_of(run.optimizer for run, _ in rows)
    for label, axes in zip(labels, panels, strict=False):
        axes.set_title(label, fontsize=11)
        for y, (run, gpu) in enumerate(rows):
            device = next((each for each in gpu.main.devices if _panel(gpu, each, by_rank=by_rank) == label), None)
            capacity = gpu.capacity_of(device) if device else None
            font = 7.5 if len(rows) <= FEW_ROWS else 6.5
            style: dict[str, Any] = {"capacity": capacity, "unit": unit, "colour": colours[run.optimizer], "font": font}
            _draw_device(axes, y, run, device, **style)
    # A grid may have more panels than there are devices.
    for axes in panels[len(labels) :]:
        axes.set_visible(False)
    _frame_devices(panels, shape, rows, unit)
    figure.supxlabel(f"memory used ({unit.name})   {_marks(rows)}", fontsize=10.5)
    return figure


def _unit(rows: Sequence[tuple[RunGpus, GpuNumbers]]) -> MemoryUnit:
    """Return the unit of memory of these runs, by their use: a large GPU that is almost empty has few MiB."""
    used = [device.memory_used for _, gpu in rows for device in gpu.devices]
    return memory_unit(memory.maximum for memory in used if memory)


def _marks(rows: Sequence[tuple[RunGpus, GpuNumbers]]) -> str:
    """Return what the marks of a graph mean."""
    text = f"bar: mean over {period(rows)}   whisker: standard deviation   dot: peak"
    has_capacity = any(gpu.capacity_of(device) for _, gpu in rows for device in gpu.devices)
    return f"{text}   dashed: capacity" if has_capacity else text


def _whisker(device: DeviceNumbers, capacity: float | None) -> tuple[float, float]:
    """Return the deviation below and above the mean, MiB: never beyond a value that was measured, or can exist."""
    memory = device.memory_used
    if memory is None or memory.deviation is None:
        return 0.0, 0.0
    highest = memory.maximum if capacity is None else min(memory.maximum, capacity)
    below = min(memory.deviation, max(0.0, memory.mean - memory.minimum))
    return below, min(memory.deviation, max(0.0, highest - memory.mean))


def _draw_device(
    axes: Axes,
    y: int,
    run: RunGpus,
    device: DeviceNumbers | None,
    *,
    capacity: float | None,
    unit: MemoryUnit,
    colour: str,
    font: float,
) -> None:
    """Draw one run in the panel of one device, with its host; a dash if the run did not use it."""
    memory = device.memory_used if device else None
    if device is None or memory is None:
        axes.text(0.01, y, "–", transform=axes.get_yaxis_transform(), va="center", color=QUIET)  # noqa: RUF001
        return
    style: dict[str, Any] = {"alpha": 0.3, "hatch": "///"} if run.status in LOST else {"alpha": 0.9}
    mean, peak = memory.mean / unit.mib, memory.maximum / unit.mib
    below, above = (part / unit.mib for part in _whisker(device, capacity))
    axes.barh(y, mean, height=0.68, color=colour, edgecolor="white", linewidth=0, **style)
    axes.errorbar(mean, y, xerr=[[below], [above]], color=DARK, elinewidth=1.2, capsize=2.5)
    axes.plot(peak, y, ".", color=DARK, markersize=5)
    if capacity is not None:
        axes.plot([capacity / unit.mib] * 2, [y - 0.5, y + 0.5], color=ALARM, linewidth=1.1, linestyle="--")
    place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    # On white: the line of the capacity may cross the number.
    paper = {"facecolor": "white", "linewidth": 0, "pad": 0.5}
    axes.annotate(unit.text(memory.maximum), (peak, y), fontsize=font, color=DARK, bbox=paper, zorder=5, **place)
    if device.host:
        text_colour = DARK if run.status in LOST else "white"
        axes.annotate(device.host, (0, y), fontsize=font + 0.5, color=text_colour, **place)


def _frame_devices(
    panels: Sequence[Axes], shape: tuple[int, int], rows: Sequence[tuple[RunGpus, GpuNumbers]], unit: MemoryUnit
) -> None:
    """Label the runs in the first column, and give all panels one scale, from 0 to above the highest peak."""
    highest = _highest(rows) / unit.mib
    name_rows(panels[0], shortened_names([run.name for run, _ in rows], 34), [run.status in LOST for run, _ in rows])
    panels[0].set_xlim(0, 1.22 * highest or 1.0)  # room for the number of a peak close to the end
    for axes in panels:
        axes.xaxis.set_major_formatter(tick)
        axes.locator_params(axis="x", nbins=5)
        axes.tick_params(axis="y", length=0, labelsize=9.0 if len(rows) <= FEW_ROWS else 7.5)
        axes.grid(visible=False, axis="y")
    for row in range(1, shape[0]):
        for text, (run, _) in zip(panels[row * shape[1]].get_yticklabels(), rows, strict=True):
            text.set_color(ALARM if run.status in LOST else DARK)


def _highest(rows: Sequence[tuple[RunGpus, GpuNumbers]]) -> float:
    """Return the highest peak or capacity, MiB."""
    known = [(gpu, device, device.memory_used) for _, gpu in rows for device in gpu.devices if device.memory_used]
    return max(max(memory.maximum, gpu.capacity_of(device) or 0.0) for gpu, device, memory in known)


def _panel(gpu: GpuNumbers, device: DeviceNumbers, *, by_rank: bool) -> str:
    """Return the title of the panel of a device. by_rank: runs over several nodes have GPU 0 several times."""
    return f"rank {device.rank}" if by_rank and device.rank is not None else gpu.label(device)


def _labels(gpus: Sequence[GpuNumbers], *, by_rank: bool) -> list[str]:
    """Return the titles of the panels of all devices, sorted by number."""
    labels = {_panel(gpu, device, by_rank=by_rank) for gpu in gpus for device in gpu.devices}
    # By number: as text, GPU 10 comes before GPU 2.
    return sorted(labels, key=lambda label: int(label.split()[1]))


def _panel_per_run(name: str, of_a_kind: Sequence[tuple[RunGpus, GpuNumbers]]) -> Figure:
    """Draw a panel per run with a bar per device: what one panel per device cannot show for dozens of them."""
    known = of_a_kind[:MAX_PANELS]
    runs = [run for run, _ in known]
    unit = _unit(known)
    word = known[0][1].unit
    shape = panels_of(len(known))
    note = truncation_note(len(known), len(of_a_kind), "runs") + simulated_mark(runs)
    figure, panels = figure_grid(name, f"Memory per {word}", shape, panels_height(shape), note=note)
    colours = colours_of(run.optimizer for run in runs)
    for axes, title, (run, gpu) in zip(panels, panel_titles(runs, shape[1]), known, strict=False):
        _draw_profile(axes, run, gpu, unit, colours[run.optimizer])
        # An empty line between the title and the panel is the place of the numbers.
        name_panel(axes, run, f"{title}\n", shape[1])
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        font = 9.0 if shape[1] <= 3 else 7.0
        axes.annotate(_extremes(gpu, unit), (0, 1), xytext=(0, 4), fontsize=font, color=QUIET, **place)
    panels[0].set_ylim(0, 1.08 * _highest(known) / unit.mib or 1.0)
    panels[0].set_xlim(-0.7, max(len(gpu.devices) for _, gpu in known) - 0.3)
    is_ranked = any(device.host for _, gpu in known for device in gpu.devices)
    frame_panels(panels, shape, len(known), "rank" if is_ranked else word)
    _number_devices(panels, [gpu for _, gpu in known])
    figure.supylabel(f"memory used ({unit.name})", fontsize=10.5)
    figure.supxlabel(_marks(known), fontsize=10.5)
    return figure


def _draw_profile(axes: Axes, run: RunGpus, gpu: GpuNumbers, unit: MemoryUnit, colour: str) -> None:
    """Draw mean, deviation, peak and capacity of each device of a run, next to each other."""
    style: dict[str, Any] = {"alpha": 0.3 if run.status in LOST else 0.9}
    capacities = [gpu.capacity_of(device) for device in gpu.main.devices]
    # A line per row of equal GPUs: dashes of each alone would look like a solid line.
    places = list(zip(range(len(capacities)), capacities, strict=True))
    for capacity, equal in groupby(places, key=lambda pair: pair[1]):
        if capacity is not None:
            at = [x for x, _ in equal]
            line: dict[str, Any] = {"color": ALARM, "linewidth": 1.1, "linestyle": CAPACITY_DASHES}
            axes.plot([at[0] - 0.5, at[-1] + 0.5], [capacity / unit.mib] * 2, **line)
    for x, device in enumerate(gpu.main.devices):
        memory = device.memory_used
        if memory is None:
            continue
        below, above = (part / unit.mib for part in _whisker(device, capacities[x]))
        mean = memory.mean / unit.mib
        axes.bar(x, mean, width=0.8, color=colour, linewidth=0, **style)
        axes.plot([x, x], [mean - below, mean + above], color=DARK, linewidth=0.8)
        axes.plot(x, memory.maximum / unit.mib, ".", color=DARK, markersize=2.5)


def _extremes(gpu: GpuNumbers, unit: MemoryUnit) -> str:
    """Return the lowest and the highest mean of a run's devices, and its peak with the device."""
    known = [(device.memory_used, device) for device in gpu.main.devices if device.memory_used]
    if not known:
        return "no device is known"
    means = [memory.mean for memory, _ in known]
    peak, device = max(known, key=lambda pair: pair[0].maximum)
    where = f"{'rank' if device.host else gpu.unit} {device_number(gpu, device).split()[0]}"
    return f"{unit.text(min(means))} to {unit.text(max(means))} {unit.name}, peak {unit.text(peak.maximum)} on {where}"


def _number_devices(panels: Sequence[Axes], gpus: Sequence[GpuNumbers]) -> None:
    """Label some places of a panel with the numbers of the devices, those of the run with most of them."""
    most = max(gpus, key=lambda gpu: len(gpu.devices))
    numbers = [device_number(most, device).split()[0] for device in most.main.devices]
    places = some_places(len(numbers), 8)
    for axes in panels:
        axes.set_xticks(places, [numbers[place] for place in places])
        axes.grid(visible=False, axis="x")
