"""Allocated hours of a matrix on a cluster: what its jobs held, from accounting, or from the files of the jobs.

A job holds its nodes from its start to its end: for set-up, restarts and lost work, too. Accounting (sacct; the pods of
Kubernetes) knows that best, and its newest answer is kept in jobs/usage.json, because it forgets. Where it does not
answer, the runners in the jobs have noted each start in starts.jsonl of their share: seconds by the clock of one host
since the script of the job began, and of a start that was killed, until its last sign of life. Waiting in the queue
costs nothing. Jobs of a preflight and of the report are not counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kmatrix.records.decode import Amount, Count, Record, as_json, decode_lines, decode_optional, field
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.jobs.claim import fresh_owner, is_listed
from kmatrix.records.jobs.files import REPORT, JobId, Shape, ShareOwner, read_submission
from kmatrix.records.jobs.paths import JobsDir, ShareDir
from kmatrix.records.lock import start_of
from kmatrix.records.paths import MatrixDir

# Accounting may count this much less than the runner, per start and node: it ends a start when the job is requeued, up
# to KillWait before its processes have ended (21 s, measured with 22.05.8), and counts whole seconds.
SLACK_S = 60.0
HOUR = 3600.0
# Environment variable: time (s) of this process that belongs to an earlier start of its job.
BEFORE = "KMATRIX_BEFORE_S"


class ShareUsage(Record, frozen=True, kw_only=True):
    """What the jobs of a share were allocated, in all of their starts together."""

    starts: Count = 0
    node_s: Amount = 0.0  # nodes x seconds
    cpu_s: Amount | None = None  # CPUs x seconds, as the scheduler counts CPUs; None: not counted, as asked for
    gpu_s: Amount | None = None  # GPUs x seconds; None: the same


class UsageFile(Record, frozen=True, kw_only=True):
    """jobs/usage.json: the newest answer of accounting about each share."""

    shares: dict[str, ShareUsage] = field(default_factory=dict)  # share id -> its jobs


class ShareStart(Record, frozen=True, kw_only=True):
    """A line of starts.jsonl: one start of the job of a share."""

    job: JobId
    restart: Count = 0
    seconds: Amount = 0.0  # from the begin of the job's script to its end, or to the last sign of life


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUsage:
    """What the jobs of a matrix were allocated so far."""

    jobs: int  # that have started; each task of an array is one
    starts: int
    node_hours: float
    cpu_hours: float
    gpu_hours: float  # 0 on the CPU
    counted: int  # jobs whose hours accounting has counted; those of the others come from their files
    is_copy: bool  # runs may have been trained by jobs of the original, which are not counted
    is_packed: bool  # runs have shared nodes, so that hours of nodes and of runs are not comparable


def process_seconds() -> float:
    """Return the seconds since this start of a job began: since its script did, which has become this process.

    A start in the place of an earlier one, in the same process, begins where that one ended: `begin_again`.
    """
    return max(0.0, _age_s() - float(os.environ.get(BEFORE) or 0))


def begin_again() -> None:
    """Record in the environment that what this process executes next is a further start of its job."""
    os.environ[BEFORE] = str(_age_s())


def _age_s() -> float:
    """Return the seconds since this process began."""
    ticks, now = start_of(os.getpid()), time.clock_gettime(time.CLOCK_BOOTTIME)
    return 0.0 if ticks is None else now - ticks / os.sysconf("SC_CLK_TCK")


def record_start(share: ShareDir, owner: ShareOwner, seconds: float) -> None:
    """Record what a start of the job of a share took. Only the runner that has the share calls it.

    owner: the claim of that start. Raises OSError if it cannot be written.
    """
    append_jsonl(share.starts, as_json(ShareStart(job=owner.job, restart=owner.restart, seconds=seconds)))


def record_killed_start(share: ShareDir, former: ShareOwner | None, job: str, restart: int) -> None:
    """Record the start before this one, if it was killed before it could. former: its claim, None without one.

    Raises OSError if it cannot be written.
    """
    if former is None or (former.job, former.restart) == (job, restart):
        return
    if (former.job, former.restart) not in _noted(share):
        record_start(share, former, former.seconds)


def read_usage(jobs: JobsDir) -> UsageFile:
    """Return the newest answer of accounting; an empty one without any."""
    return decode_optional(jobs.usage, UsageFile) or UsageFile()


def keep_usage(jobs: JobsDir, found: Mapping[str, ShareUsage]) -> None:
    """Keep an answer of accounting. It forgets old jobs: what was known of a share is only replaced by more.

    found: share id -> what accounting says now. Raises OSError if it cannot be written.
    """
    known = dict(read_usage(jobs).shares)
    known |= {share: one for share, one in found.items() if share not in known or one.node_s >= known[share].node_s}
    if known:
        write_json(jobs.usage, as_json(UsageFile(shares=known)), durable=False)


def usage_of(matrix: MatrixDir, ages: Mapping[str, float] | None = None) -> MatrixUsage | None:
    """Return what the jobs of a matrix were allocated so far, from its files; None without any that has started.

    ages: share id -> seconds since the claim of a job that runs was rewritten: it holds its nodes since then, too.
    """
    jobs = JobsDir(matrix)
    known, total, counted, packed = read_usage(jobs).shares, list[ShareUsage](), 0, False
    for folder in jobs.submissions():
        submission = read_submission(folder)
        if submission is None or submission.kind == REPORT:
            continue
        packed = packed or any(len(entry.runs) > 1 for entry in submission.shares)
        for entry in submission.shares:
            share = folder.share(entry.task)
            age_s = (ages or {}).get(share.id, 0.0)
            used, told = own_usage(share, submission.shape.nodes, age_s), known.get(share.id)
            if told is not None and _knows_all(told, used, submission.shape.nodes):
                used, counted = told, counted + bool(told.starts)
            if used.starts:
                total.append(_completed(used, submission.shape))
    if not total:
        return None
    return MatrixUsage(
        jobs=len(total),
        starts=sum(one.starts for one in total),
        node_hours=sum(one.node_s for one in total) / HOUR,
        cpu_hours=sum(one.cpu_s or 0.0 for one in total) / HOUR,
        gpu_hours=sum(one.gpu_s or 0.0 for one in total) / HOUR,
        counted=counted,
        is_copy=jobs.former.exists(),
        is_packed=packed,
    )


def own_usage(share: ShareDir, nodes: int, age_s: float = 0.0) -> ShareUsage:
    """Return what the runners of a share have noted. nodes: of each of its jobs.  age_s: see `usage_of`."""
    seconds = _noted(share)
    owner = fresh_owner(share)
    if owner is not None:  # a start that goes on, or was killed
        start = (owner.job, owner.restart)
        seconds[start] = max(seconds.get(start, 0.0), owner.seconds + age_s)
    return ShareUsage(starts=len(seconds), node_s=sum(seconds.values()) * nodes)


def _noted(share: ShareDir) -> dict[tuple[str, int], float]:
    """Return job and restart -> seconds. A start may have two lines, if its claim was still old when the next began."""
    found: dict[tuple[str, int], float] = {}
    for line in decode_lines(share.starts, ShareStart) if is_listed(share.starts) else ():
        start = (line.job, line.restart)
        found[start] = max(found.get(start, 0.0), line.seconds)
    return found


def _knows_all(told: ShareUsage, own: ShareUsage, nodes: int) -> bool:
    """Return whether accounting knows every start that the runners have noted, to its end."""
    return told.starts >= own.starts and told.node_s + SLACK_S * max(1, nodes) * told.starts >= own.node_s


def _completed(used: ShareUsage, shape: Shape) -> ShareUsage:
    """Return the usage with the CPUs and GPUs that were asked for, where accounting does not count them."""
    return ShareUsage(
        starts=used.starts,
        node_s=used.node_s,
        cpu_s=used.node_s * shape.cpus_per_node if used.cpu_s is None else used.cpu_s,
        gpu_s=used.node_s * shape.gpus_per_node if used.gpu_s is None else used.gpu_s,
    )
