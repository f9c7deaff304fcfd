"""Commands that control a running matrix: follow its logs, stop it."""

from __future__ import annotations

import codecs
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import asked_statuses, chosen_runs, find_target, results_dir, running_target
from kmatrix.engines.base import GRACE_S
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.output import check_interrupt
from kmatrix.own_file import open_to_read
from kmatrix.paste import make_command
from kmatrix.records.files import last_lines
from kmatrix.records.lock import Process, held, holder
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import Status
from kmatrix.records.states import (
    Request,
    RunRequest,
    read_matrix_status,
    read_requests,
    requests_locked,
    write_requests,
)
from kmatrix.status.state import Freed, Requested, RunState, after
from kmatrix.status.status_file import recover_status, write_state, writing
from kmatrix.status.watch import alerts_of_run
from kmatrix.text import shown

LAST_LINES = 40  # of a log, printed before following it
POLL_S = 0.2  # between two reads of a log
STOP_POLL_S = 0.1  # between two checks whether the runner has exited


def logs(arguments: Arguments) -> int:
    """Follow the log of the run that is running; of a matrix that has ended, print the end of the last one."""
    # RUN= may be a run directory, which names its matrix. Without it, a running matrix is preferred to the newest.
    matrix = running_target(arguments) if not arguments.get("RUN") else None
    matrix = matrix or find_target(arguments)
    runs = chosen_runs(matrix, arguments)
    if matrix.is_held():
        try:
            return _follow(matrix, runs, once=bool(arguments.get("RUN")))
        except KeyboardInterrupt:  # the usual way to stop following
            return 0
    there = [run for run in runs if run.output_log.exists()]
    if not there:
        raise LaunchError(
            f"no run of {matrix.name} has a log yet",
            hint=f"`{make_command('status', matrix.path)}` shows which have started",
        )
    chosen = there if arguments.get("RUN") else [max(there, key=lambda run: run.output_log.stat().st_mtime)]
    for run in chosen:
        _print_end(run)
    return 0


def _follow(matrix: MatrixDir, runs: Sequence[RunDir], *, once: bool) -> int:
    """Print the logs of the runs, one after the other, until the matrix has ended. once: or the runs have."""
    seen: set[str] = set()
    while True:
        held = matrix.is_held()  # before the runs: one that starts in between is found in the next round
        run = next((run for run in runs if run.name not in seen and _is_running(run)), None)
        if run is not None:
            seen.add(run.name)
            _title(run)
            _print_growth(matrix, run)
        elif not held or (once and all(_has_ended(run) for run in runs)):
            for one in (run for run in runs if not seen and run.output_log.exists()):
                _print_end(one)
            return 0
        time.sleep(POLL_S)
        check_interrupt()


