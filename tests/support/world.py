"""Machines in one process: supervisors, controllers, schedulers and users that take turns, and die anywhere.

Everything but the trainer and the kernel is the real code. A tick lets one actor go on to its next wait; before each
change of a file another actor may go on first, or the actor dies. Equal seeds give equal worlds, and a world that fails
prints its story.
"""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix import locks
from kmatrix.clock import clock
from kmatrix.errors import RecordError
from kmatrix.records import attempts, files
from kmatrix.records.attempts import Attempt, Exit, TakenError
from kmatrix.records.control import stop_of
from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.runs import RunResult, Status
from kmatrix.runner.supervisor import Supervisor
from kmatrix.status.look import look, saved_step

STEPS, EVERY = 6, 2  # of a run, and between its checkpoints
BAD = ("oom", "nan", "gpu lost", "nccl", "killed", "died", "preempted", "disk")  # ends of attempts
LOSS = float(pow(31, STEPS, 1000003))  # of a run, however often it was interrupted
EPOCH = 1_800_000_000.0
_BEFORE, _LOCK, _RELEASE, _HELD = files.before, locks.try_lock, locks.release, locks.is_held


class CrashError(BaseException):
    """The process is gone: nothing that it would do afterwards happens."""


class WorldClock:
    """Time that passes by ticks; files have the time of their last change. It is the clock of all that reads one."""

    def __init__(self) -> None:
        self.t, self.written = EPOCH, dict[str, float]()
        vars(clock).update(now=self.now, monotonic=self.monotonic, sleep=self.sleep, age_s=self.age_s)

    def now(self) -> float:
        return self.t

    def monotonic(self) -> float:
        return self.t - EPOCH + 1.0

    def sleep(self, seconds: float) -> None:
        self.t += seconds

    def age_s(self, path: Path) -> float:
        return self.t - self.written.get(str(path), 0.0) if path.exists() else float("inf")


@contextmanager
def replaced_kernel() -> Iterator[None]:
    """Put back what a world has replaced, at the end of the block."""
    try:
        yield
    finally:
        files.before = _BEFORE
        vars(clock).clear()
        locks.try_lock, locks.release, locks.is_held = _LOCK, _RELEASE, _HELD


@dataclass(kw_only=True)
class SimPlace:
    """Where a supervisor is."""

    host: str
    boot: str
    job: str = ""
    gpus: tuple[str, ...] = ()
    pulse_s: float = 1.0
    replaces_nodes: bool = False

    def grace_of(self, signal: str) -> float:
        return 30.0

    def kind_of(self, signal: str) -> str:
        return "time limit" if signal == "SIGUSR1" else "signal"


def _loss(result: RunResult | None) -> float | None:
    return result.final_val_loss if result else None


class Actor:
    """A process: a generator with its locks."""

    supervisor: Supervisor

    def __init__(
        self,
        world: World,
        name: str,
        host: str,
        body: Generator[None, None, Any],
        on_end: Callable[[int | None], object],
    ) -> None:
        self.world, self.name, self.host, self.body, self.on_end = world, name, host, body, on_end
        self.crash_in: int | None = None  # changes of files
        self.handles: list[int] = []
        self.is_over = self.is_suspended = False
        self.woke = -1e9  # until its next pulse after that, it does not know what happened while it was suspended

    def go(self) -> None:
        """Go on to the next wait, or to the end."""
        if self.is_over or self in self.world.stack:
            return
        self.world.stack.append(self)
        try:
            next(self.body)
        except StopIteration as end:
            self._end(end.value)
        except TakenError as error:
            self.world.log(f"{self.name}: {error.what}")
            self._end(0)
        except RecordError as error:
            self.world.log(f"{self.name}: {error.what}")
            self._end(2)
        except CrashError:
            self.world.log(f"{self.name} is killed")
            self._end(None)
        finally:
            self.world.stack.pop()

    def kill(self) -> None:
        """Send SIGKILL."""
        if not self.is_over and self not in self.world.stack:
            self.world.log(f"{self.name} is killed")
            self._end(None)

    def _end(self, code: int | None) -> None:
        """code: the exit status; None: it was killed."""
        self.is_over = True
        for handle in self.handles:
            os.close(handle)
        self.handles = []
        self.on_end(code)


