"""Draw many devices over time as heat maps: a row per device, a column per interval, the value as a colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kmatrix.report.figure import QUIET
from kmatrix.report.gpu.graphs.palette import HEAT_COLOURS, PHASE_COLOURS, UNKNOWN_COLOUR
from kmatrix.report.gpu.graphs.shared import some_places
from kmatrix.report.gpu.timelines import RecordingTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASE_SHARE = 0.09  # of the height of a panel: the strip of phases above its rows
LEAST_SPAN = 0.05  # of the highest value: smaller differences do not get the whole scale of colours
MOST_NUMBERS = 8  # of a panel


def draw_heat_maps(
    figure: Figure,
    panels: Sequence[Axes],
    found: Sequence[RecordingTimeline],
    quantity: str,
    *,
    divisor: float,
    seconds: Sequence[float],
    label: str,
) -> list[Any]:
    """Draw a heat map per run into its panel, and a bar of colours for all; return what its legend needs to add.

    divisor, seconds: recorded units per unit of the scale, and of each time axis. label: of the scale.
    """
    import numpy as np
    from matplotlib.patches import Patch

    grids = [_grid(each, quantity, divisor) for each in found]
    low, high = colour_limits(grids, quantity)
    for axes, each, grid, unit in zip(panels, found, grids, seconds, strict=True):
        image = draw_map(axes, grid, each.seconds / unit, low, high)
        _draw_phases(axes, each, unit)
        _number_rows(axes, each, MOST_NUMBERS if len(panels) <= 4 else MOST_NUMBERS // 2)
    capacities = sorted({device.memory_total for each in found for device in each.devices if device.memory_total})
    if quantity == "memory_used" and capacities:
        label += f", capacity {' and '.join(f'{total / divisor:,.1f}' for total in capacities)}"
    bar = figure.colorbar(image, ax=list(panels), location="right", fraction=0.03, pad=0.01, aspect=40)
    bar.set_label(label, fontsize=10.5)
    bar.outline.set_linewidth(0)
    is_complete = not any(bool(np.isnan(grid).any()) for grid in grids)
    return [] if is_complete else [Patch(facecolor=UNKNOWN_COLOUR, edgecolor=QUIET, label="no sample")]


def draw_map(axes: Axes, grid: Any, end: float, low: float, high: float) -> Any:
    """Draw an array (rows, columns) from 0 to `end` of the time axis, and return the image. low, high: of the scale."""
    import matplotlib

    colours = matplotlib.colormaps[HEAT_COLOURS].with_extremes(bad=UNKNOWN_COLOUR)
    extent = (0.0, end, len(grid) - 0.5, -0.5)
    style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": colours, "vmin": low, "vmax": high}
    axes.grid(visible=False)
    return axes.imshow(grid, extent=extent, **style)


def _grid(found: RecordingTimeline, quantity: str, divisor: float) -> Any:
    """Return the means as an array (devices, columns); NaN: unknown."""
    import numpy as np

    unknown = (None,) * found.columns
    lanes = (device.lanes.get(quantity) for device in found.devices)
    return np.array([unknown if lane is None else lane.mean for lane in lanes], dtype=float) / divisor


def colour_limits(grids: Sequence[Any], quantity: str) -> tuple[float, float]:
    """Return the ends of the scale of colours: of what was measured, so that differences are visible."""
    import numpy as np

    if quantity == "utilization":
        return 0.0, max(100.0, *(float(np.nanmax(grid)) for grid in grids))
    low, high = (float(end) for end in (min(map(np.nanmin, grids)), max(map(np.nanmax, grids))))
    missing = LEAST_SPAN * (abs(high) or 1.0) - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def _draw_phases(axes: Axes, found: RecordingTimeline, seconds: float) -> None:
    """Draw the phases as a strip above the rows."""
    rows = len(found.devices)
    top = -0.5 - rows * PHASE_SHARE
    if found.phases:
        axes.set_ylim(rows - 0.5, top)
    for phase in found.phases:
        begin, end = phase.begin / seconds, min(phase.end, found.seconds) / seconds
        height = 0.75 * (-0.5 - top)
        axes.broken_barh([(begin, end - begin)], (top, height), color=PHASE_COLOURS[phase.name], linewidth=0)


def _number_rows(axes: Axes, found: RecordingTimeline, most: int) -> None:
    """Label some of the rows with the numbers of their devices, or if the hosts differ, with their places."""
    numbers = [device.name.split()[1].rstrip(",") for device in found.devices]
    if len(set(numbers)) < len(numbers):
        numbers = [str(place) for place in range(len(numbers))]
    places = some_places(len(numbers), most)
    axes.set_yticks(places, [numbers[place] for place in places])
    axes.grid(visible=False)
