"""Drive an engine over a matrix: start runs, write their status, retry them, stop them on request.

The runner is one process that holds the lock of the matrix. On SIGINT or SIGTERM, runs save a checkpoint and exit
(status stopped), and runs that have not started stay planned. A second SIGINT kills at once. SIGHUP stops nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from kmatrix.curves.queue import CurvesQueue
from kmatrix.engines.base import Engine
from kmatrix.engines.local.pool import Pool
from kmatrix.errors import LaunchError
from kmatrix.records.files import own_copies, write_json
from kmatrix.records.lock import held, this_process
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.states import read_matrix_status
from kmatrix.runner.archive import finish_archiving, is_archiving
from kmatrix.runner.execution.attempts import Attempts
from kmatrix.runner.execution.budget import BudgetWatch
from kmatrix.runner.execution.display import RunDisplay, ignoring_errors, with_retry
from kmatrix.runner.execution.gpus import PoolWatch
from kmatrix.runner.execution.requests import RequestWatch
from kmatrix.runner.rounds import Reserve, SeedRounds
from kmatrix.runner.signals import StopRequest, listening
from kmatrix.runner.status_writer import StatusWriter
from kmatrix.status.alerts import Thresholds
from kmatrix.status.classify import classify
from kmatrix.status.cost import MatrixBudget, Spent, SpentBudget
from kmatrix.status.state import (
    DISK,
    MAY_BE_LEFT_OUT,
    UNSUCCESSFUL,
    Attempt,
    Ended,
    JobPhase,
    JobState,
    RecorderDied,
    RunPlan,
    RunState,
    Skipped,
    Started,
    after,
)
from kmatrix.status.status_file import recover_status, writing
from kmatrix.status.watch import RunProgress, RunUpdate, RunWatch, alerts_of_run

EXIT_FAILED, EXIT_STOPPED = 1, 130
ASKED = "asked to stop"  # start of the reason of a run that was stopped; the cause replaces it
BUDGET_SPENT = "the budget of the matrix is spent"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a matrix ended."""

    counts: Mapping[str, int]  # status -> runs of the whole matrix
    exit_code: int  # of the runs of this execution: 0, EXIT_FAILED or EXIT_STOPPED
    disk_full: bool = False  # a run failed because the disk was full, and no more runs were started
    spent: SpentBudget | None = None  # the limit of the matrix that ended it, although runs are left


def drive(
    matrix: MatrixDir,
    plans: Sequence[RunPlan],
    engine: Engine,
    *,
    skipped: Mapping[str, str] | None = None,
    on_progress: Callable[[RunProgress], None] | None = None,
    limits: Thresholds | None = None,
    pool: Pool | None = None,
    on_note: Callable[[str], None] | None = None,
    budget: MatrixBudget | None = None,
    elsewhere: Callable[[], Spent] | None = None,
    on_stop: Callable[[str], None] | None = None,
    cause: Callable[[], tuple[str, str]] | None = None,
    requests_s: float | None = None,
    left: Collection[str] = (),
    reserve: Sequence[RunPlan] = (),
    rounds: SeedRounds | None = None,
    again: bool = False,
    poll_s: float = 0.1,  # Ctrl+C and the display respond at once, and a poll costs little
) -> Outcome:
    """Execute the plans, which the engine has checked, and return the outcome; no process is left in any case.

    skipped: run name -> why it is not run.  on_progress: called with the progress of each run, every poll_s seconds.
    limits: thresholds of the alerts.  pool: the engine's GPUs; lost ones are quarantined.
    on_note: called with each note about a GPU or the budget.
    budget: of all runs of the matrix; when it is spent, the runs stop as on SIGTERM.
    elsewhere: returns what other runners of the matrix have spent of it.
    on_stop: called with the name of the first signal.  cause: called after it, when a run has ended; returns the kind
    and the reason of the stop.  requests_s: time (s) between two reads of the user's requests.
    left: kinds of ends after which the caller starts a run again, and not this call.
    reserve: plans of runs that are not wanted so far, checked by the engine, too; executed when `rounds` wants them.
    again: a failed run gets one more attempt, as with `rounds`.
    Exit code 0: all finished; 1: a run failed or was skipped; 130: stopped, and can be continued.
    Raises LaunchError if another runner holds the matrix, or a status file cannot be written.
    """
    with ExitStack() as released, held(matrix), listening() as request:
        driver = _Driver(
            matrix,
            plans,
            engine,
            skipped or {},
            ignoring_errors(on_progress) if on_progress else None,
            limits=limits or Thresholds(),
            pool=pool,
            on_note=ignoring_errors(on_note) if on_note else lambda _: None,
            budget=budget or MatrixBudget(),
            elsewhere=elsewhere,
            on_stop=on_stop,
            cause=cause,
            requests_s=requests_s,
            left=left,
            reserve=reserve,
            rounds=rounds,
            again=again,
        )
        released.callback(driver.requests.close)
        try:
            driver.begin()
            driver.loop(request, poll_s)
            return driver.end(request)
        except LaunchError:
            driver.drain(request, poll_s)  # the runs can still save their checkpoints
            raise
        finally:
            engine.cancel(driver.jobs, now=True)  # whatever happened: no trainer outlives its runner


