"""Follow what the user requests of single runs (`make hold` and `release`) while their matrix runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Protocol

from kmatrix.errors import LaunchError, RecordError
from kmatrix.records.paths import MatrixDir
from kmatrix.records.states import RunRequest, lock_requests, read_requests
from kmatrix.runner.status_writer import StatusWriter
from kmatrix.status.state import Freed, Requested, is_left_out

READ_EVERY_S = 0.5  # between two reads of the requests


class Runs(Protocol):
    """What requests do with the runs of a runner."""

    open: set[str]  # runs of this execution that have not ended

    def cancel(self, name: str) -> None:
        """Ask an open run to save a checkpoint and exit; one that has not started is never started."""

    def restart(self, name: str) -> None:
        """Queue a run that has no processes, from its last checkpoint, if it is unfinished."""

    def report(self, name: str) -> None:
        """Write the status of a run that was left out, and display it."""

    def write(self, name: str) -> None:
        """Write the status of a run."""


class RequestWatch:
    """The requests for the runs of a matrix, as far as its runner has followed them."""

    def __init__(self, matrix: MatrixDir, runs: Runs, writer: StatusWriter, every_s: float | None = None) -> None:
        """Create the watch. every_s: between two reads of the requests (s), None for READ_EVERY_S."""
        self._matrix, self._runs, self._writer, self._every_s = matrix, runs, writer, every_s
        self._requests: Mapping[str, RunRequest] = {}
        self._due = 0.0  # monotonic seconds
        self._planned: frozenset[str] = frozenset()  # runs of this execution
        self._lock = ExitStack()  # has the descriptor of the requests' lock
        self.cancelled: set[str] = set()  # runs that end because of a request

    def begin(self, planned: Iterable[str]) -> None:
        """Hold the planned runs with a request. Raises RecordError if the file is damaged."""
        self._planned = frozenset(planned)
        self._requests = read_requests(self._matrix)
        for name in self._writer.states:
            if name in self._planned and name in self._requests:
                self._leave_out(name)
            else:  # a command that was killed may have changed the requests only
                self._write(name)

    def follow(self, *, stopping: bool) -> bool:
        """Hold and release runs as the user has requested since the last call; return whether a run is open.

        stopping: nothing is started; requests are written to the status of their runs at the end.
        After it has returned False, no command can change the requests until `close`: a command that comes later finds
        no runner, and writes the status itself.
        """
        if not stopping:
            self._follow_ended()
        is_last = not self._runs.open
        if is_last:
            with suppress(LaunchError):  # a process that is stopped holds it: the next runner follows its request
                self._lock.callback(os.close, lock_requests(self._matrix))
        if not stopping and (is_last or time.monotonic() >= self._due):
            self._due = time.monotonic() + (self._every_s or READ_EVERY_S)
            self._follow_changes()
        if self._runs.open:
            self.close()
            return True
        self._read()
        for name in self._writer.states:
            self._write(name)
        return False

    def close(self) -> None:
        """Release the lock of the requests."""
        self._lock.close()

    def _read(self) -> None:
        with suppress(RecordError):  # what was read last applies
            self._requests = read_requests(self._matrix)

    def _follow_changes(self) -> None:
        former, states = self._requests, self._writer.states
        self._read()
        names = former.keys() | self._requests.keys()
        changed = {name for name in names if former.get(name) != self._requests.get(name)}
        for name in (name for name in states if name in changed):
            wanted = self._requests.get(name)
            if name not in self._planned:  # `make continue RUN=` did not select it: a later one runs it
                self._write(name)
            elif wanted is None:
                self._writer.log("run released", run=name)
                if name not in self._runs.open and is_left_out(states[name]):
                    self._restart(name)
            elif name in self._runs.open:
                # As at a stop: it saves a checkpoint, and is left out once its processes have exited.
                self._writer.log("run hold asked", run=name)
                self._runs.cancel(name)
                self.cancelled.add(name)
            else:
                self._leave_out(name)

    def _follow_ended(self) -> None:
        """Hold the runs that have ended by request, or continue them if they were released meanwhile."""
        for name in sorted(self.cancelled - self._runs.open):
            if name in self._requests:
                self._leave_out(name)
            else:
                self._restart(name)

    def _leave_out(self, name: str) -> None:
        """Record that a run without processes is held."""
        self._runs.open.discard(name)
        self.cancelled.discard(name)
        self._writer.apply(name, Requested(self._requests[name]))
        state = self._writer.states[name]
        if is_left_out(state):  # it may have finished, or failed, before
            self._writer.log("run left out", run=name, status=state.status, reason=state.reason)
            self._runs.report(name)

    def _restart(self, name: str) -> None:
        self.cancelled.discard(name)
        self._writer.apply(name, Freed())
        self._runs.restart(name)

    def _write(self, name: str) -> None:
        """Write the request for a run, or its release, to its status."""
        before = self._writer.states[name]
        self._writer.apply(name, Requested(self._requests[name]) if name in self._requests else Freed())
        if self._writer.states[name] != before:
            self._runs.write(name)
