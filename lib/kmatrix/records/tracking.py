"""The upload status of each tracker of a run (track.json)."""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

from kmatrix.own_file import open_to_read
from kmatrix.records.decode import Count, Record, as_json, decode_optional, replaced
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics, read_run_file_or_empty
from kmatrix.text import make_command

# The name of a project at every tracker: part of URLs, and of file names. Trackio reserves `registry-`.
PROJECT_NAME = re.compile(r"(?!registry-)[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
PROJECT_RULE = "expected at most 64 lower-case letters, digits and hyphens, not registry-..."


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
    # Not durable: it is rewritten every 2 s, and after a crash the trackers themselves know what they have.
    value = {"trackers": [as_json(known[name]) for name in sorted(known)], "time": time.time()}
    write_json(run.track, value, durable=False)


def read_track(run: RunDir) -> tuple[SyncStatus, ...]:
    """Return the entries of track.json, empty if the file is missing or damaged."""
    # A damaged file costs only the display: an upload asks the tracker what it has.
    return (decode_optional(run.track, _TrackFile) or _TrackFile()).trackers


def sync_status(run: RunDir) -> tuple[SyncStatus, ...]:
    """Return the status of every tracker that the run uses or has used.

    If the tracker process was killed or never ran, track.json is out of date: pending steps are counted here.
    """
    known = {status.tracker: status for status in read_track(run)}
    asked = read_run_file_or_empty(run).tracking.trackers
    # Final entries are up to date, and so is the file of a living process.
    if all(name in known and known[name].state is not SyncState.OPEN for name in asked) or is_syncing(run):
        return tuple(known.values())
    steps, reason = len(merged_metrics(run.metrics)), _reason_for_pending(run)
    for name in (*asked, *known):
        status = known.get(name, SyncStatus(tracker=name, state=SyncState.OPEN))
        if status.state is SyncState.OPEN:
            waiting = max(0, steps - status.points)
            error = status.error or (reason if waiting else "")
            known[name] = replaced(status, state=SyncState.BEHIND, waiting=waiting, error=error)
    return tuple(known[name] for name in sorted(known) if known[name].points or known[name].waiting)


def pending_messages(runs: Iterable[tuple[str, SyncStatus]], matrix: Path) -> list[str]:
    """Return one line per tracker and error with the pending steps, and the command that uploads them.

    `runs`: the name of each run with the status of one tracker.
    """
    # Runs of a matrix mostly fail for one reason, such as a missing connection: one line for all of them.
    groups: dict[tuple[str, str], list[tuple[str, SyncStatus]]] = {}
    for name, status in runs:
        if status.state in (SyncState.FAILED, SyncState.BEHIND):
            groups.setdefault((status.tracker, status.error), []).append((name, status))
    lines = []
    for (tracker, error), members in groups.items():
        waiting = sum(status.waiting for _, status in members)
        total = waiting + sum(status.points for _, status in members)
        runs_text = members[0][0] if len(members) == 1 else f"{len(members)} runs"
        reason = error or "unknown reason"
        lines.append(f"pending for {tracker}: {waiting} of {total} steps of {runs_text} ({reason})")
    return [*lines, f"upload them with {make_command('track-sync', matrix)}"] if lines else []


def links(runs: Iterable[Sequence[SyncStatus]]) -> list[str]:
    """Return one line per tracker: the link to its first run, and the number of other links."""
    return _first_of_each((status.tracker, status.link) for statuses in runs for status in statuses)


def commands(runs: Iterable[Sequence[SyncStatus]]) -> list[str]:
    """Return one line per tracker: the command that shows or uploads its first run, and the number of others."""
    return _first_of_each((status.tracker, status.how) for statuses in runs for status in statuses)


def _first_of_each(pairs: Iterable[tuple[str, str | None]]) -> list[str]:
    found: dict[str, dict[str, None]] = {}
    for tracker, text in pairs:
        if text:
            found.setdefault(tracker, {})[text] = None
    return [
        f"{tracker}: {next(iter(each))}" + (f" and {len(each) - 1} more" if len(each) > 1 else "")
        for tracker, each in found.items()
    ]


def is_syncing(run: RunDir) -> bool:
    """Return whether a tracker process of this run is alive: it holds the lock until it exits."""
    try:
        with open_to_read(run.track_lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _reason_for_pending(run: RunDir) -> str:
    """Return why track.json does not count the pending steps of a run."""
    source = read_run_file_or_empty(run).reused_from
    return f"reused from {source}" if source else "the tracker process was killed"
