"""The GPU report of any folder: a matrix of kmatrix, or recordings of the original project."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records.files import finite
from kmatrix.records.paths import MatrixDir, RunDir, matrix_dirs
from kmatrix.records.runs import Status
from kmatrix.report.analyse import analyse
from kmatrix.report.gpu.measure import TrainingTotals, gpu_of
from kmatrix.report.gpu.recordings import PATTERNS, recordings_of, text_recordings
from kmatrix.report.gpu.results import RecordedRun
from kmatrix.report.gpu.timeline import Timeline, timeline_of
from kmatrix.report.read import of_each
from kmatrix.report.render import TEXT, environment, plain
from kmatrix.report.results import Results


def find_recorded(target: Path | None, results_dir: Path) -> Path:
    """Return the given folder, or the newest matrix in `results_dir` with a run. Raises RecordError without one."""
    begun = [one.path for one in matrix_dirs(results_dir) if one.matrix_json.is_file() or _recorded_in(one.path)]
    found = target or (begun[-1] if begun else None)
    if found is None or not found.is_dir():
        what = f"{found} is not a directory" if found else f"no matrix in {results_dir.resolve()} has a run"
        raise RecordError(what, hint="pass a matrix directory, or one with gpu_stats*.json")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFolder:
    """The runs of a folder."""

    name: str
    runs: Sequence[RecordedRun]
    timeline: Callable[[RecordedRun], Timeline | None]  # of a run


def folder_of(root: Path, results: Results) -> RecordedFolder:
    """Return the runs of a matrix. root: its directory."""

    def timeline(run: RecordedRun) -> Timeline | None:
        return timeline_of(recordings_of(RunDir(root / run.name)), running=run.status == Status.RUNNING)

    runs = [RecordedRun(name=run.name, optimizer=run.optimizer, status=run.status, gpu=run.gpu) for run in results.runs]
    return RecordedFolder(name=results.name, runs=runs, timeline=timeline)


def read_folder(folder: Path) -> RecordedFolder:
    """Return the runs of a folder. Raises RecordError if there is no recording."""
    folder = folder.resolve()
    matrix = MatrixDir(folder)
    if matrix.matrix_json.is_file():
        found = folder_of(folder, analyse(matrix))
    else:
        pairs = _foreign_runs(folder)
        timelines = {run.name: timeline for run, timeline in pairs}
        runs = [run for run, _ in pairs]
        found = RecordedFolder(name=folder.name, runs=runs, timeline=lambda run: timelines[run.name])
    if not any(run.gpu for run in found.runs):
        raise RecordError(f"no GPU recording in {folder}", hint="set GPU_MONITOR=y for the next matrix")
    return found


def summarize(folder: Path) -> str:
    """Return the consolidated GPU report of a folder. Raises RecordError if it has no recording."""
    found = read_folder(folder)
    template: Any = environment(TEXT).get_template("gpu.txt.j2").module
    return plain(str(template.consolidated(found.name, found.runs))).lstrip("\n")


def _foreign_runs(folder: Path) -> list[tuple[RecordedRun, Timeline | None]]:
    """Return the run in a folder; else all in it, also those that all_results.json of the original project lists."""
    if text_recordings(folder):
        return [_foreign((folder, {}))]
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


def _foreign(found: tuple[Path, Mapping[str, Any]]) -> tuple[RecordedRun, Timeline | None]:
    """Return a run of the original project over time. found: its folder, and its entry in all_results.json."""
    folder, result = found
    tokens, success = finite(result.get("tokens")), result.get("success")
    totals = TrainingTotals(tokens=None if tokens is None else int(tokens), seconds=finite(result.get("elapsed_time")))
    _, _, optimizer = folder.name.partition("_")  # gpt2_adamw_magnitude_50
    recordings = recordings_of(RunDir(folder))
    run = RecordedRun(
        name=folder.name,
        optimizer=str(result.get("optimizer") or optimizer.partition("_")[0]),
        status=str(Status.FINISHED if success else Status.FAILED) if isinstance(success, bool) else "",
        gpu=gpu_of(RunDir(folder), totals, recordings),
    )
    return run, timeline_of(recordings)
