"""The GPU report of any folder: a matrix of kmatrix, or recordings of the original project."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.packing import usable_cores
from kmatrix.records.files import finite
from kmatrix.records.paths import MatrixDir, RunDir, matrix_dirs
from kmatrix.records.runs import Status
from kmatrix.report.gpu.measure import TrainingTotals, gpu_of
from kmatrix.report.gpu.recordings import PATTERNS, text_recordings
from kmatrix.report.gpu.results import RecordedRun
from kmatrix.report.render import TEXT, environment, plain

LARGE_BYTES = 100_000_000  # of recordings: from there, they are read by a process per core


def find_recorded(target: Path | None, results_dir: Path) -> Path:
    """Return the given folder, or the newest matrix in `results_dir` that has a run.

    Raises RecordError if there is none.
    """
    if target is not None:
        if not target.is_dir():
            hint = "pass a matrix directory, or one with gpu_stats*.json"
            raise RecordError(f"{target} is not a directory", hint=hint)
        return target
    newest = [matrix.path for matrix in reversed(matrix_dirs(results_dir)) if _has_runs(matrix)]
    if not newest:
        raise RecordError(
            f"no matrix in {results_dir.resolve()}",
            why="no test_matrix_results_* directory has a run",
            hint="pass a matrix directory, or run `make test-matrix`",
        )
    return newest[0]


def read_folder(folder: Path) -> tuple[str, Path, list[RecordedRun]]:
    """Return the name of a folder, the parent directory of its runs, and the runs.

    Raises RecordError if there is no recording.
    """
    folder = folder.resolve()
    matrix = MatrixDir(folder)
    if matrix.matrix_json.is_file():
        name, root, runs = matrix.name, folder, _of_matrix(matrix)
    elif text_recordings(folder):
        name, root, runs = folder.name, folder.parent, [_foreign(folder, {})]
    else:
        name, root, runs = folder.name, folder, _foreign_runs(folder)
    if not any(run.gpu for run in runs):
        raise RecordError(
            f"no GPU recording in {folder}",
            why=f"no run has gpu_samples.bin, {' or '.join(PATTERNS[1:])}",
            hint="set GPU_MONITOR=y for the next matrix, or pass another directory",
        )
    return name, root, runs


def summarize(folder: Path) -> str:
    """Return the consolidated GPU report of a folder. Raises RecordError if it has no recording."""
    name, _, runs = read_folder(folder)
    template: Any = environment(TEXT).get_template("gpu.txt.j2").module
    return plain(str(template.consolidated(name, runs))).lstrip("\n")


def _of_matrix(matrix: MatrixDir) -> list[RecordedRun]:
    """Return the runs of a matrix of kmatrix."""
    from kmatrix.report.analyse import analyse

    runs = analyse(matrix).runs
    return [RecordedRun(name=run.name, optimizer=run.optimizer, status=str(run.status), gpu=run.gpu) for run in runs]


def _foreign_runs(folder: Path) -> list[RecordedRun]:
    """Return the runs in all_results.json of the original project, then every other folder with a recording."""
    try:
        entries = json.loads((folder / "all_results.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        entries = []
    results = {str(one["test_id"]): one for one in entries if isinstance(one, dict) and one.get("test_id")}
    named = [name for name in results if (folder / name).is_dir()]
    recorded = sorted({path.parent.name for pattern in PATTERNS for path in folder.glob(f"*/{pattern}")})
    names = list(dict.fromkeys(named + recorded))  # listed runs first, in their order
    folders, entries = [folder / name for name in names], [results.get(name, {}) for name in names]
    size = sum(path.stat().st_size for one in folders for path in text_recordings(one)[:1])
    if len(names) == 1 or size < LARGE_BYTES:
        return list(map(_foreign, folders, entries))
    # Not forked: libraries of this process may have threads.
    with ProcessPoolExecutor(min(len(names), usable_cores()), get_context("spawn")) as pool:
        return list(pool.map(_foreign, folders, entries))


def _foreign(folder: Path, result: Mapping[str, Any]) -> RecordedRun:
    """Return a run of the original project. result: its entry in all_results.json."""
    tokens, success = finite(result.get("tokens")), result.get("success")
    totals = TrainingTotals(tokens=None if tokens is None else int(tokens), seconds=finite(result.get("elapsed_time")))
    _, _, optimizer = folder.name.partition("_")  # gpt2_adamw_magnitude_50
    return RecordedRun(
        name=folder.name,
        optimizer=str(result.get("optimizer") or optimizer.partition("_")[0]),
        status=str(Status.FINISHED if success else Status.FAILED) if isinstance(success, bool) else "",
        gpu=gpu_of(RunDir(folder), totals),
    )


def _has_runs(matrix: MatrixDir) -> bool:
    return matrix.matrix_json.is_file() or any(any(matrix.path.glob(f"*/{name}")) for name in PATTERNS)
