"""Distances of colours as readers with colour blindness see them.

Simulation: Machado, Oliveira, Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency",
IEEE TVCG 15(6), 2009, matrices of severity 1.0 for linear RGB. Distance: CIE 1976 in CIELAB, white point D65.
"""

from __future__ import annotations

import numpy as np

_MATRICES = """
normal        1.0 0.0 0.0 0.0 1.0 0.0 0.0 0.0 1.0
protanopia    0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998
deuteranopia  0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881
tritanopia    1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900
"""
VISION = {line.split()[0]: np.array(line.split()[1:], float).reshape(3, 3) for line in _MATRICES.strip().splitlines()}
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)


def distance(one: str, other: str, vision: str) -> float:
    """Return the distance of two colours #RRGGBB in CIELAB."""
    return float(np.linalg.norm(_lab(one, vision) - _lab(other, vision)))


def _lab(colour: str, vision: str) -> np.ndarray:
    """Return a colour in CIELAB as it is seen."""
    parts = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    share = np.array(XYZ) @ np.clip(VISION[vision] @ linear, 0, 1) / WHITE
    x, y, z = np.where(share > 216 / 24389, np.cbrt(share), (24389 / 27 * share + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
