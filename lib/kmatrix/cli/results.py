"""The commands that report results: pages, summary, graphs and compare. They read only the run directories."""

from __future__ import annotations

import sys
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import find_named, find_target, results_dir
from kmatrix.errors import ConfigError, RecordError
from kmatrix.kconfig.tree import Tree
from kmatrix.records.paths import MatrixDir, RunDir, is_matrix, matrix_dirs
from kmatrix.report.analyse import analyse
from kmatrix.report.compare import compare as compare_sides
from kmatrix.report.compare import comparison_text, side_of
from kmatrix.report.page import write_gallery, write_page
from kmatrix.report.write import draw_graphs, indented, schema, write_summary
from kmatrix.text import first_names, shown

EXAMPLE = "pass BASE=<matrix or run> NEW=<matrix or run>"


def summary(arguments: Arguments) -> int:
    """Write the page and the texts of a matrix, and print the summary."""
    matrix = find_target(arguments)
    results = analyse(matrix)
    path = write_page(matrix, results)
    print(write_summary(matrix, results))
    print(f"wrote {shown(path)}", file=sys.stderr)  # stdout has the summary alone
    return 0


def gallery(arguments: Arguments) -> int:
    """Write gallery.html into RESULTS_DIR=: a page about the newest matrices there."""
    folder = results_dir(arguments)
    if not (chosen := list(reversed(matrix_dirs(folder)))):
        raise RecordError(
            f"no matrix in {folder.resolve()}",
            why="no test_matrix_results_* directory is there" if folder.is_dir() else "it is not a folder",
            hint="pass RESULTS_DIR=<folder of matrices>",
        )
    print(f"wrote {shown(write_gallery(folder, chosen))}")
    return 0


def results_schema(_: Arguments) -> int:
    """Print the JSON Schema of results.json."""
    print(schema().decode(), end="")
    return 0


def graphs(arguments: Arguments) -> int:
    """Draw the graphs from the run directories."""
    matrix = find_target(arguments)
    files, notes = draw_graphs(matrix, analyse(matrix))
    for path in files:
        print(f"wrote {shown(path)}")
    for note in notes:
        print(f"note: {note}")
    return 0


def compare(arguments: Arguments) -> int:
    """Print the different settings of two matrices or two runs, and a comparison of their results.

    With FAIL_ON=worse the exit status is 1 if the final loss of any configuration is worse in NEW=, or if all of its
    runs there failed or diverged. Raises ConfigError (2) if there was nothing to test.
    """
    fail_on = arguments.get("FAIL_ON")
    base, new = (_named(arguments, name) for name in ("BASE", "NEW"))
    if type(base) is not type(new):  # a run and a matrix
        kinds = ["a run" if isinstance(one, RunDir) else "a matrix" for one in (base, new)]
        raise ConfigError(
            f"cannot compare {kinds[0]} (BASE=) with {kinds[1]} (NEW=)",
            why="compare needs two matrices or two runs",
            hint="pass a run of the matrix as <matrix>/<run>",
        )
    if base.path == new.path:
        print("note: BASE= and NEW= are the same, so no difference can be found", file=sys.stderr)
    sides = [
        side_of(MatrixDir(one.path.parent), one.name) if isinstance(one, RunDir) else side_of(one)
        for one in (base, new)
    ]
    found = compare_sides(sides[0], sides[1], Tree.parse().neutral)
    text = indented(found).decode() if arguments.is_on("JSON") else comparison_text(found)
    print(text, end="")
    if not fail_on or found.worse:
        return 1 if fail_on else 0
    if found.untested:
        names = first_names([repr(one) for one in found.untested])  # they have commas
        if len(found.untested) == len(found.configurations) + len(found.only_in_base):
            raise ConfigError(
                "FAIL_ON=worse: no final loss could be tested",
                why=f"{names}: a test needs two finished runs on both sides, on the same data",
                hint="add further seeds to both matrices (`make add TARGET=<matrix> SEED=<seeds>`)",
            )
        print(f"FAIL_ON=worse: not tested: {names}", file=sys.stderr)
    return 0


def _named(arguments: Arguments, name: str) -> MatrixDir | RunDir:
    """Return the run or matrix of BASE= or NEW=, given as a path or as a name in the results folder."""
    text = arguments.get(name)
    if not text:
        raise ConfigError(f"compare needs {name}=", hint=EXAMPLE)
    # A path relative to the current directory has priority over a name below RESULTS_DIR.
    below = results_dir(arguments)
    for path in (Path(text).expanduser(), below / text):
        if RunDir(path).run_json.is_file():
            return RunDir(path.resolve())
        if is_matrix(matrix := MatrixDir(path.parent)) and not is_matrix(MatrixDir(path)):
            raise RecordError(
                f"{name}={text}: no run {path.name} in {shown(matrix.path)}",
                why=f"its runs are {first_names(run.name for run in matrix.runs())}",
                hint=EXAMPLE,
            )
    return find_named(below, text, name)
