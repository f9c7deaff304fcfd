"""Plan, make and run a matrix from Python: docs/from-python.md. Nothing here prints; errors are KmatrixError."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmatrix.experiment.make import make_matrix
    from kmatrix.experiment.plan import plan_matrix
    from kmatrix.experiment.run import run_matrix

__all__ = ["make_matrix", "plan_matrix", "run_matrix"]

_MODULES = {"plan_matrix": "plan", "make_matrix": "make", "run_matrix": "run"}


def __getattr__(name: str) -> object:
    """Import a function on its first use.

    `make defconfig-x` imports a module of this package too, and must not pay for the engine and the trackers.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
