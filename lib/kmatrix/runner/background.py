"""The background process of a matrix on this machine, `kmatrix runner MATRIX`, and whoever watches it.

It holds the matrix and starts what is due until nothing lives. A terminal that is closed does not end it. The
foreground only watches: its first Ctrl+C stops the matrix, the second one kills what still runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kmatrix.clock import clock
from kmatrix.engines.ports import Shape
from kmatrix.engines.queue import Local
from kmatrix.errors import LaunchError
from kmatrix.gpu.nvml.detect import UNKNOWN_DISTANCE, detect, distances, occupied, usable
from kmatrix.packing import Limits, usable_cores
from kmatrix.records import attempts
from kmatrix.records.control import requests_of, stop
from kmatrix.records.files import append_jsonl, last_lines
from kmatrix.records.matrix import Plan, read_plan
from kmatrix.records.paths import ROOT, program_environment
from kmatrix.records.runs import Status
from kmatrix.runner.controller import Controller, exit_status
from kmatrix.runner.program import finish
from kmatrix.runner.supervisor import REFUSED
from kmatrix.status.look import Look, look

POLL_S, START_S = 0.2, 60.0  # between two looks; for a runner to hold its matrix, or to fail
LOCK, LOG = ".lock", "runner.log"


def run(path: Path) -> int:
    """Hold a matrix and run what is due; return its exit status. Raises KmatrixError."""
    lock = attempts.lock(path / LOCK)
    if lock is None:
        print(f"{path.name} runs already", flush=True)
        return REFUSED
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda got, _: stop(path, signal.Signals(got).name))
        note(path, "runner started", pid=os.getpid())
        code = finish(Controller(path=path, jobs=local(path)).run())
        note(path, "runner ended", status=code)
        return code
    finally:
        attempts.release(lock)


def local(path: Path) -> Local:
    """Return this machine as the engine of a matrix, with the GPUs that `make continue` was given."""
    plan, settings = read_plan(path), requests_of(path).settings
    symbols = plan.common.symbols
    gpus = usable(detect(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=settings.get("GPUS") or None)
    known = distances([gpu.uuid for gpu in gpus]) if len(gpus) > 2 else {}  # with two there is nothing to choose
    most_mib = int(symbols.get("GPU_BUSY_MEMORY") or 0)
    return Local(
        path=path,
        shape_of=shapes(plan).__getitem__,
        gpus=gpus,
        cores=usable_cores(),
        parallel=Limits.of(symbols).jobs,
        query=(lambda uuids: occupied(uuids, most_mib)) if most_mib else (lambda _: {}),
        distance=(lambda one, other: known.get(frozenset((one, other)), UNKNOWN_DISTANCE)) if known else None,
        say=lambda text: note(path, "gpu", text=text),
    )


def shapes(plan: Plan) -> Mapping[str, Shape]:
    """Return what each run needs per node."""
    found = {}
    for run in plan.runs:
        train = plan.train_of(run)
        nodes = int(train.get("num_nodes") or 1)
        ranks = int(train.get("num_gpus") or 1) // nodes
        found[run.name] = Shape(
            nodes=nodes,
            gpus=ranks if train.get("device") == "cuda" else 0,
            cpus=ranks * int(train.get("cpu_threads") or 1),
            seconds=None if run.expected_s is None else int(run.expected_s),
        )
    return found


def note(path: Path, event: str, **about: object) -> None:
    """Append a line to the journal of a matrix, for people."""
    append_jsonl(path / "journal.jsonl", {"time": clock.now(), "event": event, **about})


def start(path: Path) -> None:
    """Start the background process of a matrix, if none holds it. Raises LaunchError with the end of its log."""
    if attempts.is_held(path / LOCK):
        return
    with (path / LOG).open("ab") as log:
        began = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "kmatrix", "runner", str(path)],
            cwd=ROOT,
            env=program_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = clock.monotonic() + START_S
    while process.poll() is None and not attempts.is_held(path / LOCK) and clock.monotonic() < until:
        clock.sleep(0.02)
    if process.poll() == REFUSED and not attempts.is_held(path / LOCK):
        with (path / LOG).open("rb") as log:
            why = "".join(last_lines(log, start=began)).strip()
        raise LaunchError(f"{path.name} cannot run", why=why, hint=f"see {path / LOG}")


def watch(path: Path, show: Callable[[Look], object]) -> int:
    """Show a matrix until its background process has ended; return the exit status. show: called with each look."""
    asked = list[int]()
    former = {one: signal.signal(one, lambda got, _: asked.append(got)) for one in (signal.SIGINT, signal.SIGTERM)}
    told = 0
    try:
        while True:
            is_held = attempts.is_held(path / LOCK)  # before the look: the last look is after the end
            seen = look(path)
            show(seen)
            if asked and told == 0:
                stop(path, signal.Signals(asked[0]).name)
                told = 1
                print("stopping: the runs save a checkpoint; Ctrl+C again kills them", flush=True)
            if len(asked) > 1 and told == 1:
                kill(seen)
                told = 2
            if not is_held:
                return exit_status(seen)
            clock.sleep(POLL_S)
    finally:
        for one, handler in former.items():
            signal.signal(one, handler)


def kill(seen: Look) -> None:
    """Kill the programs of the runs that train on this host; the kernel kills their ranks."""
    me = attempts.this_process()
    for state in seen.states.values():
        one = state.attempts[-1] if state.attempts else None
        if state.status is Status.RUNNING and one is not None and attempts.is_here(one, me):
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def main(words: list[str]) -> int:
    """Run `kmatrix runner MATRIX`."""
    return run(Path(words[0]).absolute())
