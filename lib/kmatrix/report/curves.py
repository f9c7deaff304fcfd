"""Losses of several seeds -> one curve with its band, and the part of it that is worth looking at: pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kmatrix.report.values import Point
from kmatrix.stats import mean

FALL = 0.08  # share of a run in which the loss falls steeply, from near the logarithm of the vocabulary
BEYOND = 1.1  # a loss that runs away is followed up to so many times the greatest start


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line and the band around it, from the lowest to the highest seed."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def mean_curve(seeds: Sequence[Sequence[Point]], locate: Callable[[Point], float | None]) -> Curve:
    """Return the mean over seeds at the steps that all of them measured; x is the mean of where they lie."""
    by_step = [{point.step: point for point in points} for points in seeds]
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))
    columns = []
    for step in common:
        there = [points[step] for points in by_step]
        places = [place for point in there if (place := locate(point)) is not None]
        if len(places) == len(there):
            losses = [point.loss for point in there]
            columns.append((mean(places), mean(losses), min(losses), max(losses)))
    x, y, low, high = (tuple(column[i] for column in columns) for i in range(4))
    return Curve(x=x, y=y, low=low, high=high)


def top_of_view(curves: Sequence[Curve]) -> float:
    """Return the loss at which a picture may end: the greatest after the first steep fall.

    A curve that ends within that fall is shown from its start. One that runs away is cut.
    """
    fall = FALL * max(x for curve in curves for x in curve.x)
    starts = [curve.high[0] for curve in curves]
    return min(max(max(from_there(curve.x, curve.high, fall)) for curve in curves), BEYOND * max(starts))


def from_there(x: Sequence[float], y: Sequence[float], start: float) -> list[float]:
    """Return the heights of a line from x = start on, with the one at start itself; all where it ends before."""
    after = [height for place, height in zip(x, y, strict=True) if place >= start]
    before = len(x) - len(after)
    if not after or not before:
        return list(y)
    share = (start - x[before - 1]) / (x[before] - x[before - 1])
    return [y[before - 1] + share * (y[before] - y[before - 1]), *after]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of a picture that is enlarged: x from left to right, loss from bottom to top."""

    left: float
    right: float
    bottom: float
    top: float


def end_view(curves: Sequence[Curve]) -> View:
    """Return the last quarter of the curves, high enough for every curve that does not end far off."""
    lows = [from_there(curve.x, curve.low, 0.75 * curve.x[-1]) for curve in curves]
    highs = [from_there(curve.x, curve.high, 0.75 * curve.x[-1]) for curve in curves]
    limit = far_off([curve.y[-1] for curve in curves])
    bottom = min(min(low) for low in lows)
    top = max(max(high) for curve, high in zip(curves, highs, strict=True) if curve.y[-1] <= limit)
    room = 0.08 * (top - bottom) or 0.01 * abs(top) or 1.0
    ends = [curve.x[-1] for curve in curves]
    return View(left=0.75 * min(ends), right=max(ends), bottom=bottom - room, top=top + room)


def loss_range(means: Sequence[float], groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return where an axis of final losses begins and ends: it holds every loss of those that are not far off.

    groups: the losses of each configuration.  means: their means.
    """
    limit = far_off(means)
    shown = [loss for centre, losses in zip(means, groups, strict=True) if centre <= limit for loss in losses]
    room = 0.25 * (max(shown) - min(shown)) or 0.01 * abs(max(shown)) or 1.0
    return min(shown) - room, max(shown) + room


def far_off(losses: Sequence[float]) -> float:
    """Return the loss above which one would squeeze the others together.

    Three times the median distance from the lowest; the greatest where half of them are equal.
    """
    ordered = sorted(losses)
    median = ordered[len(ordered) // 2] - ordered[0]
    return ordered[0] + 3 * median if median > 0 else ordered[-1]
