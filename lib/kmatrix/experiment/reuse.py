"""Reuse finished runs of other matrices: copy their results instead of training again.

A run is reused only if the result would be the same: configuration, data, trainer code, torch, kind of device.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kmatrix.clock import clock
from kmatrix.errors import RecordError
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, End
from kmatrix.records.matrix import run_files
from kmatrix.records.paths import matrix_dirs
from kmatrix.records.runs import RunFile, Status
from kmatrix.status.fold import FINISHED, Files
from kmatrix.status.look import look

PLACES = frozenset({"init_from", "data_path"})  # fields that say where files are


def reuse_runs(
    matrix: Path, results_dir: Path, runs: Mapping[str, Mapping[str, Any]], neutral: Collection[str]
) -> dict[str, str]:
    """Copy the result of every run that has finished in another matrix below `results_dir`; return run -> source.

    runs: run -> what its run.json will have.  neutral: fields of the trainer that cannot change a result.
    """
    names = {run["run_id"]: name for name, run in runs.items()}
    reused: dict[str, str] = {}
    for other in reversed(matrix_dirs(results_dir)):  # newest first
        if other.path.resolve() == matrix.resolve():
            continue
        try:
            seen, records = look(other.path), run_files(other.path)
        except RecordError:
            continue  # a damaged matrix has nothing to reuse
        for source, state in seen.states.items():
            files, theirs = seen.files[source], records[source]
            name = names.get(files.run_id)
            if name is None or name in reused or state.status is not Status.FINISHED:
                continue
            if _is_equal(runs[name], theirs, files, neutral):
                reused[name] = theirs.reused_from or f"{other.name}/{source}"
                _copy(other.path / source, matrix / name, files.attempts[-1].number, reused[name])
    return reused


def _is_equal(ours: Mapping[str, Any], theirs: RunFile, files: Files, neutral: Collection[str]) -> bool:
    """Return whether a run would have the result of another one."""
    asked, here, there = ours["train"], ours["provenance"], theirs.provenance
    return (
        all(asked[name] == files.train.get(name) for name in asked if name not in PLACES and name not in neutral)
        and here["code"] == (files.attempts[-1].code or there.get("code"))
        and here["versions"].get("torch") == (there.get("versions") or {}).get("torch")
        and _devices(here, asked) == _devices(there, asked)
    )


def _devices(about: Mapping[str, Any], train: Mapping[str, Any]) -> list[str]:
    """Return the names of the devices of a run."""
    if train["device"] == "cuda":
        return [str(gpu.get("name")) for gpu in about.get("gpus") or []][: train["num_gpus"]]
    return [str(about.get("cpu"))]


def _copy(source: Path, run: Path, number: int, name: str) -> None:
    """Copy the result and the metrics of a finished run into the folder of another. It took no time there."""
    attempts.folder(run).mkdir(parents=True)
    for file in ("metrics.jsonl", "result.json"):
        if (source / file).is_file() and not (source / file).is_symlink():
            shutil.copy2(source / file, run / file)
    end = End(kind=FINISHED, reason=f"reused from {name}", at=clock.now())
    attempts.write(run, Attempt(number=number, started=clock.now(), end=end))
