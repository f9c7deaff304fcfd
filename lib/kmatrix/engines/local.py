"""This machine as a queue of processes: a run is `kmatrix run RUN_DIR`, on GPUs or cores that no other run has.

They live as long as the process that holds the queue: when that dies, they save a checkpoint and end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

from kmatrix.clock import clock
from kmatrix.engines.packing import Distance, place
from kmatrix.engines.place import AGAIN
from kmatrix.engines.ports import Shape
from kmatrix.engines.ranks import end_with
from kmatrix.errors import LaunchError, RecordError, reason_of
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.records import attempts
from kmatrix.records.attempts import boot_id
from kmatrix.records.files import last_lines
from kmatrix.records.paths import program_environment
from kmatrix.text import plural, printable

FINAL = (0, 3, 130, AGAIN)  # exit statuses of a program that has looked at its run; 2: it was refused
BUSY_S = 2.0  # between two questions to the driver about other processes


@dataclass(frozen=True, slots=True)
class _Job:
    process: subprocess.Popen[bytes]  # that has not ended
    shape: Shape
    gpus: tuple[str, ...]
    number: int  # of the newest attempt when it started
    log_start: int  # bytes


@dataclass(kw_only=True)
class Local:
    """The GPUs of this machine, or its cores. It fulfils `kmatrix.runner.controller.Jobs`."""

    path: Path  # of the matrix
    shape_of: Callable[[str], Shape]  # of a run; seconds: the expected time
    gpus: Sequence[Gpu] = ()  # that may be used, in the driver's order
    cores: int = 1
    parallel: int = 0  # PARALLEL_JOBS; 0: as many as fit on the GPUs, one on the CPU
    hosts: int = 1  # with those that ssh reaches: runs over several nodes start one after the other
    query: Callable[[Sequence[str]], Mapping[str, str]] = lambda _: {}  # UUIDs -> those that others use, and who
    distance: Distance | None = None  # of two GPUs; None: by their order
    say: Callable[[str], object] = lambda _: None  # called with each GPU that is left out, or back
    program: Sequence[str] = (sys.executable, "-m", "kmatrix", "run")
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    broken: dict[str, str] = field(default_factory=dict)  # run -> why it cannot begin here: it waits for a person
    _waiting: dict[str, Shape] = field(default_factory=dict)
    _running: dict[str, _Job] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)  # running ones, to save and end
    _lost: dict[str, str] = field(default_factory=dict)  # GPU -> why no run gets it until the next boot
    _busy: Mapping[str, str] = field(default_factory=dict)
    _told: dict[str, str] = field(default_factory=dict)  # GPU -> why it is left out, as said
    _due: float = -inf  # monotonic seconds, of the next question about other processes
    _is_new: bool = False  # the queue, or what is free, has changed since the last start

    def __post_init__(self) -> None:
        for folder in self.path.glob("*/attempts") if self.gpus else ():
            self._note_lost(folder.parent)

    def check(self, shapes: Sequence[Shape]) -> Iterator[LaunchError]:
        """Yield why jobs of these shapes would never start here."""
        for shape in shapes:
            if shape.nodes > self.hosts:
                hint = "pass HOSTS=a,b with names that ssh knows, or ENGINE=slurm or kubernetes"
                yield LaunchError(f"a run needs {shape.nodes} nodes, there are {self.hosts}", hint=hint)
            elif shape.gpus > len(self.gpus):
                what = f"a run needs {plural(shape.gpus, 'GPU')}, this machine has {len(self.gpus)}"
                yield LaunchError(what, hint=f"pass NUM_GPUS={len(self.gpus)}" if self.gpus else "pass DEVICE=cpu")

    def poll(self) -> dict[str, bool]:
        """Start what fits, the widest and then the longest first; return run -> whether it runs, of live jobs."""
        for run, job in list(self._running.items()):
            if (code := job.process.poll()) is not None:
                del self._running[run]
                self._reap(run, job, code)
        if any(shape.gpus for shape in self._waiting.values()):
            self._look_at_gpus()
        if self._is_new:  # else nothing fits that did not fit before
            self._is_new = False
            self._start_what_fits()
        return dict.fromkeys(self._waiting, False) | dict.fromkeys(self._running, True)

    def submit(self, runs: Sequence[str]) -> None:
        """Queue runs, but those that have a job or are broken."""
        new = (run for run in runs if run not in self.broken and run not in self._running)
        self._waiting |= {run: self.shape_of(run) for run in new}
        self._is_new = True

    def cancel(self, runs: Sequence[str], number: signal.Signals = signal.SIGTERM) -> None:
        """Remove runs that wait; ask those that run, once, to save and end. number: of the signal."""
        for run in runs:
            self._waiting.pop(run, None)
            if run in self._running and run not in self._asked:
                self._running[run].process.send_signal(number)
                self._asked.add(run)
        self._is_new = True

    def _start_what_fits(self) -> None:
        waiting = list(self._waiting)
        if self.parallel != 1:  # else another order than that of the matrix gains nothing
            sizes = {run: (one.nodes * one.gpus, one.seconds or inf) for run, one in self._waiting.items()}
            waiting.sort(key=sizes.__getitem__, reverse=True)
        usable, full = sum(gpu.uuid not in self._lost for gpu in self.gpus), set[Shape]()
        for run in waiting:
            shape = self._waiting[run]
            if shape.gpus > usable:
                out = "; ".join(f"{self._name(uuid)} is {why}" for uuid, why in self._lost.items())
                self.broken[run] = f"it needs {plural(shape.gpus, 'GPU')}, {usable} can be used: {out or 'no others'}"
                del self._waiting[run]
            elif len(self._running) >= (self.parallel or (inf if shape.gpus else 1)):
                break
            elif shape in full or (gpus := self._room(shape)) is None:
                full.add(shape)  # a run that waits for the GPUs of others keeps nobody waiting
            elif any(bool(job.shape.gpus) != bool(shape.gpus) for job in self._running.values()):
                break  # runs on GPUs and on the CPU never share the cores: its turn comes when these have ended
            else:
                self._start(run, shape, gpus)

    def _room(self, shape: Shape) -> tuple[str, ...] | None:
        """Return the GPUs that a run gets, () on the CPU; None if it does not fit now."""
        running = self._running.values()
        if not shape.gpus:  # more threads than cores are allowed, and slow
            used = sum(min(job.shape.cpus, self.cores) for job in running if not job.shape.gpus)
            return () if min(shape.cpus, self.cores) <= self.cores - used else None
        taken = {uuid for job in running for uuid in job.gpus} | set(self._busy) | set(self._lost)
        uuids = [gpu.uuid for gpu in self.gpus]
        free = [uuid for uuid in uuids if uuid not in taken]
        is_turn = shape.nodes == 1 or all(job.shape.nodes == 1 for job in running)
        return place(shape.gpus, free, uuids, self.distance) if is_turn and shape.gpus <= len(free) else None

    def _start(self, run: str, shape: Shape, gpus: tuple[str, ...]) -> None:
        del self._waiting[run]
        self._asked.discard(run)
        number = max(attempts.numbers(self.path / run), default=0)
        try:
            self._log(run).parent.mkdir(exist_ok=True)
            with self._log(run).open("ab") as log:
                log_start = log.tell()
                process = self.popen(
                    [*self.program, str(self.path / run)],
                    env=program_environment(CUDA_VISIBLE_DEVICES=",".join(gpus)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # the signals of a terminal do not reach it
                    preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),
                )
                self._running[run] = _Job(process, shape, gpus, number, log_start)
        except OSError as error:  # such as a full disk
            self.broken[run] = f"it cannot start: {reason_of(error)}"

    def _reap(self, run: str, job: _Job, code: int) -> None:
        self._is_new = True
        self._note_lost(self.path / run)
        if code not in FINAL and max(attempts.numbers(self.path / run), default=0) == job.number:
            why = self.broken[run] = f"its program ended with status {code} before it began"
            with suppress(OSError), self._log(run).open("rb") as log:
                lines = [printable(line).strip() for line in last_lines(log, start=job.log_start)]
                self.broken[run] = f"{why}: {'; '.join([line for line in lines if line][-3:]) or 'its log is empty'}"

    def _note_lost(self, run: Path) -> None:
        """Leave out the GPUs that attempts of this boot have lost: the driver, or a reboot, may bring them back."""
        with suppress(RecordError):
            for one in attempts.read_all(run):
                if one.end is not None and one.boot == boot_id():
                    self._lost |= dict.fromkeys(one.end.lost, f"lost by {run.name}: {one.end.reason}")

    def _look_at_gpus(self) -> None:
        """Ask the driver who uses idle GPUs. The memory of our own runs would count as that of others."""
        if clock.monotonic() < self._due:
            return
        self._due = clock.monotonic() + BUSY_S
        taken = {uuid for job in self._running.values() for uuid in job.gpus} | set(self._lost)
        self._busy = self.query([gpu.uuid for gpu in self.gpus if gpu.uuid not in taken])
        now = {uuid: f"in use by others: {why}" for uuid, why in self._busy.items()} | self._lost
        for uuid in (uuid for uuid in self._told | now if self._told.get(uuid) != now.get(uuid)):
            self.say(f"{self._name(uuid)} is {now.get(uuid, 'available again')}")
            self._is_new = True
        self._told = now

    def _name(self, uuid: str) -> str:
        return next((f"GPU {gpu.index}" for gpu in self.gpus if gpu.uuid == uuid), uuid)

    def _log(self, run: str) -> Path:
        return self.path / "jobs" / f"{run}.log"
