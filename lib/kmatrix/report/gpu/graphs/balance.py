"""Draw the load balance of each run: the memory of its devices around their mean, and three CVs with their classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kmatrix.gpu.balance import BALANCE, Balance, cv_text
from kmatrix.report.figure import (
    ALARM,
    DARK,
    LOST,
    MAX_ROWS,
    QUIET,
    colours_of,
    make_room,
    name_rows,
    new_figure,
    row_font,
    simulated_mark,
    truncation_note,
)
from kmatrix.report.gpu.graphs.palette import CLASS_COLOURS
from kmatrix.report.gpu.graphs.shared import MemoryUnit, device_number, devices_word, memory_unit, period
from kmatrix.report.gpu.numbers import GpuNumbers, RunGpus
from kmatrix.stats import mean
from kmatrix.text import shortened_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTITIES = {"memory_used": "memory", "utilization": "utilization", "power": "power"}  # -> word
MAX_DOTS = 16  # devices of a run as dots; more are lines, which hide each other less


def load_balance(name: str, runs: Sequence[RunGpus]) -> Figure | str:
    """Draw the memory of each device relative to the mean of its run (left), and a panel of CVs per quantity."""
    known = [(run, run.gpu) for run in runs if run.gpu and run.gpu.balance("memory_used")]
    if not known:
        return "no run recorded the memory of at least two devices"
    rows = known[:MAX_ROWS]
    note = truncation_note(len(rows), len(known)) + simulated_mark([run for run, _ in rows])
    words = {quantity: word for quantity, word in QUANTITIES.items() if any(gpu.balance(quantity) for _, gpu in rows)}
    ratios = (1.7, *([1.0] * len(words)))
    figure, axes = new_figure(name, "Load balance", columns=len(ratios), rows=len(rows), note=note, ratios=ratios)
    colours = colours_of(run.optimizer for run, _ in rows)
    unit = memory_unit(device.memory_used.mean for _, gpu in rows for device in gpu.main.devices if device.memory_used)
    for y, (run, gpu) in enumerate(rows):
        _draw_shares(axes[0], y, gpu, unit, colours[run.optimizer])
        if gpu.ranks and gpu.hides_straggler:
            text = f"straggler {100 * gpu.ranks.waiting:.0f}%"
            _margin_text(axes[-1], y, text, row_font(len(rows)) - 1, ALARM)
    # Panels with numbers in them leave less room for names.
    name_rows(axes[0], shortened_names([run.name for run, _ in rows], 30), [run.status in LOST for run, _ in rows])
    for panel, (quantity, word) in zip(axes[1:], words.items(), strict=True):
        _draw_cvs(panel, quantity, word, rows, colours)
        panel.set_yticks([])
        panel.set_ylim(axes[0].get_ylim())
    axes[0].locator_params(axis="x", nbins=4)
    # Symmetric around the mean, with room for the numbers of the devices.
    reach = 1.25 * max(abs(bound) for bound in axes[0].dataLim.intervalx) or 1.0
    axes[0].set_xlim(-reach, reach)
    axes[0].axvline(0, color=QUIET, linewidth=0.8)
    word = devices_word(gpu for _, gpu in rows)
    text = f"memory, mean over {period(rows)}: deviation\nfrom all {word} (%)   numbers: lowest, highest"
    axes[0].set_xlabel(text, fontsize=9.5)
    _name_classes(figure)
    make_room(axes[0], symmetric=True)
    for panel in axes[1:]:
        make_room(panel)
        _shade_classes(panel)
    return figure


def _draw_shares(axes: Axes, y: int, gpu: GpuNumbers, unit: MemoryUnit, colour: str) -> None:
    """Draw the mean memory of each device of a run on one row, relative to their mean."""
    devices = gpu.main.devices
    named = [(device.memory_used.mean, device_number(gpu, device)) for device in devices if device.memory_used]
    centre = mean([value for value, _ in named])
    ends = sorted((100 * (value / centre - 1) if centre else 0.0, name) for value, name in named)
    axes.plot([ends[0][0], ends[-1][0]], [y, y], color=colour, linewidth=1.6, alpha=0.6)
    few = len(ends) <= MAX_DOTS
    style: dict[str, Any] = {"marker": "o" if few else "|", "markersize": 8, "markeredgewidth": 0 if few else 1.0}
    axes.plot([x for x, _ in ends], [y] * len(ends), linestyle="", color=colour, alpha=0.8, **style)
    for (x, name), side, offset in ((ends[0], "right", -7), (ends[-1], "left", 7)):
        place: dict[str, Any] = {"xytext": (offset, 0), "textcoords": "offset points", "ha": side, "va": "center"}
        axes.annotate(name, (x, y), fontsize=8.5, color=QUIET, **place)
    _margin_text(axes, y, f"{unit.text(centre)} {unit.name}", 9, DARK)


def _draw_cvs(
    axes: Axes, quantity: str, word: str, rows: Sequence[tuple[RunGpus, GpuNumbers]], colours: dict[str, str]
) -> None:
    """Draw the CV of one quantity of each run, with its number and class."""
    # At least two classes are visible, so that the first one is not the whole background.
    balances = [gpu.balance(quantity) for _, gpu in rows]
    axes.set_xlim(0, max(1.05 * max(balance.cv for balance in balances if balance), 6.0))
    for y, ((run, _), balance) in enumerate(zip(rows, balances, strict=True)):
        _draw_cv(axes, y, balance, colours[run.optimizer], row_font(len(rows)) - 1)
    axes.set_xlabel(f"{word}\nCV (%)")
    axes.locator_params(axis="x", nbins=4)
    axes.grid(visible=False, axis="y")


def _draw_cv(axes: Axes, y: int, balance: Balance | None, colour: str, font: float) -> None:
    place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": font}
    if balance is None:
        axes.annotate("unknown", (0, y), color=QUIET, **place)
        return
    # With an edge: in a class of a similar colour the bar ends where it ends for all readers.
    axes.barh(y, balance.cv, height=0.5, color=colour, alpha=0.85, edgecolor=DARK, linewidth=0.5)
    text_colour = ALARM if balance.quality == "Poor" else DARK
    axes.annotate(f"{cv_text(balance.cv)} {balance.quality}", (balance.cv, y), color=text_colour, **place)


def _margin_text(axes: Axes, y: int, text: str, font: float, colour: str) -> None:
    """Write a text right of a panel."""
    axes.text(1.03, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=font, color=colour)


def _shade_classes(axes: Axes) -> None:
    """Shade the classes of the CV up to the end of the axis."""
    end = axes.get_xlim()[1]
    edges = [0.0, *(bound for bound, _ in BALANCE), math.inf]
    for (low, high), quality in zip(pairwise(edges), CLASS_COLOURS, strict=True):
        if low < end:
            axes.axvspan(low, min(high, end), color=CLASS_COLOURS[quality], linewidth=0, zorder=0)
    axes.set_xlim(0, end)


def _name_classes(figure: Figure) -> None:
    """Add a legend of the classes; a bound belongs to the class above it."""
    from matplotlib.patches import Patch

    bounds = [f"{bound:g}" for bound, _ in BALANCE]
    spans = [
        f"below {bounds[0]} %",
        *(f"{low} to {high} %" for low, high in pairwise(bounds)),
        f"{bounds[-1]} % or more",
    ]
    pairs = zip(CLASS_COLOURS.items(), spans, strict=True)
    handles = [Patch(color=colour, label=f"{quality}: {span}") for (quality, colour), span in pairs]
    title = "Classes of the CV, population deviation / mean"
    figure.legend(handles=handles, loc="outside lower right", ncols=4, title=title, title_fontsize=9.5)
