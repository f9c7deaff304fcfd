"""Check the invariants of the state of a run."""

from __future__ import annotations

import itertools

from kmatrix.records.runs import Status
from kmatrix.status.state import ENDED, RunState


def find_violation(state: RunState) -> str:
    """Return a message about the first violated invariant of a state, or "" for a legal state."""
    numbers = [state.archived, *(attempt.number for attempt in state.attempts)]
    if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        return "the attempts are not counted upwards"
    if any(attempt.status not in ENDED for attempt in state.attempts[:-1]):
        return "an attempt began before the former had ended"
    if any(attempt.status is Status.FINISHED for attempt in state.attempts[:-1]):
        return "a finished run was started again"
    if state.reused_from:
        return "" if state.status is Status.FINISHED and not state.attempts else "a reused run is finished"
    if state.last is None:
        return "" if state.status in (Status.PLANNED, Status.SKIPPED) else f"{state.status} without an attempt"
    return "" if state.last.status is state.status else f"{state.status}, and its attempt {state.last.status}"
