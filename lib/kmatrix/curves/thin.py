"""Reduce the points of a curve to a fixed number, without losing an extreme value."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence


def columns(steps: Sequence[int], most: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the width of a column in steps, and the range of indices of the points in each column that has any.

    steps: ascending.  most: number of columns. Up to as many points are columns of their own, of width 1.
    """
    if len(steps) <= most:
        return 1, [(at, at + 1) for at in range(len(steps))]
    width = -(-(steps[-1] + 1) // most)
    return width, list(cells(steps, width))


def cells(steps: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of indices whose steps are in the same column of this width."""
    begin = 0
    while begin < len(steps):
        end = bisect_left(steps, (steps[begin] // width + 1) * width, lo=begin)
        yield begin, end
        begin = end


def evenly(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most `most` values (3 or more): every n-th, the last one, and the lowest.

    Evenly, so that the curves of several seeds keep the same steps: their mean and differences need common ones.
    """
    if len(values) <= most:
        return list(range(len(values)))
    stride = -(-len(values) // (most - 2))
    return sorted({*range(0, len(values), stride), len(values) - 1, min(range(len(values)), key=values.__getitem__)})


def knots(xs: Sequence[float], ys: Sequence[float], most: int) -> list[int]:
    """Return the indices of the points between which straight lines follow a curve.

    No line is off by more than 1 / (2 * most) of the range of y; for a curve with more than `most` bends, by more.
    xs: strictly ascending.
    After: Bristol, Swinging door trending, ISA 1990.
    """
    if len(xs) <= 2:
        return list(range(len(xs)))
    tolerance = (max(ys) - min(ys)) / (2 * most)
    found = _swinging_door(xs, ys, tolerance)
    while len(found) > 2 * most:
        tolerance *= 2
        found = _swinging_door(xs, ys, tolerance)
    return found


def _swinging_door(xs: Sequence[float], ys: Sequence[float], tolerance: float) -> list[int]:
    kept, origin = [0], 0
    low, high = -math.inf, math.inf  # slopes of the lines that pass all points since the origin closely enough
    for at in range(1, len(xs)):
        run, rise = xs[at] - xs[origin], ys[at] - ys[origin]
        if not low * run <= rise <= high * run:
            origin = at - 1
            kept.append(origin)
            run, rise = xs[at] - xs[origin], ys[at] - ys[origin]
            low, high = -math.inf, math.inf
        low, high = max(low, (rise - tolerance) / run), min(high, (rise + tolerance) / run)
    return [*kept, len(xs) - 1]
