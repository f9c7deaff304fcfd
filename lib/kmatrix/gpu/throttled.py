"""Estimate how long a GPU was throttled, from polls of its throttle reasons."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class ThrottledTime:
    """The throttled time of one GPU by reason, s.

    A reason that two successive polls report lasted for the time between them, one that only one of them reports for
    half of it: changes are as likely before the middle as after it, so the errors cancel out in the mean.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        """Continue from these seconds by reason."""
        # Replaced as a whole: another thread may read it.
        self.seconds: dict[str, float] = dict(seconds or {})
        self._before: frozenset[str] = frozenset()

    def add(self, reasons: Collection[str], step: float) -> None:
        """Add a poll. reasons: active now.  step: time since the poll before, s; 0 for the first one."""
        now = frozenset(reasons)
        if step > 0 and (now or self._before):
            added = {reason: step * ((reason in now) + (reason in self._before)) / 2 for reason in now | self._before}
            self.seconds = self.seconds | {
                reason: self.seconds.get(reason, 0.0) + seconds for reason, seconds in added.items()
            }
        self._before = now
