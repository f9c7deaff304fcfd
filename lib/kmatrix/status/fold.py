"""Where a run stands: one pure function of its files. Nobody stores it, and nobody else decides it.

Status, estimate, summary, `make continue`, the exporter and the jobs of a cluster read it. What follows an end is the
table ENDS. Two questions are not one: `may_start` (a process that was started for this run trains it) and `is_due` (a
controller starts one by itself). After `scancel` a run may start, because Slurm may have queued it again, but no last
job submits it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kmatrix.records.attempts import ARCHIVE, NODE_LOST, VOID, Attempt, End
from kmatrix.records.control import Again, Request
from kmatrix.records.decode import Scalar
from kmatrix.records.runs import RunResult, Status

FINISHED, STOPPED, SIGNAL, LOST, ARCHIVED = "finished", "stopped", "signal", "lost", "archived"
PREEMPTED, TIME_LIMIT = "preempted", "time limit"
GPU_LOST, NCCL, OOM, NAN, KILLED, DISK = "gpu lost", "nccl", "oom", "nan", "killed", "disk"
ERROR, DIED, TIMEOUT, MISMATCH, NO_PROGRESS, DAMAGED = "error", "died", "timeout", "mismatch", "no progress", "damaged"
MOST_IDLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What follows an end of a kind."""

    status: Status
    automatic: bool = False  # another attempt follows by itself
    by_continue: bool = False  # `make continue` makes another one, without RETRY_FAILED=1
    counts: bool = False  # MOST_IDLE of these in a row without a later checkpoint fail the run
    in_place: bool = False  # the same process tries again; else the scheduler finds a place


_PLACE = Rule(status=Status.STOPPED, automatic=True, by_continue=True, counts=True)
ENDS = {
    # Of the place, not of the run
    **dict.fromkeys((LOST, TIME_LIMIT, NODE_LOST), _PLACE),
    PREEMPTED: Rule(status=Status.STOPPED, automatic=True, by_continue=True, counts=True, in_place=True),
    GPU_LOST: Rule(status=Status.FAILED, automatic=True, by_continue=True, counts=True),
    NCCL: Rule(status=Status.FAILED, automatic=True, by_continue=True, counts=True, in_place=True),
    OOM: Rule(status=Status.FAILED, automatic=True, in_place=True),  # with half the micro-batch, down to one sequence
    # Somebody meant it
    **dict.fromkeys((STOPPED, SIGNAL), Rule(status=Status.STOPPED, by_continue=True)),
    # Not the fault of the run, but the same would happen again until a person has looked
    **dict.fromkeys((KILLED, DISK, NO_PROGRESS), Rule(status=Status.FAILED, by_continue=True)),
}
ITS_FAULT = Rule(status=Status.FAILED)  # of all other kinds
# Of a seed of adaptive seeds, which has one more attempt after its first failure: the same would happen again.
NOT_AGAIN = frozenset({NAN, MISMATCH, DISK})


