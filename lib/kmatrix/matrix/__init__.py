"""Symbols -> runs: expand the axes, cut what is illegal with its reason, collapse what is equal, name and identify.

Pure and deterministic: the same configuration gives the same runs, names and ids, in the same order.
Symbols are known by name here, never by meaning; arithmetic between them comes as rules from `kmatrix.config`.
"""

from kmatrix.matrix.axes import Axis, Point, plan_axes
from kmatrix.matrix.expand import Cut, Matrix, Run, expand, settle

__all__ = ["Axis", "Cut", "Matrix", "Point", "Run", "expand", "plan_axes", "settle"]
