"""How graphs look: their style, the colour and line of each configuration, names that fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kmatrix.report.gpu_values import SIMULATED, RunGpus
from kmatrix.report.values import GroupNumbers, MatrixNumbers

LOST = ("failed", "stopped", "skipped")
MAX_LEGEND = 12  # lines that a legend names; with more it names optimizers

# After Okabe and Ito's palette, which people with any colour vision can tell apart; shades of two do not meet.
COLOURS = {"adamw": "#0072B2", "muon": "#D55E00", "sgd": "#009E73", "adam": "#6A51A3", "adafactor": "#D9A300"}
OTHER_COLOURS = ("#CC79A7", "#56B4E9", "#8C6D31", "#7F7F7F")
LINES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.4)), (0, (7, 2, 1.5, 2)))
ALARM, QUIET, DARK = "#B2182B", "#666666", "#222222"
STYLE = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "text.parse_math": False,
}

Ink = dict[str, tuple[str, Any]]  # name of a group -> its colour and its kind of line


def optimizer_colours(numbers: MatrixNumbers) -> dict[str, str]:
    """Return a colour for each optimizer: a known one has the same in every graph of every matrix."""
    return colours_of(run.optimizer for run in numbers.runs)


def colours_of(optimizers: Iterable[str]) -> dict[str, str]:
    """Return a colour for each of these optimizers, and for every known one."""
    others = sorted(set(optimizers) - COLOURS.keys())
    return COLOURS | {name: OTHER_COLOURS[place % len(OTHER_COLOURS)] for place, name in enumerate(others)}


def group_ink(numbers: MatrixNumbers, groups: Sequence[GroupNumbers]) -> Ink:
    """Return colour and line of each group: the colour is its optimizer's, shaded where that has several.

    Curves that lie on one another, as runs on 1 and 2 GPUs should, are both seen: a lighter dash on a darker line.
    """
    ink: Ink = {}
    for optimizer, colour in optimizer_colours(numbers).items():
        mine = [group for group in groups if group.runs[0].optimizer == optimizer]
        for place, group in enumerate(mine):
            if len(groups) > MAX_LEGEND:
                ink[group.name] = (colour, LINES[0])
            else:
                shade = 0.0 if len(mine) == 1 else -0.25 + 0.7 * place / (len(mine) - 1)
                ink[group.name] = (mixed(colour, shade), LINES[place % len(LINES)])
    return ink


def mixed(colour: str, shade: float) -> str:
    """Return a colour #RRGGBB brought nearer to black (shade down to -1) or to white (up to 1)."""
    target = 255 if shade > 0 else 0
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(shade) * (target - part)):02x}" for part in parts)


def shortened(name: str, limit: int) -> str:
    """Cut the middle out of a name that is too long: both ends tell runs apart."""
    if len(name) <= limit:
        return name
    half = (limit - 1) // 2
    return f"{name[: limit - 1 - half]}…{name[-half:]}"


def fate(run: RunGpus) -> str:
    """Return what a reader must know beside the name of a run."""
    marks = [SIMULATED[1:-1]] if run.gpu and run.gpu.simulated else []
    marks += [run.status] if run.status not in ("", "finished") else []
    return f" ({', '.join(marks)})" if marks else ""


def simulated_mark(runs: Sequence[RunGpus]) -> str:
    """Say when the numbers are of simulated GPUs: in the graph, for it travels without its report."""
    some = [run.gpu.simulated for run in runs if run.gpu]
    return "" if not any(some) else f"   {SIMULATED}" if all(some) else "   (some runs simulated)"
