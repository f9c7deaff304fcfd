"""GPU reports of any folder: a matrix of kmatrix, or recordings of the original project."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records.files import finite
from kmatrix.records.paths import MatrixDir, RunDir, matrix_dirs
from kmatrix.records.runs import Status
from kmatrix.report.gpu.numbers import RunGpus
from kmatrix.report.gpu.read_gpu import PATTERNS, TrainingTotals, add_timeline, read_gpu, recordings
from kmatrix.report.gpu.text import consolidated


def find_recorded(target: Path | None, results_dir: Path) -> Path:
    """Return the given folder, or the newest matrix in `results_dir` that has a run.

    Raises RecordError if there is none.
    """
    if target is not None:
        if not target.is_dir():
            raise RecordError(
                f"{target} is not a directory", hint="pass a matrix directory, or one with gpu_stats*.json"
            )
        return target
    newest = [matrix.path for matrix in reversed(matrix_dirs(results_dir)) if _has_runs(matrix)]
    if not newest:
        raise RecordError(
            f"no matrix in {results_dir.resolve()}",
            why="no test_matrix_results_* directory has a run",
            hint="pass a matrix directory, or run `make test-matrix`",
        )
    return newest[0]


def read_folder(folder: Path) -> tuple[str, Path, list[RunGpus]]:
    """Return the name of a folder, the parent directory of its runs, and the runs.

    Raises RecordError if there is no recording.
    """
    folder = folder.resolve()
    matrix = MatrixDir(folder)
    if matrix.matrix_json.is_file():
        from kmatrix.report.analysis import analyse_gpus

        name, root, runs = matrix.name, folder, analyse_gpus(matrix)
    elif recordings(folder):
        name, root, runs = folder.name, folder.parent, [_foreign(folder, {})]
    else:
        name, root, runs = folder.name, folder, _foreign_runs(folder)
    if not any(run.gpu for run in runs):
        raise RecordError(
            f"no GPU recording in {folder}",
            why=f"no run has gpu_summary.json, {' or '.join(PATTERNS[1:])}",
            hint="set GPU_MONITOR=y for the next matrix, or pass another directory",
        )
    return name, root, runs


def summarize(folder: Path) -> str:
    """Return the consolidated GPU report of a folder."""
    name, _, runs = read_folder(folder)
    return consolidated(name, runs)


def with_timelines(root: Path, runs: Sequence[RunGpus]) -> list[RunGpus]:
    """Add the memory timeline to each run. root: parent directory of the runs."""
    return [
        run if run.gpu is None else replace(run, gpu=add_timeline(RunDir(root / run.name), run.gpu)) for run in runs
    ]


def _foreign_runs(folder: Path) -> list[RunGpus]:
    """Return the runs in all_results.json of the original project, then every other folder with a recording."""
    entries = _json(folder / "all_results.json")
    results = {
        str(entry.get("test_id")): entry for entry in entries if isinstance(entry, dict) and entry.get("test_id")
    }
    named = [name for name in results if (folder / name).is_dir()]
    recorded = sorted({path.parent.name for pattern in PATTERNS for path in folder.glob(f"*/{pattern}")})
    # Listed runs first, in their order.
    return [_foreign(folder / name, results.get(name, {})) for name in dict.fromkeys(named + recorded)]


def _foreign(folder: Path, result: Mapping[str, Any]) -> RunGpus:
    """Return a run of the original project. result: its entry in all_results.json."""
    tokens = finite(result.get("tokens"))
    totals = TrainingTotals(tokens=None if tokens is None else int(tokens), seconds=finite(result.get("elapsed_time")))
    success = result.get("success")
    status = (
        {True: str(Status.FINISHED), False: str(Status.FAILED)}.get(success, "") if isinstance(success, bool) else ""
    )
    return RunGpus(
        name=folder.name,
        optimizer=str(result.get("optimizer") or _optimizer(folder.name)),
        status=status,
        gpu=read_gpu(RunDir(folder), totals),
    )


def _optimizer(name: str) -> str:
    """Return the second part of a name such as gpt2_adamw_magnitude_50."""
    parts = name.split("_")
    return parts[1] if len(parts) > 1 else ""


def _json(path: Path) -> Any:
    """Return the content of a JSON file of the original project; an empty list if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []


def _has_runs(matrix: MatrixDir) -> bool:
    return matrix.matrix_json.is_file() or any(any(matrix.path.glob(f"*/{name}")) for name in PATTERNS)
