"""The section of the page on runs that did not finish, alerts, and cells that were excluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.records.runs import ExcludedCells, Status
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.sentences.alerts import by_subject, worst
from kmatrix.status.alerts import Alert, AlertKind, Severity
from kmatrix.text import first_names

ENDED_BADLY = (Status.FAILED, Status.STOPPED, Status.SKIPPED)  # in the order of the section
MOST_LOGS = 30  # ends of logs in the page
MOST_OF_A_KIND = 10  # of them, runs that failed for one reason: the others say the same
MOST_LINES = 20  # of a log
LINE, LOG = 400, 4_000  # characters of a line, and of the end of a log
NO_REASON = "no reason recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run that did not finish."""

    place: int  # in MatrixNumbers.runs
    name: str
    reason: str
    steps: int | None  # that it completed
    max_iters: int | None  # that were planned
    attempts: int
    host: str  # of its last attempt, if that is not the host of the matrix; else ""
    tail: tuple[str, ...]  # last lines of its log
    log: str  # path of the log, relative to the matrix; "" if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRuns:
    """Runs that ended in the same way."""

    status: Status
    kind: str  # of the failure in one word; "" if unknown
    count: int
    runs: tuple[EndedRun, ...]  # the first ones

    @property
    def hidden(self) -> int:
        return self.count - len(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRow:
    """The alerts of one kind over all runs."""

    severity: Severity
    worst: str  # the worst one in a sentence
    worst_run: str
    runs: str  # names of the first runs that had it
    count: int  # of runs
    times: int  # that it began
    seconds: float  # in total, as far as it is known
    lasting: bool  # it was active when a run ended
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresSection:
    """What went wrong, and what was not tried."""

    ended: tuple[EndedRuns, ...]
    alerts: tuple[AlertRow, ...]
    excluded: tuple[ExcludedCells, ...]

    @property
    def title(self) -> str:
        parts = ["failures"] * bool(self.ended) + ["alerts"] * bool(self.alerts)
        return " and ".join(parts).capitalize() or "Excluded cells"


def failures(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> FailuresSection | None:
    """Return the section, or None if nothing went wrong and no cell was excluded."""
    del groups
    found = FailuresSection(ended=_ended(numbers), alerts=_alerts(numbers.runs), excluded=numbers.excluded)
    return found if found.ended or found.alerts or found.excluded else None


def _ended(numbers: MatrixNumbers) -> tuple[EndedRuns, ...]:
    runs, home = numbers.runs, str(numbers.provenance.get("host") or "")
    kinds: dict[tuple[Status, str], list[int]] = {}
    for status in ENDED_BADLY:
        for place, run in enumerate(runs):
            if run.status is status and run.ended_badly:
                kinds.setdefault((status, run.kind), []).append(place)
    found, logs = [], MOST_LOGS
    for (status, kind), places in kinds.items():
        chosen = places[: min(MOST_OF_A_KIND, logs)]
        logs -= len(chosen)
        shown = tuple(_ended_run(place, runs[place], home) for place in chosen)
        found.append(EndedRuns(status=status, kind=kind, count=len(places), runs=shown))
    return tuple(found)


def _ended_run(place: int, run: RunNumbers, home: str) -> EndedRun:
    host = run.attempts[-1].host if run.attempts else ""
    return EndedRun(
        place=place,
        name=run.name,
        reason=run.reason or NO_REASON,
        steps=run.steps,
        max_iters=run.max_iters,
        attempts=len(run.attempts),
        host="" if host == home else host,
        tail=_tail(run.log_tail),
        log=run.log,
    )


def _tail(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last lines, each cut at its end, as many as LOG characters hold."""
    found: list[str] = []
    room = LOG
    for line in reversed(lines[-MOST_LINES:]):
        cut = line if len(line) <= LINE else f"{line[:LINE]}…"
        room -= len(cut)
        if room < 0 and found:
            break
        found.append(cut)
    return tuple(reversed(found))


def _alerts(runs: Sequence[RunNumbers]) -> tuple[AlertRow, ...]:
    """Return one row per kind, critical ones first, then those of the most runs."""
    kinds: dict[tuple[Severity, AlertKind], list[tuple[str, tuple[Alert, ...]]]] = {}
    for run in runs:
        for alerts in by_subject(run.alerts):
            kinds.setdefault((alerts[0].severity, alerts[0].kind), []).append((run.name, alerts))
    rows = [_alert_row(severity, found) for (severity, _), found in kinds.items()]
    return tuple(sorted(rows, key=lambda row: (row.severity is Severity.WARNING, -row.count)))


def _alert_row(severity: Severity, found: Sequence[tuple[str, tuple[Alert, ...]]]) -> AlertRow:
    every = [(name, alert) for name, alerts in found for alert in alerts]
    most = worst([alert for _, alert in every])
    names = dict.fromkeys(name for name, _ in found)
    return AlertRow(
        severity=severity,
        worst=most.text,
        worst_run=next(name for name, alert in every if alert is most),
        runs=first_names(names, 3),
        count=len(names),
        times=len(every),
        seconds=sum(alert.until - alert.since for _, alert in every if alert.until is not None),
        lasting=any(alert.until is None for _, alert in every),
        advice=most.advice,
    )
