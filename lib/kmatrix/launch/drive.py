"""Drives an engine over a matrix: starts runs, writes how they stand, tries again, ends them when asked.

The runner is one process and holds the matrix's lock. SIGINT and SIGTERM let the run save and end (status
stopped); what has not started stays as it was. A second SIGINT kills at once. SIGHUP ends nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from kmatrix.alerts import Thresholds
from kmatrix.errors import LaunchError
from kmatrix.launch.alarm import Alarm, kept
from kmatrix.launch.aside import finish_move, was_set_aside
from kmatrix.launch.book import Book
from kmatrix.launch.engine import Engine, JobState, Phase, RunPlan
from kmatrix.launch.lock import held, this_process
from kmatrix.launch.pool import Pool
from kmatrix.launch.signals import Asked, listening
from kmatrix.launch.standing import settle
from kmatrix.launch.state import (
    DISK,
    HALVE,
    UNSUCCESSFUL,
    Attempt,
    Ended,
    RecorderDied,
    RunState,
    Skipped,
    Started,
    after,
    overall,
    retry,
)
from kmatrix.launch.verdict import judge
from kmatrix.launch.watch import MetricsTail, Progress, limit_s
from kmatrix.records import MatrixDir, Status, read_json

EXIT_FAILED, EXIT_STOPPED = 1, 130
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a matrix ended. counts: status -> runs of the whole matrix.  exit_code: of what was asked for now.

    no_room: a run failed by a full disk, and those that had not begun were held back.
    """

    counts: Mapping[str, int]
    exit_code: int
    no_room: bool = False


def drive(
    matrix: MatrixDir,
    plans: Sequence[RunPlan],
    engine: Engine,
    *,
    skipped: Mapping[str, str] | None = None,
    show: Callable[[Progress], None] | None = None,
    limits: Thresholds | None = None,
    pool: Pool | None = None,
    tell: Callable[[str], None] | None = None,
    poll_s: float = 0.1,
) -> Outcome:
    """Run the plans to their end and return how it went; no process is left in any case.

    skipped: run name -> why it is not run.  show: called with each change and at each look (every poll_s seconds).
    limits: what runs are warned of while they go on.
    pool: the engine's GPUs, of which one that was lost is left out.  tell: called with what is to be said of them.
    Exit code 0: all finished; 1: a run failed or was skipped; 130: stopped, resumable.
    Raises LaunchError when the runs do not fit here, another runner has the matrix, or a status cannot be written.
    """
    if problems := engine.check(plans):
        raise LaunchError(
            f"{matrix.name} cannot be run here: {problems[0]}",
            why="; ".join(problems[1:]),
            fix="change the configuration, or the number of GPUs, and look at it with make test-matrix-dry-run",
        )
    with held(matrix), listening() as asked:
        driver = _Driver(
            matrix,
            plans,
            engine,
            dict(skipped or {}),
            harmless(show) if show else None,
            limits=limits or Thresholds(),
            pool=pool or Pool([]),
            tell=harmless(tell) if tell else lambda _: None,
        )
        try:
            driver.begin()
            driver.loop(asked, poll_s)
            return driver.end(asked)
        except LaunchError:
            driver.drain(asked, poll_s)
            raise
        finally:
            engine.cancel(driver.jobs, now=True)


