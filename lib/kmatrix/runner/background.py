"""The background process of a matrix on this machine, `kmatrix runner MATRIX`.

It holds the matrix and starts what is due until nothing lives. A terminal that is closed does not end it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kmatrix import locks
from kmatrix.clock import clock
from kmatrix.engines.jobs import shapes
from kmatrix.engines.local import Local
from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.gpu.nvml.detect import UNKNOWN_DISTANCE, detect, distances, occupied, usable
from kmatrix.packing import usable_cores
from kmatrix.records.control import requests_of, stop
from kmatrix.records.files import append_jsonl, last_lines
from kmatrix.records.matrix import read_plan
from kmatrix.records.paths import ROOT, program_environment
from kmatrix.runner.conclude import conclude, wait_for_trackers
from kmatrix.runner.controller import controller_of
from kmatrix.runner.program import finish
from kmatrix.runner.supervisor import REFUSED

START_S = 60.0  # for a runner to hold its matrix, or to fail
LOCK, LOG = ".lock", "runner.log"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(path: Path) -> int:
    """Train a matrix and report on it; return its exit status. Raises KmatrixError."""

    def end(path: Path) -> None:
        wait_for_trackers(path)  # the report says what is pending
        conclude(path)

    return train(path, end)


def train(path: Path, then: Callable[[Path], object] = lambda _: None) -> int:
    """Hold a matrix and run what is due until nothing lives; return its exit status. Raises KmatrixError.

    then: called before the matrix is released.
    """
    read_plan(path)  # a folder that is not a matrix gets no lock
    lock = locks.lock(path / LOCK)
    if lock is None:
        raise LaunchError(f"{path.name} is being run")
    former = {one: signal.signal(one, lambda got, _: stop(path, signal.Signals(got).name)) for one in STOPS}
    try:
        note(path, "runner started", pid=os.getpid())
        jobs = local(path)
        code = finish(controller_of(path, jobs).run())
        for name, why in jobs.broken.items():
            print(f"{name}: {why}", flush=True)
        then(path)
        note(path, "runner ended", status=code)
        return code
    finally:
        for one, handler in former.items():
            signal.signal(one, handler)
        locks.release(lock)


def local(path: Path) -> Local:
    """Return this machine as the engine of a matrix, with the GPUs that `make continue` was given."""
    plan, settings = read_plan(path), requests_of(path).settings
    symbols, hosts = plan.common.symbols, settings.get("HOSTS", "")
    if hosts:
        os.environ["KMATRIX_HOSTS"] = hosts  # for the programs of the runs
    gpus = usable(detect(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=settings.get("GPUS") or None)
    known = distances([gpu.uuid for gpu in gpus]) if len(gpus) > 2 else {}  # with two there is nothing to choose
    most_mib = int(symbols.get("GPU_BUSY_MEMORY") or 0)
    return Local(
        path=path,
        shape_of=shapes(plan).__getitem__,
        gpus=gpus,
        cores=usable_cores(),
        parallel=int(symbols.get("PARALLEL_JOBS") or 0),
        hosts=len(hosts.split(",")),
        query=(lambda uuids: occupied(uuids, most_mib)) if most_mib else (lambda _: {}),
        distance=(lambda one, other: known.get(frozenset((one, other)), UNKNOWN_DISTANCE)) if known else None,
        say=lambda text: print(text, flush=True),
    )


def note(path: Path, event: str, **about: object) -> None:
    """Append a line to the journal of a matrix, for people."""
    append_jsonl(path / "journal.jsonl", {"time": clock.now(), "event": event, **about})


def start(path: Path) -> int:
    """Start the background process of a matrix; return where its output begins in runner.log (bytes).

    Raises LaunchError with what it has said if it cannot run.
    """
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
    while process.poll() is None and not locks.is_held(path / LOCK) and clock.monotonic() < until:
        clock.sleep(0.02)
    if process.poll() == REFUSED:
        raise LaunchError(f"{path.name} cannot run", why=said(path, began), hint=f"see {path / LOG}")
    return began


def said(path: Path, began: int) -> str:
    """Return what the background process has printed. began: as `start` has returned it."""
    with (path / LOG).open("rb") as log:
        return "".join(last_lines(log, start=began)).strip()


def main(words: list[str]) -> int:
    """Run `kmatrix runner MATRIX`."""
    try:
        return run(Path(words[0]).absolute())
    except KmatrixError as error:
        print(f"error: {error}", flush=True)
        return REFUSED
