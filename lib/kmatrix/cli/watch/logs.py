"""Follow the logs of runs, of each node; of a job that died before it trained, its own log."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kmatrix import locks
from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import chosen_runs, find_target, running_target
from kmatrix.cli.watch.jobs import look_with_jobs
from kmatrix.clock import clock
from kmatrix.errors import LaunchError
from kmatrix.records.files import last_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.status.fold import State
from kmatrix.status.look import look
from kmatrix.status.view import WAITS, JobView
from kmatrix.text import make_command, printable

LAST_LINES = 40  # of a log, printed before following it
POLL_S = 0.5  # between two looks


def logs(arguments: Arguments) -> int:
    """Follow the log of the run that is running; of a matrix that has ended, print the end of the last one."""
    # RUN= may be a run directory, which names its matrix. Without it, a running matrix is preferred to the newest.
    asked, node = arguments.get("RUN"), arguments.number("NODE")
    matrix = (None if asked else running_target(arguments)) or find_target(arguments)
    runs, (_, jobs, _) = chosen_runs(matrix, arguments), look_with_jobs(matrix.path)

    def log_of(run: RunDir) -> Path:
        """Return the log of a run; before its program wrote one, the log of its job, which has the reason."""
        if node:
            return run.path / "nodes" / f"{node}.log"
        if node == 0 or run.output_log.exists():
            return run.output_log
        return matrix.path / (jobs[run.name].log if run.name in jobs else f"jobs/{run.name}.log")

    def state_of(run: RunDir) -> State:
        return look(matrix.path).states[run.name]

    def show(run: RunDir) -> None:
        log, about = log_of(run), "" if node is None else f", node {node}"
        about = ", log of its job" if log.is_relative_to(matrix.path / "jobs") else about
        _title(f"{run.name}{about}")
        _print_growth(log, lambda: state_of(run).status is Status.RUNNING)
        state = state_of(run)
        if state.status in (Status.FAILED, Status.STOPPED) and state.reason:
            _title(f"{run.name} {state.status}: {state.reason}")

    try:
        if _follow(matrix.path, runs, log_of, show, once=bool(asked)):
            return 0
    except KeyboardInterrupt:  # the usual way to stop following
        return 0
    there = [run for run in runs if log_of(run).exists()]
    if not there:
        raise _no_log(matrix.path, node, [jobs[run.name] for run in runs if run.name in jobs])
    for run in there if asked else [max(there, key=lambda run: log_of(run).stat().st_mtime)]:
        show(run)
    return 0


def _follow(
    path: Path, runs: Sequence[RunDir], log_of: Callable[[RunDir], Path], show: Callable[[RunDir], None], *, once: bool
) -> set[str]:
    """Show the logs of runs that train, one after the other, until nobody starts runs here; return their names.

    once: until these runs have ended. On a cluster, the others may wait for their jobs for days.
    """
    done: set[str] = set()
    while True:
        is_held = locks.is_held(path / ".lock")  # before the look, for runs that start in between
        states = look(path).states
        live = [run for run in runs if run.name not in done and states[run.name].status is Status.RUNNING]
        is_over = not is_held or (once and all(states[run.name].status is not Status.PLANNED for run in runs))
        if run := next((run for run in live if log_of(run).exists()), None):
            done.add(run.name)
            show(run)
        elif is_over and not live:
            return done
        else:
            clock.sleep(POLL_S)


def _print_growth(log: Path, is_live: Callable[[], bool]) -> None:
    """Print the end of a log, then follow it until its run has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
    with log.open("rb") as file:
        text = "".join(last_lines(file)[-LAST_LINES:])
        while True:
            live = is_live()  # before the read, which then includes the last lines
            sys.stdout.write(printable(text + decoder.decode(file.read())))
            sys.stdout.flush()
            if not live:
                return
            text = ""
            clock.sleep(POLL_S)


def _no_log(path: Path, node: int | None, jobs: Sequence[JobView]) -> LaunchError:
    """Return the error for runs without a log, with the reason if their jobs wait or have ended."""
    if node is not None:
        hint = "leave out NODE= for the log of a run on one node"
        return LaunchError(f"no run of {path.name} has a log of node {node}", hint=hint)
    waits = (f"its jobs wait: {job.reason or job.state}" for job in jobs if job.phase == WAITS)
    ended = (f"a job has ended: {job.reason}" for job in jobs if job.reason)
    hint = f"`{make_command('status', path)}` shows which have started"
    return LaunchError(f"no run of {path.name} has a log yet", why=next(waits, next(ended, "")), hint=hint)


def _title(text: str) -> None:
    print(f"==> {printable(text)}", flush=True)
