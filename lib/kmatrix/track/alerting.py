"""What people are told of a run, from its status.json and events.jsonl, each thing once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kmatrix.alerts import Alert as Rule
from kmatrix.alerts import Severity, alerts_of
from kmatrix.errors import RecordError
from kmatrix.records import RunDir, Status, read_json
from kmatrix.track.tail import LineTail
from kmatrix.track.values import Alert, Level

EVENTS = {  # of the trainer that no rule of status.json tells of
    "rollback": Level.WARN,
    "checkpoint failed": Level.ERROR,
    "checkpoint left out": Level.WARN,
    "checkpoint refused": Level.WARN,
}
LEVELS = {Severity.WARNING: Level.WARN, Severity.CRITICAL: Level.ERROR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An alert, and what makes it one and the same in every reading of the files."""

    key: str
    alert: Alert


class AlertTail:
    """The alerts of one run, in the order in which they are found."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._events = LineTail(run.events)
        self._seen: set[str] = set()
        self._version: tuple[int, int] = (0, 0)

    def read(self) -> list[Told]:
        """Return the alerts that were not there at the call before."""
        found = [*self._of_status(), *self._of_events()]
        new = [told for told in found if told.key not in self._seen]
        self._seen.update(told.key for told in new)
        return sorted(new, key=lambda told: told.alert.time)

    def _of_status(self) -> Iterator[Told]:
        """Yield what status.json says, where it is another than the one before."""
        try:
            known = self._run.status.stat()
            version = (known.st_mtime_ns, known.st_ino)
            if version == self._version:
                return
            record = read_json(self._run.status)
        except (OSError, RecordError):
            return
        self._version = version
        for rule in alerts_of(record):
            yield Told(key=f"{rule.kind}|{rule.about}|{rule.since}", alert=_of_rule(rule))
        yield from _failures(self._run.name, record)

    def _of_events(self) -> Iterator[Told]:
        for _, line in self._events.read():
            event, time = str(line.get("event")), line.get("time")
            if event in EVENTS and isinstance(time, (int, float)):
                text = f"step {line.get('step')}: {line.get('text')}"
                alert = Alert(time=time, title=f"{self._run.name}: {event}", text=text, level=EVENTS[event])
                yield Told(key=f"{event}|{time}", alert=alert)


def _of_rule(rule: Rule) -> Alert:
    title = str(rule.kind).replace("_", " ") + (f" of {rule.about}" if rule.about else "")
    return Alert(time=rule.since, title=title, text=f"{rule.text} ({rule.advice})", level=LEVELS[rule.severity])


def _failures(name: str, status: Mapping[str, Any]) -> Iterator[Told]:
    """Yield the attempts that failed."""
    for attempt in status.get("attempts") or []:
        if isinstance(attempt, dict) and attempt.get("status") == Status.FAILED and attempt.get("ended"):
            number, reason = attempt.get("attempt"), str(attempt.get("reason") or "no reason is known")
            alert = Alert(time=float(attempt["ended"]), title=f"{name} failed", text=reason, level=Level.ERROR)
            yield Told(key=f"failed|{number}", alert=alert)
