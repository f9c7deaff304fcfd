"""A finished run with the same id is taken over instead of trained again: its files are linked, and it is marked.

Only what would come out the same: the same configuration, data, code of the trainer, torch, and kind of device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.errors import KmatrixError, RecordError
from kmatrix.launch.standing import settle, write_state, writing
from kmatrix.launch.state import Reused, RunState, after
from kmatrix.records import MatrixDir, RunDir, Status, matrix_dirs, read_json, write_json
from kmatrix.records.checkpoints import folder_of

PLACES = frozenset({"data_path", "checkpoint_dir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What became of the search. taken: run -> where it comes from.  not_taken: run -> why a finished one was not."""

    taken: Mapping[str, str]
    not_taken: Mapping[str, str]


def take_over(matrix: MatrixDir, results_dir: Path, neutral: Collection[str], *, recorded: bool) -> Reuse:
    """Take over every run of a new matrix that has finished in another one.

    neutral: the trainer's fields that cannot change a result.  recorded: only runs that a recorder watched.
    """
    planned = {run.name: read_json(run.run_json) for run in matrix.runs()}
    known = list(_finished(results_dir, matrix, {record.get("run_id") for record in planned.values()}))
    taken: dict[str, str] = {}
    not_taken: dict[str, str] = {}
    for run in matrix.runs():
        record = planned[run.name]
        for source, theirs in reversed(known):
            if theirs.get("run_id") != record.get("run_id"):
                continue
            why = _difference(record, theirs, neutral) or ("" if _recorded(source) or not recorded else NOT_RECORDED)
            name = str(theirs.get("reused_from") or f"{source.path.parent.name}/{source.name}")
            if not why:
                _link(source, run, record, name)
                taken[run.name] = name
                not_taken.pop(run.name, None)
                break
            not_taken.setdefault(run.name, f"{name}: {why}")
    return Reuse(taken=taken, not_taken=not_taken)


NOT_RECORDED = "its memory and energy were not recorded"


def _finished(results_dir: Path, but: MatrixDir, ids: Collection[object]) -> Iterator[tuple[RunDir, dict[str, Any]]]:
    """Every finished run with one of these ids below the folder of results, with its run.json; the newest last."""
    for matrix in matrix_dirs(results_dir):
        if matrix.path.resolve() == but.path.resolve():
            continue
        try:
            runs = matrix.runs()
        except KmatrixError:
            continue  # a damaged matrix, or one of a newer kmatrix, hinders nothing
        for run in runs:
            try:
                record = read_json(run.run_json)
                if record.get("run_id") in ids and run.result.exists() and settle(run).status is Status.FINISHED:
                    yield run, record
            except KmatrixError:
                continue


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], neutral: Collection[str]) -> str:
    """Say what would not come out the same, "" where nothing is known to."""
    mine, other = ours["train"], theirs.get("train") or {}
    fields = [name for name in mine if name not in PLACES and name not in neutral]
    if changed := [name for name in fields if mine[name] != other.get(name)]:
        return f"{', '.join(changed[:3])} {'is' if len(changed) == 1 else 'are'} not the same"
    here, there = ours["provenance"], theirs.get("provenance") or {}
    if not here.get("code") or here["code"] != there.get("code"):
        return "the trainer's code is not the same"
    if (here.get("versions") or {}).get("torch") != (there.get("versions") or {}).get("torch"):
        return "torch is not the same"
    return "" if _devices(ours) == _devices(theirs) else "it was another kind of device"


def _devices(record: Mapping[str, Any]) -> list[str]:
    """The names of the devices that a run is planned on."""
    about, train = record.get("provenance") or {}, record["train"]
    if train.get("device") == "cuda":
        return [str(gpu.get("name")) for gpu in about.get("gpus") or []][: int(train["num_gpus"])]
    return [str(about.get("cpu"))]


def _recorded(run: RunDir) -> bool:
    """Whether the devices of a run were recorded, and were real ones."""
    try:
        return not read_json(run.gpu_summary).get("simulated")
    except RecordError:
        return False


def _link(source: RunDir, run: RunDir, record: Mapping[str, Any], name: str) -> None:
    """Link the files of a finished run into another one's folder, and write that it was taken over.

    Hard links: the files stay when the other matrix is deleted, and take no room twice.
    """
    skip = {path.name for path in (run.run_json, run.config, run.defconfig, run.status, run.lock, run.former)}
    skip |= {path.name for path in run.of_trackers()}  # to its trackers it is another run
    own = {source.gpu_stats.name: run.gpu_stats.name, source.gpu_stats_multi.name: run.gpu_stats_multi.name}
    with writing(run.path):
        write_json(run.run_json, {**record, "reused_from": name})
        for path in sorted(source.path.iterdir()):
            if path.name not in skip and path != folder_of(source):
                _link_tree(path, run.path / own.get(path.name, path.name))
        if folder_of(source).is_dir():
            _link_tree(folder_of(source), Path(record["train"].get("checkpoint_dir") or run.checkpoints))
    write_state(run, after(RunState(), Reused(name)))


def _link_tree(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(source.iterdir()):
            _link_tree(path, target / path.name)
        return
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without hard links
        shutil.copy2(source, target)
