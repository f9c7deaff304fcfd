"""The upload status of each tracker of a run (track.json)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

from kmatrix.clock import clock
from kmatrix.locks import is_held
from kmatrix.records.decode import Count, Record, as_json, decode_optional, replaced
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics, read_run_file_or_empty
from kmatrix.text import first_names, make_command


class SyncState(StrEnum):
    """The state of the upload to one tracker."""

    OPEN = "open"  # in progress
    DONE = "done"  # everything was sent
    FAILED = "failed"  # the tracker returned an error
    BEHIND = "behind"  # the time limit was reached, or the tracker process was killed


class SyncStatus(Record, frozen=True, kw_only=True):
    """What one tracker has received of a run: an entry of track.json."""

    tracker: str
    state: SyncState
    points: Count = 0  # steps sent
    waiting: Count = 0  # steps pending
    sent_step: Count | None = None  # the newest step sent
    error: str = ""  # the last one; empty: none
    link: str | None = None  # URL or directory of the run at the tracker
    how: str | None = None  # command that shows the run, or uploads it
    alerts: tuple[str, ...] = ()  # keys of the alerts sent


class _TrackFile(Record, frozen=True, kw_only=True):
    """track.json."""

    trackers: tuple[SyncStatus, ...] = ()


def write_track(run: RunDir, statuses: Sequence[SyncStatus]) -> None:
    """Write track.json, keeping the entries of other trackers. Raises OSError on a full disk."""
    known = {status.tracker: status for status in (*read_track(run), *statuses)}
    value = {"trackers": [as_json(known[name]) for name in sorted(known)], "time": clock.now()}
    write_json(run.track, value, durable=False)


def read_track(run: RunDir) -> tuple[SyncStatus, ...]:
    """Return the entries of track.json; a damaged file costs the display: an upload asks the tracker what it has."""
    return (decode_optional(run.track, _TrackFile) or _TrackFile()).trackers


def sync_status(run: RunDir) -> tuple[SyncStatus, ...]:
    """Return the status of each tracker of a run. If its process was killed, pending steps are counted here."""
    known = {status.tracker: status for status in read_track(run)}
    record = read_run_file_or_empty(run)
    asked = record.tracking.trackers
    # Final entries are up to date, and so is the file of a living process.
    if all(name in known and known[name].state is not SyncState.OPEN for name in asked) or is_held(run.track_lock):
        return tuple(known.values())
    steps = len(merged_metrics(run.metrics))
    reason = f"reused from {record.reused_from}" if record.reused_from else "the tracker process was killed"
    for name in (*asked, *known):
        status = known.get(name, SyncStatus(tracker=name, state=SyncState.OPEN))
        if status.state is SyncState.OPEN:
            waiting = max(0, steps - status.points)
            error = status.error or (reason if waiting else "")
            known[name] = replaced(status, state=SyncState.BEHIND, waiting=waiting, error=error)
    return tuple(known[name] for name in sorted(known) if known[name].points or known[name].waiting)


def pending_messages(runs: Iterable[tuple[str, SyncStatus]], matrix: Path) -> list[str]:
    """Return one line per tracker and error with the pending steps, and the command that uploads them.

    runs: the name of each run with the status of one tracker.
    """
    groups: dict[tuple[str, str], list[tuple[str, SyncStatus]]] = {}
    for name, status in runs:
        if status.state in (SyncState.FAILED, SyncState.BEHIND):
            groups.setdefault((status.tracker, status.error), []).append((name, status))
    lines = []
    for (tracker, error), members in groups.items():
        waiting = sum(status.waiting for _, status in members)
        total = waiting + sum(status.points for _, status in members)
        runs_text = members[0][0] if len(members) == 1 else f"{len(members)} runs"
        lines.append(f"pending for {tracker}: {waiting} of {total} steps of {runs_text} ({error or 'unknown reason'})")
    return [*lines, f"upload them with {make_command('track-sync', matrix)}"] if lines else []


def first_of_each(pairs: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return one line per tracker: the first of its links or commands, and the number of others."""
    found: dict[str, dict[str, None]] = {}
    for tracker, text in pairs:
        if text:
            found.setdefault(tracker, {})[text] = None
    return [f"{tracker}: {first_names(each, 1)}" for tracker, each in found.items()]
