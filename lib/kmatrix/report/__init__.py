"""Run directories -> numbers -> summary, results and graphs. Reads files; changes no run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kmatrix.errors import RecordError
from kmatrix.records import MatrixDir, write_text
from kmatrix.records.finding import find_matrix
from kmatrix.report.analysis import analyse
from kmatrix.report.files import write_all_results, write_results
from kmatrix.report.gpu_report import gpu_runs, with_timeline
from kmatrix.report.gpu_text import gpu_sections
from kmatrix.report.judging import judging_section
from kmatrix.report.text import render_summary
from kmatrix.report.trackers import tracker_section

__all__ = ["analyse", "draw_graphs", "find_matrix", "update_graphs", "write_summary"]

T = TypeVar("T")


def write_summary(matrix: MatrixDir) -> str:
    """Write summary_report.txt, results.json and all_results.json from the runs alone; return the first's text.

    Graphs that are there are named at the end of the text: draw them first.
    """
    numbers = analyse(matrix)
    graphs = sorted(path.relative_to(matrix.path).as_posix() for path in matrix.graphs.glob("*.png"))
    files = [matrix.summary.name, matrix.results.name, matrix.all_results.name, *graphs]
    sections = [*judging_section(numbers.runs), *gpu_sections(gpu_runs(numbers)), *tracker_section(matrix)]
    text = render_summary(numbers, files, sections)
    _write(matrix, lambda: write_results(matrix, numbers))
    _write(matrix, lambda: write_all_results(matrix, numbers))
    _write(matrix, lambda: write_text(matrix.summary, text))
    return text


def draw_graphs(matrix: MatrixDir) -> tuple[list[Path], list[str]]:
    """Draw every graph that there are data for; return the files, and a sentence for each that was not drawn."""
    from kmatrix.report import gpu_graphs, graphs

    numbers = analyse(matrix)
    files, missing = _write(matrix, lambda: graphs.draw(numbers, matrix.graphs))
    runs = [with_timeline(matrix.path, run) for run in gpu_runs(numbers)]
    more, left_out = _write(matrix, lambda: gpu_graphs.draw(matrix.name, runs, matrix.graphs))
    return files + more, missing + left_out


def update_graphs(matrix: MatrixDir) -> list[Path]:
    """Draw every graph that there are data for, and return the files."""
    return draw_graphs(matrix)[0]


def _write(matrix: MatrixDir, action: Callable[[], T]) -> T:
    """Write files of the report; a full disk or a folder that is not ours is said as such."""
    try:
        return action()
    except OSError as error:
        raise RecordError(
            f"the report of {matrix.name} cannot be written",
            why=f"{error.filename or matrix.path}: {error.strerror or error}",
            fix="make room or mend the permissions, then run `make summary` again: the runs are untouched",
        ) from None
