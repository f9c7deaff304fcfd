"""Draw the memory of all devices of each run over time: few runs in one panel, more in a panel each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kmatrix.report.figure import (
    ALARM,
    LOST,
    colours_of,
    figure_grid,
    figure_with_strips,
    name_rows,
    shades,
    simulated_mark,
    status_note,
    tick,
    time_unit,
    truncation_note,
)
from kmatrix.report.gpu.graphs.palette import PHASE_COLOURS, TRAINING_COLOUR
from kmatrix.report.gpu.graphs.shared import (
    CAPACITY_DASHES,
    MAX_PANELS,
    MemoryUnit,
    devices_word,
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
from kmatrix.report.gpu.numbers import GpuNumbers, RunGpus
from kmatrix.text import plural, shortened_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TOGETHER = 4  # runs in one panel: lines of more would hide each other
MAX_LABEL = 58  # characters of a name in a legend
Known = Sequence[tuple[RunGpus, GpuNumbers]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a timeline between two gaps."""

    begin: float  # s
    end: float  # s
    devices: int
    capacity: float | None  # MiB, all devices


def memory_over_time(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw the memory of all devices of each run over time, with its phases and their capacity."""
    known = [(run, run.gpu) for run in runs if run.gpu and any(p.total is not None for p in run.gpu.timeline)]
    if not known:
        return "no recording has memory samples"
    _, own = time_axes(_lengths(known))
    omitted = _omitted([run for run in runs if run.gpu and run.gpu.devices], known)
    together = len(known) <= MAX_TOGETHER and not own
    return _in_one_panel(name, known, omitted) if together else _panel_per_run(name, known, omitted)


def _omitted(recorded: Sequence[RunGpus], known: Known) -> str:
    """Return how many recorded runs are not drawn, "" if all are."""
    missing = len(recorded) - len(known)
    return f"; without {plural(missing, 'run')} of unknown memory" if missing else ""


def _lengths(known: Known) -> list[float]:
    return [gpu.timeline[-1].seconds for _, gpu in known]


def _in_one_panel(name: str, known: Known, omitted: str) -> Figure:
    unit, (time_name, seconds) = _unit(known), time_unit(max(_lengths(known)))
    # A single run has its phases in the panel of its curve; several runs have a strip each.
    with_phases = [(run, gpu) for run, gpu in known if gpu.phases]
    strips = with_phases if len(known) > 1 else []
    note = f"{omitted}{simulated_mark([run for run, _ in known])}"
    figure, panels = figure_with_strips(name, "Memory over time", strips=len(strips), note=note)
    colours = _run_colours([run for run, _ in known])
    for place, (run, gpu) in enumerate(known):
        x, y = _points(gpu, unit, seconds)
        draw_line(panels[0], x, y, colours[run.name], place=place, count=len(known))
        _mark_end(panels[0], run, x, y)
    for capacity in sorted({total for _, gpu in known if not gpu.earlier and (total := gpu.capacity)}):
        draw_capacity(panels[0], capacity / unit.mib)
    for _, gpu in known:
        _draw_capacities(panels[0], gpu, unit, seconds)
    # From 0: a cut axis exaggerates differences of memory.
    panels[0].set_ylim(0, 1.05 * _highest(known, unit))
    # Up to the end of the recordings, also if the memory is unknown there.
    panels[0].set_xlim(0, 1.03 * max(_lengths(known)) / seconds or 1.0)
    panels[0].yaxis.set_major_formatter(tick)
    panels[0].set_ylabel(_value_label(known, unit))
    if strips:
        _draw_strips(panels[1], strips, seconds)
    elif with_phases:
        shade_phases(panels[0], with_phases[0][1].phases, seconds)
    panels[-1].set_xlabel(f"{_time_label(known)} ({time_name}); points are means over intervals{_gap_text(known)}")
    handles = [*_run_legend(known, colours), *_common_legend(known, word="training" if strips else "")]
    wide = any(len(handle.get_label()) > 40 for handle in handles)
    figure.legend(handles=handles, loc="outside lower left", ncols=2 if wide else 3, handlelength=3.4)
    return figure


def _panel_per_run(name: str, every: Known, omitted: str) -> Figure:
    known = every[:MAX_PANELS]
    runs = [run for run, _ in known]
    unit, lengths = _unit(known), _lengths(known)
    units, own = time_axes(lengths)
    shape = panels_of(len(known))
    # Not in the labels of the axes, which have no room for it next to a legend.
    note = f"{truncation_note(len(known), len(every), 'runs')}: {_time_label(known)}"
    note += ", each on an axis of its own" if own else ""
    note += f"{'; gap: unknown' if _gap_text(known) else ''}{omitted}{simulated_mark(runs)}"
    height = panels_height(shape, own=own)
    figure, panels = figure_grid(name, "Memory over time", shape, height, note=note, shared="y" if own else "both")
    colours = colours_of(run.optimizer for run in runs)
    titles = panel_titles(runs, shape[1])
    for axes, title, (run, gpu), (_, seconds) in zip(panels, titles, known, units, strict=False):
        x, y = _points(gpu, unit, seconds)
        draw_line(axes, x, y, colours[run.optimizer])
        _mark_end(axes, run, x, y)
        shade_phases(axes, gpu.phases, seconds)
        if not gpu.earlier and (capacity := gpu.capacity):
            draw_capacity(axes, capacity / unit.mib)
        _draw_capacities(axes, gpu, unit, seconds)
        name_panel(axes, run, title, shape[1])
    panels[0].set_ylim(0, 1.08 * _highest(known, unit))
    for axes, length, (_, seconds) in zip(panels, lengths, units, strict=False):
        axes.set_xlim(0, (length if own else max(lengths)) / seconds or 1.0)
    labels = [f"time ({unit_name})" for unit_name, _ in units]
    frame_panels(panels, shape, len(known), labels if own else labels[0])
    figure.supylabel(_value_label(known, unit), fontsize=10.5)
    figure.legend(handles=_common_legend(known), loc="outside lower left", ncols=6, handlelength=2.2)
    return figure


def _unit(known: Known) -> MemoryUnit:
    return memory_unit(point.total for _, gpu in known for point in gpu.timeline)


def _highest(known: Known, unit: MemoryUnit) -> float:
    """Return the highest value or capacity in the unit of the graph."""
    values = [point.total for _, gpu in known for point in gpu.timeline]
    values += [gpu.capacity for _, gpu in known] + [one.capacity for _, gpu in known for one in gpu.earlier]
    return max((value for value in values if value is not None), default=0.0) / unit.mib or 1.0


def _value_label(known: Known, unit: MemoryUnit) -> str:
    return f"memory used ({unit.name}), sum over the {devices_word(gpu for _, gpu in known)} of a run"


def _time_label(known: Known) -> str:
    nodes = "; nodes begin to train together" if any(gpu.nodes for _, gpu in known) else ""
    return f"time since the start of the recording{nodes}"


def _gap_text(known: Known) -> str:
    """Return what the gaps of the lines mean, "" if there is none."""
    unknown = [point for _, gpu in known for point in gpu.timeline if point.total is None]
    reasons = ["no sample"] if any(not point.memory for point in unknown) else []
    reasons += ["the memory of a device is unknown"] if any(point.memory for point in unknown) else []
    return f"; gap: {', or '.join(reasons)}" if reasons else ""


def _points(gpu: GpuNumbers, unit: MemoryUnit, seconds: float) -> tuple[list[float], list[float]]:
    """Return times and memory of a run, in the units of the axes; NaN, which is a gap of the line, if unknown."""
    x = [point.seconds / seconds for point in gpu.timeline]
    return x, [math.nan if point.total is None else point.total / unit.mib for point in gpu.timeline]


def _mark_end(axes: Axes, run: RunGpus, x: Sequence[float], y: Sequence[float]) -> None:
    """Draw a cross at the end of a run that was lost."""
    last = max(at for at, value in enumerate(y) if not math.isnan(value))
    if run.status in LOST:
        axes.plot(x[last], y[last], "X", color=ALARM, markersize=9, zorder=6, clip_on=False)


def _pieces(gpu: GpuNumbers) -> list[_Piece]:
    """Return the parts of a timeline between its gaps."""
    found: list[_Piece] = []
    begin = 0.0
    for is_gap, group in groupby(gpu.timeline, key=lambda point: not point.memory):
        points = list(group)
        if not is_gap:
            found.append(_Piece(begin, points[-1].seconds, len(points[0].memory), points[0].capacity))
            continue
        if found:
            found[-1] = replace(found[-1], end=points[0].seconds)
        begin = points[-1].seconds
    return found


def _draw_capacities(axes: Axes, gpu: GpuNumbers, unit: MemoryUnit, seconds: float) -> None:
    """Draw the capacity of each attempt and its number of devices over its time, if they had different ones."""
    if not gpu.earlier:
        return
    for (devices, capacity), group in groupby(_pieces(gpu), key=lambda piece: (piece.devices, piece.capacity)):
        if capacity is None:
            continue
        pieces = list(group)
        x = [pieces[0].begin / seconds, pieces[-1].end / seconds]
        axes.plot(x, [capacity / unit.mib] * 2, color=ALARM, linewidth=1.1, linestyle=CAPACITY_DASHES, zorder=5)
        place: dict[str, Any] = {"xytext": (3, 3), "textcoords": "offset points"}
        axes.annotate(plural(devices, gpu.unit), (x[0], capacity / unit.mib), fontsize=8, color=ALARM, **place)


def _draw_strips(axes: Axes, known: Known, seconds: float) -> None:
    """Draw a strip per run with its training and its other phases."""
    for y, (_, gpu) in enumerate(known):
        # Not the time between attempts, which belongs to no phase.
        recorded = [(one.begin / seconds, (one.end - one.begin) / seconds) for one in _pieces(gpu)]
        axes.broken_barh(recorded, (y - 0.35, 0.7), color=TRAINING_COLOUR, linewidth=0)
        for name, colour in PHASE_COLOURS.items():
            spans = [(p.begin / seconds, (p.end - p.begin) / seconds) for p in gpu.phases if p.name == name]
            axes.broken_barh(spans, (y - 0.35, 0.7), color=colour, linewidth=0)
    name_rows(axes, shortened_names([run.name for run, _ in known], 34), [run.status in LOST for run, _ in known])


def _run_colours(runs: Sequence[RunGpus]) -> dict[str, str]:
    """Return the colour of each run: a shade of its optimizer's colour."""
    found: dict[str, str] = {}
    for optimizer, colour in colours_of(run.optimizer for run in runs).items():
        shaded = shades(colour, [run.name for run in runs if run.optimizer == optimizer])
        found |= {name: shade for name, (shade, _) in shaded.items()}
    return found


def _run_legend(known: Known, colours: Mapping[str, str]) -> list[Any]:
    from matplotlib.lines import Line2D

    names = shortened_names([run.name for run, _ in known], MAX_LABEL)
    return [
        Line2D([], [], color=colours[run.name], linewidth=2.0, label=f"{name}{status_note(run)}")
        for name, (run, _) in zip(names, known, strict=True)
    ]


def _common_legend(known: Known, word: str = "") -> list[Any]:
    """Return the entries of lost runs, capacity and phases. word: of the time without a phase, if it has a colour."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    if any(run.status in LOST for run, _ in known):
        handles.append(Line2D([], [], color=ALARM, marker="X", linestyle="", markersize=8, label="did not finish"))
    if any(one.capacity for _, gpu in known for one in (gpu, *gpu.earlier)):
        label = f"capacity of the {devices_word(gpu for _, gpu in known)} of a run"
        handles.append(Line2D([], [], color=ALARM, linestyle=CAPACITY_DASHES, label=label))
    if word:
        handles.append(Patch(color=TRAINING_COLOUR, label=word))
    return handles + phase_handles(phase for _, gpu in known for phase in gpu.phases)
