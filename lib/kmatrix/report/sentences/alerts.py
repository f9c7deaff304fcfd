"""Alerts of a run as a report tells them: those of one kind about one device are one piece of news."""

from __future__ import annotations

from collections.abc import Sequence

from kmatrix.status.alerts import Alert, AlertKind, Severity


def by_subject(alerts: Sequence[Alert]) -> list[tuple[Alert, ...]]:
    """Return alerts of one kind about one device together, each in order of time, critical ones first.

    An alert that comes and goes is one piece of news.
    """
    found: dict[tuple[AlertKind, str], list[Alert]] = {}
    for alert in sorted(alerts, key=lambda alert: (alert.severity is Severity.WARNING, alert.since)):
        found.setdefault((alert.kind, alert.about), []).append(alert)
    return [tuple(group) for group in found.values()]


def worst(alerts: Sequence[Alert]) -> Alert:
    """Return the alert whose value is farthest from its threshold, which works for limits from above and below."""
    return max(alerts, key=lambda alert: abs((alert.value or 0.0) - (alert.threshold or 0.0)))
