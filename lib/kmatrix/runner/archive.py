"""Archive the result of a run before a rerun: move its files to archive/<n>/, and set the run to planned.

After a crash at any point, each file is either in the run directory or in archive/, and the next runner completes the
move.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.own_file import read_file
from kmatrix.records.checkpoint_dir import own_checkpoint_dir
from kmatrix.records.decode import as_json
from kmatrix.records.files import free_path, read_json, write_bytes, write_json
from kmatrix.records.lock import try_lock
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.plan import Rerun, runs_to_archive
from kmatrix.records.runs import Status, read_run_file
from kmatrix.records.tracking import is_syncing
from kmatrix.status.state import Archived, RunState, after
from kmatrix.status.status_file import last_number, state_of_files, write_state, writing


def archive_results(matrix: MatrixDir, runs: Sequence[RunDir]) -> dict[str, Path | None]:
    """Archive the results of these runs, which are planned afterwards; return run -> archive, None without a result.

    The caller holds the matrix. Raises LaunchError before anything is changed if a process of a run is still alive, or
    RecordError if one of its files cannot be read. After a kill either no run is archived, or `finish_rerun` archives
    all of them.
    """
    for run in runs:
        _check(run)
    with writing(matrix.rerun):
        write_json(matrix.rerun, as_json(Rerun(runs=tuple(run.name for run in runs))))
    found = {run.name: archive_result(run) for run in runs}
    with writing(matrix.rerun):
        matrix.rerun.unlink()
    return found


def finish_rerun(matrix: MatrixDir) -> list[str]:
    """Archive the results that an interrupted rerun has left, and return its runs. The caller holds the matrix."""
    names = runs_to_archive(matrix)
    if names:
        archive_results(matrix, [run for run in matrix.runs() if run.name in names])
    return sorted(names)


def archive_result(run: RunDir) -> Path | None:
    """Move the result of a run to archive/<n>/, and return that directory; None if there is no result.

    The run is planned afterwards. The caller holds the matrix.
    Raises LaunchError if a process of the run is still alive, or the disk is full.
    """
    _check(run)
    # Before the files move: the numbers of later attempts continue after the archived ones.
    state = state_of_files(run, has_runner=False)
    if is_archiving(run, state):  # a kill came after the run was planned
        finish_archiving(run)
    if not _left(run):
        return None
    with writing(run.archive):
        target = _folder(run)
        target.mkdir(parents=True, exist_ok=True)
        if run.status.exists():
            # A copy: the original stays until `write_state` replaces it.
            write_bytes(target / run.status.name, read_file(run.status))
    # From here on the run is planned: after a crash, the next runner completes the move.
    write_state(run, after(state, Archived(max(state.number, last_number(run)))))
    finish_archiving(run)
    return target


def _check(run: RunDir) -> None:
    """Raise an error if a result cannot be archived now."""
    # Taken and released at once: only to see whether a process of the run still holds it.
    lock = try_lock(run.lock)
    if lock is None:
        raise LaunchError(f"{run.name} still has processes", hint="run `make stop`, or wait until they exit")
    os.close(lock)
    if is_syncing(run):
        raise LaunchError(
            f"{run.name} still sends to its trackers",
            hint="wait for its end; track.log in the run directory shows its progress",
        )
    # A file of a newer version is found now, not after a part of the others was moved.
    state_of_files(run, has_runner=False)
    read_run_file(run)
    own_checkpoint_dir(run)


def finish_archiving(run: RunDir) -> None:
    """Move the remaining files of an archived result, also after a crash in the middle of the move."""
    target = _newest(run)
    if target is None:
        return
    with writing(target):
        record, place = read_json(run.run_json), own_checkpoint_dir(run)
        if place != run.checkpoints and place.exists():  # on another disk it is renamed, not moved
            place.replace(free_path(place.with_name(f"{place.name}.archive{target.name}")))
        for entry in _left(run):
            entry.replace(free_path(target / entry.name))
        if "reused_from" in record:  # the new result is the run's own
            write_json(run.run_json, {name: value for name, value in record.items() if name != "reused_from"})


def is_archiving(run: RunDir, state: RunState) -> bool:
    """Return whether a run may still hold files of an archived result."""
    return state.status is Status.PLANNED and run.archive.is_dir()


def _left(run: RunDir) -> list[Path]:
    """Return the files of a result, without those of the plan; result.json first."""
    stays = {path.name for path in (run.run_json, run.config, run.defconfig, run.status, run.lock, run.archive)}
    found = sorted(path for path in run.path.iterdir() if path.name not in stays)
    # Without its result a run never counts as finished, whatever else a crash leaves.
    return sorted(found, key=lambda path: path != run.result)


def _newest(run: RunDir) -> Path | None:
    numbers = [int(path.name) for path in run.archive.glob("*") if path.name.isdigit()]
    return run.archive / str(max(numbers)) if numbers else None


def _folder(run: RunDir) -> Path:
    """Return the next archive directory; one with only a status.json was created before a crash, and is used again."""
    newest = _newest(run)
    # A hidden file is a half-written status.json.
    if newest is not None and all(path.name == run.status.name or path.name[0] == "." for path in newest.iterdir()):
        return newest
    return run.archive / str(int(newest.name) + 1 if newest else 1)
