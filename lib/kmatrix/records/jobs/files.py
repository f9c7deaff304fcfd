"""The records below `jobs/` of a matrix, engine.json, and the files of a run's nodes."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kmatrix.errors import KmatrixError, RecordError
from kmatrix.own_file import list_names_first
from kmatrix.records.decode import (
    SCHEMA,
    Amount,
    Count,
    Int,
    Record,
    RunName,
    UnixTime,
    as_json,
    decode,
    decode_lines,
    decode_optional,
    field,
    indented,
    replaced,
)
from kmatrix.records.files import append_jsonl, write_bytes, write_json
from kmatrix.records.jobs.paths import JobsDir, NodeDir, ShareDir, SubmissionDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.redaction.redactor import redact_json

LOCAL, SLURM, KUBERNETES = "local", "slurm", "kubernetes"  # values of ENGINE
TITLES = {SLURM: "Slurm", KUBERNETES: "Kubernetes"}  # as users read them
INTENT, SUBMITTED, CANCELLING, CANCELLED = "intent", "submitted", "cancelling", "cancelled"  # events of jobs.jsonl
REPORT = "report"  # kind of the submission that writes the report
# Both are written into scripts and command lines, and may come from a folder of somebody else.
EngineId = Annotated[str, Meta(pattern=r"\A[0-9a-z]{1,32}\Z")]
JobId = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z][0-9A-Za-z_.-]{0,62}\Z")]

StepId = Annotated[str, Meta(pattern=r"\A[0-9a-z+]{0,20}\Z")]  # of a step of a Slurm job


class EngineFile(Record, frozen=True, kw_only=True):
    """engine.json: which cluster runs a matrix, and how its jobs are recognized."""

    engine: str  # SLURM or KUBERNETES
    id: EngineId  # random; part of the comment or label of each job
    path: str  # of the matrix when this was written: at another path, the jobs belong to the original
    settings: dict[str, str] = field(default_factory=dict)  # symbol -> value of the scheduler's settings in use
    submitted: bool = False  # every run of the first submission was handed over; False: interrupted


class Shape(Record, frozen=True, kw_only=True):
    """What each share of a submission needs."""

    nodes: Count = 1
    gpus_per_node: Count = 0  # 0: on the CPU
    ranks_per_node: Count = 1
    cpus_per_node: Count = 1
    memory_mib: Count | None = None  # per node; None: the scheduler's default
    seconds: Amount | None = None  # time limit; None: the scheduler's default


class ShareEntry(Record, frozen=True, kw_only=True):
    """A share in submission.json."""

    task: Count
    runs: tuple[RunName, ...] = ()


class SubmissionFile(Record, frozen=True, kw_only=True):
    """submission.json: shares of one shape that were handed to the scheduler at once."""

    kind: str = "runs"  # or "report": the job that writes the report after all others
    label: str = ""  # comment of the Slurm job, or label of the Kubernetes Job: finds it after a kill of the submitter
    shape: Shape = field(default_factory=Shape)
    shares: tuple[ShareEntry, ...] = ()
    after: tuple[Count, ...] = ()  # submissions that must have ended before this one starts
    # NAME=value of the command that submitted it, for the first start of the runner: RESUME, RETRY_FAILED, MICRO_BATCH,
    # TRACKER, SIMULATE, BUDGET_HOURS, BUDGET_DOLLARS.
    arguments: dict[str, str] = field(default_factory=dict)
    seeds: bool = False  # of a report: its job first submits the seeds that the verdict wants next, if there are any


class JobLine(Record, frozen=True, kw_only=True):
    """A line of jobs.jsonl."""

    # INTENT, SUBMITTED; CANCELLING, before the user ends it; CANCELLED: there is no such job, and none will be.
    event: str
    submission: Count
    time: UnixTime
    # Id of the job, or of the array; of Kubernetes: its name. CANCELLED without one: given up, it was not submitted.
    job: JobId | None = None
    why: str | None = None


class ShareOwner(Record, frozen=True, kw_only=True):
    """owner.json: the claim of the runner that has a share now."""

    job: JobId  # as in JobLine, with the task of an array: 12_3
    restart: Count = 0  # how often the scheduler has started this job again
    host: str = ""
    pid: Count | None = None
    counter: Count = 0  # grows every few seconds while the runner lives
    nodes: tuple[str, ...] = ()  # hosts of the job, the runner's first
    steps: dict[str, Count] = field(default_factory=dict)  # run -> step of its last checkpoint when this start began
    idle: Count = 0  # starts of the job in a row that saved no later step
    lost_starts: Count = 0  # starts in a row that ended at once, because a lost host was in the job again
    spent: dict[str, Amount] = field(default_factory=dict)  # run -> time (s) of all its attempts, for the budget


class ShareEnd(Record, frozen=True, kw_only=True):
    """end.json of a share: how the last start of its job ended."""

    job: str
    restart: Count = 0
    status: Status | None = None  # of its runs together
    kind: str | None = None  # time limit, preempted, node lost, or None
    reason: str | None = None
    counts: dict[str, Count] = field(default_factory=dict)  # status -> runs
    requeued: bool = False  # the job starts again
    lost: tuple[str, ...] = ()  # hosts that stopped answering


class RankExit(Record, frozen=True, kw_only=True):
    """The exit of a rank, as torchrun on its node reports it."""

    rank: Count
    exit_code: Int  # negative after a signal
    time: UnixTime = 0.0  # when torchrun noticed, by the clock of the node: not comparable with another node's


class NodeFile(Record, frozen=True, kw_only=True):
    """nodes/<k>/node.json: the agent of a run on one node."""

    node: Count
    host: str = ""
    attempt: Count = 1
    pid: Count | None = None
    pid_started: Count | None = None  # clock ticks after the boot
    boot_id: str | None = None
    counter: Count = 0  # grows every few seconds while the agent lives
    ranks: tuple[Count, ...] = ()
    gpus: str = ""  # CUDA_VISIBLE_DEVICES as the scheduler set it
    step: StepId = ""  # of the Slurm job, which kills it; "" elsewhere
    started: UnixTime | None = None  # of this attempt, by the clock of the node
    log_start: Count = 0  # bytes: size of the node's log before this attempt


class NodeEnd(Record, frozen=True, kw_only=True):
    """nodes/<k>/end.json: how the processes of a run on one node ended."""

    node: Count
    host: str = ""
    attempt: Count = 1
    exit_code: Int | None = None  # of torchrun, 128 + n after signal n
    signals: tuple[str, ...] = ()  # that the agent was sent
    log_start: Count = 0  # bytes: size of the node's log before this attempt
    exits: tuple[RankExit, ...] = ()  # of the ranks that torchrun reports, the root cause last
    tail: tuple[str, ...] = ()  # last lines of the node's log; other nodes may see the log itself only later


class SubmitterFile(Record, frozen=True, kw_only=True):
    """.submitter.json: the process that submits jobs of a matrix now, where a lock of the kernel would not do."""

    host: str = ""
    pid: Count | None = None
    token: str = ""  # random: this process alone has it
    counter: Count = 0  # grows every few seconds while it lives


class SchedulerPhase(StrEnum):
    """The phase of a job as the scheduler tells it."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"  # the scheduler has forgotten it: it ended some time ago