class SimRanks:
    """A trainer: steps, checkpoints, a result. Its value after n steps does not depend on interruptions."""

    def __init__(self, world: World, run: str, mine: Attempt, actor: Actor, outcome: tuple[str, int]) -> None:
        self.world, self.run, self.mine, self.actor, self.outcome = world, run, mine, actor, outcome
        self.dir, self.exits = world.path / run, list[Exit]()
        self.lock = os.dup(actor.handles[-1])
        self.step = saved_step(self.dir / "checkpoints") if mine.resume != "none" else 0
        self.value = self._saved() if self.step else 1
        self.stopping = self.is_over = False
        world.begins(self)
        world.ranks.append(self)

    def _saved(self) -> int:
        value: int = json.loads((self.dir / f"checkpoints/step_{self.step}.json").read_bytes())["value"]
        return value

    def poll(self) -> bool:
        if self.is_over:
            return True
        kind, at = self.outcome
        if self.stopping:
            if self.world.dice.random() < 0.8:
                self._save()
                self._result("stopped")
            return self._end(0)
        if kind != "finished" and self.step >= at:
            return self._fail(kind)
        if self.step < STEPS:
            self.step, self.value = self.step + 1, self.value * 31 % 1000003
            if self.step % EVERY == 0:
                self._save()
        if self.step >= STEPS:
            self._result("finished")
            return self._end(0)
        return False

    def _fail(self, kind: str) -> bool:
        if kind in ("killed", "died"):
            return self._end(-9 if kind == "killed" else 1)
        if kind == "preempted":
            self._save()
            self._result("stopped")
            return self._end(0)
        self._result("failed", kind)
        return self._end(1)

    trouble = None

    def stop(self, grace_s: float) -> None:
        self.stopping = True

    def kill(self) -> None:
        self._end(-9)

    def _owns(self) -> bool:
        """Return whether its attempt is the newest: rank 0 looks before it publishes."""
        return attempts.numbers(self.dir)[-1:] == [self.mine.number]

    def _save(self) -> None:
        if self._owns():
            write_json(self.dir / f"checkpoints/step_{self.step}.json", {"value": self.value}, durable=False)

    def _result(self, status: str, kind: str | None = None) -> None:
        if self._owns():
            result = RunResult(
                run_id=f"id-{self.run}",
                attempt=self.mine.number,
                status=status,
                kind=kind,
                reason=kind,
                step=self.step,
                final_val_loss=float(self.value),
            )
            write_json(self.dir / "result.json", as_json(result), durable=False)

    def _end(self, code: int) -> bool:
        if not self.is_over:
            self.is_over, self.exits = True, [Exit(rank=0, code=code)]
            os.close(self.lock)
        return True


