"""Drives an engine over a matrix: starts runs, writes how they stand, ends them when asked.

The runner is one process and holds the matrix's lock. SIGINT, SIGTERM and SIGHUP let the run save and
end (status stopped); what has not started stays planned. A second SIGINT kills at once.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.alerts import Alert, Thresholds
from kmatrix.errors import LaunchError, RecordError
from kmatrix.launch.alarm import Alarm, kept
from kmatrix.launch.engine import Engine, JobState, Phase, RunPlan
from kmatrix.launch.lock import held
from kmatrix.launch.signals import Asked, listening
from kmatrix.launch.verdict import Verdict, judge
from kmatrix.launch.watch import MetricsTail, Progress
from kmatrix.records import LOST, MatrixDir, RunDir, Status, append_jsonl, read_json, write_json

EXIT_FAILED, EXIT_STOPPED = 1, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a matrix ended. counts: status -> runs of the whole matrix.  exit_code: of what was asked for now."""

    counts: Mapping[str, int]
    exit_code: int


def drive(
    matrix: MatrixDir,
    plans: Sequence[RunPlan],
    engine: Engine,
    *,
    skipped: Mapping[str, str] | None = None,
    show: Callable[[Progress], None] | None = None,
    poll_s: float = 0.1,
    limits: Thresholds | None = None,
) -> Outcome:
    """Run the plans to their end and return how it went; no process is left in any case.

    skipped: run name -> why it is not run.  show: called with each change and at each look (every poll_s seconds).
    limits: what runs are warned of while they go on.
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
        driver = _Driver(matrix, plans, engine, dict(skipped or {}), show, limits=limits or Thresholds())
        try:
            driver.begin()
            driver.loop(asked, poll_s)
            return driver.end(asked)
        except LaunchError:
            driver.drain(asked, poll_s)
            raise
        finally:
            engine.cancel(driver.jobs, now=True)


def standing(run: RunDir) -> tuple[Status, str]:
    """Return status and reason of a run that no runner has: "running" was left by one that died."""
    try:
        record = read_json(run.status) if run.status.exists() else {}
        status, reason = Status(record.get("status", Status.PLANNED)), str(record.get("reason") or "")
        if status is not Status.RUNNING:
            return status, reason
        result = read_json(run.result) if run.result.exists() else {}
        if result and result.get("attempt") == record.get("attempt"):
            return Status(result["status"]), str(result.get("reason") or "")
    except (RecordError, KeyError, ValueError) as error:
        return Status.FAILED, str(error).splitlines()[0]
    return Status.STOPPED, LOST


class _Driver:
    """The state of one drive: what is planned, what runs, and how each run stands."""

    def __init__(
        self,
        matrix: MatrixDir,
        plans: Sequence[RunPlan],
        engine: Engine,
        skipped: dict[str, str],
        show: Callable[[Progress], None] | None,
        *,
        limits: Thresholds,
    ) -> None:
        self._limits = limits
        self._alarms: dict[str, Alarm] = {}
        self._matrix, self._engine, self._skipped, self._show = matrix, engine, skipped, show
        self._plans = {plan.name: plan for plan in plans}
        self._standing: dict[str, Status] = {}
        self._tails: dict[str, MetricsTail] = {}
        self._index: dict[str, int] = {}
        self._started = time.time()
        self.jobs: dict[str, str] = {}

    def begin(self) -> None:
        """Write how things stand before the first run, and hand the runs over."""
        for run in self._matrix.runs():
            if run.name not in self._plans and run.name not in self._skipped:
                self._settle(run)
        self._standing |= dict.fromkeys(self._plans, Status.PLANNED) | dict.fromkeys(self._skipped, Status.SKIPPED)
        self._write_matrix(Status.RUNNING)
        self._note("matrix started", pid=os.getpid(), host=socket.gethostname(), runs=len(self._plans))
        for name, reason in self._skipped.items():
            _write_run(self._matrix.run(name), Status.SKIPPED, reason=reason)
            self._note("run skipped", run=name, status=Status.SKIPPED, reason=reason)
            self._display(name, Status.SKIPPED, reason=reason)
        for plan in self._plans.values():
            _write_run(plan.dir, Status.PLANNED, attempt=plan.attempt, run_id=plan.run_id)
            self._tails[plan.name] = MetricsTail(plan.dir.metrics, attempt=plan.attempt, max_iters=_max_iters(plan))
        self.jobs = self._engine.submit(list(self._plans.values()))

    def loop(self, asked: Asked, poll_s: float) -> None:
        """Look at the runs until none is left to wait for, passing on what signals ask for."""
        told = killed = False
        while True:
            if asked.kill and not killed:
                self._engine.cancel(self.jobs, now=True)
                killed = told = True
            elif asked.since is not None and not told:
                self._engine.cancel(self.jobs)
                self._note("stop asked", signal=asked.by)
                told = True
            states = self._engine.poll(self.jobs)
            for name, state in states.items():
                self._look(name, state, stopping=told)
            if all(state.phase in (Phase.ENDED, Phase.GONE) for state in states.values()):
                return
            time.sleep(poll_s)

    def drain(self, asked: Asked, poll_s: float) -> None:
        """Let what runs save and end, without writing anything; a SIGINT meanwhile kills it."""
        fresh = asked.since is None  # then even a first SIGINT means: at once
        self._engine.cancel(self.jobs)
        while any(state.phase is Phase.RUNNING for state in self._engine.poll(self.jobs).values()):
            if asked.kill or (fresh and asked.by == "SIGINT"):
                self._engine.cancel(self.jobs, now=True)
            time.sleep(poll_s)
        with suppress(LaunchError):
            self._write_matrix(Status.FAILED)

    def end(self, asked: Asked) -> Outcome:
        """Write how the matrix ended, and return it."""
        status = _overall(list(self._standing.values()))
        self._write_matrix(status)
        self._note("matrix ended", status=status, counts=self._counts())
        now = {self._standing[name] for name in (*self._plans, *self._skipped)}
        if asked.since is not None and now & {Status.STOPPED, Status.PLANNED}:
            return Outcome(counts=self._counts(), exit_code=EXIT_STOPPED)
        if now & {Status.FAILED, Status.SKIPPED}:
            return Outcome(counts=self._counts(), exit_code=EXIT_FAILED)
        return Outcome(counts=self._counts(), exit_code=0 if now <= {Status.FINISHED} else EXIT_STOPPED)

    def _look(self, name: str, state: JobState, *, stopping: bool) -> None:
        """Take in the state of one run, and write what is new."""
        plan, before = self._plans[name], self._standing[name]
        if before is Status.PLANNED and state.phase in (Phase.RUNNING, Phase.ENDED):
            self._begin_run(plan, state)
        if self._standing[name] is Status.RUNNING and state.phase is Phase.ENDED:
            self._end_run(plan, state, judge(plan, state))
        elif state.phase is Phase.RUNNING:
            self._tails[name].read()
            self._warn(plan, state)
            self._display(name, Status.RUNNING, state=state, note="stopping, saving a checkpoint" if stopping else "")
        elif state.phase is Phase.PENDING and state.reason:
            self._display(name, Status.PLANNED, note=state.reason)

    def _begin_run(self, plan: RunPlan, state: JobState) -> None:
        self._standing[plan.name] = Status.RUNNING
        self._index[plan.name] = len(self._index) + 1
        self._alarms[plan.name] = Alarm(plan.dir, self._limits, self._tails[plan.name])
        _write_run(plan.dir, Status.RUNNING, attempt=plan.attempt, run_id=plan.run_id, state=state)
        self._write_matrix(Status.RUNNING)
        self._note("run started", run=plan.name, status=Status.RUNNING, attempt=plan.attempt, pid=state.pid)

    def _end_run(self, plan: RunPlan, state: JobState, verdict: Verdict) -> None:
        self._standing[plan.name] = verdict.status
        known: dict[str, Any] = {"attempt": plan.attempt, "reason": verdict.reason or None}
        self._tails[plan.name].read()
        self._alarms[plan.name].end()
        tail, alerts = verdict.log_tail, self._alarms[plan.name].alerts
        _write_run(plan.dir, verdict.status, run_id=plan.run_id, state=state, log_tail=tail, alerts=alerts, **known)
        self._write_matrix(Status.RUNNING)
        self._note("run ended", run=plan.name, status=verdict.status, exit_code=state.exit_code, **known)
        self._tails[plan.name].read()
        final = verdict.result.get("final_val_loss") if verdict.result else None
        self._display(plan.name, verdict.status, state=state, reason=verdict.reason, val_loss=final)

    def _warn(self, plan: RunPlan, state: JobState) -> None:
        """Write what a run is warned of when that changes."""
        alarm = self._alarms[plan.name]
        change = alarm.look()
        if not change.began and not change.ended:
            return
        _write_run(plan.dir, Status.RUNNING, attempt=plan.attempt, run_id=plan.run_id, state=state, alerts=alarm.alerts)
        for event, alerts in (("alert", change.began), ("alert over", change.ended)):
            for alert in alerts:
                self._note(event, run=plan.name, **alert.to_json())

    def _settle(self, run: RunDir) -> None:
        """Note how a run stands that is not part of this drive; put right what a dead runner left."""
        status, reason = standing(run)
        self._standing[run.name] = status
        with suppress(RecordError):  # a status that cannot be read is left for a person to see
            record = read_json(run.status) if run.status.exists() else {}
            if record.get("status") == Status.RUNNING:
                self._write(run.status, record | {"status": status, "reason": reason or None, "pid": None})

    def _display(
        self,
        name: str,
        status: Status,
        *,
        state: JobState | None = None,
        reason: str = "",
        note: str = "",
        val_loss: float | None = None,
    ) -> None:
        if self._show is None:
            return
        tail, plan = self._tails.get(name), self._plans.get(name)
        elapsed = (state.ended or time.time()) - state.started if state and state.started else None
        left = tail.left_s() if tail else None
        if left is None and plan and plan.expected_s is not None and elapsed is not None:
            left = max(0.0, plan.expected_s - elapsed)
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
                counts=self._counts(),
                alerts=self._alarms[name].active if name in self._alarms else (),
            )
        )

    def _counts(self) -> dict[str, int]:
        found = Counter(self._standing.values())
        return {status.value: found[status] for status in Status if found[status]}

    def _write_matrix(self, status: Status) -> None:
        ended = None if status is Status.RUNNING else time.time()
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        times = {"started": self._started, "ended": ended}
        self._write(self._matrix.status, {"status": status, **times, **owner, "counts": self._counts()})

    def _note(self, event: str, **known: object) -> None:
        with _writing(self._matrix.journal):
            append_jsonl(self._matrix.journal, {"time": time.time(), "event": event, **known})

    def _write(self, path: Path, value: Mapping[str, Any]) -> None:
        with _writing(path):
            write_json(path, value)


def _write_run(
    run: RunDir,
    status: Status,
    *,
    attempt: int = 1,
    run_id: str | None = None,
    state: JobState | None = None,
    reason: str | None = None,
    log_tail: Sequence[str] = (),
    alerts: Sequence[Alert] | None = None,
) -> None:
    """Write the status.json of a run. pid: only while it runs.  alerts: None for those that it has."""
    if run_id is None and run.run_json.exists():
        run_id = read_json(run.run_json).get("run_id")
    record = {
        "run_id": run_id,
        "name": run.name,
        "status": status,
        "reason": reason,
        "attempt": attempt,
        "started": state.started if state else None,
        "ended": state.ended if state else None,
        "exit_code": state.exit_code if state else None,
        "pid": state.pid if state and status is Status.RUNNING else None,
        "log_tail": list(log_tail),
        "alerts": [alert.to_json() for alert in (kept(run) if alerts is None else alerts)],
    }
    with _writing(run.status):
        write_json(run.status, record)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a disk that is full or not ours into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            fix="free some space, or see who may write there; finished runs are kept",
        ) from error


def _max_iters(plan: RunPlan) -> int | None:
    value = read_json(plan.dir.run_json).get("train", {}).get("max_iters")
    return value if isinstance(value, int) else None


def _overall(standing: Sequence[Status]) -> Status:
    """The status of a matrix: unfinished work counts before failures, since it can be continued."""
    if any(status in (Status.STOPPED, Status.PLANNED, Status.RUNNING) for status in standing):
        return Status.STOPPED
    if any(status in (Status.FAILED, Status.SKIPPED) for status in standing):
        return Status.FAILED
    return Status.FINISHED
