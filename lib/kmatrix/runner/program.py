"""`kmatrix run RUN_DIR [NODE]`: the program of a job, the same on a laptop, in a Slurm task and in a pod.

    kmatrix run --jobs FOLDER TASK      the run of a task: line TASK of FOLDER/runs
    kmatrix run RUN_DIR NODE            a further node of a run; "@": that of srun

Its exit status is for schedulers: 0 done, or nothing to do; 2 refused, 3 failed, 130 stopped: final; 143: start it
again; anything else counts as a program that could not begin.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

from kmatrix.clock import clock
from kmatrix.engines.companions import Companion, WithCompanions, preparation, recorder, trackers
from kmatrix.engines.jobs import shapes
from kmatrix.engines.local import Local
from kmatrix.engines.nodes import AllRanks, Follower, Followers
from kmatrix.engines.place import AGAIN, Here, place_of
from kmatrix.engines.ranks import Ranks, Trainer, adopt_orphans, reserve_port, unshare
from kmatrix.errors import KmatrixError, reason_of
from kmatrix.gpu.nvml.detect import detect, usable
from kmatrix.packing import usable_cores
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, TakenError
from kmatrix.records.control import requests_of
from kmatrix.records.decode import replaced
from kmatrix.records.matrix import CODE, read_plan
from kmatrix.records.paths import ROOT, RunDir
from kmatrix.records.runs import RunFile, Status, read_run_file
from kmatrix.runner.supervisor import ASKED_TO_STOP, CODES, DONE, REFUSED, Supervisor
from kmatrix.sources import sha256_of_copy, trainer_files, whole
from kmatrix.status.fold import Files, is_over, spent_s, state_of
from kmatrix.status.live import Observer
from kmatrix.status.look import look, read_run

POLL_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
CHECKOUT = "checkout"  # value of CODE: the present code, not that of the matrix
TRACKERS_S = 60.0  # for pending steps after the end of a run, if run.json has no limit
OF_A_JOB = ("KMATRIX_JOB", "KMATRIX_ADDRESS", "SLURM_JOB_ID")  # variables by which a process knows its job
LEAVE_S = 5.0  # for the followers to see the end of the last attempt
STUCK_S = 5  # after a signal: this process hangs in a write


def main(words: Sequence[str]) -> int:
    """Run the program; return its exit status."""
    try:
        if words[0] == "--jobs":
            folder, task = Path(words[1]), int(words[2])
            lines = (folder / "runs").read_text(encoding="utf-8").splitlines()
            matrix, names = folder.absolute().parent.parent, lines[task].split()
            return run(matrix / names[0], *words[3:]) if len(names) == 1 else packed(matrix, names)
        return run(Path(words[0]), *words[1:])
    except TakenError as error:
        print(f"nothing to do: {error}", flush=True)
        return DONE
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    except OSError as error:  # a full disk, a missing file: as a Python that could not begin
        print(f"error: {error.filename or words[0]}: {reason_of(error)}", file=sys.stderr, flush=True)
        return 1


def run(path: Path, node: str = "") -> int:
    """Train one run, or follow its node 0; return the exit status. Raises KmatrixError."""
    path = path.absolute()
    place = place_of(os.environ, node)
    adopt_orphans()
    program = Program(path=path, place=place)
    for number in SIGNALS:
        signal.signal(number, lambda got, _: program.got(signal.Signals(got).name))
    signal.signal(signal.SIGALRM, lambda *_: program.stop_now())
    if place.node:
        return finish(program.follow())
    return finish(program.lead())


def packed(matrix: Path, names: Sequence[str]) -> int:
    """Train runs that fit on this node together, each in a process of its own; return the exit status."""
    place, signals = place_of(os.environ), list[signal.Signals]()
    for number in SIGNALS:
        signal.signal(number, lambda got, _: signals.append(signal.Signals(got)))
    for name in OF_A_JOB:  # for the runs this is a machine: the job is not theirs
        os.environ.pop(name, None)
    gpus = usable(detect(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=None)
    planned = shapes(read_plan(matrix))
    local = Local(
        path=matrix, shape_of=planned.__getitem__, gpus=gpus, cores=usable_cores(), parallel=len(names), say=say
    )
    local.submit(names)
    while jobs := local.poll():
        if signals:
            local.cancel(list(jobs), signals[0])
        clock.sleep(POLL_S)
    for name, why in local.broken.items():
        print(f"error: {name}: {why}", file=sys.stderr, flush=True)
    if signals:
        return place.again() if signals[0] is signal.SIGUSR1 else AGAIN
    states = look(matrix).states
    codes = [CODES.get(states[name].status, ASKED_TO_STOP) for name in names]
    return REFUSED if local.broken else max(codes)


def finish(waits: Generator[None, None, int]) -> int:
    """Go on after each wait until the end; return its value."""
    while True:
        try:
            next(waits)
        except StopIteration as end:
            return int(end.value)
        clock.sleep(POLL_S)


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@dataclass(kw_only=True)
class Program:
    """The supervisor of a run with its real ranks, companions and other nodes."""

    path: Path
    place: Here
    signals: list[str] = field(default_factory=list)
    _ranks: Ranks | None = None  # of this node
    _followers: Followers | None = None
    _port: socket | None = None  # kept open for rank 0, which binds it, too
    _tracking: list[Companion] = field(default_factory=list)
    _observer: Observer | None = None  # of the newest attempt

    def lead(self) -> Generator[None, None, int]:
        """Train the run, and wait for what its trackers still send if nobody else lets them."""
        leader = Supervisor(
            run=self.path,
            place=self.place,
            start=self.start,
            gather=self.gather,
            equip=self.equip,
            say=say,
            signals=self.signals,
        )
        work = leader.lead()
        while True:
            try:
                next(work)
            except StopIteration as end:
                code = int(end.value)
                break
            if self._observer is not None:
                self._observer.poll()
            yield
        if self._observer is not None:
            self._observer.end()
        until, others = clock.monotonic() + LEAVE_S, self._followers.programs if self._followers else ()
        while any(one.poll() is None for one in others) and clock.monotonic() < until:  # else they are killed: an error
            yield
        while self.place.job and any(one.poll() is None for one in self._tracking):  # a job ends with this process
            yield
        # Whoever sends SIGTERM means it, and Slurm itself requeues what it preempts.
        return self.place.again() if code == AGAIN and self.signals[:1] in ([], ["SIGUSR1"]) else code

    def got(self, name: str) -> None:
        """Note a signal, and see to it that the ranks get one even if this process hangs in a write."""
        self.signals.append(name)
        signal.alarm(STUCK_S)

    def stop_now(self) -> None:
        """Ask the ranks to save and stop."""
        if self._ranks is not None:
            self._ranks.stop(self.place.grace_of(self.signals[0]))

    def settings(self) -> dict[str, str]:
        """Return what the last `make continue` has set."""
        return requests_of(self.path.parent).settings

    def trainer(self, settings: Mapping[str, str], spent_s: float = 0.0) -> tuple[RunFile, Trainer]:
        """Return run.json, and what the ranks are started with. spent_s: by earlier attempts."""
        record = read_run_file(RunDir(self.path))
        code, train = self.path.parent / CODE, record.train
        return record, Trainer(
            code=code if code.is_dir() and settings.get("CODE") != CHECKOUT else ROOT,
            ranks=train.num_gpus or 1,
            nodes=train.num_nodes or 1,
            cuda=train.device == "cuda",
            threads=train.cpu_threads or 1,
            grace_s=max(self.place.grace_of(name) for name in ("SIGTERM", "SIGUSR1")),
            spent_s=spent_s,
            variables=record.environment,
        )

    def equip(self, mine: Attempt) -> Attempt:
        """Return an attempt with the code that it runs, and the address of its rank 0."""
        _, trainer = self.trainer(self.settings())
        gpus = self.place.gpus[: trainer.ranks // trainer.nodes] if trainer.cuda else ()
        unshare(self.path)
        code = whole(trainer_files(ROOT)) if trainer.code == ROOT else sha256_of_copy(trainer.code)
        if self._port is not None:
            self._port.close()
        self._port = reserve_port() if trainer.ranks > 1 else None
        port = self._port.getsockname()[1] if self._port else 0
        address = self.place.address if trainer.nodes > 1 else ""
        return replaced(mine, gpus=gpus, nodes=trainer.nodes, address=address, port=port, code=code)

    def gather(self) -> Generator[object, None, None]:
        """Start the other nodes, once, and wait until all are there."""
        nodes = self.trainer({})[1].nodes
        if nodes == 1:
            return
        if self._followers is None:
            programs = self.place.start_followers(program("run", str(self.path)), nodes)
            self._followers = Followers(run=self.path, job=self.place.job, nodes=nodes, programs=programs)
        yield from self._followers.gather()

    def start(self, mine: Attempt, lock: int, node: int = 0) -> Any:
        """Start the ranks of this node, and their companions."""
        settings, earlier = self.settings(), attempts.read_all(self.path)
        state = state_of(Files(attempts=tuple(one for one in earlier if one.number < mine.number)))
        record, trainer = self.trainer(settings, spent_s(state))
        here = trainer.ranks // trainer.nodes
        gpus = self.place.gpus[:here] if trainer.cuda else ()
        if node:
            (self.path / "nodes" / str(node)).mkdir(exist_ok=True)  # for the recording, and the times of its ranks
        variables = trainer.environment(gpus, os.environ)
        self._ranks = ranks = Ranks(self.path, mine, trainer, variables, lock=lock, node=node)
        symbols, companions = record.symbols, list[Companion]()
        if symbols.get("GPU_MONITOR") == "y":
            hz, simulate = int(symbols.get("GPU_MONITOR_HZ") or 0), settings.get("SIMULATE", "")
            about = {"hz": hz, "node": node, "first_rank": node * here}
            companions.append(recorder(self.path, mine, gpus=gpus, simulate=simulate, **about))
        if node:
            return WithCompanions(ranks, companions)
        if self._observer is not None:
            self._observer.end()
        self._observer = Observer(self.path, mine.number, symbols, ranks=trainer.ranks)
        asked = record.tracking
        if asked.trackers:
            limit_s = asked.limit_s or TRACKERS_S
            self._tracking = [trackers(self.path, asked.trackers, project=asked.project, limit_s=limit_s)]
        data = preparation(self.path, trainer.code) if record.train.data_streaming else None
        everywhere = ranks if self._followers is None else AllRanks(mine.number, ranks, self._followers)
        return WithCompanions(everywhere, [*companions, *self._tracking], data=data)

    def follow(self) -> Generator[None, None, int]:
        """Train on a further node what node 0 begins."""
        nothing = os.open(os.devnull, os.O_RDONLY)  # the lock of the run is that of node 0, which waits for the others
        follower = Follower(
            run=self.path,
            job=self.place.job,
            node=self.place.node,
            start=lambda order: self.start(order, nothing, self.place.node),
            grace_of=self.place.grace_of,
            is_done=self.is_done,
            is_orphan=self.place.is_orphan,
            signals=self.signals,
        )
        return (yield from follower.follow())

    def is_done(self) -> bool:
        """Return whether the run needs no further attempt in this job."""
        plan = read_plan(self.path.parent)
        planned = next(one for one in plan.runs if one.name == self.path.name)
        state = state_of(
            read_run(self.path.parent, plan, planned, requests_of(self.path.parent)), spare=planned.selected
        )
        # RUNNING: node 0 has just begun the next attempt, which this node has not seen.
        return is_over(state) or not (state.may_start or state.status is Status.RUNNING)


def program(*words: str) -> list[str]:
    """Return the command of this program."""
    return [sys.executable, "-m", "kmatrix", *words]
