"""What holds for the state of every run: the invariants that tests check after each transition."""

from __future__ import annotations

import itertools

from kmatrix.records.runs import Status
from kmatrix.status.state import ENDED, RunState


def why_illegal(state: RunState) -> str:
    """Return what is wrong with a state, "" for nothing."""
    numbers = [state.archived, *(attempt.number for attempt in state.attempts)]
    if any(later <= former for former, later in itertools.pairwise(numbers)):
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
