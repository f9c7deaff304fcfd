"""What a run can be, and what moves it: a table of events, pure and total.

An event that does not fit the state leaves it as it is. So no order of events, crashes included, leads to an
illegal state, and only `SetAside`, which a person asks for, takes a run out of "finished".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kmatrix.records import LOST, Status

OOM, TIMEOUT, MISMATCH, NOT_STARTED, DIED, LOST_KIND = "oom", "timeout", "mismatch", "not started", "died", "lost"
KILLED = "killed"  # by a signal from outside: the kernel's out of memory killer, a person, another program
DISK = "disk"  # full: what was not written yet is trained again, when there is room
GPU_LOST, NCCL = "gpu lost", "nccl"  # not the run's own doing: another GPU, or another attempt, may do better
PREEMPTED = "preempted"  # asked to stop by somebody who is not the runner, and saved
MOST_RETRIES = {GPU_LOST: 2, NCCL: 2, PREEMPTED: 2}  # attempts in a row that follow such an end by themselves
NOT_ITS_FAULT = frozenset({DISK, KILLED, GPU_LOST, NCCL})
HALVE = "halve"  # the policy for memory: again, with a smaller micro-batch and the same global batch
OPEN = (Status.STOPPED, Status.PLANNED, Status.RUNNING)  # there is work left
UNSUCCESSFUL = (Status.FAILED, Status.SKIPPED)
ENDED = frozenset({Status.FINISHED, Status.FAILED, Status.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One execution of a run. started, ended: Unix seconds.  micro_batch: sequences; None: as run.json has it.

    resume: what it began from, in the trainer's words.  kind: of a failure or a stop, such as oom or signal.
    gpus: UUIDs that it was given.
    """

    number: int
    status: Status = Status.RUNNING
    resume: str = "none"
    micro_batch: int | None = None
    started: float | None = None
    ended: float | None = None
    kind: str | None = None
    reason: str = ""
    exit_code: int | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run. set_aside: number of the last attempt whose files lie in former/; later ones are counted from there.

    reused_from: the run of another matrix that this one was taken over from, "" for none.
    """

    status: Status = Status.PLANNED
    reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    set_aside: int = 0
    reused_from: str = ""

    @property
    def number(self) -> int:
        """The number of the last attempt, 0 before the first."""
        return self.attempts[-1].number if self.attempts else self.set_aside

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


@dataclass(frozen=True, slots=True)
class Skipped:
    """The run cannot run here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt has processes."""

    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The running attempt has no process any more, and this is how it ended: a trainer that crashed, too."""

    status: Status
    at: float | None = None
    kind: str | None = None
    reason: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDied:
    """Nobody looks after the run any more.

    number: the last attempt that left a trace in the run's files.  ended: what its result says; None without one.
    """

    number: int = 0
    ended: Ended | None = None


