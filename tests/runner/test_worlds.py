"""Whatever happens, every run finishes once, with the losses of an uninterrupted run. KMATRIX_FIRST= chooses seeds."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kmatrix import locks
from kmatrix.engines.ports import UnreachableError
from kmatrix.records.control import requests_of, stop, stop_of
from kmatrix.records.runs import Status
from kmatrix.runner import requests
from kmatrix.runner.controller import Controller, exit_status
from kmatrix.runner.rerun import rerun
from kmatrix.status.look import Look, look
from tests.support.world import Actor, World, replaced_kernel

FIRST = int(os.environ.get("KMATRIX_FIRST", "0"))
GATE, NIGHTLY = 60, 3000  # worlds of each kind


class Processes:
    """This machine: two runs at a time. Its jobs end with the runner that holds it."""

    def __init__(self, world: World) -> None:
        self.world, self.broken = world, frozenset[str]()
        self.jobs: dict[str, Actor | None] = {}  # None: it waits

    def poll(self) -> Mapping[str, bool]:
        self.jobs = {run: actor for run, actor in self.jobs.items() if actor is None or not actor.is_over}
        for run in [run for run, actor in self.jobs.items() if actor is None]:
            if sum(actor is not None for actor in self.jobs.values()) < 2:
                self.jobs[run] = self.world.supervisor(run, "host0")
        return {run: actor is not None for run, actor in self.jobs.items()}

    def submit(self, runs: Sequence[str]) -> None:
        for run in runs:
            assert run not in self.jobs, "two jobs of a run"
            self.jobs[run] = None

    def cancel(self, runs: Sequence[str]) -> None:
        for run in runs:
            if (actor := self.jobs[run]) is None:
                del self.jobs[run]
            else:
                actor.supervisor.signals.append("SIGTERM")

    def die(self, code: int | None) -> None:
        """Let the kernel tell the supervisors that their parent was killed."""
        for actor in self.jobs.values():
            if code is None and actor is not None and not actor.is_over:
                actor.supervisor.signals.append("SIGTERM")


class Laptop(World):
    """One machine, and what its user types."""

    runner: Actor | None = None

    def go_on(self, *, retry_failed: bool = False) -> None:
        """`make continue`: ask for what does not go on by itself, and start a runner if there is none."""
        if self.runner is not None and not self.runner.is_over:
            return  # "it runs already"

        def command() -> None:
            self.allow_faults(retry_failed)
            asked = requests.go_on(look(self.path), retry_failed=retry_failed)
            self.log(f"continue {'RETRY_FAILED=1 ' if retry_failed else ''}asks for {asked}")
            processes = Processes(self)
            body = Controller(path=self.path, jobs=processes).run()
            self.runner = self.spawn("runner", "host0", body, on_end=processes.die)

        self.command("continue", command)

    def power_failure(self) -> None:
        """All processes die at once."""
        self.log("power failure")
        for actor in [*self.actors]:
            actor.kill()

    def user(self) -> None:
        """Somebody types something."""
        run = self.dice.choice(list(self.script))
        words = ("continue", "continue", "retry", "stop", "hold", "hold", "release", "rerun", "kill", "power failure")
        what = self.dice.choice(words)
        self.log(f"user: {what} {run}")
        living = [one for one in self.actors if not one.is_over and one not in self.stack]
        if what in ("continue", "retry"):
            self.go_on(retry_failed=what == "retry")
        elif what == "power failure":
            self.power_failure()
        elif what == "kill" and living:
            self.dice.choice(living).kill()
        elif what == "stop":
            self.command(what, lambda: stop(self.path))
        elif what == "hold":
            self.command(what, lambda: requests.hold(look(self.path), [run]))
        elif what == "release":
            self.command(what, lambda: requests.release(look(self.path), [run]))
        elif what == "rerun":
            if not locks.is_held(self.path / run / ".lock"):
                self.finished.pop(run, None)
            self.faults_allowed[run] += 1  # before: a rerun that is killed after it has the run is an order, too
            self.command(what, lambda: rerun(self.path / run))

    def settle(self) -> None:
        """Let everything go on until nothing lives."""
        while any(not one.is_over for one in self.actors):
            self.tick()
            self.check()


def is_open(seen: Look) -> bool:
    """Return whether a run does not wait for its own fault to be retried."""
    return any(
        state.status in (Status.STOPPED, Status.PLANNED) or state.kind in ("no progress", "killed", "disk")
        for state in seen.states.values()
    )


def laptop(seed: int, path: Path) -> None:
    world = Laptop(path, seed)
    with story(world):
        world.go_on()
        for _ in range(world.dice.randint(20, 250)):
            if world.dice.random() < 0.04:
                world.user()
            world.tick()
            world.check()
        # From here on nothing is killed: what a person does who comes back in the morning.
        world.calm()
        requests.release(look(path), list(world.script))
        if world.runner is not None and not world.runner.is_over:
            world.settle()  # what was released goes on by itself
            if stop_of(path) is None:
                assert all(state.kind != "stopped" for state in look(path).states.values()), "released, and stopped"
        for _ in range(30):
            world.settle()
            if not is_open(look(path)):
                break
            world.go_on()  # plain `make continue` finishes all but own faults
        else:
            raise AssertionError(f"plain continue never ends: {look(path).states}")
        for _ in range(30):
            if all(state.status is Status.FINISHED for state in look(path).states.values()):
                break
            world.go_on(retry_failed=True)
            world.settle()
        finished(world)
        before = {run: state.number for run, state in look(path).states.items()}
        world.go_on()  # nothing is left: it trains nothing
        world.settle()
        assert {run: state.number for run, state in look(path).states.items()} == before


class Job:
    """A job of the scheduler."""

    def __init__(self, run: str) -> None:
        self.run, self.starts = run, 0
        self.actor: Actor | None = None  # None: it waits
        self.code: int | None = None


class Queue:
    """A scheduler, which knows each job by its run. What it answers may get lost."""

    def __init__(self, world: World) -> None:
        self.world, self.jobs, self.broken = world, list[Job](), frozenset[str]()
        self.ever = set[str]()  # runs that had a job: the folders of jobs/ tell

    def _answer(self) -> None:
        if self.world.crashes and self.world.dice.random() < 0.1:
            raise UnreachableError("no answer")

    def poll(self) -> Mapping[str, bool]:
        self._answer()
        return {job.run: job.actor is not None for job in self.jobs}

    def submit(self, runs: Sequence[str]) -> None:
        self._answer()
        self.jobs += map(Job, runs)
        self.ever |= set(runs)
        if self.world.crashes and self.world.dice.random() < 0.1:
            raise UnreachableError("received, and its answer is lost")

    def cancel(self, runs: Sequence[str]) -> None:
        self._answer()
        for job in [job for job in self.jobs if job.run in runs]:
            self.end(job)

    def end(self, job: Job) -> None:
        """`scancel`: a job that waits is gone, one that runs gets SIGTERM."""
        if job.actor is None:
            self.jobs.remove(job)
        elif not job.actor.is_over:
            job.actor.supervisor.signals.append("SIGTERM")

    def turn(self) -> None:
        """Start and end jobs."""
        dice, world = self.world.dice, self.world
        for job in list(self.jobs):
            if job.actor is None and dice.random() < 0.3:
                job.starts += 1
                job.actor = world.supervisor(job.run, dice.choice(world.hosts), on_end=_noted(job))
            elif job.actor is not None and job.actor.is_over:
                again = job.code in (143, None) and job.starts < 6 and dice.random() < 0.8  # requeued, replaced
                if again and stop_of(world.path) is None:
                    job.actor = None
                else:
                    self.jobs.remove(job)
            elif job.actor is not None and job.actor.is_suspended and dice.random() < 0.1:
                world.log(f"{job.actor.name} is given up, but lives")
                job.actor = None  # its node failed: the job starts again elsewhere, and the process hangs
        if world.crashes and self.jobs and dice.random() < 0.05:
            twice = dice.choice(self.jobs).run
            self.jobs.append(Job(twice))
            world.log(f"a second job of {twice} appears")


def _noted(job: Job) -> Callable[[int | None], None]:
    def note(code: int | None) -> None:
        job.code = code

    return note


class Cluster(World):
    """Three hosts whose locks exclude on that host only, and a scheduler."""

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path, seed, hosts=3, runs=1 + seed % 2)
        self.queue = Queue(self)

    def submit(self, *, ask: bool = True, retry_failed: bool = False) -> None:
        """`make continue` on a login node, or the last job (not `ask`): one step."""

        def command() -> None:
            known = frozenset(self.queue.ever)
            try:
                if ask:
                    self.allow_faults(retry_failed)
                    asked = requests.go_on(look(self.path, list(self.queue.poll())), retry_failed=retry_failed)
                    self.log(f"continue asks for {asked}")
                Controller(path=self.path, jobs=self.queue, known=frozenset() if ask else known).step()
            except UnreachableError as error:
                self.log(error.what)

        self.command("continue" if ask else "last job", command)

    def event(self) -> None:
        """Something happens."""
        words = ("submit", "last", "retry", "stop", "scancel", "hang", "hang", "back", "back")
        what = self.dice.choice(words)
        self.log(f"event: {what}")
        living = [one for one in self.actors if not one.is_over and hasattr(one, "supervisor")]
        if what in ("submit", "last", "retry"):
            self.submit(ask=what != "last", retry_failed=what == "retry")
        elif what == "stop":
            stop(self.path)
        elif what == "scancel" and self.queue.jobs:
            self.queue.end(self.dice.choice(self.queue.jobs))
        elif what == "hang" and living:
            self.dice.choice(living).is_suspended = True
        elif what == "back":
            self.wake()

    def turn(self) -> None:
        self.queue.turn()
        if self.crashes and self.dice.random() < 0.05:
            self.event()
        self.tick()
        self.check()


def cluster(seed: int, path: Path) -> None:
    world = Cluster(path, seed)
    with story(world):
        world.submit()
        for _ in range(world.dice.randint(20, 300)):
            world.turn()
        world.calm()
        for _ in range(30):
            for _ in range(3000):
                if not world.queue.jobs and all(one.is_over for one in world.actors):
                    break
                world.turn()
            else:
                raise AssertionError("jobs never end")
            if all(state.status is Status.FINISHED for state in look(path).states.values()):
                break
            world.submit(retry_failed=True)
        finished(world)


def finished(world: World) -> None:
    """Check that all runs of a world finished."""
    seen = look(world.path)
    assert {state.status for state in seen.states.values()} == {Status.FINISHED}, seen.states
    assert exit_status(seen) == 0
    assert all(one.is_over for one in world.ranks), "a trainer outlives everything"
    assert not requests_of(world.path).runs


class story:  # noqa: N801 (a block)
    """Print what happened in a world if the block fails."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            print(f"seed {self.world.seed}", *self.world.story, sep="\n")


def explore(tell: Callable[[int, Path], None], seeds: range) -> None:
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="world-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            with replaced_kernel():
                tell(seed, folder / "m")
        finally:
            shutil.rmtree(folder)


@pytest.mark.parametrize("kind", [laptop, cluster])
def test_whatever_happens_every_run_finishes_once_with_the_right_losses(kind: Callable[[int, Path], None]) -> None:
    explore(kind, range(FIRST, FIRST + GATE))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [laptop, cluster])
def test_the_same_in_many_worlds(kind: Callable[[int, Path], None]) -> None:
    explore(kind, range(FIRST + GATE, FIRST + NIGHTLY))
