"""The command that prints what the processes of runs print: followed while they run, else its end."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.targets import chosen_runs, find_target, running_target
from kmatrix.errors import LaunchError, RecordError
from kmatrix.records import MatrixDir, RunDir, Status, read_json

LAST_LINES = 40
TAIL_BYTES = 65536
LOOK_S = 0.2


def logs(arguments: Arguments) -> int:
    """Follow the log of the run that is running; of a matrix that has ended, print the end of the last one."""
    matrix = running_target(arguments) if not arguments.get("RUN") else None
    matrix = matrix or find_target(arguments)
    runs = chosen_runs(matrix, arguments)
    if matrix.is_held():
        try:
            return _follow(matrix, runs, once=bool(arguments.get("RUN")))
        except KeyboardInterrupt:
            return 0
    there = [run for run in runs if run.output_log.exists()]
    if not there:
        raise LaunchError(f"no run of {matrix.name} has a log yet", fix="`make status` shows which have started")
    chosen = there if arguments.get("RUN") else [max(there, key=lambda run: run.output_log.stat().st_mtime)]
    for run in chosen:
        _print_end(run)
    return 0


def last_lines(file: BinaryIO) -> str:
    """Return the last lines of a log, and leave the file at its end."""
    file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
    return "".join(file.read().decode(errors="replace").splitlines(keepends=True)[-LAST_LINES:])


def _follow(matrix: MatrixDir, runs: Sequence[RunDir], *, once: bool) -> int:
    """Print what runs write, one after the other, until the matrix has ended. once: or the runs have."""
    seen: set[str] = set()
    while True:
        held = matrix.is_held()
        run = next((run for run in runs if run.name not in seen and _is_running(run)), None)
        if run is not None:
            seen.add(run.name)
            _title(run)
            _print_growth(matrix, run)
        elif not held or (once and all(_has_ended(run) for run in runs)):
            for one in (run for run in runs if not seen and run.output_log.exists()):
                _print_end(one)
            return 0
        time.sleep(LOOK_S)


def _print_growth(matrix: MatrixDir, run: RunDir) -> None:
    """Print the end of a log, and then what is added, until the run has ended."""
    letters = codecs.getincrementaldecoder("utf-8")("replace")
    with run.output_log.open("rb") as file:
        text = last_lines(file)
        while True:
            live = _is_running(run) and matrix.is_held()
            sys.stdout.write(text + letters.decode(file.read()))
            sys.stdout.flush()
            if not live:
                return
            text = ""
            time.sleep(LOOK_S)


def _print_end(run: RunDir) -> None:
    _title(run)
    with run.output_log.open("rb") as file:
        sys.stdout.write(last_lines(file))


def _title(run: RunDir) -> None:
    print(f"==> {run.name}", flush=True)


def _status(run: RunDir) -> str:
    try:
        return str(read_json(run.status).get("status")) if run.status.exists() else Status.PLANNED
    except RecordError:
        return Status.FAILED


def _is_running(run: RunDir) -> bool:
    return _status(run) == Status.RUNNING


def _has_ended(run: RunDir) -> bool:
    return _status(run) not in (Status.RUNNING, Status.PLANNED)
