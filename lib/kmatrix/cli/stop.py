"""The command that ends a running matrix from another terminal: its runs save, and `make continue` goes on."""

from __future__ import annotations

import os
import signal
import time

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import shown
from kmatrix.cli.targets import results_dir, running_target
from kmatrix.errors import LaunchError
from kmatrix.launch.engine import GRACE_S
from kmatrix.launch.lock import Process, holder
from kmatrix.launch.standing import settle
from kmatrix.records import MatrixDir, Status, read_json

LOOK_S = 0.1


def stop(arguments: Arguments) -> int:
    """Ask the runner of a matrix to let its runs save and end; wait until it has, and say how things stand."""
    matrix = running_target(arguments)
    owner = holder(matrix) if matrix else None
    if matrix is None or owner is None:
        where = shown(matrix.path if matrix else results_dir(arguments))
        raise LaunchError(f"no matrix is running in {where}", fix="pass TARGET=<matrix> or RESULTS_DIR=<folder>")
    ask(matrix, owner)
    print(f"asked process {owner.pid} to stop {shown(matrix.path)}", flush=True)
    said: set[str] = set()
    while matrix.is_held():
        for name in _running(matrix) - said:
            said.add(name)
            print(f"  waiting for {name} to save a checkpoint and end, {GRACE_S:.0f} s at most", flush=True)
        time.sleep(LOOK_S)
    states = [settle(run).status for run in matrix.runs()]
    print("stopped: " + ", ".join(f"{states.count(s)} {s}" for s in Status if s in states))
    if Status.STOPPED in states or Status.PLANNED in states:
        print(f"  go on: make continue TARGET={shown(matrix.path)}")
    return 0


def ask(matrix: MatrixDir, owner: Process) -> None:
    """Send SIGTERM to the runner, and to no process that only has its number."""
    try:
        handle = os.pidfd_open(owner.pid or 0)
    except (OSError, AttributeError):
        handle = -1
    try:
        if handle < 0 or not owner.lives_here():
            raise LaunchError(
                f"{matrix.name} is being run by process {owner.pid} on {owner.host}",
                why="that is no process that can be reached from here",
                fix="type make stop on that machine, or in that container",
            )
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended by itself
    except PermissionError:
        raise LaunchError(
            f"{matrix.name} is being run by process {owner.pid}, which belongs to another user",
            fix="ask that user, or type make stop as that user",
        ) from None
    finally:
        if handle >= 0:
            os.close(handle)


def _running(matrix: MatrixDir) -> set[str]:
    """The runs that have processes now."""
    found = (run for run in matrix.runs() if run.status.exists())
    return {run.name for run in found if read_json(run.status).get("status") == Status.RUNNING}
