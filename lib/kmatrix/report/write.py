"""Write the reports of a matrix into its directory: page, summary, results and graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kmatrix.errors import RecordError
from kmatrix.records.files import write_text
from kmatrix.records.paths import MatrixDir
from kmatrix.report import graphs
from kmatrix.report.folders import with_timelines
from kmatrix.report.formats.junit import write_junit
from kmatrix.report.formats.results_csv import write_csv
from kmatrix.report.formats.results_json import write_all_results, write_results
from kmatrix.report.formats.results_md import write_markdown
from kmatrix.report.gpu.graphs import device_timelines
from kmatrix.report.gpu.graphs import matrix as gpu_graphs
from kmatrix.report.numbers import MatrixNumbers, gpu_runs
from kmatrix.report.page import assemble
from kmatrix.report.summary import render_summary, tracker_lines
from kmatrix.text import make_command

T = TypeVar("T")


def write_summary(numbers: MatrixNumbers) -> str:
    """Write the summary and the files for other programs; return the text of the summary.

    The summary lists the page and the graphs that exist: make them first.
    """
    matrix = MatrixDir(numbers.path)
    drawn = sorted(path.relative_to(matrix.path).as_posix() for path in matrix.graphs.glob("*.png"))
    page = [matrix.page.name] if matrix.page.exists() else []
    writers: dict[Path, Callable[[], None]] = {
        matrix.results: lambda: write_results(matrix, numbers),
        matrix.all_results: lambda: write_all_results(matrix, numbers),
        matrix.report_md: lambda: write_markdown(matrix.report_md, numbers),
        matrix.results_csv: lambda: write_csv(matrix.results_csv, numbers),
        matrix.junit: lambda: write_junit(matrix.junit, numbers),
    }
    files = [matrix.summary.name, *(path.name for path in writers), *page, *drawn]
    text = render_summary(numbers, tracker_lines(matrix), files)
    # The summary last: it refers to the other files.
    for write in (*writers.values(), lambda: write_text(matrix.summary, text)):
        _write(matrix, write)
    return text


def write_page(numbers: MatrixNumbers) -> Path:
    """Write report.html, and return its path."""
    return _write(MatrixDir(numbers.path), lambda: assemble.write_page(numbers))


def draw_graphs(numbers: MatrixNumbers) -> tuple[list[Path], list[str]]:
    """Draw every graph that has data; return the files, and the reason for each graph that was not drawn."""
    matrix = MatrixDir(numbers.path)
    files, missing = _write(matrix, lambda: graphs.draw(numbers, matrix.graphs))
    runs = gpu_runs(numbers)
    timed = with_timelines(matrix.path, runs)
    more, more_missing = _write(matrix, lambda: gpu_graphs.draw(matrix.name, timed, matrix.graphs))
    over_time, none_over_time = _write(
        matrix, lambda: device_timelines.draw(matrix.name, runs, matrix.path, matrix.graphs)
    )
    return [*files, *over_time, *more], [*missing, *none_over_time, *more_missing]


def _write(matrix: MatrixDir, action: Callable[[], T]) -> T:
    """Call `action`. Raises RecordError if the disk is full or the directory is not writable."""
    try:
        return action()
    except OSError as error:
        again = make_command("summary", matrix.path)
        raise RecordError(
            f"the report of {matrix.name} cannot be written",
            why=f"{error.filename or matrix.path}: {error.strerror or error}",
            hint=f"free disk space or fix the permissions, then run `{again}`: the runs are not affected",
        ) from None
