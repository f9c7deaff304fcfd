"""The jobs of a matrix on a cluster as status and estimate show them: where runs are, why they wait, what is quiet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kmatrix.records.jobs.claim import is_listed
from kmatrix.records.jobs.files import SchedulerPhase
from kmatrix.records.jobs.paths import ShareDir
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.records.states import RunRequest
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.activity import Activity, Handover, MatrixActivity, ShareState
from kmatrix.status.state import RunState

SUSPENDED = "SUSPENDED"  # state of a job of Slurm that has its nodes, and whose processes an administrator has stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """The job of one run. Unknown values are None or empty."""

    activity: Activity
    id: str = ""  # with the task of an array: 12_3
    share: str = ""  # id of the share: 1.3
    hosts: tuple[str, ...] = ()  # while it runs, that of rank 0 first
    nodes: int = 1  # that the run uses
    reason: str = ""  # why it waits, is quiet or is gone, as the scheduler gives it
    before: str = ""  # how its last start ended that was killed, if the scheduler tells
    halts: str = ""  # why its processes do not go on; they still have their nodes
    starts: float | None = None  # Unix seconds, expected by the scheduler
    restarts: int = 0  # how often the scheduler has started the job again
    is_starting: bool = False  # its runner has not begun yet
    quiet: Mapping[str, float] = field(default_factory=dict)  # host -> seconds without a sign of life
    lost: tuple[str, ...] = ()  # hosts that stopped answering in the start before
    died_early: bool = False  # its job ended before its runner began: only the log of the job says why

    def waits_s(self, now: float) -> float | None:
        """Return the seconds until the expected start, None if the scheduler expects none yet. now: Unix seconds."""
        return None if self.starts is None else max(0.0, self.starts - now)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixJobs:
    """The jobs of a matrix."""

    engine: str
    scheduler: str  # its name, as users read it
    activity: Activity
    running: int  # jobs; each task of an array is one
    waiting: int
    unknown: int
    silent: str = ""  # why the scheduler does not answer, in its words; "" if it does
    unsubmitted: int = 0  # unfinished runs without a job
    is_interrupted: bool = False  # its submission was
    left_out: Mapping[str, str] = field(default_factory=dict)  # run whose job waits -> that its user has held it
    original: str = ""  # the path that its jobs were submitted for, if it is another one
    is_copy: bool = False  # the matrix that they belong to is still there
    next_seeds: Activity | None = None  # of the job that submits the next seeds; None without one
    next_job: str = ""  # its id
    next_log: str = ""  # of that job, below the matrix, if it began: why it has submitted nothing


def job_of(activity: MatrixActivity, run: RunDir, state: RunState, train: TrainConfig) -> RunJob | None:
    """Return the job of a run; None on one machine, and of a run without a job."""
    share = activity.of(run.name)
    if activity.engine is None or share.share is None:
        return None
    owner, view = share.owner, share.view
    halts = view.reason if view is not None and view.state == SUSPENDED and share.activity is Activity.RUNNING else ""
    is_live = share.activity is Activity.RUNNING and share.end is None and owner is not None
    # Of a job that its user has cancelled, it is known why it is gone; and the scheduler calls a job whose runs were
    # held or stopped a failed one, where its runner has recorded why it ended.
    has_end = share.end is not None and not share.end.requeued
    is_told = share.activity is Activity.NONE and (share.handover is Handover.CANCELLED or has_end)
    quiet = activity.quiet_hosts(run, state.number) if state.status is Status.RUNNING and not halts else {}
    return RunJob(
        activity=share.activity,
        id=_id(share),
        share=share.share.id,
        hosts=share.hosts,
        nodes=train.num_nodes or 1,
        reason="" if (is_live and not quiet) or is_told else _reason(share),
        before=view.before if view is not None else "",
        halts=halts,
        starts=view.starts if view is not None and share.activity is Activity.QUEUED else None,
        restarts=owner.restart if owner is not None else 0,
        is_starting=share.activity is Activity.RUNNING and not is_live,
        quiet=quiet,
        lost=share.end.lost if share.end is not None else (),
        died_early=_died_early(share),
    )


def _died_early(share: ShareState) -> bool:
    """Return whether a job ended by itself, without a sign of its runner."""
    view = share.view
    if share.activity is not Activity.NONE or share.owner is not None or view is None or view.state == "CANCELLED":
        return False
    return share.share is not None and view.phase is SchedulerPhase.ENDED and is_listed(share.share.log)


def jobs_of(
    activity: MatrixActivity, runs: Iterable[tuple[str, Status]], requests: Mapping[str, RunRequest]
) -> MatrixJobs | None:
    """Return the jobs of a matrix, None on one machine. runs: the name and the status of each.  requests: of runs."""
    engine = activity.engine
    if engine is None:
        return None
    counts, last = activity.counts(), activity.next_seeds
    states = [activity.of(name) for name, status in runs if status in (Status.PLANNED, Status.STOPPED)]
    without = [
        one for one in states if one.activity is Activity.NONE and one.handover in (Handover.NO, Handover.INTENT)
    ]
    return MatrixJobs(
        engine=engine.engine,
        scheduler=activity.scheduler,
        activity=activity.activity,
        running=counts[Activity.RUNNING],
        waiting=counts[Activity.QUEUED],
        unknown=counts[Activity.UNKNOWN],
        silent=activity.why_silent,
        # The job of the next seeds submits them.
        unsubmitted=len(without) if last is None or last.activity is Activity.NONE else 0,
        is_interrupted=not engine.submitted or any(one.share is not None for one in without),
        # A runner follows a request: until its job starts, only the file of the requests has it.
        left_out={
            name: asked.reason for name, asked in requests.items() if activity.of(name).activity is Activity.QUEUED
        },
        original=activity.original,
        is_copy=activity.is_copy,
        next_seeds=last.activity if last is not None else None,
        next_job=_id(last) if last is not None else "",
        next_log=_log_of(last.share) if last is not None and last.share is not None else "",
    )


def _log_of(share: ShareDir) -> str:
    """Return the log of a job below its matrix, "" if the job has not begun."""
    return str(share.log.relative_to(share.path)) if is_listed(share.log) else ""


def _reason(share: ShareState) -> str:
    """Return why a job waits, starts or has ended, as the scheduler gives it."""
    if share.activity is Activity.QUEUED and (share.view is None or not share.view.reason) and share.end is not None:
        return f"its job starts again ({share.end.kind})" if share.end.kind else "its job starts again"
    return share.view.reason if share.view is not None else ""


def _id(share: ShareState) -> str:
    if share.view is not None:
        return share.view.job
    return share.owner.job if share.owner is not None else ""
