"""The smallest difference that a t test detects."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from kmatrix.stats import critical

POWER = 0.8  # with which the smallest detectable difference is found
NODES = 256  # of the integral over the normal distribution: errors below 1e-8
HALVINGS = 44  # of an interval: 1e-13 of it is left
REACH = 9.0  # standard deviations: the normal distribution has 1e-19 beyond them


def power(shift: float, freedom: float, t: float) -> float:
    """Return P(T > t) for t > 0, T following the noncentral t with noncentrality `shift`: the power of a test.

    T > t if Z + shift > t chi / sqrt(freedom), so this is the mean over the normal Z of the distribution function of
    chi2 at freedom ((Z + shift) / t)^2. Source: Johnson, Kotz, Balakrishnan, Continuous Univariate Distributions 2
    (1995), chapter 31. SciPy's noncentral t returns NaN for large shifts with few degrees of freedom.
    """
    import numpy as np
    from scipy.special import gammainc

    nodes, weights = gauss_nodes(NODES)
    low = max(-shift, -REACH)
    half = (REACH - low) / 2
    z = half * nodes + (REACH + low) / 2
    below = np.exp(-z * z / 2) * gammainc(freedom / 2, freedom / 2 * ((z + shift) / t) ** 2)
    return float(half * (weights @ below)) / math.sqrt(2 * math.pi)


@lru_cache(maxsize=4096)
def detectable_shift(freedom: float, p: float) -> float:
    """Return the noncentrality that a one-sided t test at level p finds with a power of 80 %.

    It uses neither the mean nor the variance that was observed. Multiply it by the standard error of the difference.
    """
    t = critical(p, freedom)
    low, high = 0.0, t + 1
    while power(high, freedom, t) < POWER:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, freedom, t) < POWER else (low, middle)
    return high


@lru_cache(maxsize=4)
def gauss_nodes(number: int) -> tuple[Any, Any]:
    """Return the nodes and weights of Gauss-Legendre quadrature from -1 to 1."""
    from numpy.polynomial.legendre import leggauss

    nodes, weights = leggauss(number)
    return nodes, weights
