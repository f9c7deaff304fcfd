"""A matrix of ours, or a folder of the original project's, -> its runs with their GPUs, and the reports on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records import MatrixDir, RunDir, Status, matrix_dirs
from kmatrix.report.analysis import analyse
from kmatrix.report.gpu import PATTERNS, Work, read_gpu, recordings
from kmatrix.report.gpu import with_timeline as timed
from kmatrix.report.gpu_text import consolidated
from kmatrix.report.gpu_values import RunGpus
from kmatrix.report.reading import finite
from kmatrix.report.values import MatrixNumbers


def gpu_runs(numbers: MatrixNumbers) -> list[RunGpus]:
    """Return the runs of a matrix beside what was recorded of them."""
    return [
        RunGpus(name=run.name, optimizer=run.optimizer, status=str(run.status), gpu=run.gpu) for run in numbers.runs
    ]


def with_timeline(root: Path, run: RunGpus) -> RunGpus:
    """Return a run with its memory over time. root: the folder of its matrix."""
    return run if run.gpu is None else replace(run, gpu=timed(RunDir(root / run.name), run.gpu))


def find_recorded(target: Path | None, results_dir: Path) -> Path:
    """Return the folder that is asked for, or the newest matrix with a recording, else the newest with a run.

    Raises RecordError when there is no such folder, or nothing in it was recorded.
    """
    if target is not None:
        if not target.is_dir():
            raise RecordError(
                f"{target} is not a folder", fix="name the folder of a matrix, or of runs with gpu_stats*.json"
            )
        return target
    newest = [matrix.path for matrix in reversed(matrix_dirs(results_dir)) if _has_runs(matrix)]
    if not newest:
        raise RecordError(
            f"{results_dir.resolve()} holds no matrix",
            why="no folder test_matrix_results_* in it has a run",
            fix="name the folder of a matrix, or run `make test-matrix` to make one",
        )
    return newest[0]


def read_folder(folder: Path) -> tuple[str, Path, list[RunGpus]]:
    """Return the name of a folder, where its runs lie, and the runs: of a matrix of ours, or of foreign recordings.

    Raises RecordError when nothing was recorded there.
    """
    folder = folder.resolve()
    matrix = MatrixDir(folder)
    if matrix.matrix_json.is_file() or any(folder.glob("*/run.json")):
        name, root, runs = matrix.name, folder, gpu_runs(analyse(matrix))
    elif recordings(folder):
        name, root, runs = folder.name, folder.parent, [_foreign(folder, {})]
    else:
        name, root, runs = folder.name, folder, _foreign_runs(folder)
    if not any(run.gpu for run in runs):
        raise RecordError(
            f"{folder} holds no recording of GPUs",
            why=f"no run in it has gpu_summary.json, {' or '.join(PATTERNS[1:])}",
            fix="record the next matrix with GPU_MONITOR=y, or name another folder",
        )
    return name, root, runs


def summarize(folder: Path) -> str:
    """Return the consolidated report on a folder."""
    name, _, runs = read_folder(folder)
    return consolidated(name, runs)


def draw_memory(folder: Path, output: Path | None) -> tuple[list[Path], list[str]]:
    """Draw the four graphs on GPUs into `output`, or into the folder's graphs/; see gpu_graphs.draw."""
    from kmatrix.report import gpu_graphs

    name, root, runs = read_folder(folder)
    target = output or folder / "graphs"
    try:
        return gpu_graphs.draw(name, [with_timeline(root, run) for run in runs], target)
    except OSError as error:
        raise RecordError(
            f"the graphs of {name} cannot be written",
            why=f"{error.filename or target}: {error.strerror or error}",
            fix="make room, mend the permissions, or name another folder: --output DIR",
        ) from None


def _foreign_runs(folder: Path) -> list[RunGpus]:
    """Return the runs that the original's list of results names, then every other folder with a recording."""
    entries = _json(folder / "all_results.json")
    results = {
        str(entry.get("test_id")): entry for entry in entries if isinstance(entry, dict) and entry.get("test_id")
    }
    named = [name for name in results if (folder / name).is_dir()]
    there = sorted({path.parent.name for pattern in PATTERNS for path in folder.glob(f"*/{pattern}")})
    return [_foreign(folder / name, results.get(name, {})) for name in dict.fromkeys(named + there)]


def _foreign(folder: Path, result: Mapping[str, Any]) -> RunGpus:
    """Return a run that left no record of ours."""
    own = _json(folder / "training_metrics.json")
    about = {**(own if isinstance(own, dict) else {}), **result}
    tokens = finite(about, "tokens")
    work = Work(tokens=None if tokens is None else int(tokens), seconds=finite(about, "elapsed_time"))
    success = about.get("success")
    status = (
        {True: str(Status.FINISHED), False: str(Status.FAILED)}.get(success, "") if isinstance(success, bool) else ""
    )
    return RunGpus(
        name=folder.name,
        optimizer=str(about.get("optimizer") or _optimizer(folder.name)),
        status=status,
        gpu=read_gpu(RunDir(folder), work),
    )


def _optimizer(name: str) -> str:
    """Return the optimizer of a folder like gpt2_adamw_magnitude_50: what follows the model."""
    parts = name.split("_")
    return parts[1] if len(parts) > 1 else ""


def _json(path: Path) -> Any:
    """Return what a file of the original holds; an empty list where there is none, or it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []


def _has_runs(matrix: MatrixDir) -> bool:
    files = ("run.json", *PATTERNS)
    return matrix.matrix_json.is_file() or any(any(matrix.path.glob(f"*/{name}")) for name in files)
