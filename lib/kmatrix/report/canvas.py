"""The canvas of every graph: its size, its title, its rows, how it becomes a file. matplotlib is imported when used."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.records import write_bytes
from kmatrix.report.ink import ALARM, DARK, QUIET, shortened
from kmatrix.report.layout import amount

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 12.0, 7.5, 100  # inches, inches, dots an inch: 1200 x 750 pixels
MAX_ROWS = 40  # rows that a graph by run shows
MAX_NAME = 62  # characters of a name beside a row


def new_figure(
    name: str, title: str, *, columns: int = 1, rows: int = 0, note: str = "", ratios: Sequence[float] = (2.0, 1.0)
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure with its title and panels; it grows with the number of rows. name: of the matrix."""
    figure = _blank(max(HEIGHT, 1.8 + 0.3 * rows))
    axes = list(figure.subplots(1, columns, squeeze=False, width_ratios=list(ratios[:columns]))[0])
    axes[0].set_title(title, pad=26)
    remark(axes[0], f"{name}{note}")
    return figure, axes


def new_grid(
    name: str, title: str, shape: tuple[int, int], height: float, *, note: str = ""
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of panels (rows, columns) that share their axes, by rows. height: inches."""
    figure = _blank(height)
    axes = list(figure.subplots(*shape, squeeze=False, sharex=True, sharey=True).flat)
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.012, 1 - 0.42 / height, f"{name}{note}", color=QUIET, fontsize=10.5, va="top")
    return figure, axes


def new_stack(name: str, title: str, *, strips: int, note: str = "") -> tuple[Figure, list[Axes]]:
    """Return a figure with one large panel, and below it, where there are strips, one with so many rows."""
    low = 0.5 + 0.3 * strips if strips else 0.0
    figure = _blank(HEIGHT + low)
    if strips:
        axes = list(figure.subplots(2, 1, sharex=True, height_ratios=[HEIGHT - 1.5, low]))
    else:
        axes = [figure.subplots()]
    axes[0].set_title(title, pad=26)
    remark(axes[0], f"{name}{note}")
    return figure, axes


def remark(axes: Axes, text: str) -> None:
    """Write a quiet line above a panel."""
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(text, (0, 1), xytext=(0, 9), color=QUIET, fontsize=10.5, annotation_clip=False, **place)


def save(figure: Figure, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(buffer, metadata={"Software": None})  # savefig draws twice: once for the layout alone
    write_bytes(path, buffer.getvalue())
    return path


def tick(value: float, _position: float = 0) -> str:
    """Return the text of a tick: 250, 2.5k, 10M."""
    if abs(value) < 1000:
        return f"{value:g}"
    text = amount(value)
    digits, letter = text[:-1], text[-1]
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + letter


def name_rows(axes: Axes, names: Sequence[str], lost: Sequence[bool]) -> None:
    """Write names beside rows, the first on top; those of lost runs in red."""
    labels = [shortened(name, MAX_NAME) for name in names]
    font = row_font(len(names)) - (1.5 if max(map(len, labels)) > 45 else 0.0)
    axes.set_yticks(range(len(names)), labels, fontsize=font)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for label, is_lost in zip(axes.get_yticklabels(), lost, strict=True):
        label.set_color(ALARM if is_lost else DARK)


def row_font(rows: int) -> float:
    return 10.5 if rows <= 20 else 9.0


def left_out(shown: int, total: int) -> str:
    return f": the first {shown} of {total} rows" if shown < total else ""


def _blank(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    return figure
