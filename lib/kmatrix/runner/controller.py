"""Start what is due: on one machine again and again, in the last job of a cluster once. It remembers nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kmatrix.clock import clock
from kmatrix.engines.ports import UnreachableError
from kmatrix.records.control import CONTROL, requests_of, stop
from kmatrix.records.runs import Status
from kmatrix.status import fold
from kmatrix.status.cost import spent
from kmatrix.status.look import Look, look
from kmatrix.status.wanted import wanted

LOOKS_S, SHARE = 1.0, 20  # a look at least this long after the last one, and that many times as long as it took


class Jobs(Protocol):
    """The jobs of a matrix: processes of this machine, or of a scheduler. Each call may raise UnreachableError."""

    def poll(self) -> Mapping[str, bool]:
        """Start what fits, if that is ours to do; return run -> whether it runs (False: it waits), of live jobs."""

    def submit(self, runs: Sequence[str]) -> None: ...

    def cancel(self, runs: Sequence[str]) -> None: ...

    @property
    def broken(self) -> Collection[str]:
        """Return runs whose program could not begin here: they wait for a person."""


def everything(seen: Look) -> Sequence[str]:
    """Return all runs."""
    return list(seen.states)


@dataclass(kw_only=True)
class Controller:
    """Who starts runs. Its state is the files of the matrix, and the jobs that live."""

    path: Path
    jobs: Jobs
    wanted: Callable[[Look], Sequence[str]] = everything  # what the losses want; pure
    spent: Callable[[Look], str] = lambda _: ""  # that the budget of the matrix is spent, "" if it is not
    only: frozenset[str] | None = None  # of `make continue RUN=`
    # Of a last job: the runs that ever had a job. One of these that waits no more, and never began, was cancelled.
    known: frozenset[str] = field(default=frozenset())

    def step(self, jobs: Mapping[str, bool] | None = None) -> bool:
        """Do what can be done now; return whether something is live, or was submitted. jobs: as `poll` has told."""
        try:
            jobs = self.jobs.poll() if jobs is None else jobs
        except UnreachableError:
            return True  # nothing is known of jobs, so nothing is submitted
        seen = look(self.path, [run for run, runs in jobs.items() if runs])
        if seen.stop is None and (why := self.spent(seen)):
            stop(self.path, why)
            seen = look(self.path, list(jobs))
        live = {run for run, state in seen.states.items() if state.status is Status.RUNNING} | set(jobs)
        if seen.stop is not None:
            self.jobs.cancel(list(jobs))  # what waits never starts; what runs has seen the file
            return bool(live)
        if due := [run for run in self.wanted(seen) if self._is_due(seen, run) and run not in live]:
            self.jobs.submit(due)
        return bool(live or due)

    def _is_due(self, seen: Look, run: str) -> bool:
        state = seen.states[run]
        is_chosen = (self.only is None or run in self.only) and (state.attempts or run not in self.known)
        return state.is_due and bool(is_chosen) and run not in self.jobs.broken

    def run(self) -> Generator[None, None, int]:
        """Step until nothing is live; return the exit status of the matrix. Each `yield` is a short wait.

        A look follows a change of jobs or of control/, and else comes so rarely that it takes at most 5 % of a core.
        """
        known: object = None
        due = clock.monotonic()
        while True:
            jobs = self.jobs.poll()
            now = (dict(jobs), _stamp(self.path / CONTROL))
            if now != known or clock.monotonic() >= due:
                began, known = clock.monotonic(), now
                if not self.step(jobs):
                    return exit_status(look(self.path), self.wanted)
                due = clock.monotonic() + max(LOOKS_S, SHARE * (clock.monotonic() - began))
            yield


def controller_of(path: Path, jobs: Jobs, known: Collection[str] = ()) -> Controller:
    """Return the controller of a matrix, with the runs that the last `make continue` chose. known: see `Controller`."""
    only = requests_of(path).settings.get("RUN")
    return Controller(
        path=path,
        jobs=jobs,
        wanted=wanted,
        spent=spent,
        only=frozenset(only.split(",")) if only else None,
        known=frozenset(known),
    )


def _stamp(folder: Path) -> object:
    """Return what changes with the files of a folder, which are replaced by renames."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None


def exit_status(seen: Look, wanted: Callable[[Look], Sequence[str]] = everything) -> int:
    """Return 0 if all runs finished that the losses want, 1 if one failed or was skipped, 130 if some can go on."""
    needed = set(wanted(seen))
    states = [state for run, state in seen.states.items() if run in needed or state.attempts]
    return fold.EXIT[fold.overall(states)]
