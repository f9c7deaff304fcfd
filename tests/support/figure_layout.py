"""Find texts of a figure that are cut off or overlap, from the bounding boxes of the renderer."""

from __future__ import annotations

from itertools import combinations

from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SLACK = 1.0  # pixels: boxes contain the white space around glyphs


def layout_problems(figure) -> list[str]:
    """Return a sentence per text outside the figure, and per pair of texts that overlap."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [(text.get_text().strip(), _box(text, renderer)) for text in visible_texts(figure)]
    width, height = figure.bbox.width, figure.bbox.height
    problems = [
        f"{name!r} is cut off"
        for name, box in boxes
        if box.x0 < -SLACK or box.y0 < -SLACK or box.x1 > width + SLACK or box.y1 > height + SLACK
    ]
    problems += [f"{a!r} overlaps {b!r}" for (a, one), (b, other) in combinations(boxes, 2) if _overlap(one, other)]
    for legend in figure.findobj(Legend):
        inside = {id(text) for text in legend.findobj(Text)}
        outer = legend.get_window_extent(renderer)
        problems += [
            f"the legend covers {text.get_text().strip()!r}"
            for text in visible_texts(figure)
            if id(text) not in inside and _overlap(outer, _box(text, renderer))
        ]
    return problems


def visible_texts(figure) -> list[Text]:
    """Return the texts that are drawn: not those of hidden panels, nor labels of ticks outside of their axis."""
    hidden = {id(text) for axes in figure.axes if not axes.get_visible() for text in axes.findobj(Text)}
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


def _box(text, renderer) -> Bbox:
    """Return the box of a text without empty lines at its end, which only reserve space."""
    box = text.get_window_extent(renderer)
    lines = text.get_text().split("\n")
    used = len(text.get_text().rstrip("\n").split("\n"))
    return Bbox([[box.x0, box.y1 - box.height * used / len(lines)], [box.x1, box.y1]])


def _overlap(one, other) -> bool:
    return (
        min(one.x1, other.x1) - max(one.x0, other.x0) > SLACK and min(one.y1, other.y1) - max(one.y0, other.y0) > SLACK
    )
