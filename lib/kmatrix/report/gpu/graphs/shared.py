"""What several GPU graphs share: the unit of memory, capacities, words for devices, and a panel per run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kmatrix.report.figure import ALARM, DARK, HEIGHT, LOST, status_note, tick, time_unit
from kmatrix.report.gpu.graphs.palette import PHASE_COLOURS
from kmatrix.report.gpu.numbers import DeviceNumbers, GpuNumbers, RecordedPhase, RunGpus
from kmatrix.text import shortened_names, without_common_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 30  # runs with a panel of their own
OWN_AXES = 20.0  # length of the longest run / that of the shortest, from which each panel has its own time axis
MIB_PER_GIB = 1024.0
LARGE_MIB = 10 * MIB_PER_GIB  # memory above it is in GiB
DASH = 3.0  # of a line that others may cover, in widths of the line
CAPACITY_DASHES = (0, (5, 2))
TITLE_ROOM = {1: 110, 2: 64, 3: 44, 4: 36, 5: 31}  # panels in a row -> characters above one


@dataclass(frozen=True, slots=True)
class MemoryUnit:
    """The unit of all memory in one graph."""

    name: str
    mib: float  # MiB per unit

    def text(self, mib: float) -> str:
        """Return an amount of memory as a number in this unit."""
        value = mib / self.mib
        return f"{value:,.1f}" if self.mib > 1 and abs(value) < 1000 else f"{value:,.0f}"


def memory_unit(amounts: Iterable[float | None]) -> MemoryUnit:
    """Return GiB if one of these amounts (MiB) is above 10 GiB, else MiB."""
    largest = max((amount for amount in amounts if amount is not None), default=0.0)
    return MemoryUnit("GiB", MIB_PER_GIB) if largest > LARGE_MIB else MemoryUnit("MiB", 1.0)


def devices_word(gpus: Iterable[GpuNumbers]) -> str:
    """Return the word for the devices of these runs: "GPUs", "ranks", or "devices" if there are both."""
    units = {gpu.unit for gpu in gpus}
    return f"{units.pop()}s" if len(units) == 1 else "devices"


def period(known: Sequence[tuple[RunGpus, GpuNumbers]]) -> str:
    """Return the period of the means of these runs."""
    trained = [gpu.training is not None for _, gpu in known]
    return "the training" if all(trained) else "the run" if not any(trained) else "the training, if known"


def device_number(gpu: GpuNumbers, device: DeviceNumbers) -> str:
    """Return the number of a device; over several nodes its rank and its host."""
    number = gpu.label(device).split()[1]
    return f"{number if device.rank is None else device.rank} on {device.host}" if device.host else number


def draw_line(axes: Axes, x: Any, y: Any, colour: str, *, place: int = 0, count: int = 1) -> None:
    """Draw one of `count` lines of a panel; all of them are visible where they have the same values.

    A value between two gaps (NaN) is a dot.
    """
    alone = [at for at in range(len(y)) if _is_alone(y, at)]
    if alone:
        axes.plot(
            [x[at] for at in alone], [y[at] for at in alone], ".", color=colour, markersize=5, zorder=3, clip_on=False
        )
    axes.plot(x, y, color=colour, linewidth=1.8 if count == 1 else 1.0, zorder=3)
    if count > 1:
        # Dashes where the other lines have none.
        dashes = (DASH * place, (DASH, DASH * (count - 1)))
        axes.plot(x, y, color=colour, linewidth=2.2, linestyle=dashes, dash_capstyle="butt", zorder=4)


def _is_alone(values: Sequence[float], at: int) -> bool:
    """Return whether a value is known but neither the one before nor the one after it."""
    near = (values[place] for place in (at - 1, at + 1) if 0 <= place < len(values))
    return not math.isnan(values[at]) and all(map(math.isnan, near))


def draw_capacity(axes: Axes, capacity: float) -> None:
    """Draw the memory that there is, in the unit of the axis."""
    axes.axhline(capacity, color=ALARM, linewidth=1.1, linestyle=CAPACITY_DASHES, zorder=5)


def shade_phases(axes: Axes, phases: Iterable[RecordedPhase], seconds: float, end: float = math.inf) -> None:
    """Shade the phases of a run up to `end` (s). seconds: per unit of the axis."""
    for phase in phases:
        span = phase.begin / seconds, min(phase.end, end) / seconds
        axes.axvspan(*span, color=PHASE_COLOURS[phase.name], linewidth=0, zorder=0)


def phase_handles(phases: Iterable[RecordedPhase]) -> list[Any]:
    """Return the entries of these phases for a legend."""
    from matplotlib.patches import Patch

    present = {phase.name for phase in phases}
    return [Patch(color=colour, label=name) for name, colour in PHASE_COLOURS.items() if name in present]


def panels_height(shape: tuple[int, int], *, own: bool = False) -> float:
    """Return the height of a figure with a panel per run, inches. shape: rows and columns. own: each has x labels."""
    return max(HEIGHT, 1.7 + (1.9 if own else 1.5) * shape[0])


def some_places(count: int, most: int) -> list[int]:
    """Return at most this many places of a row, from the first one, as far from each other as a power of two."""
    return list(range(0, count, 2 ** max(0, math.ceil(math.log2(count / most)))))


def panels_of(runs: int) -> tuple[int, int]:
    """Return rows and columns of the panels of this many runs: wide panels, at most five in a row."""
    columns = 1 if runs <= 2 else 2 if runs <= 4 else 3 if runs <= 12 else 4 if runs <= 16 else 5
    return math.ceil(runs / columns), columns


def panel_titles(runs: Sequence[RunGpus], columns: int) -> list[str]:
    """Return the title of each panel, name and status, short enough for this many panels in a row."""
    # If all runs are simulated, the line above all panels says so.
    is_all = all(run.gpu and run.gpu.simulated for run in runs)
    notes = [status_note(replace(run, gpu=None) if is_all else run) for run in runs]
    limit = TITLE_ROOM[columns] - max(map(len, notes))
    names = [run.name for run in runs]
    is_long = len(names) > 1 and max(map(len, names)) > limit
    short = shortened_names(without_common_parts(names) if is_long else names, limit)
    return [f"{name}{note}" for name, note in zip(short, notes, strict=True)]


def name_panel(axes: Axes, run: RunGpus, title: str, columns: int) -> None:
    """Write the title of the panel of a run: in red if it was lost."""
    font = 11 if columns == 1 else 10 if columns <= 3 else 8
    axes.set_title(title, fontsize=font, color=ALARM if run.status in LOST else DARK, fontweight="normal", pad=4)


def time_axes(lengths: Sequence[float]) -> tuple[list[tuple[str, float]], bool]:
    """Return unit and seconds per unit of the time axis of each panel, and whether each has an axis of its own.

    On the axis of the longest run, runs of less than a twentieth of it would be invisible. lengths: of the runs, s.
    """
    known = [length for length in lengths if length > 0]
    if known and max(known) > OWN_AXES * min(known):
        return [time_unit(length) for length in lengths], True
    return [time_unit(max(lengths))] * len(lengths), False


def frame_panels(panels: Sequence[Axes], shape: tuple[int, int], used: int, labels: str | Sequence[str]) -> None:
    """Format the axes of all panels, and label the lowest panel of each column.

    labels: of the x axis; or one per panel, if each has an axis of its own.
    """
    for at, axes in enumerate(panels):
        # A grid may have more panels than there are runs.
        axes.set_visible(at < used)
        axes.yaxis.set_major_formatter(tick)
        axes.locator_params(axis="x", nbins=4 if shape[1] > 2 else 8)
        axes.locator_params(axis="y", nbins=4 if shape[0] > 2 else 6)
        axes.tick_params(labelsize=9 if shape[1] <= 3 else 8)
        # Shared axes are labelled in the last row only, which may have fewer panels.
        if isinstance(labels, str) and at + shape[1] >= used:
            axes.tick_params(axis="x", labelbottom=True)
            axes.set_xlabel(labels, fontsize=9.5)
        elif not isinstance(labels, str) and at < used:
            axes.set_xlabel(labels[at], fontsize=8, labelpad=1)
