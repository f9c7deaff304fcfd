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
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

from kmatrix.clock import clock
from kmatrix.engines.nodes import AllRanks, Follower, Followers
from kmatrix.engines.place import AGAIN, Here, place_of
from kmatrix.engines.ranks import Ranks, Trainer, adopt_orphans, reserve_port
from kmatrix.errors import KmatrixError
from kmatrix.records.attempts import Attempt, TakenError
from kmatrix.records.control import requests_of
from kmatrix.records.decode import replaced
from kmatrix.records.matrix import read_plan
from kmatrix.records.paths import ROOT, RunDir
from kmatrix.records.runs import RunFile, read_run_file
from kmatrix.runner.companions import Companion, WithCompanions, preparation, recorder, trackers
from kmatrix.runner.supervisor import DONE, REFUSED, Supervisor
from kmatrix.status.fold import is_over, state_of
from kmatrix.status.look import read_run

POLL_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TRACKERS_S = 60.0  # for pending steps after the end of a run, if run.json has no limit
CODE = "code"  # folder of a matrix with the sources of the trainer


def main(words: Sequence[str]) -> int:
    """Run the program; return its exit status."""
    try:
        if words[0] == "--jobs":
            folder, task = Path(words[1]), int(words[2])
            lines = (folder / "runs").read_text(encoding="utf-8").splitlines()
            return run(folder.parent.parent / lines[task], *words[3:])
        return run(Path(words[0]), *words[1:])
    except TakenError as error:
        print(f"nothing to do: {error}", flush=True)
        return DONE
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED


def run(path: Path, node: str = "") -> int:
    """Train one run, or follow its node 0; return the exit status. Raises KmatrixError."""
    path = path.absolute()
    place = place_of(os.environ, node)
    adopt_orphans()
    signals = list[str]()
    for number in SIGNALS:
        signal.signal(number, lambda got, _: signals.append(signal.Signals(got).name))
    program = Program(path=path, place=place, signals=signals)
    if place.node:
        return finish(program.follow())
    code = finish(program.lead())
    # Only a notice starts it again: whoever sends SIGTERM means it, and Slurm itself requeues what it preempts.
    return place.again() if code == AGAIN and signals[:1] == ["SIGUSR1"] else code


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
    signals: list[str]
    _followers: Followers | None = None
    _port: socket | None = None  # reserved for rank 0, from the attempt's file to its ranks
    _tracking: list[Companion] = field(default_factory=list)

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
        code = yield from leader.lead()
        while self.place.job and any(one.poll() is None for one in self._tracking):  # a job ends with this process
            yield
        return code

    def trainer(self) -> tuple[RunFile, Trainer]:
        """Return run.json, and what the ranks are started with."""
        record = read_run_file(RunDir(self.path))
        code, train = self.path.parent / CODE, record.train
        return record, Trainer(
            code=code if code.is_dir() else ROOT,
            ranks=train.num_gpus or 1,
            nodes=train.num_nodes or 1,
            cuda=train.device == "cuda",
            threads=train.cpu_threads or 1,
            grace_s=max(self.place.grace_of(name) for name in ("SIGTERM", "SIGUSR1")),
            variables=record.environment,
        )

    def equip(self, mine: Attempt) -> Attempt:
        """Return an attempt with the address of its rank 0."""
        _, trainer = self.trainer()
        gpus = self.place.gpus[: trainer.ranks // trainer.nodes] if trainer.cuda else ()
        if self._port is not None:
            self._port.close()
        self._port = reserve_port()
        port = self._port.getsockname()[1]
        return replaced(mine, gpus=gpus, nodes=trainer.nodes, address=self.place.address, port=port)

    def gather(self) -> Generator[object, None, None]:
        """Start the other nodes, once, and wait until all are there."""
        nodes = self.trainer()[1].nodes
        if nodes == 1:
            return
        if self._followers is None:
            programs = self.place.start_followers(program("run", str(self.path)), nodes)
            self._followers = Followers(run=self.path, job=self.place.job, nodes=nodes, programs=programs)
        yield from self._followers.gather()

    def start(self, mine: Attempt, lock: int, node: int = 0) -> Any:
        """Start the ranks of this node, and their companions."""
        record, trainer = self.trainer()
        if self._port is not None and node == 0:
            self._port.close()  # rank 0 binds it now
            self._port = None
        here = trainer.ranks // trainer.nodes
        gpus = self.place.gpus[:here] if trainer.cuda else ()
        ranks = Ranks(self.path, mine, trainer, trainer.environment(gpus, os.environ), lock=lock, node=node)
        symbols, companions = record.symbols, list[Companion]()
        if symbols.get("GPU_MONITOR") == "y":
            hz = int(symbols.get("GPU_MONITOR_HZ") or 0)
            companions.append(recorder(self.path, mine.number, hz=hz, gpus=gpus, node=node, first_rank=node * here))
        if node:
            return WithCompanions(ranks, companions)
        if names := record.tracking.trackers:
            asked = record.tracking
            limit_s = asked.limit_s or TRACKERS_S
            self._tracking = [trackers(self.path, names, project=asked.project, limit_s=limit_s)]
        data = preparation(self.path) if record.train.data_streaming else None
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
        return is_over(state) or not state.may_start


def program(*words: str) -> list[str]:
    """Return the command of this program."""
    return [sys.executable, "-m", "kmatrix", *words]