class World:
    """A matrix, its hosts, and whoever acts on it."""

    def __init__(self, path: Path, seed: int, *, hosts: int = 1, runs: int = 0) -> None:
        self.dice, self.seed, self.path = random.Random(seed), seed, path
        self.story, self.stack = list[str](), list[Actor]()
        self.actors, self.ranks = list[Actor](), list[SimRanks]()
        self.clock = WorldClock()
        self.hosts = [f"host{number}" for number in range(hosts)]
        self.has_one_boot = self.dice.random() < 0.2  # containers of one kernel, with locks of their own
        self.has_links = self.dice.random() < 0.9
        self.crashes, self.stopped_at = True, None
        self.pulse_s, self.tick_s = (1.0, 0.3) if hosts == 1 else (10.0, 3.0)
        files.before = self._before  # type: ignore[assignment]
        locks.try_lock, locks.release, locks.is_held = self._try_lock, self._release, self._is_held
        names = [f"run_{number}" for number in range(runs or self.dice.randint(1, 3))]
        self.script = {
            name: [
                (self.dice.choice(BAD), self.dice.randint(0, STEPS - 1))
                for _ in range(self.dice.choice([0, 0, 1, 1, 2, 3]))
            ]
            for name in names
        }
        self.finished, self.highest = dict[str, bytes](), dict[str, int]()
        self.faults_allowed = dict.fromkeys(names, 1)
        (path / "control").mkdir(parents=True)
        plan = [{"name": name, "run_id": f"id-{name}"} for name in names]
        (path / "config.txt").touch()
        write_json(path / "matrix.json", {"name": "m", "runs": plan}, durable=False)

    stopped_at: float | None

    # The kernel: locks of the worst storage, which exclude on one host only
    def _place_of_lock(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.{self.stack[-1].host if self.stack else self.hosts[0]}")

    def _try_lock(self, path: Path) -> int | None:
        handle = _LOCK(self._place_of_lock(path))
        if handle is not None and self.stack:
            self.stack[-1].handles.append(handle)
        return handle

    def _release(self, handle: int) -> None:
        if self.stack:
            self.stack[-1].handles.remove(handle)
        os.close(handle)

    def _is_held(self, path: Path) -> bool:
        return _HELD(self._place_of_lock(path))

    def _before(self, what: str, path: Path) -> None:
        self.clock.written[str(path)] = self.clock.t
        if what == "link" and not self.has_links:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if not self.stack or not self.crashes:
            return
        actor = self.stack[-1]
        if actor.crash_in is not None:
            actor.crash_in -= 1
            if actor.crash_in < 0:
                raise CrashError
        if len(self.stack) < 4 and self.dice.random() < 0.25:  # somebody else is faster
            self.tick(kill=False)

    # Processes
    def log(self, text: str) -> None:
        self.story.append(f"{self.clock.t - EPOCH:7.1f} {text}")

    def spawn(
        self,
        name: str,
        host: str,
        body: Generator[None, None, Any],
        on_end: Callable[[int | None], object] = lambda _: None,
    ) -> Actor:
        actor = Actor(self, name, host, body, on_end)
        self.actors.append(actor)
        if self.crashes and self.dice.random() < 0.3:
            actor.crash_in = self.dice.randint(0, 25)
        return actor

    def command(self, name: str, what: Callable[[], object]) -> Actor:
        """Let somebody type a command, which runs to its end, or dies."""

        def body() -> Generator[None, None, None]:
            what()
            return
            yield

        actor = self.spawn(name, self.hosts[0], body())
        actor.go()
        return actor

    def supervisor(self, run: str, host: str, on_end: Callable[[int | None], object] = lambda _: None) -> Actor:
        """Start `kmatrix run`."""

        def start(mine: Attempt, _: int) -> SimRanks:
            bad = self.script[run]
            outcome = bad.pop(0) if bad else ("finished", 0)
            self.log(f"{run} attempt {mine.number} on {host} from {mine.resume}, will be {outcome}")
            return SimRanks(self, run, mine, actor, outcome)

        def ended(code: int | None) -> None:
            for ranks in self.ranks:  # the kernel kills them with their parent
                if ranks.actor is actor:
                    ranks.kill()
            on_end(code)

        boot = "boot" if self.has_one_boot else f"boot-{host}"
        place = SimPlace(host=host, boot=boot, job="" if len(self.hosts) == 1 else "7", pulse_s=self.pulse_s)
        one = Supervisor(run=self.path / run, place=place, start=start, say=lambda text: self.log(f"{run}: {text}"))
        actor = self.spawn(f"supervisor {run} on {host}", host, one.lead(), on_end=ended)
        actor.supervisor = one
        return actor

    def tick(self, *, kill: bool = True) -> None:
        """Let somebody go on to the next wait."""
        self.clock.t += self.tick_s
        self.actors = [one for one in self.actors if not one.is_over]
        awake = [one for one in self.actors if not one.is_suspended and one not in self.stack]
        if awake:
            one = self.dice.choice(awake)
            if kill and self.crashes and self.dice.random() < 0.01:
                one.kill()
            else:
                one.go()

    def wake(self) -> None:
        """Let suspended processes go on."""
        for one in self.actors:
            one.woke = self.clock.t if one.is_suspended else one.woke
            one.is_suspended = False
        self.stopped_at = self.clock.t if self.stopped_at else None  # they have to see the file first

    def calm(self) -> None:
        """Let nothing be killed or suspended any more."""
        self.crashes = False
        self.wake()
        for one in self.actors:
            one.crash_in = None

    def allow_faults(self, retry_failed: bool) -> None:
        """Let each run fail by its own fault once more: also a command that is killed may have written its orders."""
        for run in self.faults_allowed:
            self.faults_allowed[run] += retry_failed

    # What must hold
    def begins(self, ranks: SimRanks) -> None:
        """Check that an attempt may train now."""
        others = [one for one in self.ranks if one.run == ranks.run and not one.is_over]
        late = [one for one in others if not one.actor.is_suspended and self.clock.t > one.actor.woke + 60]
        numbers = [one.mine.number for one in late]
        assert not late, f"two attempts of {ranks.run} train: {numbers} and {ranks.mine.number}"
        with suppress(FileNotFoundError):
            status = json.loads((ranks.dir / "result.json").read_bytes())["status"]
            assert status != "finished", "a finished run trains"
        is_stopped = self.stopped_at is not None and self.clock.t > self.stopped_at + 100
        assert not (is_stopped and stop_of(self.path) is not None), "it starts after a stop"

    def check(self) -> None:
        """Check that every file can be read at every moment, and says what is true."""
        seen = look(self.path)
        self.stopped_at = None if seen.stop is None else self.stopped_at or self.clock.t
        patience = 30.0 if len(self.hosts) == 1 else 400.0
        if self.stopped_at is not None and self.clock.t > self.stopped_at + patience:
            assert all(one.is_over or one.actor.is_suspended for one in self.ranks), "it trains on after a stop"
        for run, state in seen.states.items():
            found = seen.files[run]
            assert not found.damage, found.damage
            assert not state.attempts or (self.path / run / "run.json").exists(), "an attempt without a plan"
            assert state.number >= self.highest.get(run, 0), "numbers of attempts only grow"
            self.highest[run] = state.number
            assert state.reason != "result.json is missing", f"{run}: its result was moved, and it does not say so"
            own = [one for one in found.attempts if one.end and one.end.kind in ("nan", "died")]
            assert len(own) <= self.faults_allowed[run], f"{run} was retried by itself after its own fault: {own}"
            if state.status is Status.FINISHED:
                content = (self.path / run / "result.json").read_bytes()
                assert self.finished.setdefault(run, content) == content, "a finished run changed"
                assert _loss(found.result) == LOSS, "not the losses of an uninterrupted run"
            else:
                assert run not in self.finished, f"{run} was finished, and is {state}"
