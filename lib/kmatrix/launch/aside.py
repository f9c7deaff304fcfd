"""A result that is to be replaced: what a run left goes to its folder former/<n>/, whole, and the run is planned again.

Killed at any point, the old result is still in the run's folder or in former/, and the next runner ends the move.
"""

from __future__ import annotations

import os
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.launch.lock import try_lock
from kmatrix.launch.standing import last_number, settle, write_state, writing
from kmatrix.launch.state import RunState, SetAside, after
from kmatrix.records import RunDir, Status, read_json, write_json
from kmatrix.records.tracking import is_fed


def set_aside(run: RunDir) -> Path | None:
    """Move what the run left to former/<n>/ and plan it again. Returns that folder; None where it left nothing.

    Hold the matrix. Raises LaunchError where a process of the run still lives, or the disk is full.
    """
    lock = try_lock(run.lock)
    if lock is None:
        raise LaunchError(f"{run.name} still has processes", fix="`make stop` ends the matrix; or wait for their end")
    os.close(lock)
    if is_fed(run):
        raise LaunchError(
            f"{run.name} still sends to its trackers", fix="wait for its end; track.log in its folder tells"
        )
    state = settle(run)
    if not _left(run):
        return None
    with writing(run.former):
        target = _folder(run)
        target.mkdir(parents=True, exist_ok=True)
        if run.status.exists():
            write_json(target / run.status.name, read_json(run.status))
    write_state(run, after(state, SetAside(max(state.number, last_number(run)))))
    finish_move(run)
    return target


def finish_move(run: RunDir) -> None:
    """Move what is still there of a result that was set aside, also after a crash in the middle of it."""
    target = _newest(run)
    if target is None:
        return
    with writing(target):
        record = read_json(run.run_json)
        place = Path(record["train"].get("checkpoint_dir") or run.checkpoints)
        outside = place.parent.resolve() != run.path.resolve()
        if outside and place.exists():  # on another disk it stays there, under another name
            place.replace(_free(place.with_name(f"{place.name}.former{target.name}")))
        for entry in _left(run):
            entry.replace(_free(target / entry.name))
        if "reused_from" in record:  # what comes now is its own
            write_json(run.run_json, {name: value for name, value in record.items() if name != "reused_from"})


def was_set_aside(run: RunDir, state: RunState) -> bool:
    """Whether a run is planned again, and may still hold files of its former result."""
    return state.status is Status.PLANNED and run.former.is_dir()


def _left(run: RunDir) -> list[Path]:
    """What belongs to a result, and not to the plan of the run. The result itself comes first."""
    stays = {path.name for path in (run.run_json, run.config, run.defconfig, run.status, run.lock, run.former)}
    found = sorted(path for path in run.path.iterdir() if path.name not in stays)
    return sorted(found, key=lambda path: path != run.result)


def _newest(run: RunDir) -> Path | None:
    numbers = [int(path.name) for path in run.former.glob("*") if path.name.isdigit()]
    return run.former / str(max(numbers)) if numbers else None


def _folder(run: RunDir) -> Path:
    """The next folder; one that holds nothing but a status was begun by a process that was killed."""
    newest = _newest(run)
    if newest is not None and [path.name for path in newest.iterdir()] in ([], [run.status.name]):
        return newest
    return run.former / str(int(newest.name) + 1 if newest else 1)


def _free(path: Path) -> Path:
    """A name that nothing has yet: nothing is overwritten."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
