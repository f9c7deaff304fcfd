"""Reuse finished runs of other matrices: copy their results instead of training again.

A run is reused only if its files would be the same: configuration, data, trainer code, torch, kind of device.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmatrix.clock import clock
from kmatrix.errors import RecordError
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, End
from kmatrix.records.matrix import run_files
from kmatrix.records.paths import matrix_dirs
from kmatrix.records.runs import Status
from kmatrix.status.fold import FINISHED
from kmatrix.status.look import look


def reuse_runs(matrix: Path, results_dir: Path, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Copy the result of every run that has finished in another matrix below `results_dir`; return run -> source.

    runs: run -> what its run.json will have.
    """
    names = {run["run_id"]: name for name, run in runs.items()}
    reused: dict[str, str] = {}
    for other in reversed(matrix_dirs(results_dir)):  # newest first
        try:
            seen, records = look(other.path), run_files(other.path)
        except RecordError:
            continue  # a damaged matrix has nothing to reuse
        for source, state in seen.states.items():
            files, theirs = seen.files[source], records[source]
            name = names.get(files.run_id, "")
            if not name or name in reused or state.status is not Status.FINISHED:
                continue
            ours, last = runs[name], files.attempts[-1]
            there = theirs.provenance | ({"code": last.code} if last.code else {})
            if _causes(ours["train"], ours["provenance"]) == _causes(files.train, there):
                reused[name] = theirs.reused_from or f"{other.name}/{source}"
                _copy(other.path / source, matrix / name, last.number, reused[name])
    return reused


def _causes(train: Mapping[str, Any], origin: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what decides the result of a run, and what is logged and saved of it."""
    gpus = [gpu.get("name") for gpu in origin.get("gpus") or ()][: train["num_gpus"]]
    return (
        dict(train),
        origin.get("code"),
        (origin.get("versions") or {}).get("torch"),
        gpus if train["device"] == "cuda" else origin.get("cpu"),
    )


def _copy(source: Path, run: Path, number: int, name: str) -> None:
    """Copy the result and the metrics of a finished run into the folder of another. It took no time there."""
    attempts.folder(run).mkdir(parents=True)
    for file in ("metrics.jsonl", "result.json"):
        if (source / file).is_file():
            shutil.copy2(source / file, run / file)
    end = End(kind=FINISHED, reason=f"reused from {name}", at=clock.now())
    attempts.write(run, Attempt(number=number, started=clock.now(), end=end))
