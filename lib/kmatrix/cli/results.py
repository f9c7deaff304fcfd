"""The commands that report: summary and graphs, from the run directories alone."""

from __future__ import annotations

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import shown
from kmatrix.cli.targets import find_target
from kmatrix.records import MatrixDir


def summary(arguments: Arguments) -> int:
    """Write summary_report.txt, results.json and all_results.json, and print the summary."""
    report(find_target(arguments), draw=False)
    return 0


def graphs(arguments: Arguments) -> int:
    """Draw the graphs again."""
    _draw(find_target(arguments))
    return 0


def report(matrix: MatrixDir, *, draw: bool) -> None:
    """Write and print everything that is made from a matrix's run directories."""
    from kmatrix.report import write_summary

    if draw:
        _draw(matrix)
    print(write_summary(matrix))


def _draw(matrix: MatrixDir) -> None:
    from kmatrix.report import draw_graphs

    files, sentences = draw_graphs(matrix)
    for path in files:
        print(f"wrote {shown(path)}")
    for sentence in sentences:
        print(f"note: {sentence}")
