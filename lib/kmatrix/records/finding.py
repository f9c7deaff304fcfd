"""Which folder of a matrix is meant: a path, a name below the folder of results, or the newest."""

from __future__ import annotations

from pathlib import Path

from kmatrix.errors import RecordError
from kmatrix.records import MATRIX_PREFIX, MatrixDir, matrix_dirs


def find_matrix(results_dir: Path, target: str | None, argument: str = "TARGET") -> MatrixDir:
    """Return the matrix that TARGET names: a path, or a name below the folder of results; the newest by default.

    argument: what the command calls it.  Raises RecordError when there is none.
    """
    there = [matrix for matrix in matrix_dirs(results_dir) if _is_matrix(matrix)]
    if target:
        for path in (Path(target).expanduser(), results_dir / target):
            if _is_matrix(MatrixDir(path)):
                return MatrixDir(path.resolve())
        newest = ", ".join(matrix.name for matrix in there[:-6:-1])
        raise RecordError(
            f"{argument}={target} is not the folder of a matrix",
            why=f"the newest of {len(there)} in {results_dir}: {newest}" if there else f"{results_dir} holds no matrix",
            fix=f"pass {argument}=<one of these, or a path>" if there else "run `make test-matrix` to make one",
        )
    if not there:
        raise RecordError(
            f"{results_dir} holds no matrix",
            why=f"no folder {MATRIX_PREFIX}* in it has a matrix.json or a run",
            fix="run `make test-matrix` to make one, or pass TARGET=<folder of a matrix>",
        )
    return there[-1]


def _is_matrix(matrix: MatrixDir) -> bool:
    return matrix.matrix_json.is_file() or any(matrix.path.glob("*/run.json"))
