"""One start of a job: claim its share, train its runs, and requeue the job if something is left."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kmatrix.engines.allocation import Allocation, StopCause
from kmatrix.engines.base import GRACE_S
from kmatrix.engines.local.engine import LocalEngine
from kmatrix.engines.spread import Spread
from kmatrix.engines.staging import Stage, stage_folder
from kmatrix.errors import LaunchError
from kmatrix.gpu.nvml.detect import Gpu, detect, usable
from kmatrix.packing import Limits, usable_cores
from kmatrix.records.decode import as_json, replaced
from kmatrix.records.files import write_json
from kmatrix.records.jobs.claim import Claim, fresh_owner, is_listed
from kmatrix.records.jobs.files import (
    ShareEnd,
    ShareOwner,
    SubmissionFile,
    read_share_end,
)
from kmatrix.records.lock import this_process
from kmatrix.records.paths import ROOT
from kmatrix.records.runs import Status
from kmatrix.runner.execute import (
    check_plans,
    gpu_pool,
    matrix_trackers,
    recorder_launcher,
    recording_hz,
    symbols,
)
from kmatrix.runner.loop import EXIT_FAILED, Outcome, drive
from kmatrix.runner.resume import TRAINER, ResumePlan, describe_plan, reopen
from kmatrix.runner.share.budget import SharedBudget
from kmatrix.runner.share.folder import RunningShare
from kmatrix.runner.share.log import ProgressLog, say
from kmatrix.runner.share.restarts import (
    MOST_IDLE,
    MOST_LOST_STARTS,
    explain_lost,
    fail_open_runs,
    idle_starts,
    saved_steps,
)
from kmatrix.runner.share.rivals import (
    former_claim,
    has_been_cancelled,
    let_former_leave,
    newer_submission,
    other_runner,
    own_part,
)
from kmatrix.runner.share.stop import Cause, Signals
from kmatrix.status.alerts import Thresholds
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.state import NODE_LOST, OPEN, PREEMPTED, RunPlan, is_left_out, overall
from kmatrix.status.status_file import recover_status
from kmatrix.text import first_names, plural

KILL_S = 30.0  # from the signal that ends a job to SIGKILL, if the scheduler does not tell: the default of Slurm
MARGIN_S = 5.0  # of it, for the last files
LEAST_GRACE_S = 5.0
LEAST_TRY_S = 10.0  # for which it is tried, even after the limit of the job
AGAIN_S = 5.0  # between two tries to requeue the job
END_S = 20.0  # a requeued job is killed within this time
REQUESTS_S = 5.0  # between two reads of the user's requests: there are many jobs, and one storage
NODES_POLL_S = 0.2


@dataclass(slots=True)
class ShareJob:
    """This start of a job, and its share of the matrix."""

    share: RunningShare
    submission: SubmissionFile
    allocation: Allocation
    command: tuple[str, ...] = TRAINER
    torchrun: tuple[str, ...] | None = None  # command line of the launcher, None for that of this interpreter
    signals: Signals = field(default_factory=Signals)
    claim: Claim | None = None
    plans: Sequence[RunPlan] = ()
    spread: Spread | None = None
    staging: Stage | None = None  # keeps its copies as long as this process lives

    def run(self) -> int:
        """Run the share; return the exit status of the job."""
        allocation = self.allocation
        start = f"start {allocation.restart + 1}" if allocation.restart else "first start"
        runs = plural(len(self.share.names), "run")
        hosts = " ".join(allocation.hosts)
        say(f"job {allocation.job} of {allocation.name}, {start}, on {hosts}: {runs} of {self.share.path}")
        if self._is_cancelled():  # it was just being queued again, or was given up before it appeared
            say("nothing to do: the job was cancelled; `continue` submits its runs again")
            return 0
        ours = own_part(self.share)
        if ours.names:
            self.share = ours
        why = other_runner(ours, allocation, self._is_stopped) if ours.names else newer_submission(self.share)
        if why:
            say(f"nothing to do: {why}")
            return 0
        before, former = fresh_owner(self.share), former_claim(self.share)
        steps = saved_steps(self.share.all_runs())
        idle = idle_starts(before, allocation.job, allocation.restart, steps)
        lost = self._still_lost()
        try:
            if lost:
                return self._leave_lost_hosts(before, steps, idle, lost)
            self._begin_claim(steps, idle)
            if why := newer_submission(self.share):  # since the first look; its job sees the claim, and this end
                say(f"nothing to do: {why}")
                self._write(ShareEnd(job=allocation.job, restart=allocation.restart))
                return 0
            if before is not None and before.job == allocation.job:
                let_former_leave(self.share, before, self._is_stopped)
            explain_lost(self.share.runs(), former)
            # Not by the number of starts: a node may have failed before this program began.
            is_first = before is None or before.job != allocation.job
            return self._train(idle, self.submission.arguments if is_first else {})
        finally:
            if self.claim is not None:
                self.claim.end()

    def _is_cancelled(self) -> bool:
        return has_been_cancelled(self.share, self.allocation)

    def _is_stopped(self) -> bool:
        return bool(self.signals.names)

    def _still_lost(self) -> list[str]:
        """Return the hosts that the last start lost, are in this job again, and still do not answer."""
        end = read_share_end(self.share) if is_listed(self.share.end) else None
        if end is None or not end.requeued or end.job != self.allocation.job:
            return []
        suspects = [host for host in end.lost if host in self.allocation.hosts]
        return self.allocation.silent(suspects) if suspects else []

    def _leave_lost_hosts(
        self, before: ShareOwner | None, steps: Mapping[str, int], idle: int, lost: Sequence[str]
    ) -> int:
        """End a start that got a lost host again; after too many such starts, the job stays stopped."""
        tries = (before.lost_starts if before is not None and before.job == self.allocation.job else 0) + 1
        self._begin_claim(steps, idle, lost_starts=tries)
        hosts = " and ".join(lost)
        again = tries <= MOST_LOST_STARTS
        say(f"{hosts} still does not answer" if len(lost) == 1 else f"{hosts} still do not answer")
        if not again:
            say(f"that was start {tries} with lost hosts: the job is not requeued; `continue` submits another one")
        reason = f"{hosts} did not answer at {plural(tries, 'start')} in a row"
        return self._end(None, StopCause(kind=NODE_LOST, reason=reason, again=again), lost=lost)

    def _begin_claim(self, steps: Mapping[str, int], idle: int, *, lost_starts: int = 0) -> None:
        self.share.folder.mkdir(parents=True, exist_ok=True)
        me = this_process()
        owner = ShareOwner(
            job=self.allocation.job,
            restart=self.allocation.restart,
            host=me.host,
            pid=me.pid,
            nodes=self.allocation.hosts,
            steps=dict(steps),
            idle=idle,
            lost_starts=lost_starts,
        )
        self.claim = Claim(self.share, owner, on_loss=self._leave_at_once)
        self.claim.begin()

    def _leave_at_once(self) -> None:
        """Kill the runs and exit, without a further file: another start of the job has them now."""
        say("another start of this job has the share: this one leaves at once, and writes nothing more")
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        for plan in self.plans:
            if self.spread is not None:
                self.spread.kill(plan)
        os._exit(0)

    def _train(self, idle: int, asked: Mapping[str, str]) -> int:
        """Train the runs of the share, and end the job. asked: of the submission's arguments, those for this start."""
        share, arguments = self.share, self.submission.arguments
        if idle >= MOST_IDLE:
            failed = fail_open_runs(share.runs(), idle, self.allocation.job)
            say(f"{idle} restarts in a row saved no later step: failed {first_names(failed)}")
            return self._end(None, None)
        limits = Limits(jobs=max(1, len(share.names)))
        gpus, plan = self._plan(asked, limits)
        for line in describe_plan(plan):
            say(line)
        if not plan.plans:
            return self._end(None, None)
        values = symbols(share)
        budget = MatrixBudget.of({**values, **{name: text for name, text in arguments.items() if text}})
        shared = SharedBudget(share, self.claim) if budget and self.claim is not None else None
        if shared is not None:
            shared.begin()
        cause = Cause(self.allocation, self.signals)
        engine = self._engine(plan, gpus, limits, values)
        self._stage(plan)
        try:
            outcome = self._drive(plan, engine, budget, shared, cause)
        finally:
            if shared is not None:
                shared.end()
        stop = cause.get() if self.signals.names else None
        if stop is None and engine.lost_hosts:
            hosts = " and ".join(engine.lost_hosts)
            stop = StopCause(kind=NODE_LOST, reason=f"{hosts} stopped answering", again=True)
        if stop is None and self.allocation.replaces_nodes and (reason := self._preemption()):
            stop = StopCause(kind=PREEMPTED, reason=reason, again=True)
        return self._end(outcome, stop, lost=engine.lost_hosts or (stop.lost if stop else ()))

    def _preemption(self) -> str:
        """Return why an open run was preempted without this job: on another node."""
        states = [recover_status(run, has_runner=True) for run in self.share.runs()]
        ends = [state.last for state in states if state.status in OPEN and not is_left_out(state)]
        return next((end.reason or PREEMPTED for end in ends if end is not None and end.kind == PREEMPTED), "")

    def _stage(self, plan: ResumePlan) -> None:
        """Copy the data of the runs without agents to this node; agents do that for their own."""
        folder = stage_folder(self.allocation.stage_dir)
        if folder is not None and self.spread is not None:
            self.staging = Stage(folder, say, self._is_stopped)
            here = [one.dir for one in plan.plans if not self.spread.has_agents(one)]
            os.environ.update(self.staging.environment(here))

    def _plan(self, arguments: Mapping[str, str], limits: Limits) -> tuple[tuple[Gpu, ...], ResumePlan]:
        found = detect()
        for note in found.notes:
            say(f"note: {note}")
        gpus = usable(found, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=None)
        plan = reopen(
            self.share,
            gpus,
            resume=arguments.get("RESUME") or "auto",
            retry_failed=arguments.get("RETRY_FAILED") in ("1", "y"),
            micro_batch=int(arguments["MICRO_BATCH"]) if arguments.get("MICRO_BATCH") else None,
            command=self.command,
            limits=limits,
        )
        return gpus, plan

    def _engine(
        self, plan: ResumePlan, gpus: tuple[Gpu, ...], limits: Limits, values: Mapping[str, str]
    ) -> LocalEngine:
        arguments = self.submission.arguments
        self.plans, self.spread = plan.plans, self.allocation.spread()
        kill_s = self.allocation.kill_s
        engine = LocalEngine(
            Path(sys.executable),
            ROOT,
            self.torchrun,
            gpus=gpu_pool(gpus, values) if any(one.cuda for one in plan.plans) else (),
            cores=usable_cores(),
            limits=limits,
            grace_s=grace_of(kill_s),
            recorders=recorder_launcher(arguments.get("SIMULATE") or "", recording_hz(values)),
            trackers=matrix_trackers(self.share, _trackers(arguments)),
            spread=self.spread,
            stage_dir=self.allocation.stage_dir,
        )
        check_plans(self.share, plan.plans, engine)
        return engine

    def _drive(
        self,
        plan: ResumePlan,
        engine: LocalEngine,
        budget: MatrixBudget,
        shared: SharedBudget | None,
        cause: Cause,
    ) -> Outcome:
        def find_cause() -> tuple[str, str]:
            found = cause.get()
            return found.kind, found.reason

        def on_stop(name: str) -> None:
            self.signals.names.append(name)
            cause.ask()

        values = symbols(self.share)
        return drive(
            self.share,
            plan.plans,
            engine,
            skipped=plan.skipped,
            again=plan.again,
            on_progress=ProgressLog(),
            on_note=lambda text: say(f"note: {text}"),
            limits=Thresholds.of(values),
            pool=engine.pool,
            budget=budget,
            elsewhere=None if shared is None else shared.elsewhere,
            on_stop=on_stop,
            cause=find_cause,
            requests_s=REQUESTS_S,
            # The next attempt waits for the node that replaces the preempted one, however long that takes.
            left=(PREEMPTED,) if self.allocation.replaces_nodes else (),
            poll_s=NODES_POLL_S,
        )

    def _end(self, outcome: Outcome | None, stop: StopCause | None, *, lost: Collection[str] = ()) -> int:
        """Write how this start ended, and put the job back if something is left; return the exit status."""
        states = {run.name: recover_status(run, has_runner=True) for run in self.share.runs()}
        left = [name for name, state in states.items() if state.status in OPEN and not is_left_out(state)]
        counts = Counter(state.status.value for state in states.values())
        again = bool(stop and stop.again and left) and not (outcome is not None and outcome.disk_full)
        if again and (self._is_cancelled() or self.allocation.is_cancelled()):
            say("the job was cancelled meanwhile: it is not queued again; `continue` submits another one")
            again = False
        most = self.allocation.most_restarts
        if again and most is not None and self.allocation.restart >= most:
            say(f"the job has been restarted {plural(most, 'time')}, the most allowed: `continue` submits another one")
            again = False
        end = ShareEnd(
            job=self.allocation.job,
            restart=self.allocation.restart,
            status=overall([state.status for state in states.values()]),
            kind=stop.kind if stop else None,
            reason=stop.reason if stop else None,
            counts=dict(counts),
            requeued=again,
            lost=tuple(lost),
        )
        self._write(end)
        said = ", ".join(f"{number} {status}" for status, number in counts.items()) or "no run"
        say(f"end of job {self.allocation.job}: {said}" + (f"; {stop.reason}" if stop else ""))
        if again and self._requeue(end):
            return 0
        return outcome.exit_code if outcome is not None else EXIT_FAILED if counts.get(Status.FAILED) else 0

    def _write(self, end: ShareEnd) -> None:
        try:
            write_json(self.share.end, as_json(end))
        except OSError as error:
            say(f"cannot write {self.share.end}: {error.strerror}")

    def _requeue(self, end: ShareEnd) -> bool:
        """Queue the job again, which ends this start; return whether that was possible."""
        left, known = self.allocation.left_s(), len(self.signals.names)
        deadline = time.monotonic() + (60.0 if left is None else max(LEAST_TRY_S, left - MARGIN_S))
        while why := self.allocation.requeue():
            say(f"cannot requeue the job: {why}")
            if time.monotonic() + AGAIN_S > deadline or self._is_cancelled():
                self._write(replaced(end, requeued=False))
                say("the runs stay stopped: `continue` submits them again")
                return False
            time.sleep(AGAIN_S)
        say("the job is back in the queue: it starts again from the last checkpoints")
        if self.claim is not None:
            self.claim.end()
        over = time.monotonic() + END_S
        while len(self.signals.names) == known and time.monotonic() < over:
            time.sleep(NODES_POLL_S)  # the scheduler ends this start now
        return True


def grace_of(kill_s: float | None) -> float:
    """Return the time (s) that runs get to save: less than the scheduler gives, and than torchrun needs."""
    return max(LEAST_GRACE_S, min(GRACE_S, (KILL_S if kill_s is None else kill_s) - MARGIN_S))


def _trackers(arguments: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the trackers of TRACKER=, None if it was not given. The submitter has checked it."""
    if "TRACKER" not in arguments:
        return None
    return tuple(name for name in arguments["TRACKER"].split(",") if name not in ("", "none"))


def open_job(share: RunningShare, submission: SubmissionFile, allocation: Allocation) -> ShareJob:
    """Return the start of a job. Raises LaunchError if its share has no runs."""
    if not share.names:
        raise LaunchError(
            f"submission {share.submission} has no task {share.task}",
            why=f"its shares are in {share.folder.parent}",
            hint="submit the matrix again: make continue",
        )
    return ShareJob(share=share, submission=submission, allocation=allocation)
