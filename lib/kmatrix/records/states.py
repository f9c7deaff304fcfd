"""The records status.json and requests.json, the files of the ranks, and the lines of logs.

requests.json has the runs that are held, not a list of orders: it survives any kill, and a copy has its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from kmatrix.errors import LaunchError
from kmatrix.records.decode import (
    Amount,
    Count,
    Int,
    Number,
    Record,
    UnixTime,
    as_json,
    decode,
    decode_optional,
    field,
)
from kmatrix.records.files import write_json
from kmatrix.records.lock import boot_id, try_lock
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import GpuEntry, Status

LOCK_S = 10.0  # another process holds the requests for milliseconds
HELD_TEXT = "held by user"  # start of the reason of such a run


class AlertEntry(Record, frozen=True, kw_only=True):
    """An alert in status.json."""

    kind: str
    severity: str
    since: UnixTime
    about: str | None = None
    value: Number | None = None
    threshold: Number | None = None
    reason: str | None = None
    until: UnixTime | None = None


class Clock(Record, frozen=True):
    """A time of the monotonic clock, which nobody sets and which starts at 0 with each boot of the machine."""

    monotonic: Amount  # s
    boot_id: str | None = None  # the kernel's id of the boot

    @classmethod
    def now(cls) -> Clock:
        """Return the current time."""
        return cls(monotonic=time.monotonic(), boot_id=boot_id())

    def since(self) -> float | None:
        """Return the seconds since then; None on another machine, or after a boot."""
        if self.boot_id is None or self.boot_id != boot_id():
            return None
        return max(0.0, time.monotonic() - self.monotonic)


class AttemptRecord(Record, frozen=True, kw_only=True):
    """An execution of a run in status.json."""

    attempt: Count | None = None  # None: 1
    status: Status = Status.PLANNED
    resume: str | None = None
    micro_batch: Count | None = None  # sequences
    started: UnixTime | None = None
    ended: UnixTime | None = None
    kind: str | None = None
    reason: str | None = None
    exit_code: Int | None = None
    clock: Clock | None = None  # its start by the monotonic clock
    seconds: Amount | None = None  # from its start to its end; None: running, or not recorded
    gpus: tuple[str, ...] = ()  # UUIDs
    hosts: tuple[str, ...] = ()  # of its nodes, that of rank 0 first


class RunStatusFile(AttemptRecord, frozen=True, kw_only=True):
    """status.json of a run. The keys of its last attempt are the run's own, too."""

    pid: Count | None = None
    log_tail: tuple[str, ...] = ()
    alerts: tuple[AlertEntry, ...] = ()
    attempts: tuple[AttemptRecord, ...] = ()
    set_aside: Count | None = None  # number of the last archived attempt
    reused_from: str | None = None  # <matrix>/<run>

    def __post_init__(self) -> None:
        if self.status is Status.RUNNING and not self.attempts:
            raise ValueError("a running run has no attempt")


class BudgetEntry(Record, frozen=True, kw_only=True):
    """The budget of a matrix in its status.json: that of its last execution. 0: no limit."""

    hours: Amount = 0.0
    dollars: Amount = 0.0


class MatrixStatusFile(Record, frozen=True, kw_only=True):
    """status.json of a matrix."""

    status: Status | None = None
    started: UnixTime | None = None
    ended: UnixTime | None = None
    counts: dict[str, Count] = field(default_factory=dict)  # number of runs by status
    gpus: tuple[GpuEntry, ...] | None = None  # that runs may get
    unselected: tuple[str, ...] = ()  # unfinished runs that `make continue RUN=` left alone
    budget: BudgetEntry | None = None  # None of clusters: that of the configuration


class EventLine(Record, frozen=True, kw_only=True):
    """A line of events.jsonl, gpu_events.jsonl or journal.jsonl."""

    event: str
    time: UnixTime
    step: Count | None = None
    text: str | None = None
    run: str | None = None
    gpu_index: Count | None = None
    monotonic: Amount | None = None  # seconds since the boot, in gpu_events.jsonl
    xid: Count | None = None  # code of an XID error
    xid_count: Count = 1  # number of these errors since the event before
    attempt: Count | None = None  # of the run, in `started` of gpu_events.jsonl


class PhaseLine(Record, frozen=True, kw_only=True):
    """A line of phases.jsonl: a stretch without training."""

    phase: str
    begin: UnixTime
    end: UnixTime
    attempt: Count = 1
    step: Count | None = None
    begin_monotonic: Amount | None = None  # seconds since the boot
    end_monotonic: Amount | None = None


class TimingLine(Record, frozen=True, kw_only=True):
    """A line of a rank's timings.jsonl: means since the line before."""

    step: Count
    steps: Count
    compute_ms: Amount
    step_ms: Amount


def read_run_status(run: RunDir) -> RunStatusFile | None:
    """Return status.json of a run, or None if it is missing or damaged. Raises SchemaError if it is too new."""
    return decode_optional(run.status, RunStatusFile)


def read_matrix_status(matrix: MatrixDir) -> MatrixStatusFile:
    """Return status.json of a matrix, empty if it is missing or damaged. Raises SchemaError if it is too new."""
    return decode_optional(matrix.status, MatrixStatusFile) or MatrixStatusFile()


class RunRequest(Record, frozen=True, kw_only=True):
    """The request to hold a run."""

    time: UnixTime

    @property
    def reason(self) -> str:
        """The reason in the status of the run: `held by user, 2026-11-22 19:30:05 UTC`."""
        return f"{HELD_TEXT}, {datetime.fromtimestamp(self.time, UTC):%Y-%m-%d %H:%M:%S} UTC"


class RequestFile(Record, frozen=True, kw_only=True):
    """requests.json."""

    runs: dict[str, RunRequest] = field(default_factory=dict)


def read_requests(matrix: MatrixDir) -> Mapping[str, RunRequest]:
    """Return run -> its request; empty without requests.

    Raises RecordError if the file is damaged, SchemaError if a newer version wrote it: a held run must not start.
    """
    return decode(matrix.requests, RequestFile).runs if matrix.requests.exists() else {}


def change_requests(matrix: MatrixDir, names: Collection[str], *, hold: bool) -> Mapping[str, RunRequest]:
    """Hold runs, or release them; return the former requests of these runs.

    A run that is held already keeps its time. Raises LaunchError if another process does not release the file.
    """
    with requests_locked(matrix):
        return write_requests(matrix, names, hold=hold)


def write_requests(matrix: MatrixDir, names: Collection[str], *, hold: bool) -> Mapping[str, RunRequest]:
    """Write requests as `change_requests` does, for a caller that holds their lock."""
    known = dict(read_requests(matrix))
    former = {name: known[name] for name in names if name in known}
    for name in names:
        if not hold:
            known.pop(name, None)
        elif name not in known:
            known[name] = RunRequest(time=time.time())
    if known or matrix.requests.exists():
        write_json(matrix.requests, as_json(RequestFile(runs=known)))
    return former


@contextmanager
def requests_locked(matrix: MatrixDir) -> Iterator[None]:
    """Keep other processes from changing the requests in the block. Raises LaunchError as `lock_requests`."""
    lock = lock_requests(matrix)
    try:
        yield
    finally:
        os.close(lock)


def lock_requests(matrix: MatrixDir) -> int:
    """Return a descriptor that keeps other processes from changing the requests until it is closed.

    Raises LaunchError if another process does not release them.
    """
    deadline = time.monotonic() + LOCK_S
    while (lock := try_lock(matrix.requests_lock)) is None:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{matrix.requests} is locked by another command", why="or its matrix is just ending", hint="try again"
            )
        time.sleep(0.01)
    return lock
