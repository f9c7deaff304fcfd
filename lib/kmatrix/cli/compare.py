"""The command that holds two matrices, or two runs, together."""

from __future__ import annotations

import json
from pathlib import Path

from kmatrix.cli.again import yes
from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import open_tree
from kmatrix.cli.targets import results_dir
from kmatrix.errors import ConfigError
from kmatrix.records import SCHEMA, MatrixDir, RunDir
from kmatrix.records.finding import find_matrix
from kmatrix.report.files import clean

EXAMPLE = "pass BASE=<matrix or run> NEW=<matrix or run>"


def compare(arguments: Arguments) -> int:
    """Print what was set differently in two matrices or two runs, and what may be said of their numbers."""
    from kmatrix.report.compare import compared, side_of_matrix, side_of_run, to_json
    from kmatrix.report.compare_text import render

    base, new = (_named(arguments, name) for name in ("BASE", "NEW"))
    if type(base) is not type(new):
        kinds = ["a run" if isinstance(one, RunDir) else "a matrix" for one in (base, new)]
        raise ConfigError(
            f"BASE= is {kinds[0]} and NEW= {kinds[1]}",
            why="two matrices are compared, or two runs",
            fix="name a run of the matrix by its folder, <matrix>/<run>",
        )
    sides = [side_of_run(one) if isinstance(one, RunDir) else side_of_matrix(one) for one in (base, new)]
    tree = open_tree(arguments)
    neutral = {*tree.neutral, *tree.neutral_unless}
    found = compared(sides[0], sides[1], neutral, one=isinstance(base, RunDir))
    if yes(arguments, "JSON"):
        print(json.dumps(clean({"schema": SCHEMA, **to_json(found)}), indent=2))
    else:
        print(render(found), end="")
    return 0


def _named(arguments: Arguments, name: str) -> MatrixDir | RunDir:
    """Return the run or the matrix that BASE= or NEW= names: a path, or a name below the folder of results."""
    text = arguments.get(name)
    if not text:
        raise ConfigError(f"compare needs {name}=", fix=EXAMPLE)
    below = results_dir(arguments)
    for path in (Path(text).expanduser(), below / text):
        if RunDir(path).run_json.is_file():
            return RunDir(path.resolve())
    return find_matrix(below, text, name)
