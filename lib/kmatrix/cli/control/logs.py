"""Follow the logs of runs, of each node; of a job that died before it trained, its own log."""

from __future__ import annotations

import codecs
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import ask, chosen_runs, find_target, look, running_target
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.own_file import open_to_read
from kmatrix.records.files import last_lines
from kmatrix.records.jobs.files import read_node
from kmatrix.records.jobs.paths import NodeDir, ShareDir, nodes_of
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import Status
from kmatrix.status.activity import MAY_RUN, Activity, MatrixActivity, ShareState
from kmatrix.status.status_file import recover_status
from kmatrix.text import make_command, printable

TRACEBACK = "Traceback (most recent call last):"
# The last line of a traceback of torchrun.
LAUNCHER = re.compile(
    r"torch\.distributed\.elastic\.multiprocessing\.(api\.SignalException|errors\.ChildFailedError)\b"
)
LAST_LINES = 40  # of a log, printed before following it
POLL_S = 0.2  # between two reads of a log
LOOK_S = 5.0  # between two looks whether a job of a cluster still runs
MOST_JOBS = 3  # logs of jobs that are printed


def logs(arguments: Arguments) -> int:
    """Follow the log of the run that is running; of a matrix that has ended, print the end of the last one."""
    # RUN= may be a run directory, which names its matrix. Without it, a running matrix is preferred to the newest.
    matrix = running_target(arguments) if not arguments.get("RUN") else None
    matrix = matrix or find_target(arguments)
    runs, node = chosen_runs(matrix, arguments), asked_node(arguments)
    followed = _Followed(matrix, look(matrix), node)
    if followed.activity.engine is None:
        live = runs if followed.activity.is_running else []
    else:  # the others may wait for their jobs for days
        live = [run for run in runs if followed.activity.has_runner(run.name)]
    if live:
        try:
            return _follow(followed, live, once=bool(arguments.get("RUN")))
        except KeyboardInterrupt:  # the usual way to stop following
            return 0
    there = [run for run in runs if followed.log_of(run).exists()]
    dead = _dead_jobs(followed.activity, runs) if node is None else []
    if not there and not dead:
        raise _no_log(followed, runs)
    # The newest log of all runs, unless a job died before it could write one: it has the reason.
    chosen = (
        there
        if arguments.get("RUN")
        else [max(there, key=lambda run: followed.log_of(run).stat().st_mtime)]
        if there and not dead
        else []
    )
    for run in chosen:
        _print_end(followed.title_of(run), followed.log_of(run))
        _print_why(run)
    for state, share in dead[:MOST_JOBS]:
        _print_end(_job_title(state, share), share.log)
    if len(dead) > MOST_JOBS:
        print(f"and {len(dead) - MOST_JOBS} more jobs: pass RUN=")
    return 0


def asked_node(arguments: Arguments) -> int | None:
    """Return the number of NODE=, None without it. Raises ConfigError if it is not a number from 0."""
    text = arguments.get("NODE")
    if text and not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise ConfigError(f"NODE={text}", why="expected the number of a node of the run, from 0")
    return int(text) if text else None


@dataclass(slots=True)
class _Followed:
    """A matrix whose logs are followed, with what is known about who runs it."""

    matrix: MatrixDir
    activity: MatrixActivity
    node: int | None = None  # of a run over several nodes; None: the run's own log, of its first node
    _due: float = field(default_factory=lambda: time.monotonic() + LOOK_S)

    def log_of(self, run: RunDir) -> Path:
        return run.output_log if self.node is None else NodeDir(run, self.node).output_log

    def title_of(self, run: RunDir) -> str:
        """Return the name of the run, and the node with its host if one was asked for."""
        if self.node is None:
            return run.name
        agent = read_node(NodeDir(run, self.node))
        return f"{run.name}, node {self.node}" + (f" on {printable(agent.host)}" if agent and agent.host else "")

    def is_live(self, run: RunDir | None = None) -> bool:
        """Return whether a runner has the run, or the matrix if none is given."""
        if self.activity.engine is None:
            self.activity.refresh()
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LOOK_S
            self.activity.refresh(ask(self.matrix))
        return self.activity.is_running if run is None else self.activity.has_runner(run.name)


def _dead_jobs(activity: MatrixActivity, runs: Sequence[RunDir]) -> list[tuple[ShareState, ShareDir]]:
    """Return the jobs of these runs whose runner did not record an end, and that have a log: it has the reason.

    Their runs are unfinished: they never began, or were cut off.
    """
    found: dict[str, tuple[ShareState, ShareDir]] = {}
    for run in runs:
        state = activity.of(run.name)
        share = state.share
        if share is None or share.id in found or state.activity in MAY_RUN or state.end is not None:
            continue
        with suppress(OSError):
            if share.log.stat().st_size and _is_open(run):
                found[share.id] = (state, share)
    return list(found.values())


def _is_open(run: RunDir) -> bool:
    return recover_status(run, has_runner=False).status in (Status.PLANNED, Status.STOPPED)


