"""Reuse finished runs of other matrices: link their files instead of training again.

A run is reused only if the result would be the same: configuration, data, trainer code, torch, kind of device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import KmatrixError
from kmatrix.records.checkpoint_dir import INDEX, checkpoint_dir, own_checkpoint_dir
from kmatrix.records.decode import Record, decode_optional
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import STAGED, MatrixDir, RunDir, matrix_dirs
from kmatrix.records.plan import keep_checkpoints
from kmatrix.records.runs import RunFile, Status, read_run_file, read_train_values
from kmatrix.status.state import Reused, RunState, after
from kmatrix.status.status_file import recover_status, write_state, writing

PLACES = frozenset({"init_from", "data_path"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """The result of a search for runs to reuse."""

    reused: Mapping[str, str]  # run -> its source
    not_reused: Mapping[str, str]  # run -> finished run with the same id, and why it does not fit


def reuse_runs(matrix: MatrixDir, results_dir: Path, neutral: Collection[str], *, recorded: bool) -> Reuse:
    """Reuse every run of a new matrix that has finished in another matrix below `results_dir`.

    neutral: fields of the trainer that cannot change a result.  recorded: only reuse runs with a GPU recording.
    """
    # Only runs without a result: the directory of a reused run is replaced.
    runs = [run for run in matrix.runs() if not run.status.exists() and not run.result.exists()]
    planned = {run.name: read_run_file(run) for run in runs}
    known = list(_finished(results_dir, matrix, {record.run_id for record in planned.values()}))
    reused: dict[str, str] = {}
    not_reused: dict[str, str] = {}
    for run in runs:
        record = planned[run.name]
        # Newest first, so that the reported reason is about the latest code.
        for source, theirs in reversed(known):
            if theirs.run_id != record.run_id:
                continue
            why = _difference((run, record), (source, theirs), neutral)
            if not why and recorded and not _recorded(source):
                why = NOT_RECORDED
            if not why and any(path.is_symlink() for path in _result_files(source)):
                why = HAS_LINKS
            name = theirs.reused_from or f"{source.path.parent.name}/{source.name}"
            if not why:
                _link(source, run, name)
                reused[run.name] = name
                not_reused.pop(run.name, None)
                break
            not_reused.setdefault(run.name, f"{name} {why}")
    return Reuse(reused=reused, not_reused=not_reused)


NOT_RECORDED = "has no recording of memory and energy"
HAS_LINKS = "contains symbolic links"


def _finished(results_dir: Path, exclude: MatrixDir, ids: Collection[str | None]) -> Iterator[tuple[RunDir, RunFile]]:
    """Yield the finished runs with these ids below a results directory, with their run.json, newest last."""
    for matrix in matrix_dirs(results_dir):
        if matrix.path.resolve() == exclude.path.resolve():
            continue
        try:
            runs = matrix.runs()
        except KmatrixError:
            continue  # a damaged matrix, or one of a newer kmatrix, is ignored
        for run in runs:
            try:
                record = read_run_file(run)
                if record.run_id not in ids or not run.result.exists():
                    continue
                if recover_status(run, has_runner=False).status is Status.FINISHED:
                    yield run, record
            except KmatrixError:
                continue


def _difference(new: tuple[RunDir, RunFile], old: tuple[RunDir, RunFile], neutral: Collection[str]) -> str:
    """Return a difference that can change the result, "" if there is none."""
    (run, ours), (source, theirs) = new, old
    asked, trained = read_train_values(run), read_train_values(source)
    fields = [name for name in asked if name not in PLACES and name not in neutral]
    if changed := [name for name in fields if asked[name] != trained.get(name)]:
        return f"differs in {', '.join(changed[:3])}"
    if asked.get("log_norms") and not trained.get("log_norms"):  # neutral: the result is equal, but not the log
        return "has no norms per layer (LOG_NORMS)"
    here, there = ours.provenance, theirs.provenance
    if not here.get("code") or here["code"] != there.get("code"):
        return "differs in the code of the trainer"
    if (here.get("versions") or {}).get("torch") != (there.get("versions") or {}).get("torch"):
        return "differs in the version of torch"
    return "" if _devices(ours) == _devices(theirs) else "ran on another kind of device"


def _devices(run: RunFile) -> list[str]:
    """Return the names of the devices of a run."""
    about = run.provenance
    if run.train.device == "cuda":
        return [str(gpu.get("name")) for gpu in about.get("gpus") or []][: run.train.num_gpus]
    return [str(about.get("cpu"))]


def _recorded(run: RunDir) -> bool:
    """Return whether a run has a recording of real devices."""
    summary = decode_optional(run.gpu_summary, _Summary)
    return summary is not None and not summary.simulated


class _Summary(Record, frozen=True, kw_only=True):
    """The source of a recording in gpu_summary.json."""

    simulated: bool | None = None


def _link(source: RunDir, run: RunDir, name: str) -> None:
    """Link the files of a finished run into the directory of another, and record its source.

    With hard links the files stay if the other matrix is deleted, and use no additional disk space.
    """
    own = {source.gpu_stats.name: run.gpu_stats.name, source.gpu_stats_multi.name: run.gpu_stats_multi.name}
    # In a hidden directory until it is complete: a run with a part of the files would be resumed, and its trainer
    # would append to the other run's files.
    staged = RunDir(run.path.with_name(f".{run.name}{STAGED}"))
    with writing(run.path):
        shutil.rmtree(staged.path, ignore_errors=True)  # of a process that was killed here
        staged.path.mkdir()
        for path in (run.config, run.defconfig):
            if path.exists():
                _link_tree(path, staged.path / path.name)
        for path in _result_files(source):
            _link_tree(path, staged.path / own.get(path.name, path.name))
        # Separately: CHECKPOINT_DIR may be on another disk than the run.
        place = own_checkpoint_dir(run)
        checkpoints = place.with_name(f".{run.name}{STAGED}")
        if place == run.checkpoints:
            checkpoints = staged.checkpoints
        shutil.rmtree(checkpoints, ignore_errors=True)
        if checkpoint_dir(source).is_dir():
            checkpoints.mkdir(parents=True)
            # Checkpoints only: the matrix.json of a foreign matrix can name any folder of this user.
            for path in sorted(checkpoint_dir(source).iterdir()):
                if path.name == INDEX or path.suffix == ".pt":
                    _link_tree(path, checkpoints / path.name)
        write_json(staged.run_json, {**read_json(run.run_json), "reused_from": name})
    write_state(staged, after(RunState(), Reused(name)))
    with writing(run.path):
        # Without its run.json the run is missing: after a kill, `continue` makes it again from the plan.
        run.run_json.unlink()
        shutil.rmtree(run.path)
        if place != run.checkpoints and checkpoints.exists():
            keep_checkpoints(run)
            checkpoints.rename(place)  # before the run: one that is missing does not continue from them
        staged.path.rename(run.path)


def _result_files(run: RunDir) -> list[Path]:
    """Return the files and folders of a run that its reuse links, without its checkpoints."""
    skip = {path.name for path in (run.run_json, run.config, run.defconfig, run.status, run.lock, run.archive)}
    skip |= {path.name for path in run.tracker_files()}  # for its trackers it is another run
    skip.add(run.checkpoints.name)
    return [path for path in sorted(run.path.iterdir()) if path.name not in skip]


def _link_tree(source: Path, target: Path) -> None:
    """Link the regular files in a folder, or one file. A link in a foreign run may name any file of this user."""
    if source.is_symlink():
        return
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.iterdir()):
            _link_tree(path, target / path.name)
        return
    try:
        os.link(source, target)
    except FileExistsError:
        pass  # a foreign run may have the file of this run's name as well: copying would write to the linked one
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
