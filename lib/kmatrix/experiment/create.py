"""Write the folder of a matrix with everything that is needed to reproduce its runs, or add runs to one."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.clock import clock
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.provenance import copy_code
from kmatrix.experiment.reuse import reuse_runs
from kmatrix.records.checkpoint_dir import check_own_files
from kmatrix.records.control import Request, change
from kmatrix.records.decode import replaced
from kmatrix.records.files import read_json, sync_folder, write_json, write_text
from kmatrix.records.matrix import CODE, INNER, MORE, OWN, SYMBOL, write_files
from kmatrix.records.paths import STAGED, MatrixDir, next_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the folder of a matrix is made from, or extended with."""

    about: dict[str, Any]  # matrix.json without its runs
    runs: dict[str, dict[str, Any]]  # run -> its run.json, and `config` as in matrix.json
    config: str  # the .config that the matrix is made from
    sources: Path  # folder with the sources of the trainer
    skipped: Mapping[str, str]  # run -> why it cannot run here
    reuse: bool  # results of other matrices


def create(
    contents: Contents, results_dir: Path, checkpoint_dir: Path | None = None, *, on_message: OnMessage = ignore
) -> MatrixDir:
    """Make the folder of a matrix, and return it. The folder of a run is made when somebody takes the run.

    checkpoint_dir: None if checkpoints are saved in the run directories.  on_message: called with each note.
    """
    staged, path = _stage(results_dir)
    try:  # complete, or not there
        folder = checkpoint_dir.resolve() / path.name if checkpoint_dir else None
        write_text(staged.config, contents.config)
        copy_code(contents.sources, staged.path / CODE)
        runs = _reused(staged, contents, results_dir, on_message)
        common = common_of(runs)
        place = {"name": path.name, "place": str(path.resolve()), "checkpoints": str(folder) if folder else None}
        listed = [planned(common, run) for run in runs]
        _write(staged, {**contents.about, **place, "common": common, "runs": listed})
        _skip(staged, contents.skipped)
        sync_folder(staged.path)
        if folder:  # never one that exists: matrices of two results folders may have the same name
            folder.mkdir(parents=True)
        staged.path.rename(path)
        sync_folder(path.parent)
    except BaseException:  # a full disk, Ctrl+C: nothing refers to these files
        shutil.rmtree(staged.path, ignore_errors=True)
        raise
    return MatrixDir(path)


def add_to(matrix: MatrixDir, contents: Contents, *, on_message: OnMessage = ignore) -> None:
    """Add runs to a matrix. contents: of these runs only.  on_message: as for `create`."""
    check_own_files(matrix)
    record = read_json(matrix.matrix_json)
    runs = _reused(matrix, contents, matrix.path.parent, on_message)
    listed = [*record["runs"], *(planned(record["common"], run) for run in runs)]
    changed = {name: contents.about[name] for name in ("axes", "overrides", "equal", "verdict")}
    _write(matrix, {**record, **changed, "runs": listed})
    _skip(matrix, contents.skipped)


def _reused(matrix: MatrixDir, contents: Contents, results_dir: Path, on_message: OnMessage) -> list[dict[str, Any]]:
    """Return all runs, after the results of those that have finished in other matrices were copied."""
    runs = contents.runs
    found = reuse_runs(matrix.path, results_dir, runs) if contents.reuse else {}
    for name, source in found.items():
        on_message(f"{name}: reused from {source} (REUSE=n trains it again)")
    return [run | ({"reused_from": found[name]} if name in found else {}) for name, run in runs.items()]


def _write(matrix: MatrixDir, contents: Mapping[str, Any]) -> None:
    """Write matrix.json, and run.json of the reused runs: nobody takes these."""
    write_json(matrix.matrix_json, contents)
    for run in contents["runs"]:
        if run.get("reused_from"):
            write_files(matrix.path, contents, run)


def forget_reuse(matrix: MatrixDir, names: Collection[str]) -> None:
    """Write into matrix.json that these runs are trained here, whose results were those of other matrices."""
    record = read_json(matrix.matrix_json)
    for run in record["runs"]:
        if run["name"] in names:
            run.pop("reused_from", None)
    write_json(matrix.matrix_json, record)


def _skip(matrix: MatrixDir, skipped: Mapping[str, str]) -> None:
    """Leave out the runs that cannot run here: the next `make continue` looks at them again."""
    if skipped:
        requests = {name: Request(skip=why) for name, why in skipped.items()}
        change(matrix.path, lambda known: replaced(known, runs={**known.runs, **requests}))


def common_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the values of run.json of all runs share. Those of `symbols` and `train` are compared one by one."""
    return _shared(runs, OWN) | {key: _shared([run[key] for run in runs]) for key in INNER}


def _shared(values: Sequence[Mapping[str, Any]], own: Sequence[str] = ()) -> dict[str, Any]:
    return {
        key: value
        for key, value in values[0].items()
        if key not in own and all(key in one and one[key] == value for one in values)
    }


def planned(common: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run as matrix.json has it: its values of run.json that differ from the common ones."""
    own = _own(common, run, OWN) | {key: _own(common[key], run[key]) for key in INNER}
    return own | {"symbols": {name: None for name in common["symbols"] if name not in run["symbols"]} | own["symbols"]}


def _own(common: Mapping[str, Any], run: Mapping[str, Any], own: Sequence[str] = ()) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key in own or key not in common or common[key] != value}


def config_lines(common: str, own: str) -> dict[str, str]:
    """Return how the text of a .config differs from the common one, as `make_files` takes it."""
    theirs, ours = common.split("\n"), own.split("\n")
    gone, new = set(theirs).difference(ours), set(ours).difference(theirs)
    named = {name[1]: line for line in ours if line in new and (name := SYMBOL.match(line))}
    found = {line: named.pop(name[1], "") for line in theirs if line in gone and (name := SYMBOL.match(line))}
    more = [line for line in ours if line in named.values()]
    return found | ({MORE: "\n".join([*more, ""])} if more else {})


def _stage(results_dir: Path) -> tuple[MatrixDir, Path]:
    """Make a hidden directory for a new matrix, and return it with the path that the matrix will have."""
    while True:
        path = next_path(results_dir, clock.now())
        staged = path.with_name(f".{path.name}{STAGED}")
        with suppress(FileExistsError):  # of another command in the same second: the next path has a number
            staged.mkdir()
            return MatrixDir(staged), path