@dataclass(frozen=True, slots=True)
class RecorderDied:
    """The recording has a hole; the training does not know."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Somebody wants a new result; the files of the old one lie in former/. number: the last attempt among them."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class Reused:
    """A finished run of another matrix is this one."""

    source: str


Event = Skipped | Started | Ended | RunnerDied | RecorderDied | SetAside | Reused


def after(state: RunState, event: Event) -> RunState:  # noqa: PLR0911  (one line for each event)
    """Return the state behind an event; the same where the event does not fit."""
    match event:
        case Skipped() if not state.attempts and state.status in (Status.PLANNED, Status.SKIPPED):
            return replace(state, status=Status.SKIPPED, reason=event.reason)
        case Started() if _may_start(state) and event.attempt.number > state.number:
            begun = replace(event.attempt, status=Status.RUNNING)
            return replace(state, status=Status.RUNNING, reason="", attempts=(*state.attempts, begun))
        case Ended() if state.status is Status.RUNNING and event.status in ENDED:
            return _ended(state, event)
        case RunnerDied():
            return _abandoned(state, event)
        case SetAside() if state.status is not Status.RUNNING:
            return RunState(set_aside=max(state.number, event.number))
        case Reused() if not state.attempts and state.status in (Status.PLANNED, Status.SKIPPED):
            return replace(state, status=Status.FINISHED, reason="", reused_from=event.source)
    return state


def why_illegal(state: RunState) -> str:
    """Return what is wrong with a state, "" for nothing."""
    numbers = [state.set_aside, *(attempt.number for attempt in state.attempts)]
    if any(later <= former for former, later in itertools.pairwise(numbers)):
        return "the attempts are not counted upwards"
    if any(attempt.status not in ENDED for attempt in state.attempts[:-1]):
        return "an attempt began before the former had ended"
    if any(attempt.status is Status.FINISHED for attempt in state.attempts[:-1]):
        return "a finished run was started again"
    if state.reused_from:
        return "" if state.status is Status.FINISHED and not state.attempts else "a run that was taken over is finished"
    if state.last is None:
        return "" if state.status in (Status.PLANNED, Status.SKIPPED) else f"{state.status} without an attempt"
    return "" if state.last.status is state.status else f"{state.status}, and its attempt {state.last.status}"


def next_attempt(
    state: RunState,
    *,
    batch_size: int,
    policy: str = HALVE,
    resume: str = "auto",
    retry_failed: bool = False,
    retry_killed: bool = False,
) -> Attempt | None:
    """Return the attempt that goes on with a run, or None where there is none to make.

    batch_size: the micro-batch of run.json.  policy: what a lack of memory leads to.  resume: from where, where an
    attempt was made before.  A failed run has a next attempt where one follows by itself (`retry`), or where it is
    asked for: for every one (retry_failed), or for one that did not fail by itself: that was killed, lost its GPU,
    broke off in NCCL, or found the disk full (retry_killed).
    """
    if state.status in (Status.FINISHED, Status.RUNNING):
        return None
    last = state.last
    if last is None:
        return Attempt(number=state.number + 1)
    micro_batch = last.micro_batch
    if state.status is Status.FAILED:
        again = retry(state, batch_size=batch_size, policy=policy)
        if again is None and not retry_failed and not (retry_killed and last.kind in NOT_ITS_FAULT):
            return None
        micro_batch = again.micro_batch if again else micro_batch
    return Attempt(number=state.number + 1, resume=resume, micro_batch=micro_batch)


def retry(state: RunState, *, batch_size: int, policy: str = HALVE) -> Attempt | None:
    """Return the attempt that follows an end by itself, from the last good checkpoint; None where none does.

    A lack of memory leads to smaller micro-batches, until one sequence is too much. What was not the run's doing is
    tried again, each kind so often in a row (MOST_RETRIES); an attempt that ends in another way begins the count anew.
    """
    last = state.last
    if last is None or state.status not in (Status.FAILED, Status.STOPPED):
        return None
    number = state.number + 1
    smaller = after_out_of_memory(last, batch_size) if policy == HALVE else None
    if smaller is not None:
        return Attempt(number=number, resume="auto", micro_batch=smaller)
    row = itertools.takewhile(lambda attempt: attempt.kind in MOST_RETRIES, reversed(state.attempts))
    if 0 < sum(attempt.kind == last.kind for attempt in row) <= MOST_RETRIES.get(last.kind or "", 0):
        return Attempt(number=number, resume="auto", micro_batch=last.micro_batch)
    return None


def after_out_of_memory(attempt: Attempt, batch_size: int) -> int | None:
    """Return the micro-batch to try after this attempt; None where memory was not the matter, or there is no smaller.

    It is the largest divisor that is at most half: the global batch stays the same by accumulation.
    """
    used = attempt.micro_batch or batch_size
    if attempt.kind != OOM or used < 2:
        return None
    return next(size for size in range(used // 2, 0, -1) if used % size == 0)


def overall(runs: Sequence[Status]) -> Status:
    """Return the status of a matrix: unfinished work counts before failures, since it can be continued."""
    if any(status in OPEN for status in runs):
        return Status.STOPPED
    return Status.FAILED if any(status in UNSUCCESSFUL for status in runs) else Status.FINISHED


def _may_start(state: RunState) -> bool:
    return state.status not in (Status.RUNNING, Status.FINISHED)


def _ended(state: RunState, event: Ended) -> RunState:
    ended = replace(
        state.attempts[-1],
        status=event.status,
        ended=event.at,
        kind=event.kind,
        reason=event.reason,
        exit_code=event.exit_code,
    )
    return replace(state, status=event.status, reason=event.reason, attempts=(*state.attempts[:-1], ended))


def _abandoned(state: RunState, event: RunnerDied) -> RunState:
    """A running attempt ends by its result, or as stopped; one that nobody wrote down yet is added."""
    if state.status is not Status.RUNNING:
        if event.number <= state.number or not _may_start(state):
            return state
        state = after(state, Started(Attempt(number=event.number)))
    return _ended(state, event.ended or Ended(status=Status.STOPPED, kind=LOST_KIND, reason=LOST))
