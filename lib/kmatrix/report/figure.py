"""Figures that all graphs share: size, style, colours, title and file. matplotlib is imported when something is drawn.

Pictures and the page have the same colours, which can be told apart with the common forms of colour blindness; dashes
and names say the same. An optimizer has its colour in every matrix.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kmatrix.records.files import write_bytes
from kmatrix.report.read import of_each
from kmatrix.report.results import Configuration
from kmatrix.text import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
Job = tuple[str, Callable[[], "Figure | str"]]  # file name, and what draws it or says why there is nothing to draw
ROW = 0.34  # inches of a run or configuration
MOST = 30  # runs or configurations of a figure
MOST_NAME = 48  # characters of a run or configuration
TIME_UNITS = (("hours", 3600.0, 3 * 3600.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))  # name, s, used from
ALARM, DARK = "#b3261e", "#16191d"
# On white and on black paper.
PALETTE = (
    *(("#0a4a96", "#78a6ee"), ("#bf4f26", "#f0784f"), ("#117c56", "#9fe8b8"), ("#8f5aea", "#8371ea")),
    *(("#b88406", "#f2cb45"), ("#de2f92", "#c866a6"), ("#22262c", "#eef0f5"), ("#1f9adf", "#5fcbdc")),
)
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.4)), (0, (7, 2, 1.5, 2)))
OPTIMIZERS = {
    **{"adamw": 0, "muon": 1, "sgd": 2, "adam": 3, "adafactor": 4, "lion": 5, "soap": 6, "schedulefree": 7},
    **{"adamwadv": 5, "adamwspam": 6, "adamwprune": 7, "adopt": 4},
}
RC_PARAMS = {
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,  # losses that differ by 1e-6 would read as small numbers with "+2.123"
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "text.parse_math": False,  # names may have dollar signs
}


def colour_of(optimizer: str) -> int:
    """Return the place of the colour of an optimizer."""
    return OPTIMIZERS.get(optimizer, sum(optimizer.encode()) % len(PALETTE))


def marks_of(configurations: Sequence[Configuration]) -> dict[str, tuple[int, int]]:
    """Return configuration -> colour and dash. Those of one optimizer have different dashes, then other colours."""
    optimizers = {one.axes.get("optimizer", "") for one in configurations}
    used: Counter[int] = Counter()
    found = {}
    for place, one in enumerate(configurations):
        colour = colour_of(one.axes.get("optimizer", ""))
        if len(optimizers) < 2:  # its configurations differ in something else, and have all colours, its own first
            colour = (colour + place) % len(PALETTE)
        found[one.name] = colour, used[colour] % len(DASHES)
        used[colour] += 1
    return found


def new_figure(
    about: str, title: str, panels: int = 1, columns: int = 1, *, labels: Sequence[str] = (), shared: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels.

    about: the line below the title. labels: of the rows of each panel, the first on top. shared: of one quantity.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = math.ceil(panels / columns)
    height = 1.5 + rows * (0.8 + ROW * len(labels) if labels else max(1.7, 6.0 / rows))
    # Not pyplot: it keeps global state, selects a display, and is not safe in threads.
    figure = Figure(figsize=(12, height), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    every = list(figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared or len(labels) > 0).flat)
    for spare in every[panels:]:
        spare.remove()
    for lowest in every[max(0, panels - columns) : panels]:
        lowest.tick_params(labelbottom=True)
    if labels:
        every[0].set_yticks(range(len(labels)), labels)
        every[0].set_ylim(len(labels) - 0.4, -0.6)
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.012, 1 - 0.42 / height, shortened(about, 150), color="#5f6773", va="top")
    return figure, every[:panels]


def first_of(about: str, items: Sequence[T], what: str, most: int = MOST) -> tuple[str, Sequence[T]]:
    """Return the items that a figure shows, and the line below its title with a note if these are not all."""
    return f"{about}, the first {most} of {len(items)} {what}" if len(items) > most else about, items[:most]


def draw_jobs(jobs: Sequence[Job], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw graphs as PNG into `folder`; return the files, and the reason for each graph that was not drawn."""
    import matplotlib.figure  # before processes are forked
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # A context: the settings of the process are restored after drawing, and a user's matplotlibrc is ignored.
    with matplotlib.style.context(["default", RC_PARAMS]):
        found = of_each(partial(_draw, FigureCanvasAgg, folder), jobs)
    return [one for one in found if isinstance(one, Path)], [one for one in found if isinstance(one, str)]


def _draw(canvas: Any, folder: Path, job: Job) -> Path | str:
    name, make = job
    made = make()
    if isinstance(made, str):
        return f"{name} was not drawn: {made}"
    canvas(made).print_png(buffer := io.BytesIO(), metadata={"Software": None})  # savefig would draw twice
    write_bytes(folder / name, buffer.getvalue())
    return folder / name


def time_unit(longest: float) -> tuple[str, float]:
    """Return the unit of a time axis and its length in seconds. longest: end of the axis, seconds."""
    return next((unit, size) for unit, size, least in TIME_UNITS if longest >= least)
