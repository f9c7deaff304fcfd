"""Run directories -> Results, one value; and everything that is rendered from it: texts, page, pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kmatrix.report.analyse import analyse
    from kmatrix.report.page import write_page
    from kmatrix.report.write import draw_graphs, write_summary

__all__ = ["analyse", "draw_graphs", "write_page", "write_summary"]


def __getattr__(name: str) -> Any:
    """Return a function of this package. Imported on demand: a report on GPUs alone needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kmatrix.report.analyse import analyse
    from kmatrix.report.page import write_page
    from kmatrix.report.write import draw_graphs, write_summary

    found = {"analyse": analyse, "draw_graphs": draw_graphs, "write_page": write_page, "write_summary": write_summary}
    return found[name]
