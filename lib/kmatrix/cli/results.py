"""The commands that report: summary and graphs, from the run directories alone."""

from __future__ import annotations

import os
from pathlib import Path

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import ROOT, config_path, shown
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


def find_target(arguments: Arguments) -> MatrixDir:
    """Return the matrix that TARGET= names, the newest by default."""
    from kmatrix.report import find_matrix

    return find_matrix(_results_dir(arguments), arguments.get("TARGET") or None)


def _results_dir(arguments: Arguments) -> Path:
    """RESULTS_DIR= of the command line, else of .config, else the project's root."""
    text = arguments.get("RESULTS_DIR")
    if text:
        return Path(text).expanduser()
    path = config_path(arguments)
    if path.exists():
        from kmatrix.cli.session import open_tree
        from kmatrix.kconfig import read_assignments

        for item in read_assignments(open_tree(arguments), path):
            if item.name == "RESULTS_DIR":
                return Path(os.path.normpath(ROOT / Path(item.value).expanduser()))
    return ROOT
