"""Figures, colours and labels that all graphs share. matplotlib is imported when something is drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kmatrix.records.files import write_bytes
from kmatrix.report.gpu.numbers import SIMULATED, RunGpus
from kmatrix.report.numbers import GroupNumbers, MatrixNumbers
from kmatrix.text import count, shortened, shortened_names, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH, HEIGHT, DPI = 12.0, 7.5, 100  # inches, inches, dots per inch: 1200 x 750 pixels
MAX_ROWS = 40  # rows of a graph with one row per run
MAX_NAME_LENGTH = 62  # characters of the name of a row, or of a matrix
MAX_NOTE_LENGTH = 140  # characters of a line above all panels
MAX_LEGEND = 12  # lines that a legend names; with more, it names optimizers
LOST = ("failed", "stopped", "skipped")
TIME_UNITS = (("hours", 3600.0, 3 * 3600.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))  # name, s, used from

# After Okabe and Ito's palette, which is safe for colour-blind readers; the shades of two colours do not overlap.
COLOURS = {"adamw": "#0072B2", "muon": "#D55E00", "sgd": "#009E73", "adam": "#3B1F8F", "adafactor": "#D9A300"}
OTHER_COLOURS = ("#A55AFF", "#5A1500", "#004D47", "#222222")
ALARM, QUIET, DARK = "#B2182B", "#666666", "#222222"
LINES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.4)), (0, (7, 2, 1.5, 2)))
LineStyles = dict[str, tuple[str, Any]]  # name of a group or run -> colour, line style

RC_PARAMS = {
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
    "text.parse_math": False,  # names may have dollar signs
}


def new_figure(
    name: str, title: str, *, columns: int = 1, rows: int = 0, note: str = "", ratios: Sequence[float] = (2.0, 1.0)
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure with its title and panels; its height fits the number of rows. name: of the matrix."""
    # Inches: 1.8 for the title and the labels of the axis, 0.3 per row.
    figure = _blank(max(HEIGHT, 1.8 + 0.3 * rows))
    axes = list(figure.subplots(1, columns, squeeze=False, width_ratios=list(ratios[:columns]))[0])
    axes[0].set_title(title, pad=26)
    subtitle(axes[0], f"{shortened(name, MAX_NAME_LENGTH)}{note}")
    return figure, axes