def _print_growth(matrix: MatrixDir, run: RunDir) -> None:
    """Print the end of a log, then follow it until the run has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character
    with open_to_read(run.output_log) as file:
        text = "".join(last_lines(file)[-LAST_LINES:])
        while True:
            live = _is_running(run) and matrix.is_held()  # before the read, which then includes the last lines
            sys.stdout.write(text + decoder.decode(file.read()))
            sys.stdout.flush()
            if not live:
                return
            text = ""
            time.sleep(POLL_S)
            check_interrupt()


def _print_end(run: RunDir) -> None:
    _title(run)
    with open_to_read(run.output_log) as file:
        sys.stdout.writelines(last_lines(file)[-LAST_LINES:])


def _title(run: RunDir) -> None:
    print(f"==> {run.name}", flush=True)


def _is_running(run: RunDir) -> bool:
    return recover_status(run, has_runner=True).status is Status.RUNNING


def _has_ended(run: RunDir) -> bool:
    return recover_status(run, has_runner=True).status not in (Status.RUNNING, Status.PLANNED)


def stop(arguments: Arguments) -> int:
    """Stop the runner of a matrix: its runs save a checkpoint and exit. Wait for it, and print the result."""
    matrix = running_target(arguments)
    owner = holder(matrix) if matrix else None
    if matrix is None or owner is None:
        where = shown(matrix.path if matrix else results_dir(arguments))
        raise LaunchError(f"no matrix is running in {where}", hint="pass TARGET=<matrix> or RESULTS_DIR=<folder>")
    ask(matrix, owner)
    print(f"sent SIGTERM to the runner (pid {owner.pid}) of {shown(matrix.path)}", flush=True)
    # The lock is released when the runner has exited: after that, no status changes any more.
    announced: set[str] = set()
    while matrix.is_held():
        for run in (run for run in matrix.runs() if run.name not in announced and _is_running(run)):
            announced.add(run.name)
            print(f"  waiting for {run.name} to save a checkpoint and exit, {GRACE_S:.0f} s at most", flush=True)
        time.sleep(STOP_POLL_S)
    states = [recover_status(run, has_runner=False).status for run in matrix.runs()]
    print("stopped: " + ", ".join(f"{states.count(s)} {s}" for s in Status if s in states))
    if Status.STOPPED in states or Status.PLANNED in states:
        print(f"  continue: {make_command('continue', matrix.path)}")
    return 0


def ask(matrix: MatrixDir, owner: Process) -> None:
    """Send SIGTERM to the runner, never to another process with a reused pid."""
    # First the handle, then the check: from then on, the handle cannot refer to another process.
    try:
        handle = os.pidfd_open(owner.pid or 0)
    except (OSError, AttributeError):  # AttributeError: not on macOS
        handle = -1
    try:
        if handle < 0 or not owner.lives_here():
            raise LaunchError(
                f"{matrix.name} is being run by process {owner.pid} on {owner.host}",
                why="that process cannot be signalled from here",
                hint="run make stop on that machine, or in that container",
            )
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just exited
    except PermissionError:
        raise LaunchError(
            f"{matrix.name} is being run by process {owner.pid}, which belongs to another user",
            hint="ask that user, or run make stop as that user",
        ) from None
    finally:
        if handle >= 0:
            os.close(handle)


def skip(arguments: Arguments) -> int:
    """Skip runs of a matrix, which goes on: RUN= or STATUS=."""
    return _request(arguments, Request.SKIP)


def hold(arguments: Arguments) -> int:
    """Pause runs: waiting ones are not started, running ones save a checkpoint and free their GPUs."""
    return _request(arguments, Request.HOLD)


def release(arguments: Arguments) -> int:
    """Continue runs that were skipped or held."""
    return _request(arguments, None)


def _request(arguments: Arguments, wanted: Request | None) -> int:
    """Record a request for runs, for the runner of the matrix now or later; None releases them."""
    if not arguments.get("RUN") and not arguments.get("STATUS"):
        raise ConfigError(
            f"{arguments.target} needs runs", hint="pass RUN=<name, number or pattern>, or STATUS=planned"
        )
    matrix = None if RunDir(Path(arguments.get("RUN"))).run_json.is_file() else running_target(arguments)
    matrix = matrix or find_target(arguments)
    statuses, running = asked_statuses(arguments), matrix.is_held()
    states = {run.name: recover_status(run, has_runner=running) for run in chosen_runs(matrix, arguments)}
    states = {name: state for name, state in states.items() if not statuses or state.status in statuses}
    if not states:
        print(f"no run of {shown(matrix.path)} is {arguments.get('STATUS').replace(',', ' or ')}")
        return 0
    ended = {name: state.status for name, state in states.items() if wanted and state.status is Status.FINISHED}
    names = [name for name in states if name not in ended]
    # Until the statuses are written, another such command waits: it would take this one for the runner.
    with requests_locked(matrix):
        with writing(matrix.requests):
            former = write_requests(matrix, names, wanted)
        is_written = _write_at_once(matrix, names)
    later = () if is_written else read_matrix_status(matrix).unselected
    for name, status in ended.items():
        print(f"{name}: {status}, nothing to {arguments.target}")
    for name in names:
        print(f"{name}: {_answer(wanted, former.get(name), states[name], followed=is_written, later=name in later)}")
    if wanted is None and (former if is_written else former.keys() & later):
        print(f"  continue: {make_command('continue', matrix.path)}")
    return 0


def _answer(wanted: Request | None, before: RunRequest | None, state: RunState, *, followed: bool, later: bool) -> str:
    """Return what a request does to a run. before: its former request.

    followed: it is in the status already.  later: a runner leaves the run alone, because it was not selected.
    """
    done = {Request.SKIP: "skipped", Request.HOLD: "held", None: "released"}[wanted]
    if wanted is None and before is None:
        return "neither skipped nor held"
    if before is not None and before.request is wanted:
        return f"already {done}"
    if state.status is Status.FAILED:
        return f"{done}; it has failed, and is not retried" if wanted else f"{done}; it has failed"
    if followed:
        return done
    if wanted is None and later:
        return f"{done}; the command that is running did not select it: continue when that has ended"
    return f"{done}, the runner follows within a second"


def _write_at_once(matrix: MatrixDir, names: Sequence[str]) -> bool:
    """Write the requests of runs to their status, and return True; False if a runner holds the matrix and does it."""
    if matrix.is_held():
        return False
    try:
        with held(matrix):
            requests = read_requests(matrix)
            for run in (matrix.run(name) for name in names):
                state = recover_status(run, has_runner=False)
                now = after(state, Requested(requests[run.name]) if run.name in requests else Freed())
                if now != state:
                    write_state(run, now, alerts=alerts_of_run(run))
    except LaunchError:
        if matrix.is_held():  # a runner was faster
            return False
        raise
    return True
