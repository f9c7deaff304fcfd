"""The state machine of a run: its states, and the events that change them. Pure.

An event that does not apply to a state leaves it unchanged. So no order of events, crashes included, leads to an
illegal state, and only `Archived`, which a user requests, changes a finished run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kmatrix.records.paths import RunDir
from kmatrix.records.runs import LOST, Status
from kmatrix.records.states import HELD_TEXT, Clock, RunRequest

# Kinds of ends: failures and stops.
OOM, TIMEOUT, MISMATCH, NOT_STARTED, DIED, LOST_KIND = "oom", "timeout", "mismatch", "not started", "died", "lost"
KILLED = "killed"  # by a signal from outside: the kernel's out of memory killer, a person, another program
NAN = "nan"  # the training diverged: another attempt with the same seed would, too
DATA = "data"  # missing, damaged, or not prepared
DISK = "disk"  # full: steps after the last checkpoint are trained again when there is space
GPU_LOST, NCCL = "gpu lost", "nccl"  # not caused by the run: another GPU, or another attempt, may succeed
PREEMPTED = "preempted"  # stopped by another program than the runner, with a checkpoint; or by the scheduler
TIME_LIMIT = "time limit"  # stopped, with a checkpoint, because the job of the run reached its time limit
NODE_LOST = "node lost"  # a node of the run stopped answering
NO_PROGRESS = "no progress"  # failed, because several starts of its job in a row saved no later step
# Ends of the place where a run executed, not of the run: it is stopped, and its next attempt is made elsewhere.
ELSEWHERE = frozenset({PREEMPTED, TIME_LIMIT, NODE_LOST})

# Twice in a row: a broken machine must not retry a run forever. A killed run is not retried: the kernel's out of memory
# killer would kill it again, and a person meant it (docs/decisions/0010-automatic-retries.md).
MOST_RETRIES = {GPU_LOST: 2, NCCL: 2, PREEMPTED: 2}  # automatic retries in a row after such an end
NOT_ITS_FAULT = frozenset({DISK, KILLED, GPU_LOST, NCCL})
# Of a seed of adaptive seeds, which has one more attempt after any other failure: the same would happen again.
NOT_AGAIN = frozenset({NAN, MISMATCH, DISK})
OPEN = (Status.STOPPED, Status.PLANNED, Status.RUNNING)  # there is work left
MAY_BE_LEFT_OUT = (Status.PLANNED, Status.STOPPED, Status.SKIPPED)
UNSUCCESSFUL = (Status.FAILED, Status.SKIPPED)
ENDED = frozenset({Status.FINISHED, Status.FAILED, Status.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One execution of a run."""

    number: int  # from 1
    status: Status = Status.RUNNING
    resume: str = "none"  # start of the training: none, auto, latest, best or the path of a checkpoint
    micro_batch: int | None = None  # sequences, None for that of run.json
    started: float | None = None  # Unix seconds
    ended: float | None = None  # Unix seconds
    kind: str | None = None  # of a failure or a stop, such as oom or signal
    reason: str = ""
    exit_code: int | None = None
    gpus: tuple[str, ...] = ()  # UUIDs of its GPUs
    hosts: tuple[str, ...] = ()  # of its nodes, that of rank 0 first
    clock: Clock | None = None  # its start by the monotonic clock, None if it was not recorded
    seconds: float | None = None  # from the start to the end of its processes; None: running, or not recorded

    def duration_s(self, now: float | None = None) -> float | None:
        """Return the seconds from its start to its end, or until now if it runs; None if unknown. now: Unix seconds.

        The wall clock, which may be set back, counts only if the monotonic clock was not recorded.
        """
        if self.seconds is not None:
            return self.seconds
        if self.started is None or (self.ended is None and (now is None or self.status is not Status.RUNNING)):
            return None
        if self.ended is None and self.clock is not None and (since := self.clock.since()) is not None:
            return since
        until = now if self.ended is None else self.ended
        return None if until is None else max(0.0, until - self.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run."""

    status: Status = Status.PLANNED
    reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    archived: int = 0  # number of the last archived attempt; later attempts are numbered from there
    reused_from: str = ""  # the finished run of another matrix that was reused, "" for none

    @property
    def number(self) -> int:
        """The number of the last attempt, 0 before the first."""
        return self.attempts[-1].number if self.attempts else self.archived

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


@dataclass(frozen=True, slots=True)
class Skipped:
    """The run cannot run here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """The processes of an attempt were started."""

    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The running attempt ended: all its processes have exited."""

    status: Status
    at: float | None = None  # Unix seconds
    kind: str | None = None
    reason: str = ""
    exit_code: int | None = None
    seconds: float | None = None  # since the start of the attempt, by the monotonic clock; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDied:
    """The runner of the run died."""

    number: int = 0  # last attempt with metrics or a result
    ended: Ended | None = None  # its end by result.json, None without one
    last_seen: float | None = None  # Unix seconds of the last sign of the attempt, None without one


@dataclass(frozen=True, slots=True)
class RecorderDied:
    """The GPU recorder died; training is not affected."""


@dataclass(frozen=True, slots=True)
class Archived:
    """The user requested a rerun, and the files of the old result are archived."""

    number: int = 0  # last archived attempt


@dataclass(frozen=True, slots=True)
class Requested:
    """The user has held the run, which has no processes."""

    request: RunRequest


@dataclass(frozen=True, slots=True)
class Freed:
    """The user has released the run: it continues where it was."""


@dataclass(frozen=True, slots=True)
class Reused:
    """The result of an equal run of another matrix is reused."""

    source: str


Event = Skipped | Started | Ended | RunnerDied | RecorderDied | Archived | Reused | Requested | Freed


def after(state: RunState, event: Event) -> RunState:  # noqa: PLR0911  (one line for each event)
    """Return the state after an event; the same state if the event does not apply to it."""
    match event:
        case Skipped() if not state.attempts and state.status in (Status.PLANNED, Status.SKIPPED):
            return replace(state, status=Status.SKIPPED, reason=event.reason)
        # Numbers only grow, because they identify the lines of an attempt in metrics.jsonl.
        case Started() if _may_start(state) and event.attempt.number > state.number:
            begun = replace(event.attempt, status=Status.RUNNING)
            return replace(state, status=Status.RUNNING, reason="", attempts=(*state.attempts, begun))
        case Ended() if state.status is Status.RUNNING and event.status in ENDED:
            return _ended(state, event)
        case RunnerDied():
            return _abandoned(state, event)
        case Archived() if state.status is not Status.RUNNING:
            return RunState(archived=max(state.number, event.number))
        case Requested() if state.status in MAY_BE_LEFT_OUT:
            return replace(state, status=_before(state), reason=event.request.reason)
        case Freed() if is_left_out(state):
            return replace(state, status=_before(state), reason=state.last.reason if state.last else "")
        case Reused() if not state.attempts and state.status in (Status.PLANNED, Status.SKIPPED):
            return replace(state, status=Status.FINISHED, reason="", reused_from=event.source)
    return state


def next_attempt(
    state: RunState,
    *,
    batch_size: int,
    resume: str = "auto",
    retry_failed: bool = False,
    retry_killed: bool = False,
    again: bool = False,
) -> Attempt | None:
    """Return the next attempt of a run, None if it needs none.

    batch_size: the micro-batch of run.json.  resume: start of an attempt after the first.  A failed run has a next
    attempt if it is retried automatically (`retry`), if all failed runs are retried (retry_failed), or if it did not
    fail by itself: it was killed, lost its GPU, lost the NCCL connection or found the disk full (retry_killed).
    again: as for `retry`.
    """
    if state.status in (Status.FINISHED, Status.RUNNING):
        return None
    last = state.last
    if last is None:
        # A reused run without its result: like any failed run, it is only trained again if the user asks for it.
        failed = state.status is Status.FAILED and not retry_failed
        return None if failed else Attempt(number=state.number + 1)
    micro_batch = last.micro_batch
    if state.status is Status.FAILED:
        automatic = retry(state, batch_size=batch_size, again=again)
        if automatic is None and not retry_failed and not (retry_killed and last.kind in NOT_ITS_FAULT):
            return None
        micro_batch = automatic.micro_batch if automatic else micro_batch
    return Attempt(number=state.number + 1, resume=resume, micro_batch=micro_batch)


def retry(state: RunState, *, batch_size: int, again: bool = False) -> Attempt | None:
    """Return the automatic retry after an end, from the last good checkpoint; None if there is none.

    Out of memory is retried with smaller micro-batches, down to one sequence. Failures that the run did not cause are
    retried a number of times in a row (MOST_RETRIES); an end of another kind resets the count.
    again: the run is a seed of adaptive seeds, and its first failure is retried once (NOT_AGAIN has the exceptions).
    """
    last = state.last
    if last is None or state.status not in (Status.FAILED, Status.STOPPED):
        return None
    number = state.number + 1
    smaller = after_out_of_memory(last, batch_size)
    if smaller is not None:
        return Attempt(number=number, resume="auto", micro_batch=smaller)
    # Counted back to the last end of another kind: the run made progress then, or failed by itself.
    row = itertools.takewhile(lambda attempt: attempt.kind in MOST_RETRIES, reversed(state.attempts))
    if 0 < sum(attempt.kind == last.kind for attempt in row) <= MOST_RETRIES.get(last.kind or "", 0):
        return Attempt(number=number, resume="auto", micro_batch=last.micro_batch)
    failures = sum(attempt.status is Status.FAILED for attempt in state.attempts)
    if again and state.status is Status.FAILED and failures == 1 and last.kind not in NOT_AGAIN:
        return Attempt(number=number, resume="auto", micro_batch=last.micro_batch)
    return None


def after_out_of_memory(attempt: Attempt, batch_size: int) -> int | None:
    """Return the micro-batch of the retry; None if memory was not the cause, or there is no smaller one.

    It is the largest divisor that is at most half: gradient accumulation keeps the global batch.
    """
    used = attempt.micro_batch or batch_size
    if attempt.kind != OOM or used < 2:
        return None
    return next(size for size in range(used // 2, 0, -1) if used % size == 0)


def is_left_out(state: RunState) -> bool:
    """Return whether the user has held the run."""
    return state.status in MAY_BE_LEFT_OUT and state.reason.startswith(HELD_TEXT)


def _before(state: RunState) -> Status:
    """Return the status of a run without the request of its user."""
    return state.last.status if state.last else Status.PLANNED


def overall(runs: Sequence[Status]) -> Status:
    """Return the status of a matrix. Unfinished runs count before failed ones, because they can be continued."""
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
        seconds=event.seconds,
    )
    return replace(state, status=event.status, reason=event.reason, attempts=(*state.attempts[:-1], ended))


def _abandoned(state: RunState, event: RunnerDied) -> RunState:
    """Return the state after the runner died: the attempt, added if missing, ended by its result or was stopped."""
    if state.status is not Status.RUNNING:
        if event.number <= state.number or not _may_start(state):
            return state
        state = after(state, Started(Attempt(number=event.number)))
    lost = Ended(status=Status.STOPPED, at=event.last_seen, kind=LOST_KIND, reason=LOST)
    return _ended(state, event.ended or lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One attempt that is ready to start."""

    name: str
    run_id: str
    dir: RunDir
    ranks: int  # on all nodes together
    nodes: int = 1  # each has the same number of ranks
    cuda: bool = False  # each rank needs its own GPU
    gpus: tuple[str, ...] = ()  # UUIDs, chosen by the engine at the start; () on several nodes: as the scheduler set
    cpu_threads: int = 1  # per rank
    command: tuple[str, ...] = ("-m", "gpt2.train")  # run by torchrun, followed by `arguments`
    timeout_s: float = 0.0  # 0: no timeout
    attempt: int = 1
    expected_s: float | None = None  # estimated duration, which only decides the order of starts; None: unknown
    resume: str = "none"  # start of the training: none, auto, latest, best or the path of a checkpoint
    micro_batch: int | None = None  # sequences, None for that of run.json; the global batch is kept
    spent_s: float = 0.0  # time of the attempts before, from launch to end
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of the trainer: network and runtime

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        return self.ranks // self.nodes

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments of the trainer."""
        arguments = [str(self.dir.path), "--attempt", str(self.attempt)]
        arguments += [] if self.resume == "none" else ["--resume", self.resume]
        return arguments + ([] if self.micro_batch is None else ["--micro-batch", str(self.micro_batch)])


class JobPhase(StrEnum):
    """The phase of a job. How its run ended is determined by `kmatrix.status.classify`."""

    PENDING = "pending"  # not started yet
    RUNNING = "running"
    ENDED = "ended"  # all processes have exited
    GONE = "gone"  # cancelled before it started, or given up because there will never be enough GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The engine's view of the processes of one run."""

    phase: JobPhase
    pid: int | None = None  # the process to signal to stop the run
    started: float | None = None  # Unix seconds
    ended: float | None = None  # Unix seconds
    clock: Clock | None = None  # the start by the monotonic clock
    seconds: float | None = None  # from the start to the end, by the monotonic clock
    exit_code: int | None = None  # negative, or 128 + n, after signal n
    cancelled: bool = False  # `cancel` was called
    reason: str = ""  # why the engine ended it, could not start it or has not started it yet
    kind: str = ""  # the same in one word
    gpus: tuple[str, ...] = ()  # UUIDs of its GPUs
    hosts: tuple[str, ...] = ()  # of its nodes, that of rank 0 first
    log_start: int = 0  # bytes: size of output.log before this attempt
    recorder_deaths: int = 0  # number of recorders that died
    records_gpus: bool = False  # a recorder samples GPUs of this run, real or simulated ones
