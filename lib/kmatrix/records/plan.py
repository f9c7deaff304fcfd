"""The planned runs of a matrix: everything that a run directory is made from, so that a missing one is made again.

plan.jsonl.gz has one line per run with the text of its files. It is on disk before the first run directory exists.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import LaunchError, RecordError
from kmatrix.own_file import read_file
from kmatrix.records.checkpoint_dir import checkpoint_dir, own_checkpoint_dir
from kmatrix.records.decode import SCHEMA, Record, RunName, decode_gzip_lines, decode_optional
from kmatrix.records.files import free_path, write_bytes
from kmatrix.records.lock import holder, in_use
from kmatrix.records.paths import (
    MATRIX_PREFIX,
    MOST_BYTES,
    STAGED,
    MatrixDir,
    RunDir,
    is_matrix,
    made_path,
    matrix_dirs,
    staged_dir,
)

FILES = (".config", "defconfig", "run.json")  # of a new run; run.json last: without it a directory is not a run


@dataclass(frozen=True, slots=True)
class RunTexts:
    """The name of a run, and the text of each of FILES."""

    name: str
    texts: tuple[str, ...]  # in the order of FILES


class Rerun(Record, frozen=True, kw_only=True):
    """rerun.json: the runs whose results are being archived. It exists until all are."""

    runs: tuple[RunName, ...] = ()


def runs_to_archive(matrix: MatrixDir) -> frozenset[str]:
    """Return the runs that an interrupted rerun planned again, and whose results may not be archived yet."""
    if not matrix.rerun.exists():  # the common case, asked for each run
        return frozenset()
    return frozenset((decode_optional(matrix.rerun, Rerun) or Rerun()).runs)


class _Line(Record, frozen=True, kw_only=True):
    name: RunName
    files: dict[str, str]  # file name -> its text


def write_plan(matrix: MatrixDir, runs: Iterable[RunTexts], *, append: bool = False) -> None:
    """Write the plan of a matrix, durably. append: after the runs that it has.

    Raises RecordError if the plan that it has is damaged, SchemaError if a newer version wrote it.
    """
    known = b""
    if append and matrix.plan.exists():
        for _ in planned_runs(matrix):  # what follows a damaged part could not be read
            pass
        known = read_file(matrix.plan)
    lines = (
        json.dumps({"schema": SCHEMA, "name": run.name, "files": dict(zip(FILES, run.texts, strict=True))})
        for run in runs
    )
    # Level 1: thousands of configurations differ in a few lines, so that any level makes them small. A file of several
    # members is one file to gzip. Without a time stamp, equal plans are equal files.
    text = "".join(f"{line}\n" for line in lines).encode()
    write_bytes(matrix.plan, known + gzip.compress(text, compresslevel=1, mtime=0))


def planned_runs(matrix: MatrixDir) -> Iterator[RunTexts]:
    """Yield the planned runs, none without a plan.

    Raises RecordError if the file is damaged, SchemaError if a newer version wrote it.
    """
    if not matrix.plan.exists():
        return
    for line in decode_gzip_lines(matrix.plan, _Line, MOST_BYTES):
        if not line.files.keys() >= set(FILES):
            raise RecordError(f"{matrix.plan} is damaged", why=f"the files of {line.name} are incomplete")
        yield RunTexts(line.name, tuple(line.files[name] for name in FILES))


def interrupted_dirs(results_dir: Path) -> list[Path]:
    """Return the directories of matrices whose creation was killed before their plan was complete: nothing ran."""
    staged = [path for path in _staged_dirs(results_dir) if not _is_being_made(path)]
    return staged + [matrix.path for matrix in matrix_dirs(results_dir) if not is_matrix(matrix)]


def refuse_unmade(results_dir: Path, target: str | None, argument: str = "TARGET") -> None:
    """Raise RecordError or LaunchError if the matrix that is not there is being made, or its creation was interrupted.

    target: a path or a name in the results folder; by default the newest.  argument: its name in messages.
    """
    if target:
        found = [staged_dir(path) for path in (Path(target).expanduser(), results_dir / target)]
        staged, what = next((path for path in found if path.is_dir()), None), f"{argument}={target}"
    else:
        staged = next(reversed(_staged_dirs(results_dir)), None)
        what = made_path(staged).name if staged else ""
    if staged is None:
        return
    if _is_being_made(staged):
        raise in_use(MatrixDir(staged))
    raise RecordError(
        f"the creation of {what} was interrupted before its plan was complete",
        why="no run was made",
        hint=f"run the command again; {staged} can be removed",
    )


def _staged_dirs(results_dir: Path) -> list[Path]:
    """Return the directories in which matrices are prepared, oldest first."""
    return sorted(results_dir.glob(f".{MATRIX_PREFIX}*{STAGED}"))


def _is_being_made(staged: Path) -> bool:
    """Return whether a process holds the directory in which it prepares a matrix."""
    try:
        return holder(MatrixDir(staged)) is not None
    except LaunchError:  # somebody else's directory, which cannot be locked from here
        return MatrixDir(staged).is_held()


def make_runs(matrix: MatrixDir, names: Collection[str]) -> list[str]:
    """Make the directories of these planned runs, and return the names of those that the plan has.

    The caller holds the matrix. Existing files are not changed: only the missing ones of a directory are written.
    Raises RecordError if the plan is damaged.
    """
    # The whole file before the first directory: its checksum is at the end. The last line of a name is the valid one,
    # because `make add` may have been killed between the plan and matrix.json.
    wanted = {run.name: run for run in planned_runs(matrix) if run.name in names} if names else {}
    for run in wanted.values():
        make_run(matrix, run)
    return list(wanted)


def make_run(matrix: MatrixDir, planned: RunTexts) -> RunDir:
    """Make the directory of a run, or the missing files of an existing one."""
    run = matrix.run(planned.name)
    if run.path.is_dir():
        # Its results are kept, if it has any.
        for name, text in zip(FILES, planned.texts, strict=True):
            path = run.path / name
            if not path.exists() or not path.stat().st_size:
                write_bytes(path, text.encode())
        return run
    keep_checkpoints(run)
    # Complete or absent. Not flushed to disk one by one, because the plan is: after a power failure it is made again.
    staged = matrix.path / f".{run.name}.new"
    shutil.rmtree(staged, ignore_errors=True)  # of a process that was killed here
    staged.mkdir()
    for name, text in zip(FILES, planned.texts, strict=True):
        (staged / name).write_text(text, encoding="utf-8")
    staged.rename(run.path)
    return run


def keep_checkpoints(run: RunDir) -> None:
    """Rename the checkpoints that a deleted run left below CHECKPOINT_DIR: the new run must not continue from them.

    Raises LaunchError if they belong to another matrix.
    """
    place = checkpoint_dir(run)
    if place != run.checkpoints and os.path.lexists(place):
        own_checkpoint_dir(run)
        place.rename(free_path(place.with_name(f"{place.name}.archive0")))