def _no_log(followed: _Followed, runs: Sequence[RunDir]) -> LaunchError:
    """Return the error for runs without a log, with the reason if their jobs wait."""
    matrix, hint = followed.matrix, f"`{make_command('status', followed.matrix.path)}` shows which have started"
    if followed.node is not None:
        nodes = [node.node for node in nodes_of(runs[0])] if len(runs) == 1 else []
        why = f"{runs[0].name} has nodes 0 to {max(nodes)}" if nodes else ""
        if len(runs) == 1 and not nodes and runs[0].output_log.exists():
            why, hint = f"{runs[0].name} is on one node", "leave out NODE="
        return LaunchError(f"no run of {matrix.name} has a log of node {followed.node}", why=why, hint=hint)
    states = [followed.activity.of(run.name) for run in runs]
    waits = [state for state in states if state.activity is Activity.QUEUED]
    ended = [state.view.reason for state in states if state.activity is Activity.NONE and state.view]
    reason = waits[0].view.reason if waits and waits[0].view else ""
    why = f"its jobs wait: {reason or followed.activity.scheduler}" if waits else ""
    why = why or next((f"a job has ended: {text}" for text in ended if text), "")
    return LaunchError(f"no run of {matrix.name} has a log yet", why=why, hint=hint)


def _follow(followed: _Followed, runs: Sequence[RunDir], *, once: bool) -> int:
    """Print the logs of the runs, one after the other, until the matrix has ended. once: or the runs have."""
    seen: set[str] = set()
    _print_starting(followed, runs)
    while True:
        held = followed.is_live()  # before the runs: one that starts in between is found in the next round
        run = next((run for run in runs if run.name not in seen and _is_running(run)), None)
        if run is not None and (followed.node is None or followed.log_of(run).exists()):
            seen.add(run.name)
            _title(followed.title_of(run))
            _print_growth(followed, run)
            if followed.activity.engine is not None:  # on this machine, the terminal of the matrix says it
                _print_why(run)
        elif not held or (once and all(_has_ended(run) for run in runs)):
            for one in (run for run in runs if not seen and followed.log_of(run).exists()):
                _print_end(followed.title_of(one), followed.log_of(one))
                _print_why(one)
            return 0
        time.sleep(POLL_S)


def _print_starting(followed: _Followed, runs: Sequence[RunDir]) -> None:
    """Print the logs of jobs that have started on a cluster, and none of whose runs has: what they are doing."""
    shares = {}
    for run in runs:
        state = followed.activity.of(run.name)
        if state.share is not None and followed.node is None and not _is_running(run):
            shares[state.share.id] = (state, state.share)
    if len(shares) < len(runs) or not shares:
        return
    for state, share in list(shares.values())[:MOST_JOBS]:
        if share.log.exists() and share.log.stat().st_size:
            _print_end(_job_title(state, share), share.log)
        else:
            _title(f"{_job_title(state, share)} has started, and printed nothing yet")


def _print_growth(followed: _Followed, run: RunDir) -> None:
    """Print the end of a log, then follow it until the run has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
    with open_to_read(followed.log_of(run)) as file:
        text = "".join(last_lines(file)[-LAST_LINES:])
        while True:
            live = _is_running(run) and followed.is_live(run)  # before the read, which then includes the last lines
            sys.stdout.write(printable(text + decoder.decode(file.read())))
            sys.stdout.flush()
            if not live:
                return
            text = ""
            time.sleep(POLL_S)


def _print_end(title: str, log: Path) -> None:
    _title(title)
    with open_to_read(log) as file:
        sys.stdout.writelines(map(printable, without_launcher(last_lines(file))[-LAST_LINES:]))


def without_launcher(lines: Iterable[str]) -> list[str]:
    """Return the lines of a log without the tracebacks of torchrun itself.

    They only say that a rank failed or that it was signalled, in forty lines that follow the reason.
    """
    kept: list[str] = []
    block: list[str] = []  # a traceback so far
    for line in lines:
        if line.startswith(TRACEBACK):
            kept += block
            block = [line]
        elif not block:
            kept.append(line)
        elif line[:1].isspace():  # a blank line, too: of a frame without its source
            block.append(line)
        else:
            kept += [] if LAUNCHER.match(line) else [*block, line]
            block = []
    return kept + block


def _print_why(run: RunDir) -> None:
    """Print why a run ended without success: torchrun's report follows the reason in the log, and names any rank."""
    state = recover_status(run, has_runner=True)
    if state.status in (Status.FAILED, Status.STOPPED) and state.reason:
        _title(f"{run.name} {state.status}: {state.reason}")


def _job_title(state: ShareState, share: ShareDir) -> str:
    """Return `job 12_3 (share 1.3): ended with an error`."""
    job = state.view.job if state.view else state.owner.job if state.owner else ""
    reason = f": {state.view.reason}" if state.view and state.view.reason else ""
    return f"job {job or 'unknown'} (share {share.id}){reason}"


def _title(text: str) -> None:
    print(f"==> {printable(text)}", flush=True)


def _is_running(run: RunDir) -> bool:
    return recover_status(run, has_runner=True).status is Status.RUNNING


def _has_ended(run: RunDir) -> bool:
    return recover_status(run, has_runner=True).status not in (Status.RUNNING, Status.PLANNED)
