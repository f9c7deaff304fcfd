"""Exact probabilities of a paired t test that is looked at after every seed from the first look to the maximum.

After n seeds, p_n is the one-sided p of Student's t of the n differences, with n - 1 degrees of freedom. The sequential
p value is

    G(min over looks i <= n of p_i / w_i),  w_n = (n - 1) / (maximum - 1),
    G(a) = P(some look i has p_i <= a w_i)  if the true mean is 0.

It holds whenever the looks end. G is computed, not simulated, and without a normal approximation: given t_{n+1}, the
distribution of t_n depends neither on the mean nor on the standard deviation of the differences, so that one integral
per look runs the sequence backwards.

Sources: Hall, Wijsman, Ghosh, Annals of Mathematical Statistics 36 (1965): the t statistics form a Markov chain.
Jennison, Turnbull, Biometrika 78 (1991): exact sequential t tests. Liu, Anderson, JASA 103 (2008): sequential p values.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kmatrix.stats import critical, lower_tail
from kmatrix.verdict.power import gauss_nodes

# Points of an interpolated function between two of its kinks. Up to 10 seeds, G has a relative error below 4e-7 where
# a verdict is decided (a from 0.01 on) and below 2e-5 at 1e-5, as 400 points show; of 100 seeds 2e-6 and 3e-4.
PER_PANEL = 64
PER_INTEGRAL = 48  # nodes of an integral between two kinks
KNOTS = 40  # of the table of G
LOWEST, HIGHEST = 1e-9, 0.5  # a of the first and of the last knot: G is proportional to a below, and no evidence above

# P(a boundary was crossed at an earlier look | t_n), a function of phi = atan(t_n / sqrt(n - 1))
_Earlier = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Looks:
    """When the seeds of a pair are looked at, and how much of the level each look may use."""

    first: int  # seeds
    most: int = 0  # seeds; 0: their number was fixed, and they are looked at once

    def after(self, seeds: int) -> range:
        """Return the numbers of seeds that were looked at by now."""
        return range(self.first if self.most else max(self.first, seeds), seeds + 1)

    def p(self, smallest: float) -> float:
        """Return the one-sided p. smallest: the minimum of p_n / w_n over the looks so far."""
        return crossing_table(self.first, self.most).p(smallest) if self.most else smallest

    def level(self, p: float, seeds: int) -> float:
        """Return the one-sided level of the look after so many seeds if p is that of all looks together."""
        return level(p, self.first, self.most) * self.weight(seeds) if self.most else p

    def weight(self, seeds: int) -> float:
        """Return w_n, the share of the level that a look may use."""
        return weight(seeds, self.most) if self.most else 1.0


def weight(seeds: int, most: int) -> float:
    """Return w_n, the share of the level that a look after `seeds` of `most` seeds, at least 2, may use.

    It grows linearly, so that the last look keeps nearly all the power of a fixed plan.
    """
    return (min(seeds, most) - 1) / (most - 1)


def boundary(a: float, first: int, most: int) -> list[float]:
    """Return the t after `first` to `most` seeds at which p_n = a w_n."""
    return [critical(a * weight(n, most), n - 1) for n in range(first, most + 1)]


def crossing(limits: Sequence[float], first: int) -> list[float]:
    """Return the probability that t_n reached its limit at this look or before, for each look, if the true mean is 0.

    limits: of t after `first`, `first` + 1, ... seeds.  first: at least 2.
    """
    found: list[float] = []
    earlier: _Earlier | None = None
    for place, limit in enumerate(limits):
        n = first + place
        found.append(_total(earlier, n, limit))
        if place + 1 < len(limits):
            earlier = _step(earlier, n, limit, limits[place + 1])
    return found


class CrossingTable:
    """G of one plan of looks, as a table of log(G(a) / a) over log a, interpolated by cubic polynomials."""

    __slots__ = ("_coefficients", "_knots")

    def __init__(self, first: int, most: int) -> None:
        import numpy as np
        from scipy.interpolate import CubicSpline

        grid = np.logspace(math.log10(LOWEST), math.log10(HIGHEST), KNOTS)
        reached = [min(1.0, crossing(boundary(float(a), first, most), first)[-1]) for a in grid]
        spline = CubicSpline(np.log(grid), np.log(reached) - np.log(grid))
        # As Python's numbers: a lookup takes 1 us instead of 20 us.
        self._knots: list[float] = spline.x.tolist()
        self._coefficients: list[list[float]] = spline.c.T.tolist()

    def p(self, smallest: float) -> float:
        """Return G(smallest), smallest: the minimum of p_n / w_n over the looks so far. One-sided."""
        if smallest >= HIGHEST:
            return 1.0
        x = math.log(max(smallest, 1e-300))
        return min(1.0, math.exp(x + self._ratio(x)))

    def level(self, p: float) -> float:
        """Return the a with G(a) = p: the one-sided level of a look with weight 1."""
        goal = math.log(max(p, 1e-300))
        low, high = self._knots[0], self._knots[-1]
        if goal <= low + self._ratio(low):
            return math.exp(goal - self._ratio(low))
        if goal >= high + self._ratio(high):
            return HIGHEST
        while True:
            middle = (low + high) / 2
            if not low < middle < high:
                return math.exp(middle)
            low, high = (middle, high) if middle + self._ratio(middle) < goal else (low, middle)

    def _ratio(self, x: float) -> float:
        x = min(max(x, self._knots[0]), self._knots[-1])
        place = min(max(bisect_right(self._knots, x) - 1, 0), len(self._coefficients) - 1)
        cube, square, slope, value = self._coefficients[place]
        step = x - self._knots[place]
        return ((cube * step + square) * step + slope) * step + value


@lru_cache(maxsize=64)
def crossing_table(first: int, most: int) -> CrossingTable:
    """Return G for looks after `first` to `most` seeds. The first call for a plan takes about 0.02 s per look."""
    return CrossingTable(first, most)


@lru_cache(maxsize=65536)
def level(p: float, first: int, most: int) -> float:
    """Return the one-sided level of a look with weight 1, if the probability to cross the boundary ever is p."""
    return crossing_table(first, most).level(p)


def _panels(top: float, n: int) -> list[tuple[float, float]]:
    """Return the parts of (-pi/2, top) between the kinks of the function, at t = -1 and t = 1."""
    kinks = (-math.pi / 2, math.atan(-1 / math.sqrt(n - 1)), math.atan(1 / math.sqrt(n - 1)))
    cuts = [*(kink for kink in kinks if kink < top - 1e-9), top]
    return list(itertools.pairwise(cuts))


def _total(earlier: _Earlier | None, n: int, limit: float) -> float:
    """Return the probability of a crossing at look n or before: the mean over t_n."""
    import numpy as np

    total = lower_tail(-limit, n - 1)
    if earlier is None:
        return total
    nodes, weights = gauss_nodes(PER_INTEGRAL)
    log_density = math.lgamma(n / 2) - math.lgamma((n - 1) / 2) - math.log(math.pi) / 2
    for low, high in _panels(math.atan2(limit, math.sqrt(n - 1)), n):
        phi = (high - low) / 2 * nodes + (high + low) / 2
        # The density of t_n, times the slope of t_n over phi: cos(phi)^(n - 2), up to a constant.
        density = math.exp(log_density) * np.cos(phi) ** (n - 2)
        total += float(np.sum((high - low) / 2 * weights * density * earlier(phi)))
    return total


def _step(earlier: _Earlier | None, n: int, limit: float, next_limit: float) -> _Earlier:
    """Return P(crossed at look n or before | t_{n+1}) as a function of phi = atan(t_{n+1} / sqrt(n)).

    t_n = sqrt((n - 1) / (n + 1)) (t_{n+1} - B) / sqrt(1 - B^2), B one coordinate of a random unit vector in n
    dimensions: (1 + B) / 2 ~ Beta((n - 1) / 2, (n - 1) / 2), free of the mean and of the standard deviation.
    """
    import numpy as np
    from scipy.special import betainc

    panels = _panels(math.atan2(next_limit, math.sqrt(n)), n + 1)
    phi = np.concatenate([low + (high - low) * _spline(PER_PANEL)[0] for low, high in panels])
    t = math.sqrt(n) * np.tan(np.clip(phi, -math.pi / 2 + 1e-12, math.pi / 2 - 1e-12))
    # t_n crosses its limit for B below b1 and above b2, the roots of a quadratic equation.
    kappa = limit * math.sqrt((n + 1) / (n - 1))
    half = (n - 1) / 2
    root = np.sqrt(np.maximum(1 + kappa**2 - t**2, 0.0))
    r1, r2 = (t - kappa * root) / (1 + kappa**2), (t + kappa * root) / (1 + kappa**2)
    b1 = np.where(t <= -1, -1.0, np.clip(r1, -1, 1))
    b2 = np.where(t >= 1, np.clip(r2, -1, 1), 1.0)
    value = betainc(half, half, (1 + b1) / 2) + betainc(half, half, (1 - b2) / 2)
    if earlier is not None:  # those that are below the limit now, and had crossed an earlier one
        nodes, weights = gauss_nodes(PER_INTEGRAL)
        norm = math.sqrt(math.pi) * math.exp(math.lgamma((n - 1) / 2) - math.lgamma(n / 2))
        last, start = np.arccos(b1)[:, None], np.arccos(b2)[:, None]
        theta = (last - start) / 2 * nodes + (last + start) / 2
        sine = np.maximum(np.sin(theta), 1e-300)
        before = np.arctan2(t[:, None] - np.cos(theta), math.sqrt(n + 1) * sine)
        value = value + np.sum((last - start) / 2 * weights * earlier(before) * sine ** (n - 2) / norm, axis=1)
    return _joined(panels, phi, value)


def _joined(panels: Sequence[tuple[float, float]], phi: Any, values: Any) -> _Earlier:
    """Return one function of the values at the points of each panel, smooth in it; constant after the last panel."""
    import numpy as np
    from scipy.interpolate import PPoly

    matrix = _spline(PER_PANEL)[1]
    parts = [
        matrix @ known * (1 / (high - low)) ** np.arange(3, -1, -1)[:, None]
        for (low, high), known in zip(panels, np.split(values, len(panels)), strict=True)
    ]
    ends = [one[:-1] for one in np.split(phi, len(panels))]
    whole = PPoly.construct_fast(np.concatenate(parts, axis=1), np.concatenate([*ends, phi[-1:]]))
    last = phi[-1]

    def value(at: Any) -> Any:
        return np.minimum(np.maximum(whole(np.minimum(at, last)), 0.0), 1.0)

    return value


@lru_cache(maxsize=2)
def _spline(number: int) -> tuple[Any, Any]:
    """Return points between 0 and 1, dense near both, and the matrix that makes a cubic spline of the values there."""
    import numpy as np
    from scipy.interpolate import CubicSpline

    points = (1 - np.cos(np.linspace(0, math.pi, number))) / 2
    return points, CubicSpline(points, np.eye(number)).c
