"""Write the curves of runs that have ended, one at a time, never in the way of the runs that still train."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kmatrix.curves.make import make_curves, source_bytes, write_curves
from kmatrix.errors import RecordError, is_full, reason_of
from kmatrix.records.paths import RunDir

# Of a run's log and recordings: what takes a second at most, because meanwhile no run is watched. The report makes the
# curves of larger runs.
MOST_BYTES = 32 << 20


class CurvesQueue:
    """The runs that have ended and whose curves.json is not written yet."""

    def __init__(self, log: Callable[..., None]) -> None:
        """Create the queue. log: writes an event to the journal."""
        self._log = log
        self._waiting: deque[tuple[RunDir, int]] = deque()

    def add(self, run_dir: RunDir, attempt: int) -> None:
        """Add a run. attempt: its last one."""
        if sum(source_bytes(run_dir)) <= MOST_BYTES:
            self._waiting.append((run_dir, attempt))

    def write_next(self) -> bool:
        """Write the curves of the run that has waited longest; return whether there was one.

        An error is logged, except that of a full disk, which the runner reports. The report tries again.
        """
        if not self._waiting:
            return False
        run_dir, attempt = self._waiting.popleft()
        try:
            write_curves(run_dir, make_curves(run_dir, attempt))
        except (OSError, RecordError, ValueError, ArithmeticError) as error:
            if not is_full(error):
                self._log("curves not written", run=run_dir.name, reason=reason_of(error))
        return True
