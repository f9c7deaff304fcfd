"""Figures that all graphs share: their size, style, title and file. matplotlib is imported when something is drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kmatrix.records.files import write_bytes
from kmatrix.text import count, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 12.0, 7.5, 100  # inches, inches, dots per inch: 1200 x 750 pixels
MOST_NAME = 62  # characters of the name of a matrix
TIME_UNITS = (("hours", 3600.0, 3 * 3600.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))  # name, s, used from
LOST = ("failed", "stopped", "skipped")
ALARM, QUIET, DARK = "#b3261e", "#5f6773", "#16191d"
LINES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.4)), (0, (7, 2, 1.5, 2)))
RC_PARAMS = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.formatter.useoffset": False,  # losses that differ by 1e-6 would read as small numbers with "+2.123"
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "text.parse_math": False,  # names may have dollar signs
}


Job = tuple[str, Callable[[], "Figure | str"]]  # file name, and what draws it or says why there is nothing to draw


def new_figure(
    name: str,
    title: str,
    shape: tuple[int, int] = (1, 1),
    *,
    height: float = HEIGHT,
    note: str = "",
    shared: Literal["both", "y", ""] = "",
) -> tuple[Figure, list[Axes]]:
    """Return a figure with its title and panels (rows, columns). height: inches. shared: axes that all have in common.

    name: of the matrix, in the line below the title with the note.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Not pyplot: it keeps global state, selects a display, and is not safe in threads.
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    axes = list(figure.subplots(*shape, squeeze=False, sharex=shared == "both", sharey=shared != "").flat)
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.012, 1 - 0.42 / height, f"{shortened(name, MOST_NAME)}{note}", color=QUIET, fontsize=10.5, va="top")
    return figure, axes


def figure_of_rows(
    name: str, title: str, rows: int, total: int, what: str, *, columns: int = 1, mark: str = ""
) -> tuple[Figure, list[Axes]]:
    """Return a figure for a row per run or configuration. total: of them, what: the word for them."""
    height = max(3.0, 1.8 + 0.4 * rows)
    note = f"{first_of(rows, total, what)}{mark}"
    return new_figure(name, title, (1, columns), height=height, note=note, shared="y")


def name_rows(panel: Axes, names: Sequence[str], alarms: Sequence[bool] = ()) -> None:
    """Label the rows of a panel, the first on top. alarms: whether each name is red."""
    panel.set_yticks(range(len(names)), names, fontsize=9.5 if len(names) <= 20 else 7.5)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")
    for label, is_alarm in zip(panel.get_yticklabels(), alarms, strict=False):
        label.set_color(ALARM if is_alarm else DARK)


def beside(panel: Axes, text: str, place: tuple[float, float], colour: str = DARK) -> None:
    """Write a text to the right of a place."""
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9.5, "annotation_clip": False}
    panel.annotate(text, place, (6, 0), color=colour, **style)


def first_of(shown: int, total: int, what: str) -> str:
    """Return which runs or configurations a figure shows, "" if all."""
    return f": the first {shown} of {total} {what}" if shown < total else ""


def subtitle(axes: Axes, text: str) -> None:
    """Write a grey line above a panel."""
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(text, (0, 1), xytext=(0, 9), color=QUIET, fontsize=10.5, annotation_clip=False, **place)


def draw_jobs(jobs: Iterable[Job], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw graphs into `folder`; return the files, and the reason for each graph that was not drawn."""
    import matplotlib.style

    files: list[Path] = []
    missing: list[str] = []
    # A context: the settings of the process are restored after drawing, and a user's matplotlibrc is ignored.
    with matplotlib.style.context(["default", RC_PARAMS]):
        for name, make in jobs:
            made = make()
            if isinstance(made, str):
                missing.append(f"{name} was not drawn: {made}")
            else:
                files.append(save(made, folder / name))
    return files, missing


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG. The same figure gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(buffer, metadata={"Software": None})  # savefig draws twice: once for the layout alone
    write_bytes(path, buffer.getvalue())
    return path


def tick(value: float, _position: float = 0) -> str:
    """Return the label of a tick: 250, 2.5k, 10M."""
    if abs(value) < 1000:
        return f"{value:g}"
    text = count(value)
    digits, letter = text[:-1], text[-1]
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + letter


def time_unit(longest: float) -> tuple[str, float]:
    """Return the unit of a time axis and its length in seconds. longest: end of the axis, seconds."""
    return next((unit, size) for unit, size, least in TIME_UNITS if longest >= least)


def mark_of(simulated: Sequence[bool], what: str) -> str:
    """Return the mark of a graph by whether each of its recordings is of simulated GPUs. what: the word for them."""
    return "" if not any(simulated) else "   (simulated)" if all(simulated) else f"   (some {what} simulated)"
