"""The GPUs of one execution: lost ones get no more runs, and what changes is written and noted."""

from __future__ import annotations

from collections.abc import Callable

from kmatrix.engines.local.pool import Pool
from kmatrix.runner.status_writer import StatusWriter
from kmatrix.status.classify import RunEnd


class PoolWatch:
    """The pool of GPUs of a runner."""

    def __init__(self, pool: Pool, writer: StatusWriter, on_note: Callable[[str], None]) -> None:
        """Create the watch. on_note: called with each GPU that is left out, or back."""
        self._pool, self._writer, self._on_note = pool, writer, on_note
        self._excluded: dict[str, str] = {}  # GPU -> why, as reported last

    def leave_out_lost(self, run: str, end: RunEnd) -> None:
        """Remove the GPUs that a run has lost from the pool."""
        for uuid in end.lost:
            self._pool.quarantine(uuid, f"{end.reason} ({run})")

    def report(self) -> bool:
        """Report GPUs that were left out, or returned, since the last call; return whether there are any."""
        out, before = self._pool.excluded, self._excluded
        for uuid in (uuid for uuid in {**before, **out} if before.get(uuid) != out.get(uuid)):
            name = self._pool.name(uuid)
            self._writer.log("gpu left out" if uuid in out else "gpu back", gpu=uuid, name=name, reason=out.get(uuid))
            self._on_note(f"{name} is {out[uuid]}" if uuid in out else f"{name} is available again")
        self._excluded = out
        return out != before
