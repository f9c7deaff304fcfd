"""Reuse finished runs of other matrices: copy their results instead of training again.

A run is reused only if the result would be the same: configuration, data, trainer code, torch, kind of device.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
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
    matrix: Path, results_dir: Path, records: Mapping[str, Mapping[str, Any]], neutral: Collection[str]
) -> dict[str, str]:
    """Copy the result of every run that has finished in another matrix below `results_dir`; return run -> source.

    records: run -> what its run.json will have.  neutral: fields of the trainer that cannot change a result.
    """
    known = list(_finished(results_dir, matrix, {record["run_id"] for record in records.values()}))
    reused: dict[str, str] = {}
    for name, record in records.items():
        for source, theirs, files in reversed(known):  # newest first
            if files.run_id == record["run_id"] and _is_equal(record, theirs, files, neutral):
                reused[name] = theirs.reused_from or f"{source.parent.name}/{source.name}"
                _copy(source, matrix / name, files.attempts[-1].number, reused[name])
                break
    return reused


def _finished(results_dir: Path, matrix: Path, ids: Collection[str]) -> Iterator[tuple[Path, RunFile, Files]]:
    """Yield the finished runs with these ids in other matrices, newest last."""
    for other in matrix_dirs(results_dir):
        if other.path.resolve() == matrix.resolve():
            continue
        try:
            seen, records = look(other.path), run_files(other.path)
        except RecordError:
            continue  # a damaged matrix has nothing to reuse
        for name, state in seen.states.items():
            if records[name].run_id in ids and state.status is Status.FINISHED:
                yield other.path / name, records[name], seen.files[name]


def _is_equal(ours: Mapping[str, Any], theirs: RunFile, files: Files, neutral: Collection[str]) -> bool:
    """Return whether a run would have the result of another one."""
    asked, trained = ours["train"], files.train
    here, there = ours["provenance"], theirs.provenance
    return (
        all(asked[name] == trained.get(name) for name in asked if name not in PLACES and name not in neutral)
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
