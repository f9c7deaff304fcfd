"""What was sent of a run to which tracker: track.json, written by the process that feeds them, and read back."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records import RunDir, merged_metrics, read_json, write_json


class Sending(StrEnum):
    """How the feeding of one tracker stands."""

    OPEN = "open"  # it goes on
    DONE = "done"  # everything was sent
    FAILED = "failed"  # the tracker refused
    BEHIND = "behind"  # it took too long, or the process was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one tracker holds of a run. points: steps; waiting: steps that it lacks.

    sent_step: the newest that it has.  error: what was met last, "" for nothing.  link: where a person can look.
    how: a command that shows it, or sends it on.  alerts: keys of those that were told.
    """

    tracker: str
    state: Sending
    points: int = 0
    waiting: int = 0
    sent_step: int | None = None
    error: str = ""
    link: str | None = None
    how: str | None = None
    alerts: tuple[str, ...] = ()


def write_track(run: RunDir, sent: Sequence[Sent]) -> None:
    """Write track.json; trackers that are not among `sent` stay in it. Raises OSError on a full disk."""
    known = {one.tracker: one for one in (*read_track(run), *sent)}
    trackers = {name: _to_json(one) for name, one in sorted(known.items())}
    write_json(run.track, {"trackers": trackers, "time": time.time()}, durable=False)


def read_track(run: RunDir) -> tuple[Sent, ...]:
    """Return what track.json says; nothing where it is not there, or not whole."""
    try:
        trackers = read_json(run.track)["trackers"]
        return tuple(_from_json(name, value) for name, value in trackers.items())
    except (RecordError, OSError, KeyError, ValueError, TypeError, AttributeError):
        return ()


def sent_of(run: RunDir) -> tuple[Sent, ...]:
    """Return what each tracker that the run has, or had, holds of it: track.json, and what it cannot say itself.

    Where the process was killed, or none ever ran, nobody counted what came after: it is counted here.
    """
    told = {one.tracker: one for one in read_track(run)}
    asked = _asked(run)
    if all(name in told and told[name].state is not Sending.OPEN for name in asked) or is_fed(run):
        return tuple(told.values())
    steps, why = len(merged_metrics(run.metrics)), _why_not(run)
    for name in (*asked, *told):
        one = told.get(name, Sent(tracker=name, state=Sending.OPEN))
        if one.state is Sending.OPEN:
            waiting = max(0, steps - one.points)
            told[name] = _counted(one, waiting, why)
    return tuple(told[name] for name in sorted(told) if told[name].points or told[name].waiting)


def not_sent(runs: Iterable[tuple[str, Sent]], matrix: str) -> list[str]:
    """Return what the trackers of a matrix lack, and the command that sends it; nothing where they have all.

    runs: the name of each with what one tracker holds of it.
    """
    groups: dict[tuple[str, str], list[tuple[str, Sent]]] = {}
    for name, sent in runs:
        if sent.state in (Sending.FAILED, Sending.BEHIND):
            groups.setdefault((sent.tracker, sent.error), []).append((name, sent))
    lines = []
    for (tracker, error), those in groups.items():
        waiting, known = (sum(sent.waiting for _, sent in those), sum(sent.waiting + sent.points for _, sent in those))
        what = those[0][0] if len(those) == 1 else f"{len(those)} runs"
        lines.append(f"not sent to {tracker}: {waiting} of {known} points of {what} ({error or 'no reason is known'})")
    return [*lines, f"send them with make track-replay TARGET={matrix}"] if lines else []


def links(runs: Iterable[Sequence[Sent]]) -> list[str]:
    """Return for each tracker where its first run can be looked at, and how many more there are. runs: of each."""
    return _firsts((sent.tracker, sent.link) for several in runs for sent in several)


def commands(runs: Iterable[Sequence[Sent]]) -> list[str]:
    """Return for each tracker the command that shows its first run, or sends it on."""
    return _firsts((sent.tracker, sent.how) for several in runs for sent in several)


def _firsts(pairs: Iterable[tuple[str, str | None]]) -> list[str]:
    found: dict[str, dict[str, None]] = {}
    for tracker, text in pairs:
        if text:
            found.setdefault(tracker, {})[text] = None
    return [
        f"{tracker}: {next(iter(each))}" + (f" and {len(each) - 1} more" if len(each) > 1 else "")
        for tracker, each in found.items()
    ]


def is_fed(run: RunDir) -> bool:
    """Whether a process feeds the run's trackers now: it holds the lock for as long as it lives."""
    try:
        with run.track_lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _asked(run: RunDir) -> tuple[str, ...]:
    try:
        value = read_json(run.run_json).get("tracking") or {}
        return tuple(str(name) for name in value.get("trackers") or ())
    except (RecordError, AttributeError, TypeError):
        return ()


def _why_not(run: RunDir) -> str:
    """Why nobody counted what was sent of a run."""
    try:
        taken = read_json(run.run_json).get("reused_from")
    except RecordError:
        taken = None
    return f"it was taken over from {taken}" if taken else "the process that sends was killed"


def _counted(sent: Sent, waiting: int, why: str) -> Sent:
    return replace(sent, state=Sending.BEHIND, waiting=waiting, error=sent.error or (why if waiting else ""))


def _to_json(sent: Sent) -> dict[str, Any]:
    value = asdict(sent)
    del value["tracker"]
    return {**value, "alerts": list(sent.alerts), "error": sent.error or None}


def _from_json(name: str, value: dict[str, Any]) -> Sent:
    return Sent(
        tracker=name,
        state=Sending(value["state"]),
        points=int(value.get("points") or 0),
        waiting=int(value.get("waiting") or 0),
        sent_step=value.get("sent_step"),
        error=str(value.get("error") or ""),
        link=value.get("link"),
        how=value.get("how"),
        alerts=tuple(str(key) for key in value.get("alerts") or ()),
    )
