"""The GPU report of any folder: a matrix of kmatrix, or recordings of the original project."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records.files import finite
from kmatrix.records.paths import MatrixDir, RunDir, matrix_dirs
from kmatrix.records.runs import Status
from kmatrix.report.analyse import analyse
from kmatrix.report.gpu.measure import gpu_of
from kmatrix.report.gpu.recordings import PATTERNS, recordings_of, text_recordings
from kmatrix.report.gpu.timeline import Timeline, timeline_of
from kmatrix.report.read import of_each
from kmatrix.report.render import TEXT, environment, plain
from kmatrix.report.results import Run


def find_recorded(target: Path | None, results_dir: Path) -> Path:
    """Return the given folder, or the newest matrix in `results_dir` with a run. Raises RecordError without one."""
    begun = [one.path for one in matrix_dirs(results_dir) if one.matrix_json.is_file() or _recorded_in(one.path)]
    found = target or (begun[-1] if begun else None)
    if found is None or not found.is_dir():
        what = f"{found} is not a directory" if found else f"no matrix in {results_dir.resolve()} has a run"
        raise RecordError(what, hint="pass a matrix directory, or one with gpu_stats*.json")
    return found


def read_folder(folder: Path) -> tuple[Path, Sequence[Run], Mapping[str, Timeline | None]]:
    """Return the folder that contains the runs of a matrix, of a folder, or of its parent; the runs; those over time.

    The runs of a matrix are not read over time. Raises RecordError if there is no recording.
    """
    root = folder = folder.resolve()
    if MatrixDir(folder).matrix_json.is_file():
        runs, timelines = list(analyse(MatrixDir(folder)).runs), {}
    else:
        root = folder.parent if text_recordings(folder) else folder
        found = [_foreign((folder, {}))] if text_recordings(folder) else _foreign_runs(folder)
        runs, timelines = [run for run, _ in found], {run.name: one for run, one in found}
    if not any(run.gpu for run in runs):
        raise RecordError(f"no GPU recording in {folder}", hint="set GPU_MONITOR=y for the next matrix")
    return root, runs, timelines


def summarize(folder: Path) -> str:
    """Return the consolidated GPU report of a folder. Raises RecordError if it has no recording."""
    root, runs, _ = read_folder(folder)
    template: Any = environment(TEXT).get_template("gpu.txt.j2").module
    return plain(str(template.consolidated(root.name, runs))).lstrip("\n")


def _foreign_runs(folder: Path) -> list[tuple[Run, Timeline | None]]:
    """Return all runs in a folder, also those that all_results.json of the original project lists."""
    try:
        entries = json.loads((folder / "all_results.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        entries = []
    results = {str(one["test_id"]): one for one in entries if isinstance(one, dict) and one.get("test_id")}
    folders = sorted(_recorded_in(folder) | {folder / name for name in results if (folder / name).is_dir()})
    size = sum(path.stat().st_size for one in folders for path in text_recordings(one)[:1])
    return of_each(_foreign, [(path, results.get(path.name, {})) for path in folders], size)


def _recorded_in(folder: Path) -> set[Path]:
    return {path.parent for pattern in PATTERNS for path in folder.glob(f"*/{pattern}")}


def _foreign(found: tuple[Path, Mapping[str, Any]]) -> tuple[Run, Timeline | None]:
    """Return a run of the original project, also over time. found: its folder, and its entry in all_results.json."""
    folder, result = found
    tokens, nodes = finite(result.get("tokens")), recordings_of(RunDir(folder))
    tokens = None if tokens is None else int(tokens)
    _, _, optimizer = folder.name.partition("_")  # gpt2_adamw_magnitude_50
    run = Run(
        name=folder.name,
        optimizer=str(result.get("optimizer") or optimizer.partition("_")[0]),
        status=Status.FAILED if result.get("success") is False else Status.FINISHED,
        gpu=gpu_of(RunDir(folder), nodes, tokens=tokens, seconds=finite(result.get("elapsed_time"))),
    )
    return run, timeline_of(nodes)
