"""Reuse finished runs of other matrices: copy their results instead of training again.

A run is reused only if the result would be the same: configuration, data, trainer code, torch, kind of device.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from kmatrix.errors import KmatrixError
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import STAGED, MatrixDir, RunDir, matrix_dirs
from kmatrix.records.runs import RunFile, Status, read_run_file, read_train_values
from kmatrix.status.state import Reused, RunState, after
from kmatrix.status.status_file import recover_status, write_state, writing

PLACES = frozenset({"init_from", "data_path"})  # fields that say where files are


def reuse_runs(matrix: MatrixDir, results_dir: Path, neutral: Collection[str]) -> dict[str, str]:
    """Reuse every run of a new matrix that has finished in another one below `results_dir`; return run -> source.

    neutral: fields of the trainer that cannot change a result.
    """
    runs = [run for run in matrix.runs() if not run.status.exists() and not run.result.exists()]
    planned = {run.name: read_run_file(run) for run in runs}
    known = list(_finished(results_dir, matrix, {record.run_id for record in planned.values()}))
    reused: dict[str, str] = {}
    for run in runs:
        for source, theirs in reversed(known):  # newest first
            if theirs.run_id == planned[run.name].run_id and _is_equal(
                (run, planned[run.name]), (source, theirs), neutral
            ):
                reused[run.name] = theirs.reused_from or f"{source.path.parent.name}/{source.name}"
                _copy(source, run, reused[run.name])
                break
    return reused


def _finished(results_dir: Path, exclude: MatrixDir, ids: Collection[str | None]) -> Iterator[tuple[RunDir, RunFile]]:
    """Yield the finished runs with these ids below a results directory, with their run.json, newest last."""
    for matrix in matrix_dirs(results_dir):
        if matrix.path.resolve() == exclude.path.resolve():
            continue
        try:
            runs = matrix.runs()
        except KmatrixError:
            continue  # a damaged matrix is ignored
        for run in runs:
            try:
                record = read_run_file(run)
                if record.run_id in ids and recover_status(run, has_runner=False).status is Status.FINISHED:
                    yield run, record
            except KmatrixError:
                continue


def _is_equal(new: tuple[RunDir, RunFile], old: tuple[RunDir, RunFile], neutral: Collection[str]) -> bool:
    """Return whether a run would have the result of another one."""
    (run, ours), (source, theirs) = new, old
    asked, trained = read_train_values(run), read_train_values(source)
    here, there = ours.provenance, theirs.provenance
    return (
        all(asked[name] == trained.get(name) for name in asked if name not in PLACES and name not in neutral)
        and bool(here.get("code"))
        and here["code"] == there.get("code")
        and (here.get("versions") or {}).get("torch") == (there.get("versions") or {}).get("torch")
        and _devices(ours) == _devices(theirs)
    )


def _devices(run: RunFile) -> list[str]:
    """Return the names of the devices of a run."""
    about = run.provenance
    if run.train.device == "cuda":
        return [str(gpu.get("name")) for gpu in about.get("gpus") or []][: run.train.num_gpus]
    return [str(about.get("cpu"))]


def _copy(source: RunDir, run: RunDir, name: str) -> None:
    """Copy the result and the metrics of a finished run into the directory of another, and record its source."""
    # In a hidden directory until it is complete. A run without its directory is made again from the plan.
    staged = RunDir(run.path.with_name(f".{run.name}{STAGED}"))
    with writing(run.path):
        shutil.rmtree(staged.path, ignore_errors=True)  # of a process that was killed here
        shutil.copytree(run.path, staged.path)
        for path in (source.result, source.run_used, source.metrics):
            if path.is_file() and not path.is_symlink():
                shutil.copy2(path, staged.path / path.name)
        write_json(staged.run_json, {**read_json(run.run_json), "reused_from": name})
    write_state(staged, after(RunState(), Reused(name)))
    with writing(run.path):
        run.run_json.unlink()  # first: the run is missing from now on
        shutil.rmtree(run.path)
        staged.path.rename(run.path)