class _Driver:
    """The state of one execution: pending and running runs, and the status of each run of the matrix."""

    def __init__(
        self,
        matrix: MatrixDir,
        plans: Sequence[RunPlan],
        engine: Engine,
        skipped: Mapping[str, str],
        on_progress: Callable[[RunProgress], None] | None,
        *,
        limits: Thresholds,
        pool: Pool | None,
        on_note: Callable[[str], None],
        budget: MatrixBudget,
        elsewhere: Callable[[], Spent] | None,
        on_stop: Callable[[str], None] | None,
        cause: Callable[[], tuple[str, str]] | None,
        requests_s: float | None,
        left: Collection[str],
        reserve: Sequence[RunPlan],
        rounds: SeedRounds | None,
        again: bool,
    ) -> None:
        self._matrix, self._engine, self._skipped = matrix, engine, skipped
        self._limits, self._on_note = limits, on_note
        every = (*plans, *reserve)
        self._attempts = Attempts(every, again=again or rounds is not None, left=left)
        self._plans, self._train = self._attempts.plans, self._attempts.train
        self._writer = StatusWriter(matrix, pool if any(plan.cuda for plan in every) else None)
        self._writer.budget = budget
        self._pool = None if pool is None else PoolWatch(pool, self._writer, on_note)
        self._watches: dict[str, RunWatch] = {}
        self._recorder_deaths: Counter[str] = Counter()
        self._curves = CurvesQueue(self._writer.log)
        self._waits: set[str] = set()  # runs whose next attempt cannot start yet
        self.open = {plan.name for plan in plans}  # runs of this execution that have not ended
        self._reserve = Reserve(self, self._writer, [plan.name for plan in reserve], rounds, on_note)
        self._display = RunDisplay(on_progress, self._writer, self._train, self._reserve, self._plans)
        self.requests = RequestWatch(matrix, self, self._writer, requests_s)
        self._budget = BudgetWatch(matrix, budget, elsewhere) if budget else None
        self._spent: SpentBudget | None = None
        self._on_stop, self._find_cause = on_stop, cause
        self._is_signalled = False
        self.jobs: dict[str, str] = {}
        self.disk_full = False

    @property
    def states(self) -> dict[str, RunState]:
        return self._writer.states

    def begin(self) -> None:
        """Write the status of all runs, and submit the plans to the engine."""
        read_matrix_status(self._matrix)  # refuses one of a newer version, before anything is written
        # Appending to a file with other hard links would change the matrix that this one was copied from.
        with writing(self._matrix.path):
            own_copies(self._matrix.status.parent, below=False)  # of a share, its own folder
            for plan in self._plans.values():
                own_copies(plan.dir.path, skip=(plan.dir.archive.name,))
        # Read the state of all runs, now that the lock is held: the plans may be older.
        for run in self._matrix.runs():
            self.states[run.name] = recover_status(run, has_runner=False)
        self._writer.missing = len(self._matrix.missing())
        self._drop_outdated_plans()
        here = self._plans.keys() | self._skipped.keys()
        reserve = self._reserve.unneeded()
        unfinished = (name for name, state in self.states.items() if state.status in MAY_BE_LEFT_OUT)
        self._writer.unselected = tuple(name for name in unfinished if name not in here and name not in reserve)
        if self._budget is not None:
            self._budget.begin(self.states)

        # Write what is known before the first start.
        self._writer.open()
        known = {"reserve": len(self._reserve.names)} if self._reserve.is_used else {}
        self._writer.log("matrix started", **asdict(this_process()), runs=len(self.open), **known)
        for name, reason in self._skipped.items():
            self._writer.apply(name, Skipped(reason))
            self._writer.log("run skipped", run=name, status=self.states[name].status, reason=reason)
            self._display.show(name, reason=reason)
        for name, state in self.states.items():
            if is_archiving(self._matrix.run(name), state):
                finish_archiving(self._matrix.run(name))
            self._write_run(name, unless_current=True)

        # Watches first: they start at the current end of metrics.jsonl.
        for name in self.open:
            self._watch(self._plans[name])
        self.requests.begin(self._plans)
        self.jobs = self._engine.submit([self._plans[name] for name in self._plans if name in self.open])
        self._reserve.start_wanted()

    def _drop_outdated_plans(self) -> None:
        """Drop plans that another runner executed before this one got the lock: a finished run stays finished."""
        for name, plan in list(self._plans.items()):
            state = self.states.get(name, RunState())
            # The state machine refuses a start of a finished run, and of an attempt number that exists.
            if after(state, Started(Attempt(number=plan.attempt))) == state:
                del self._plans[name]
                self.open.discard(name)

    def loop(self, request: StopRequest, poll_s: float) -> None:
        """Poll the engine until all runs have ended, and forward stop requests to it."""
        stopping = killed = hung_up = False
        while self.requests.follow(stopping=stopping):
            if request.kill and not killed:
                self._engine.cancel(self.jobs, now=True)
                killed = stopping = True
            elif request.since is not None and not stopping:
                self._engine.cancel(self.jobs)
                self._writer.log("stop asked", signal=request.by)
                stopping = self._is_signalled = True
                if self._on_stop is not None:
                    self._on_stop(request.by)
            if request.hung_up and not hung_up:
                self._writer.log("terminal lost")
                hung_up = True
            for name, job in self._engine.poll(self.jobs).items():
                if name in self.open:
                    self._handle(name, job, stopping=stopping)
            if self._pool is not None and self._pool.report():
                self._writer.write_matrix(Status.RUNNING)
            if not killed:
                self._curves.write_next()
            if not stopping and self.has_spent():
                stopping = True
            if self.open:
                time.sleep(poll_s)

    def has_spent(self, *, now: bool = False) -> bool:
        """Return whether the budget of the matrix is spent; if so, stop its runs. now: not throttled."""
        if self._budget is None or self._spent:
            return self._spent is not None
        if spent := self._budget.spent(self.states, now=now):
            self._spent = spent
            self._engine.cancel(self.jobs)
            self._writer.log("budget spent", reason=spent.text)
            self._on_note(f"{BUDGET_SPENT} ({spent.text}): its runs save a checkpoint and stop")
        return self._spent is not None

    def start(self, name: str) -> None:
        """Queue the next attempt of a run of the reserve."""
        if (plan := self._attempts.next(name, self.states[name])) is not None:
            self._submit(plan)

    def cancel(self, name: str) -> None:
        """Ask an open run to save a checkpoint and exit; one that has not started is never started."""
        self._engine.cancel({name: self.jobs[name]})

    def restart(self, name: str) -> None:
        """Queue a run that was held, from its last checkpoint, if it is unfinished."""
        self._write_run(name)
        if self.disk_full:  # no more runs are started
            return
        if name in self._reserve.names:
            self._reserve.start_wanted()
        elif (plan := self._attempts.next(name, self.states[name])) is not None:
            self._submit(plan)

    def report(self, name: str) -> None:
        """Write the status of a run that was left out, and display it."""
        self._write_run(name)
        self._writer.write_matrix(Status.RUNNING)
        self._display.show(name, reason=self.states[name].reason)

    def write(self, name: str) -> None:
        """Write the status of a run."""
        self._write_run(name)

    def drain(self, request: StopRequest, poll_s: float) -> None:
        """Stop the running runs after a status could not be written; SIGINT kills them."""
        first = request.since is None  # then even the first SIGINT kills
        self._engine.cancel(self.jobs)
        # Wait until all have saved; the loop that handles stop requests is gone, so SIGINT is handled here.
        while self.open & self.jobs.keys():
            if request.kill or (first and request.by == "SIGINT"):
                self._engine.cancel(self.jobs, now=True)
            for name, job in self._engine.poll(self.jobs).items():
                if name in self.open:
                    with suppress(LaunchError):
                        self._handle(name, job, stopping=True)
            time.sleep(poll_s)
        if not self.states:  # not read yet: no status is known
            return
        with suppress(LaunchError):
            self._writer.write_matrix(self._reserve.overall())

    def end(self, request: StopRequest) -> Outcome:
        """Write the final status of the matrix, and return the outcome."""
        while not request.kill and self._curves.write_next():
            pass
        counts = self._writer.counts()
        status, reserve = self._reserve.overall(), self._reserve.unneeded()
        self._writer.write_matrix(status)
        self._writer.log("matrix ended", status=status, counts=counts)
        now = {self.states[name].status for name in (*self._plans, *self._skipped) if name not in reserve}
        unfinished = now & {Status.STOPPED, Status.PLANNED}
        # A stop that came after the last run had ended stopped nothing: the results decide.
        if request.since is not None and unfinished:
            code = EXIT_STOPPED
        elif now & set(UNSUCCESSFUL):
            code = EXIT_FAILED
        else:
            code = 0 if now <= {Status.FINISHED} else EXIT_STOPPED
        spent = self._spent if unfinished else None
        return Outcome(counts=counts, exit_code=code, disk_full=self.disk_full, spent=spent)

    def _handle(self, name: str, job: JobState, *, stopping: bool) -> None:
        """Apply the engine's state of one run, and write what changed."""
        plan = self._plans[name]
        # A short job may have ended before its first poll: its start is recorded first.
        if self.states[name].status is not Status.RUNNING and job.phase in (JobPhase.RUNNING, JobPhase.ENDED):
            self._begin_run(plan, job)
        if job.recorder_deaths > self._recorder_deaths[name]:
            self._recorder_deaths[name] = job.recorder_deaths
            self._writer.apply(name, RecorderDied())
            self._writer.log("recorder died", run=name)
        if job.phase is JobPhase.ENDED:
            self._end_run(plan, job, stopping=stopping)
        elif job.phase is JobPhase.GONE:
            self.open.discard(name)
            if job.reason and not job.cancelled:
                self._give_up(name, job.reason)
                self._reserve.start_wanted()
        elif job.phase is JobPhase.RUNNING:
            update = self._watches[name].poll()
            self._write_alerts(plan, job, update)
            ending = stopping or name in self.requests.cancelled
            self._display.show(name, update, job=job, note="stopping, saving a checkpoint" if ending else "")
        elif job.reason:
            if name not in self._waits:  # once: the reason changes with each process that exits
                self._waits.add(name)
                self._writer.log("run waits", run=name, attempt=plan.attempt, reason=job.reason)
            self._display.show(name, note=job.reason)

    def _give_up(self, name: str, reason: str) -> None:
        """Mark a run that has too few GPUs now as skipped, if it never started; else keep its state."""
        self._writer.apply(name, Skipped(reason))
        self._write_run(name)
        self._writer.log("run given up", run=name, status=self.states[name].status, reason=reason)
        self._display.show(name, reason=reason)

    def _begin_run(self, plan: RunPlan, job: JobState) -> None:
        self._waits.discard(plan.name)
        self._writer.apply(plan.name, Started(_attempt(plan, job)))
        self._display.started(plan.name)
        self._watches[plan.name].start(records_gpus=job.records_gpus)
        self._write_run(plan.name, job=job)
        self._writer.write_matrix(Status.RUNNING)
        known = {"attempt": plan.attempt, "resume": plan.resume, "micro_batch": plan.micro_batch}
        known |= {"gpus": list(job.gpus), "hosts": list(job.hosts)}
        self._writer.log("run started", run=plan.name, status=Status.RUNNING, **known, pid=job.pid)

    def _end_run(self, plan: RunPlan, job: JobState, *, stopping: bool) -> None:
        end = classify(plan.dir, _attempt(plan, job), job)
        if self._is_signalled and self._find_cause is not None and end.kind == "signal":
            kind, reason = self._find_cause()
            end = replace(end, kind=kind, reason=end.reason.replace(ASKED, reason, 1))
        elif self._spent and end.kind == "signal":
            end = replace(end, reason=end.reason.replace(ASKED, BUDGET_SPENT, 1))
        # Before any retry is submitted, which must not get the lost GPU again.
        if self._pool is not None:
            self._pool.leave_out_lost(plan.name, end)
        self.open.discard(plan.name)
        self._writer.apply(
            plan.name,
            Ended(
                status=end.status,
                at=job.ended,
                kind=end.kind,
                reason=end.reason,
                exit_code=job.exit_code,
                seconds=job.seconds,
            ),
        )
        update = self._watches[plan.name].end()
        self._log_alerts(plan, update)
        self._write_run(plan.name, job=job, log_tail=end.log_tail)
        if end.status is Status.FAILED and end.result is None and plan.dir.path.is_dir():
            # Rank 0 was killed, or hung: it could not say why.
            about = {"status": end.status, "kind": end.kind, "reason": end.reason}
            with suppress(OSError):  # on a full disk
                write_json(plan.dir.result, {"run_id": plan.run_id, "attempt": plan.attempt, **about})
        self._writer.write_matrix(Status.RUNNING)
        known = {"exit_code": job.exit_code, "kind": end.kind, "attempt": plan.attempt}
        self._writer.log("run ended", run=plan.name, status=end.status, **known, reason=end.reason or None)
        again = None
        if not stopping and plan.name not in self.requests.cancelled:
            again = self._attempts.after_end(plan.name, self.states[plan.name])
        if end.result and end.result.final_val_loss is not None:
            update = replace(update, val_loss=end.result.final_val_loss)
        self._display.show(plan.name, update, job=job, reason=with_retry(end.reason, again, plan.micro_batch))
        if again is not None:
            self._submit_retry(again)
        else:
            self._curves.add(plan.dir, plan.attempt)
        if end.kind == DISK:
            self._hold_back()
        if not stopping:
            self._reserve.start_wanted()

    def _hold_back(self) -> None:
        """Start no more runs on a full disk: the others stay planned, running ones continue as far as they can."""
        waiting = [name for name in self.open if self.states[name].status is not Status.RUNNING]
        if waiting:
            self._engine.cancel({name: self.jobs[name] for name in waiting})
            self._writer.log("disk full", held_back=sorted(waiting))
        self.disk_full = True

    def _write_alerts(self, plan: RunPlan, job: JobState, update: RunUpdate) -> None:
        """Write the alerts of a run if they changed."""
        if update.alerts.began or update.alerts.ended:
            self._write_run(plan.name, job=job)
            self._log_alerts(plan, update)

    def _log_alerts(self, plan: RunPlan, update: RunUpdate) -> None:
        """Write what changed in the alerts of a run to the journal."""
        for event, alerts in (("alert", update.alerts.began), ("alert over", update.alerts.ended)):
            for alert in alerts:
                self._writer.log(event, run=plan.name, **alert.to_json())

    def _submit_retry(self, plan: RunPlan) -> None:
        last = self.states[plan.name].last
        known = {"attempt": plan.attempt, "micro_batch": plan.micro_batch, "after": last.kind if last else None}
        self._writer.log("run retried", run=plan.name, **known)
        self._submit(plan)

    def _submit(self, plan: RunPlan) -> None:
        """Queue a further attempt of a run."""
        self._plans[plan.name] = plan
        self.open.add(plan.name)
        self._watch(plan)
        self.jobs |= self._engine.submit([plan])

    def _watch(self, plan: RunPlan) -> None:
        self._watches[plan.name] = RunWatch(
            plan.dir,
            self._limits,
            self._train[plan.name],
            attempt=plan.attempt,
            ranks=plan.ranks,
            resume=plan.resume,
        )

    def _write_run(
        self, name: str, *, job: JobState | None = None, log_tail: Sequence[str] = (), unless_current: bool = False
    ) -> None:
        if unless_current and self._writer.is_current(name):
            return
        alerts = self._watches[name].alerts if name in self._watches else alerts_of_run(self._matrix.run(name))
        self._writer.write_run(name, alerts, job=job, log_tail=log_tail)


def _attempt(plan: RunPlan, job: JobState) -> Attempt:
    return Attempt(
        number=plan.attempt,
        resume=plan.resume,
        micro_batch=plan.micro_batch,
        started=job.started,
        clock=job.clock,
        gpus=job.gpus,
        hosts=job.hosts,
    )