class _Driver:
    """The state of one drive: what is to be run, what runs, and how each run of the matrix stands."""

    def __init__(
        self,
        matrix: MatrixDir,
        plans: Sequence[RunPlan],
        engine: Engine,
        skipped: dict[str, str],
        show: Callable[[Progress], None] | None,
        *,
        limits: Thresholds,
        pool: Pool,
        tell: Callable[[str], None],
    ) -> None:
        self._limits, self._pool, self._tell = limits, pool, tell
        self._left_out: dict[str, str] = {}  # GPU -> why, as it was told last
        self._alarms: dict[str, Alarm] = {}
        self._matrix, self._engine, self._skipped, self._show = matrix, engine, skipped, show
        self._plans = {plan.name: plan for plan in plans}
        self._train = {plan.name: _train(plan) for plan in plans}
        self._book = Book(matrix, self._pool if any(plan.cuda for plan in plans) else None)
        self._tails: dict[str, MetricsTail] = {}
        self._index: dict[str, int] = {}
        self._recorders: Counter[str] = Counter()  # run -> recorders that died
        self._open = set(self._plans)  # runs that have not come to an end in this drive
        self.jobs: dict[str, str] = {}
        self.no_room = False  # a run failed by a full disk

    def begin(self) -> None:
        """Write how things stand before the first run, and hand the runs over."""
        for run in self._matrix.runs():
            self._book.states[run.name] = settle(run)
        self._leave_what_moved_on()
        self._book.open()
        self._book.note("matrix started", **asdict(this_process()), runs=len(self._plans))
        for name, reason in self._skipped.items():
            self._book.move(name, Skipped(reason))
            self._book.note("run skipped", run=name, status=self._book.states[name].status, reason=reason)
            self._display(name, reason=reason)
        for name, standing in self._book.states.items():
            if was_set_aside(self._matrix.run(name), standing):
                finish_move(self._matrix.run(name))
            self._write_run(name, unless_ended=True)
        for plan in self._plans.values():
            self._follow(plan)
        self.jobs = self._engine.submit(list(self._plans.values()))

    def _leave_what_moved_on(self) -> None:
        """Drop plans that another runner carried out between their making and the lock: a finished run stays."""
        for name, plan in list(self._plans.items()):
            state = self._book.states.get(name, RunState())
            if after(state, Started(Attempt(number=plan.attempt))) == state:
                del self._plans[name]
                self._open.discard(name)

    def loop(self, asked: Asked, poll_s: float) -> None:
        """Look at the runs until none is left to wait for, passing on what signals ask for."""
        told = killed = lost = False
        while self._open:
            if asked.kill and not killed:
                self._engine.cancel(self.jobs, now=True)
                killed = told = True
            elif asked.since is not None and not told:
                self._engine.cancel(self.jobs)
                self._book.note("stop asked", signal=asked.by)
                told = True
            if asked.hung_up and not lost:
                self._book.note("terminal lost")
                lost = True
            for name, state in self._engine.poll(self.jobs).items():
                if name in self._open:
                    self._look(name, state, stopping=told)
            self._look_at_gpus()
            if self._open:
                time.sleep(poll_s)

    def _look_at_gpus(self) -> None:
        """Tell which GPUs are left out, and which are back."""
        out = self._pool.out
        if out == self._left_out:
            return
        for uuid in (uuid for uuid in {**self._left_out, **out} if self._left_out.get(uuid) != out.get(uuid)):
            name = self._pool.name(uuid)
            self._book.note("gpu left out" if uuid in out else "gpu back", gpu=uuid, name=name, reason=out.get(uuid))
            self._tell(f"{name} is {out[uuid]}" if uuid in out else f"{name} is back")
        self._left_out = out
        self._book.write_matrix(Status.RUNNING)

    def drain(self, asked: Asked, poll_s: float) -> None:
        """Let what runs save and end, without writing anything; a SIGINT meanwhile kills it."""
        fresh = asked.since is None  # then even a first SIGINT means: at once
        self._engine.cancel(self.jobs)
        while any(state.phase is Phase.RUNNING for state in self._engine.poll(self.jobs).values()):
            if asked.kill or (fresh and asked.by == "SIGINT"):
                self._engine.cancel(self.jobs, now=True)
            time.sleep(poll_s)
        with suppress(LaunchError):
            self._book.write_matrix(Status.FAILED)

    def end(self, asked: Asked) -> Outcome:
        """Write how the matrix ended, and return it."""
        status = overall([state.status for state in self._book.states.values()])
        self._book.write_matrix(status)
        self._book.note("matrix ended", status=status, counts=self._book.counts())
        now = {self._book.states[name].status for name in (*self._plans, *self._skipped)}
        if asked.since is not None and now & {Status.STOPPED, Status.PLANNED}:
            code = EXIT_STOPPED
        elif now & set(UNSUCCESSFUL):
            code = EXIT_FAILED
        else:
            code = 0 if now <= {Status.FINISHED} else EXIT_STOPPED
        return Outcome(counts=self._book.counts(), exit_code=code, no_room=self.no_room)

    def _look(self, name: str, state: JobState, *, stopping: bool) -> None:
        """Take in what the engine says of one run, and write what is new."""
        plan = self._plans[name]
        running = self._book.states[name].status is Status.RUNNING
        if not running and state.phase in (Phase.RUNNING, Phase.ENDED):
            self._begin_run(plan, state)
        if state.recorder_deaths > self._recorders[name]:
            self._recorders[name] = state.recorder_deaths
            self._book.move(name, RecorderDied())
            self._book.note("recorder died", run=name)
        if state.phase is Phase.ENDED:
            self._end_run(plan, state, stopping=stopping)
        elif state.phase is Phase.GONE:
            self._open.discard(name)
            if state.reason and not state.cancelled:
                self._give_up(name, state.reason)
        elif state.phase is Phase.RUNNING:
            self._tails[name].read()
            self._warn(plan, state)
            self._display(name, job=state, note="stopping, saving a checkpoint" if stopping else "")
        elif state.reason:
            self._display(name, note=state.reason)

    def _give_up(self, name: str, reason: str) -> None:
        """Leave a run as it is for which there are not GPUs enough any more; one that never began is skipped."""
        self._book.move(name, Skipped(reason))
        self._write_run(name)
        self._book.note("run given up", run=name, status=self._book.states[name].status, reason=reason)
        self._display(name, reason=reason)

    def _begin_run(self, plan: RunPlan, state: JobState) -> None:
        attempt = Attempt(
            number=plan.attempt,
            resume=plan.resume,
            micro_batch=plan.micro_batch,
            started=state.started,
            gpus=state.gpus,
        )
        self._book.move(plan.name, Started(attempt))
        self._index.setdefault(plan.name, len(self._index) + 1)
        self._alarms[plan.name] = Alarm(plan.dir, self._limits, self._tails[plan.name])
        self._write_run(plan.name, job=state)
        self._book.write_matrix(Status.RUNNING)
        known = {"attempt": plan.attempt, "resume": plan.resume, "micro_batch": plan.micro_batch}
        known["gpus"] = list(state.gpus)
        self._book.note("run started", run=plan.name, status=Status.RUNNING, **known, pid=state.pid)

    def _end_run(self, plan: RunPlan, state: JobState, *, stopping: bool) -> None:
        verdict = judge(plan, state)
        for uuid in verdict.lost:
            self._pool.quarantine(uuid, f"{verdict.reason} ({plan.name})")
        self._open.discard(plan.name)
        ended = Ended(
            status=verdict.status,
            at=state.ended,
            kind=verdict.kind,
            reason=verdict.reason,
            exit_code=state.exit_code,
        )
        self._book.move(plan.name, ended)
        self._tails[plan.name].read()
        self._alarms[plan.name].end()
        self._write_run(plan.name, job=state, log_tail=verdict.log_tail)
        self._book.write_matrix(Status.RUNNING)
        known = {"exit_code": state.exit_code, "kind": verdict.kind, "attempt": plan.attempt}
        self._book.note("run ended", run=plan.name, status=verdict.status, **known, reason=verdict.reason or None)
        again = None if stopping else self._again(plan)
        final = verdict.result.get("final_val_loss") if verdict.result else None
        self._display(plan.name, job=state, reason=_and_again(verdict.reason, again, plan.micro_batch), val_loss=final)
        if again is not None:
            self._try_again(again)
        if verdict.kind == DISK:
            self._hold_back()

    def _hold_back(self) -> None:
        """Start nothing more on a full disk: what has not begun stays planned, what runs goes on as far as it can."""
        waiting = [name for name in self._open if self._book.states[name].status is not Status.RUNNING]
        if waiting:
            self._engine.cancel({name: self.jobs[name] for name in waiting})
            self._book.note("disk full", held_back=sorted(waiting))
        self.no_room = True

    def _warn(self, plan: RunPlan, state: JobState) -> None:
        """Write what a run is warned of when that changes."""
        change = self._alarms[plan.name].look()
        if not change.began and not change.ended:
            return
        self._write_run(plan.name, job=state)
        for event, alerts in (("alert", change.began), ("alert over", change.ended)):
            for alert in alerts:
                self._book.note(event, run=plan.name, **alert.to_json())

    def _again(self, plan: RunPlan) -> RunPlan | None:
        """The attempt that follows an end by itself."""
        train = self._train[plan.name]
        batch_size, policy = int(train.get("batch_size") or 1), str(train.get("oom_policy") or HALVE)
        attempt = retry(self._book.states[plan.name], batch_size=batch_size, policy=policy)
        if attempt is None:
            return None
        return replace(plan, attempt=attempt.number, resume=attempt.resume, micro_batch=attempt.micro_batch)

    def _try_again(self, plan: RunPlan) -> None:
        last = self._book.states[plan.name].last
        known = {"attempt": plan.attempt, "micro_batch": plan.micro_batch, "after": last.kind if last else None}
        self._book.note("run retried", run=plan.name, **known)
        self._plans[plan.name] = plan
        self._open.add(plan.name)
        self._follow(plan)
        self.jobs |= self._engine.submit([plan])

    def _follow(self, plan: RunPlan) -> None:
        train = self._train[plan.name]
        most = train.get("max_iters")
        self._tails[plan.name] = MetricsTail(
            plan.dir.metrics,
            attempt=plan.attempt,
            max_iters=most if isinstance(most, int) else None,
            limit_s=limit_s(train),
        )

    def _display(
        self, name: str, *, job: JobState | None = None, reason: str = "", note: str = "", val_loss: float | None = None
    ) -> None:
        if self._show is None:
            return
        tail, status = self._tails.get(name), self._book.states[name].status
        if note and status is not Status.RUNNING:
            status = Status.PLANNED  # it waits, whatever became of its former attempt
        elapsed = (job.ended or time.time()) - job.started if job and job.started else None
        left = tail.left_s() if tail else None
        self._show(
            Progress(
                run=name,
                index=self._index.get(name, 0),
                total=len(self._plans),
                status=status,
                reason=reason,
                note=note,
                step=tail.step if tail else None,
                max_iters=tail.max_iters if tail else None,
                loss=tail.loss if tail else None,
                val_loss=val_loss if val_loss is not None else (tail.val_loss if tail else None),
                tokens_per_second=tail.tokens_per_second if tail else None,
                elapsed_s=elapsed,
                left_s=left if status is Status.RUNNING else None,
                counts=self._book.counts(),
                alerts=self._alarms[name].active if name in self._alarms else (),
            )
        )

    def _write_run(
        self, name: str, *, job: JobState | None = None, log_tail: Sequence[str] = (), unless_ended: bool = False
    ) -> None:
        alerts = self._alarms[name].alerts if name in self._alarms else kept(self._matrix.run(name))
        self._book.write_run(name, alerts, job=job, log_tail=log_tail, unless_ended=unless_ended)


def harmless(say: Callable[[T], None]) -> Callable[[T], None]:
    """Return a display that harms no run where it cannot write: its log's disk is full, or its terminal is gone."""

    def said(value: T) -> None:
        with suppress(OSError):
            say(value)

    return said


def _train(plan: RunPlan) -> Mapping[str, Any]:
    value = read_json(plan.dir.run_json).get("train")
    return value if isinstance(value, dict) else {}


def _and_again(reason: str, again: RunPlan | None, micro_batch: int | None) -> str:
    if again is None:
        return reason
    smaller = again.micro_batch is not None and again.micro_batch != micro_batch
    return f"{reason}; again" + (f" with a micro-batch of {again.micro_batch}" if smaller else "")
