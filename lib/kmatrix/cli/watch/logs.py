"""Follow the logs of runs, of each node; of a job that died before it trained, its own log."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix import locks
from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import chosen_runs, find_target, running_target
from kmatrix.cli.watch.jobs import look_with_jobs
from kmatrix.clock import clock
from kmatrix.errors import LaunchError
from kmatrix.records.control import requests_of
from kmatrix.records.files import last_lines
from kmatrix.records.matrix import LOCAL
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.status.fold import State, state_of
from kmatrix.status.look import Look, read_run
from kmatrix.status.view import WAITS, JobView
from kmatrix.text import make_command, printable

LAST_LINES = 40  # of a log, printed before following it
POLL_S = 0.2  # between two reads of a log


def logs(arguments: Arguments) -> int:
    """Follow the log of the run that is running; of a matrix that has ended, print the end of the last one."""
    # RUN= may be a run directory, which names its matrix. Without it, a running matrix is preferred to the newest.
    asked = arguments.get("RUN")
    matrix = (None if asked else running_target(arguments)) or find_target(arguments)
    runs, node = chosen_runs(matrix, arguments), arguments.number("NODE")
    seen, jobs, _ = look_with_jobs(matrix.path)
    followed = _Followed(seen, jobs, node)
    # On a cluster the others may wait for their jobs for days.
    live = runs if followed.is_held() else [run for run in runs if followed.is_running(run)]
    if live:
        try:
            return _follow(followed, live, once=bool(asked))
        except KeyboardInterrupt:  # the usual way to stop following
            return 0
    there = [run for run in runs if followed.log_of(run).exists()]
    if not there:
        raise _no_log(followed, runs)
    for run in there if asked else [max(there, key=lambda run: followed.log_of(run).stat().st_mtime)]:
        followed.print_end(run)
    return 0


@dataclass(slots=True)
class _Followed:
    """A matrix whose logs are followed."""

    seen: Look
    jobs: Mapping[str, JobView]
    node: int | None = None  # of a run over several nodes; None: the run's own log, of its first node
    _runs: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._runs = {run.name: at for at, run in enumerate(self.seen.plan.runs)}

    def log_of(self, run: RunDir) -> Path:
        """Return the log of a run; before its program wrote one, the log of its job, which has the reason."""
        if self.node:
            return run.path / "nodes" / f"{self.node}.log"
        if self.node == 0 or run.output_log.exists():
            return run.output_log
        job = self.jobs.get(run.name)
        return self.seen.path / (job.log if job else f"jobs/{run.name}.log")

    def state(self, run: RunDir) -> State:
        """Return where a run stands now."""
        plan, path = self.seen.plan, self.seen.path
        planned = plan.runs[self._runs[run.name]]
        return state_of(read_run(path, plan, planned, requests_of(path)), spare=planned.selected)

    def is_running(self, run: RunDir) -> bool:
        return self.state(run).status is Status.RUNNING

    def is_held(self) -> bool:
        """Return whether the background process of this host runs the matrix."""
        return self.seen.plan.engine == LOCAL and locks.is_held(self.seen.path / ".lock")

    def title_of(self, run: RunDir) -> str:
        if self.log_of(run).is_relative_to(self.seen.path / "jobs"):
            return f"{run.name}, log of its job"
        return run.name if self.node is None else f"{run.name}, node {self.node}"

    def print_end(self, run: RunDir) -> None:
        _title(self.title_of(run))
        with self.log_of(run).open("rb") as file:
            sys.stdout.writelines(map(printable, last_lines(file)[-LAST_LINES:]))
        self.print_why(run)

    def print_why(self, run: RunDir) -> None:
        """Print why a run ended without success."""
        state = self.state(run)
        if state.status in (Status.FAILED, Status.STOPPED) and state.reason:
            _title(f"{run.name} {state.status}: {state.reason}")


def _no_log(followed: _Followed, runs: Sequence[RunDir]) -> LaunchError:
    """Return the error for runs without a log, with the reason if their jobs wait."""
    matrix, hint = followed.seen.path, f"`{make_command('status', followed.seen.path)}` shows which have started"
    if followed.node is not None:
        what = f"no run of {matrix.name} has a log of node {followed.node}"
        return LaunchError(what, hint="leave out NODE= for the log of a run on one node")
    jobs = [followed.jobs[run.name] for run in runs if run.name in followed.jobs]
    waits = next((job for job in jobs if job.phase == WAITS), None)
    ended = next((job for job in jobs if job.reason), None)
    why = (
        f"its jobs wait: {waits.reason or waits.state}"
        if waits
        else f"a job has ended: {ended.reason}"
        if ended
        else ""
    )
    return LaunchError(f"no run of {matrix.name} has a log yet", why=why, hint=hint)


def _follow(followed: _Followed, runs: Sequence[RunDir], *, once: bool) -> int:
    """Print the logs of the runs, one after the other, until the matrix has ended. once: or the runs have."""
    done: set[str] = set()
    while True:
        held = followed.is_held()  # before the runs: one that starts in between is found in the next round
        run = next((run for run in runs if run.name not in done and followed.is_running(run)), None)
        if run is not None:
            if followed.log_of(run).exists():
                done.add(run.name)
                _title(followed.title_of(run))
                _print_growth(followed, run)
                followed.print_why(run)
        elif not held or (once and all(followed.state(one).status is not Status.PLANNED for one in runs)):
            for one in (run for run in runs if not done and followed.log_of(run).exists()):
                followed.print_end(one)
            return 0
        clock.sleep(POLL_S)


def _print_growth(followed: _Followed, run: RunDir) -> None:
    """Print the end of a log, then follow it until the run has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
    with followed.log_of(run).open("rb") as file:
        text = "".join(last_lines(file)[-LAST_LINES:])
        while True:
            live = followed.is_running(run)  # before the read, which then includes the last lines
            sys.stdout.write(printable(text + decoder.decode(file.read())))
            sys.stdout.flush()
            if not live:
                return
            text = ""
            clock.sleep(POLL_S)


def _title(text: str) -> None:
    print(f"==> {printable(text)}", flush=True)
