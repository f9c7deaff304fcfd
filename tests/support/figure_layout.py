"""Find texts of a figure that are cut off or overlap, from their extents in the renderer."""

from __future__ import annotations

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SLACK = 1.0  # pixels: extents contain the white space around glyphs


def layout_problems(figure) -> list[str]:
    """Return a sentence per text outside the figure, and per pair of texts that overlap."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    extents = [(text.get_text().strip(), _extent(text, renderer)) for text in visible_texts(figure)]
    width, height = figure.bbox.width, figure.bbox.height
    problems = [
        f"{name!r} is cut off"
        for name, extent in extents
        if extent.x0 < -SLACK or extent.y0 < -SLACK or extent.x1 > width + SLACK or extent.y1 > height + SLACK
    ]
    problems += [f"{a!r} overlaps {b!r}" for (a, one), (b, other) in combinations(extents, 2) if _overlap(one, other)]
    for legend in figure.findobj(Legend):
        inside = {id(text) for text in legend.findobj(Text)}
        outer = legend.get_window_extent(renderer)
        problems += [
            f"the legend covers {text.get_text().strip()!r}"
            for text in visible_texts(figure)
            if id(text) not in inside and _overlap(outer, _extent(text, renderer))
        ]
    return problems


def visible_texts(figure) -> list[Text]:
    """Return the texts that are drawn: no labels of ticks outside of their axis."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            margin = (high - low) * 1e-6
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low - margin <= tick.get_loc() <= high + margin:
                    hidden |= {id(tick.label1), id(tick.label2)}
    return [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in hidden
    ]


def _extent(text, renderer) -> Bbox:
    """Return the extent of a text without empty lines at its end, which only reserve space."""
    extent = text.get_window_extent(renderer)
    lines = text.get_text().split("\n")
    used = len(text.get_text().rstrip("\n").split("\n"))
    return Bbox([[extent.x0, extent.y1 - extent.height * used / len(lines)], [extent.x1, extent.y1]])


def _overlap(one, other) -> bool:
    return (
        min(one.x1, other.x1) - max(one.x0, other.x0) > SLACK and min(one.y1, other.y1) - max(one.y0, other.y0) > SLACK
    )