def figure_grid(
    name: str,
    title: str,
    shape: tuple[int, int],
    height: float,
    *,
    note: str = "",
    shared: Literal["both", "x", "y", ""] = "both",
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of panels (rows, columns). height: inches.  shared: axes that all have in common."""
    # Long notes take a second line.
    lines = wrap(f"{shortened(name, MAX_NAME_LENGTH)}{note}", width=MAX_NOTE_LENGTH)
    height += 0.2 * (len(lines) - 1)
    figure = _blank(height)
    same: dict[str, Any] = {"sharex": shared in ("both", "x"), "sharey": shared in ("both", "y")}
    axes = list(figure.subplots(*shape, squeeze=False, **same).flat)
    below = "\n" * len(lines)
    figure.suptitle(f"{title}{below}", x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.012, 1 - 0.42 / height, "\n".join(lines), color=QUIET, fontsize=10.5, va="top")
    return figure, axes


def figure_with_strips(name: str, title: str, *, strips: int, note: str = "") -> tuple[Figure, list[Axes]]:
    """Return a figure with one large panel, and if `strips` is not 0, a panel with that many rows below it."""
    low = 0.5 + 0.3 * strips if strips else 0.0
    figure = _blank(HEIGHT + low)
    if strips:
        axes = list(figure.subplots(2, 1, sharex=True, height_ratios=[HEIGHT - 1.5, low]))
    else:
        axes = [figure.subplots()]
    axes[0].set_title(title, pad=26)
    subtitle(axes[0], f"{shortened(name, MAX_NAME_LENGTH)}{note}")
    return figure, axes


def subtitle(axes: Axes, text: str) -> None:
    """Write a grey line above a panel."""
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(text, (0, 1), xytext=(0, 9), color=QUIET, fontsize=10.5, annotation_clip=False, **place)


def draw_jobs(jobs: Iterable[tuple[str, Callable[[], Figure | str]]], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw graphs into `folder`; return the files, and the reason for each graph that was not drawn.

    jobs: file name, and a function that returns the figure or the reason why there is none.
    """
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


def plain_ticks(axes: Axes, which: Literal["x", "y"]) -> None:
    """Label the ticks of an axis with complete numbers, with as many decimals as they need to differ.

    matplotlib would write losses that differ by 1e-6 as small numbers with "+2.123" at the end of the axis.
    """
    axes.ticklabel_format(axis=which, style="plain", useOffset=False)
    axes.locator_params(axis=which, nbins=5)  # long labels need room


def time_unit(longest: float) -> tuple[str, float]:
    """Return the unit of a time axis and its length in seconds. longest: end of the axis, seconds."""
    return next((unit, size) for unit, size, least in TIME_UNITS if longest >= least)


def name_rows(axes: Axes, names: Sequence[str], lost: Sequence[bool]) -> None:
    """Label the rows of a panel, the first on top; lost runs in red."""
    labels = shortened_names(names, MAX_NAME_LENGTH)
    # Long names would take more than half of the width.
    font = row_font(len(names)) - (1.5 if max(map(len, labels)) > 45 else 0.0)
    axes.set_yticks(range(len(names)), labels, fontsize=font)
    # Reversed: the first row is on top, as in the tables.
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for label, is_lost in zip(axes.get_yticklabels(), lost, strict=True):
        label.set_color(ALARM if is_lost else DARK)


def make_room(axes: Axes, *, symmetric: bool = False) -> None:
    """Extend the x axis from 0, or on both sides of it, until the annotations of points fit next to long row names."""
    from matplotlib.text import Annotation

    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # decides the width that the row names leave
    width = axes.bbox.width / (2 if symmetric else 1)
    limit = axes.get_xlim()[1]
    for text in axes.texts:
        if isinstance(text, Annotation):
            gap = 1.5 * abs(float(text.xyann[0])) * figure.dpi / 72
            needed = min(text.get_window_extent().width + gap, 0.9 * width)
            limit = max(limit, abs(float(text.xy[0])) * width / (width - needed))
    axes.set_xlim(-limit if symmetric else 0, limit)


def row_font(rows: int) -> float:
    return 10.5 if rows <= 20 else 9.0


def truncation_note(shown: int, total: int, what: str = "rows") -> str:
    return f": the first {shown} of {total} {what}" if shown < total else ""


def optimizer_colours(numbers: MatrixNumbers) -> dict[str, str]:
    """Return a colour for each optimizer of a matrix."""
    return colours_of(run.optimizer for run in numbers.runs)


def colours_of(optimizers: Iterable[str]) -> dict[str, str]:
    """Return a colour for each optimizer; those in COLOURS are the same in every graph of every matrix."""
    # Sorted, so that the colours do not depend on the order of the runs.
    others = sorted(set(optimizers) - COLOURS.keys())
    return COLOURS | {name: OTHER_COLOURS[place % len(OTHER_COLOURS)] for place, name in enumerate(others)}


def group_styles(numbers: MatrixNumbers, groups: Sequence[GroupNumbers]) -> LineStyles:
    """Return the colour and line style of each group, shaded if its optimizer has several groups.

    Curves on top of each other, such as runs on 1 and 2 GPUs, are both visible: a lighter dash on a darker line.
    """
    styles: LineStyles = {}
    for optimizer, colour in optimizer_colours(numbers).items():
        names = [group.name for group in groups if group.runs[0].optimizer == optimizer]
        if len(groups) > MAX_LEGEND:  # too many to tell apart: one style per optimizer
            styles |= dict.fromkeys(names, (colour, LINES[0]))
        else:
            styles |= shades(colour, names)
    return styles


def shades(colour: str, names: Sequence[str]) -> LineStyles:
    """Return a shade of a colour and a line style for each name."""
    styles: LineStyles = {}
    for place, name in enumerate(names):
        # From a quarter of black to almost half of white: lighter ones would vanish on a white page.
        shade = 0.0 if len(names) == 1 else -0.25 + 0.7 * place / (len(names) - 1)
        styles[name] = (mixed(colour, shade), LINES[place % len(LINES)])
    return styles


def mixed(colour: str, shade: float) -> str:
    """Return a colour #RRGGBB mixed with black (shade down to -1) or white (shade up to 1)."""
    target = 255 if shade > 0 else 0
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(shade) * (target - part)):02x}" for part in parts)


def status_note(run: RunGpus) -> str:
    """Return " (simulated, failed)" if a run is simulated or did not finish."""
    marks = [SIMULATED[1:-1]] if run.gpu and run.gpu.simulated else []
    marks += [run.status] if run.status not in ("", "finished") else []
    return f" ({', '.join(marks)})" if marks else ""


def simulated_mark(runs: Sequence[RunGpus]) -> str:
    """Return a mark for graphs of simulated GPUs. It is in the graph itself, which may be shown without its report."""
    return mark_of([run.gpu.simulated for run in runs if run.gpu], "runs")


def mark_of(simulated: Sequence[bool], what: str) -> str:
    """Return the mark of a graph by whether each of its recordings is of simulated GPUs. what: the word for them."""
    return "" if not any(simulated) else f"   {SIMULATED}" if all(simulated) else f"   (some {what} simulated)"


def _blank(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Not pyplot: it keeps global state, selects a display, and is not safe in threads.
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    return figure