HAVE_ENDED = (SchedulerPhase.ENDED, SchedulerPhase.UNKNOWN)  # nothing follows, as far as the scheduler knows


LIVE = frozenset({SchedulerPhase.PENDING, SchedulerPhase.RUNNING})


class JobView(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The scheduler's view of the job of one share."""

    job: str  # with the task of an array: 12_3
    phase: SchedulerPhase
    state: str = ""  # in the scheduler's own words: PENDING, CrashLoopBackOff
    reason: str = ""  # why it waits or ended, as a sentence
    before: str = ""  # how its last start ended that was killed, if the scheduler tells
    nodes: tuple[str, ...] = ()
    starts: UnixTime | None = None  # expected start
    label: str = ""  # comment or label that the scheduler has for the job; "" in poll.json, where it was checked


class PollFile(Record, frozen=True, kw_only=True):
    """poll.json: the newest answer of the scheduler."""

    jobs: dict[str, JobView] = field(default_factory=dict)  # share id -> its job
    why_not: str = ""  # why the scheduler did not answer the last question; `jobs` is then an older answer


def read_engine(matrix: MatrixDir) -> EngineFile | None:
    """Return engine.json, None for a matrix of this machine. Raises RecordError if it is damaged, SchemaError if newer.

    Required once it exists: without it, the runs of a cluster would be started here, too. Also raises RecordError for a
    link in place of `jobs/`, which commands that only read write to.
    """
    path = JobsDir(matrix).engine_json
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # storage that does not answer: `decode` says why
        pass
    folder = JobsDir(matrix).path
    if os.path.islink(folder):  # noqa: PTH114  (False if the storage does not answer)
        raise RecordError(
            f"{folder} is a link to {folder.readlink()}",
            why="the answers of the scheduler would be written outside the matrix",
            hint="replace the link by the folder itself, then run the command again",
        )
    list_names_first()  # other hosts write to this matrix
    return decode(path, EngineFile)


def refuse_lost_engine(matrix: MatrixDir) -> None:
    """Raise RecordError if a matrix without engine.json has jobs: it would be trained here, and by them."""
    jobs = JobsDir(matrix)
    if jobs.submissions():
        raise RecordError(
            f"{jobs.engine_json} is missing",
            why="a cluster runs this matrix: it has submissions",
            hint=f"restore it from a copy; or, if no job is left, remove {jobs.path}",
        )


def is_at_home(matrix: MatrixDir, engine: EngineFile) -> bool:
    """Return whether a matrix is the folder that its engine.json was written for, so that the jobs are its own."""
    here, home = matrix.path.resolve(), engine.path
    try:  # hosts may mount the storage at different places
        return home == str(here) or (os.path.isabs(home) and here.samefile(home))  # noqa: PTH117  (a text)
    except (OSError, ValueError):  # ValueError: no path at all
        return False


def is_copy(engine: EngineFile) -> bool:
    """Return whether a matrix that is not at home is a copy: the one that engine.json was written for is there."""
    try:
        found = read_engine(MatrixDir(Path(engine.path)))
    except KmatrixError:  # unreadable from here, but there
        return True
    except ValueError:  # no path at all
        return False
    return found is not None and found.id == engine.id


def other_submitter(matrix: MatrixDir) -> str:
    """Return the user whose jobs run a matrix, "" for this user."""
    try:
        number = os.stat(JobsDir(matrix).engine_json).st_uid  # noqa: PTH116  (of the file, also through a link)
    except OSError:
        return ""
    if number == os.geteuid():
        return ""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def write_engine(matrix: MatrixDir, engine: EngineFile) -> None:
    """Write engine.json."""
    write_json(JobsDir(matrix).engine_json, as_json(engine))


def read_submission(folder: SubmissionDir) -> SubmissionFile | None:
    """Return submission.json, None if it is missing or damaged."""
    return decode_optional(folder.submission_json, SubmissionFile)


def job_label(engine_id: str, submission: int) -> str:
    """Return the comment or label of the jobs of a submission. Valid as a name of Kubernetes, too."""
    return f"kmatrix-{engine_id}-{submission}"


def share_job(job: str, submission: SubmissionFile, task: int) -> str:
    """Return the id of the job of one share: 12_3 for a task of an array, 12 for the only share of a submission."""
    return f"{job}_{task}" if len(submission.shares) > 1 else job


def newest_shares(matrix: MatrixDir) -> Mapping[str, ShareDir]:
    """Return run -> the share of the newest submission that lists it."""
    found: dict[str, ShareDir] = {}
    for folder in JobsDir(matrix).submissions():
        submission = read_submission(folder)
        for entry in submission.shares if submission else ():
            found.update(dict.fromkeys(entry.runs, folder.share(entry.task)))
    return found


def append_job_line(jobs: JobsDir, line: JobLine) -> None:
    """Append a line to jobs.jsonl. Only the submitter does, which holds its lock."""
    append_jsonl(jobs.log, as_json(line))


def job_lines(jobs: JobsDir) -> Iterator[JobLine]:
    """Yield the lines of jobs.jsonl."""
    yield from decode_lines(jobs.log, JobLine)


def submitted_jobs(jobs: JobsDir) -> Mapping[int, str]:
    """Return submission -> job id, of those that were handed over and noted."""
    return {line.submission: line.job for line in job_lines(jobs) if line.event == SUBMITTED and line.job}


def given_up(jobs: JobsDir) -> frozenset[int]:
    """Return the submissions that were not submitted: a job of one that appears later leaves its runs alone."""
    last = {line.submission: line for line in job_lines(jobs)}
    return frozenset(number for number, line in last.items() if line.event == CANCELLED and line.job is None)


def is_cancelled(jobs: JobsDir, submission: int, job: str) -> bool:
    """Return whether the user ends a job, or its submission was given up before it was known to have one.

    job: with the task of an array, as in JobView.
    """
    events = [line for line in job_lines(jobs) if line.submission == submission]
    if not events or events[-1].event not in (CANCELLING, CANCELLED):
        return False
    return events[-1].job in (None, job, job.rpartition("_")[0])


def read_submitter(jobs: JobsDir) -> SubmitterFile | None:
    """Return the process that submits jobs now, or was killed while it did; None without one."""
    return decode_optional(jobs.submitter, SubmitterFile)


def read_poll(jobs: JobsDir) -> PollFile | None:
    """Return the newest answer of the scheduler, however old it is; None if it was never asked."""
    return decode_optional(jobs.poll, PollFile)


def write_poll(jobs: JobsDir, poll: PollFile) -> None:
    """Write poll.json. Raises OSError if it cannot be written."""
    # Thousands of pending jobs have the same few reasons: each is searched for keys once.
    texts = {poll.why_not, *(text for view in poll.jobs.values() for text in (view.reason, view.before))}
    reasons = {text: str(redact_json(text)) for text in texts}
    jobs_known = {
        share: replaced(view, reason=reasons[view.reason], before=reasons[view.before])
        for share, view in poll.jobs.items()
    }
    known = replaced(poll, jobs=jobs_known, why_not=reasons[poll.why_not])
    write_bytes(jobs.poll, indented({"schema": SCHEMA, **as_json(known)}), durable=False)


def read_share_owner(share: ShareDir) -> ShareOwner | None:
    """Return the claim of a share, None without one. It may be old: `records.jobs.claim`."""
    return decode_optional(share.owner, ShareOwner)


def read_share_end(share: ShareDir) -> ShareEnd | None:
    """Return how the last start of a share's job ended, None if it has not ended, or was killed."""
    return decode_optional(share.end, ShareEnd)


def is_end_of(end: ShareEnd | None, owner: ShareOwner) -> bool:
    """Return whether the start of the job that has claimed a share has ended. end: perhaps of another start."""
    return end is not None and (end.job, end.restart) == (owner.job, owner.restart)


def read_node(node: NodeDir) -> NodeFile | None:
    """Return node.json of a node, None if its agent has not started."""
    return decode_optional(node.node_json, NodeFile)


def host_of(node: NodeDir) -> str:
    """Return the host of a node of a run; "node 1" if its agent has not started."""
    agent = read_node(node)
    return agent.host if agent and agent.host else f"node {node.node}"


def read_node_end(node: NodeDir) -> NodeEnd | None:
    """Return end.json of a node, None if its agent runs or was killed."""
    return decode_optional(node.end, NodeEnd)
