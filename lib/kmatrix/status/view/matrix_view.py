"""The values of `make status` and `make estimate`: a matrix, its runs, and their devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kmatrix.records.runs import Status
from kmatrix.records.tracking import SyncStatus
from kmatrix.status.activity import Activity
from kmatrix.status.cost import SpentBudget
from kmatrix.status.estimate import EstimateSource
from kmatrix.status.run_jobs import MatrixJobs, RunJob

TO_COME = (Status.RUNNING, Status.PLANNED, Status.STOPPED)  # of runs that have not ended for good


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The maximum memory use of one device."""

    device: str  # index of a GPU on its host, or number of a rank in the run
    most: float  # MiB
    total: float | None  # MiB
    host: str = ""  # of a run over several nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """One GPU of the machine, by the newest recording of a run on it. Unknown values are None."""

    index: int | None
    name: str
    uuid: str
    run: str = ""  # the run that uses it, "" for none
    utilization: float | None = None  # percent
    memory_used: float | None = None  # MiB
    memory_total: float | None = None  # MiB
    power: float | None = None  # watts
    temperature: float | None = None  # degrees C
    at: float | None = None  # Unix seconds of these values
    out: str = ""  # why no run may use it, "" if runs may
    host: str = ""  # on a cluster; "" on one machine


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The current values of one run. Unknown values are None."""

    name: str
    status: Status
    kind: str | None = None
    reason: str = ""
    attempt: int = 0
    micro_batch: int | None = None
    step: int | None = None
    max_iters: int | None = None
    loss: float | None = None  # nats/token, training
    val_loss: float | None = None  # nats/token
    tokens_per_second: float | None = None
    mfu: float | None = None  # 0 to 1
    ranks: int | None = None
    device: str = ""
    memory_mib: float | None = None  # MiB, maximum of its fullest device
    memory: tuple[DeviceMemory, ...] = ()
    gpus: tuple[str, ...] = ()  # UUIDs, of its last attempt
    hosts: tuple[str, ...] = ()  # of the nodes of its last attempt, that of rank 0 first
    elapsed_s: float | None = None  # of all attempts
    worked_s: float | None = None  # of the attempts that led to its weights, without lost work
    wall_s: float | None = None  # of all attempts in this matrix, from launch to end; 0 of a reused run
    gpu_hours: float | None = None  # held in this time; None on the CPU
    attempt_s: float | None = None  # of the running attempt
    left_s: float | None = None  # of its own time, without waiting
    left_from: EstimateSource | None = None
    schedule_share: float | None = None  # 0 to 1, at which its budget will end it; None: not before its last step
    starts_s: float | None = None  # seconds from now
    ends_s: float | None = None  # seconds from now
    epochs: float | None = None
    all_epochs: float | None = None
    dollars: float | None = None  # spent
    all_dollars: float | None = None  # in total
    ended_by: str | None = None  # why a finished run ended early
    alerts: tuple[str, ...] = ()  # active ones
    reused_from: str = ""
    missing: bool = False  # it has no run.json: `continue` makes it again
    reserve: bool = False  # of adaptive seeds: it is not needed so far
    trackers: tuple[SyncStatus, ...] = ()
    job: RunJob | None = None  # on a cluster; None on one machine, and without a job
    ends: tuple[str, ...] = ()  # how the attempts before the last one ended: kinds, or statuses without a kind
    last_end: str = ""  # the reason of the newest one of them

    @property
    def to_come(self) -> bool:
        """True if it has not ended for good, and the matrix needs it."""
        return self.status in TO_COME and not self.reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherSeeds:
    """The runs in reserve of a matrix with adaptive seeds."""

    runs: int
    likely_runs: int | None  # of them, if open comparisons need as many seeds as expected; None: not known yet
    likely_s: float | None  # seconds until the end of the matrix with those; None: unknown
    most_s: float | None  # with all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView:
    """The current values of a matrix."""

    name: str
    path: Path
    status: Status
    running: bool  # a runner holds it; on a cluster: a job runs, or may run
    started: float | None  # Unix seconds
    ended: float | None  # Unix seconds
    left_s: float | None  # until its end, if it runs or is continued now; None if unknown for a run
    dollars: float | None  # spent on all runs with a price; None without one
    all_dollars: float | None  # at the end; None also if the time left of a run with a price is unknown
    runs: tuple[RunView, ...]
    ends: float | None = None  # Unix seconds of its end, if it runs or is continued now
    gpus: tuple[GpuView, ...] = ()  # of the machine, in the driver's order
    jobs: MatrixJobs | None = None  # on a cluster; None on one machine
    looks: tuple[str, ...] = ()  # with adaptive seeds: what was decided at the last look at the verdict
    seeds: FurtherSeeds | None = None  # with adaptive seeds, while there are runs in reserve
    spent: SpentBudget | None = None  # the limit of its configuration that its runs have reached

    @property
    def is_active(self) -> bool:
        """True if it runs, or will go on by itself: jobs wait for their start."""
        return self.running or (self.jobs is not None and self.jobs.activity is not Activity.NONE)

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(run.status for run in self.runs)
        return {status.value: found[status] for status in Status if found[status]}