def rule_of(kind: str) -> Rule:
    """Return what follows an end of this kind."""
    return ENDS.get(kind, ITS_FAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What the files of a run say, read once per look."""

    run_id: str = ""
    train: Mapping[str, Scalar] = field(default_factory=dict)  # as planned: field -> value
    micro_batch: int = 1  # as planned, sequences
    attempts: tuple[Attempt, ...] = ()  # all, also archived ones: their numbers count
    result: RunResult | None = None
    saved: int = 0  # step of the newest checkpoint
    is_live: bool = False  # of the last attempt, if it has no end: its lock is held, or its job runs
    request: Request | None = None
    again: Again | None = None
    damage: str = ""  # of a file, with its name


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands."""

    status: Status
    kind: str = ""  # of its last end
    reason: str = ""
    number: int = 0  # of its last attempt, archived ones included
    attempts: tuple[Attempt, ...] = ()  # without archived ones
    may_start: bool = False
    is_due: bool = False


def state_of(files: Files, *, spare: bool = False) -> State:
    """Return where a run stands. spare: a seed of adaptive seeds, whose first failure is retried once."""
    number = files.attempts[-1].number if files.attempts else 0
    archived = max((place for place, one in enumerate(files.attempts, 1) if one.what == ARCHIVE), default=0)
    attempts = tuple(one for one in files.attempts[archived:] if one.end is None or one.end.kind != VOID)
    last = files.attempts[-1] if files.attempts else None
    is_archived = last is not None and last.what == ARCHIVE

    def state(status: Status, kind: str = "", reason: str = "", *, starts: bool = False, due: bool = False) -> State:
        return State(
            status=status, kind=kind, reason=reason, number=number, attempts=attempts, may_start=starts, is_due=due
        )

    if files.damage:
        return state(Status.FAILED, DAMAGED, files.damage)
    if files.result is not None and files.result.status == "finished" and not is_archived:
        wrong = mismatch(files, files.result)
        return state(Status.FAILED, MISMATCH, wrong) if wrong else state(Status.FINISHED, FINISHED)
    if last is not None and last.end is None and files.is_live and not is_archived:
        return state(Status.RUNNING)
    status, kind, reason, automatic = _open(files, attempts, spare=spare)
    asked = files.again is not None and files.again.after == number
    starts = status in (Status.PLANNED, Status.STOPPED) or automatic or asked
    due = (automatic or asked) and not (is_archived and files.is_live)  # else a rerun moves its files just now
    if files.request is None:
        return state(status, kind, reason, starts=starts, due=due)
    if status is not Status.FAILED:
        status = Status.SKIPPED if files.request.skip and not attempts else status
        held = f"held by user, {datetime.fromtimestamp(files.request.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
        reason = files.request.skip or held
    return state(status, kind, reason)


def _open(files: Files, attempts: Sequence[Attempt], *, spare: bool) -> tuple[Status, str, str, bool]:
    """Return status, kind and reason of a run that neither finished nor trains, and whether it goes on by itself."""
    if not attempts:
        return Status.PLANNED, "", "", True
    end = end_of(attempts[-1], files.result)
    rule = rule_of(end.kind)
    if end.kind == FINISHED:  # it said so, and its result is gone
        return Status.FAILED, MISMATCH, "result.json is missing", False
    if rule.counts and idle(attempts, files.saved) >= MOST_IDLE:
        reasons = [f"{one.kind}: {one.reason}" for one in map(end_of, attempts[-MOST_IDLE:])]
        return Status.FAILED, NO_PROGRESS, f"{MOST_IDLE} attempts saved no later step ({'; '.join(reasons)})", False
    failures = sum(rule_of(end_of(one).kind).status is Status.FAILED for one in attempts)
    again = spare and rule.status is Status.FAILED and failures == 1 and end.kind not in NOT_AGAIN
    is_smallest = end.kind == OOM and (attempts[-1].micro_batch or files.micro_batch) < 2
    return rule.status, end.kind, end.reason, (rule.automatic and not is_smallest) or again


def next_attempt(files: Files, state: State) -> Attempt:
    """Return the attempt that follows, without what only its process knows."""
    last = files.attempts[-1] if files.attempts else None
    number = state.number + 1
    if last is not None and last.what == ARCHIVE and last.end is None:  # a rerun was killed: first it is completed
        return Attempt(number=number, what=ARCHIVE, into=last.into or last.number)
    asked = files.again if files.again is not None and files.again.after == state.number else None
    batch = asked.micro_batch if asked else None
    if not state.attempts:
        return Attempt(number=number, micro_batch=batch, step=files.saved)
    former = state.attempts[-1]
    batch = batch or former.micro_batch
    if asked is None and end_of(former).kind == OOM:
        used = former.micro_batch or files.micro_batch
        batch = next((size for size in range(used // 2, 0, -1) if used % size == 0), 1)
    resume = asked.resume if asked else "auto"
    return Attempt(number=number, resume=resume, micro_batch=batch, step=files.saved, ordered=asked is not None)


def end_of(attempt: Attempt, result: RunResult | None = None) -> End:
    """Return how an attempt without processes ended; its process was killed if it did not write that."""
    if attempt.end is not None:
        return attempt.end
    if result is not None and result.attempt == attempt.number and result.status == "failed":
        return End(kind=result.kind or ERROR, reason=result.reason or "", step=result.step or 0)
    kind, _, reason = attempt.stop.partition(": ")
    if kind:  # its user, or its scheduler, meant it: a kill before it had saved does not make it one of the place
        why = f"{reason or kind}, killed before it had ended"
        return End(kind=kind if kind in ENDS else SIGNAL, reason=why, seconds=attempt.seconds)
    return End(kind=LOST, reason="its process was killed", seconds=attempt.seconds)


def idle(attempts: Sequence[Attempt], saved: int) -> int:
    """Return how many of the last attempts ended for want of a place, and saved no later step than they began with.

    saved: step of the newest checkpoint.
    """
    found, later = 0, saved
    for one in reversed(attempts):
        if not rule_of(end_of(one).kind).counts or later > one.step:
            break
        found, later = found + 1, one.step
        if one.ordered:  # a person has looked at what was before
            break
    return found


def mismatch(files: Files, result: RunResult) -> str:
    """Return how a finished run differs from the planned one, "" if it does not."""
    if result.run_id != files.run_id:
        return f"result.json is of another run: {result.run_id}"
    told = {change.name: change.used for change in result.adjusted}
    wrong = [
        f"{name} requested {files.train[name]}, used {used}"
        for name, used in result.used.items()
        if files.train.get(name) is not None and files.train[name] != used and told.get(name) != used
    ]
    return f"configuration mismatch: {'; '.join(wrong)}" if wrong else ""


def loss_of(files: Files, state: State) -> float | None:
    """Return the loss (nats/token) that a verdict sees of a run that is over; infinity if it diverged.

    A run that ended above its loss before the first step diverged, too.
    """
    if state.status is Status.FINISHED and files.result is not None:
        final, initial = files.result.final_val_loss, files.result.initial_val_loss
        return math.inf if final is not None and not final < (math.inf if initial is None else initial) else final
    return math.inf if state.kind == NAN else None


def is_over(state: State) -> bool:
    """Return whether nothing more comes of a run by itself: a verdict does not wait for it."""
    return state.status in (Status.FINISHED, Status.SKIPPED) or (state.status is Status.FAILED and not state.is_due)


def spent_s(state: State) -> float:
    """Return the seconds of all attempts, by the clocks of their processes: what a cost and a budget count.

    A running attempt tells with each pulse: no clocks of two hosts are compared.
    """
    return sum(one.end.seconds if one.end else one.seconds for one in state.attempts)


def overall(states: Sequence[State]) -> Status:
    """Return the status of a matrix. Unfinished runs count before failed ones: they can be continued."""
    found = {state.status for state in states}
    if Status.RUNNING in found:
        return Status.RUNNING
    if found & {Status.STOPPED, Status.PLANNED}:
        return Status.STOPPED
    return Status.FAILED if found & {Status.FAILED, Status.SKIPPED} else Status.FINISHED


EXIT = {Status.FINISHED: 0, Status.FAILED: 1, Status.STOPPED: 130, Status.RUNNING: 130}
