"""Cut the pending runs of a matrix into jobs: shares of equal shape and time form submissions. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kmatrix.engines.base import JobRules
from kmatrix.records.decode import replaced
from kmatrix.records.jobs.files import REPORT, Shape, ShareEntry, SubmissionFile
from kmatrix.status.state import RunPlan
from kmatrix.text import duration, plural

REPORT_S = 1800.0  # time limit of the job that writes the report
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
# Time limits are rounded up to a multiple of the step below the first limit above them. So runs of similar length are
# one array, and a scheduler that backfills still sees short jobs as short.
STEPS = ((HOUR, 10 * MINUTE), (4 * HOUR, 30 * MINUTE), (12 * HOUR, HOUR), (DAY, 2 * HOUR), (math.inf, 6 * HOUR))


@dataclass(frozen=True, slots=True)
class Share:
    """A share before it has a number: its shape and its runs."""

    shape: Shape
    runs: tuple[str, ...]


def submissions_of(plans: Sequence[RunPlan], rules: JobRules) -> list[SubmissionFile]:
    """Return the submissions for these attempts, the widest first, then the longest: they wait longest for nodes.

    Their labels, and the numbers of submissions that they wait for, are not set.
    """
    found: dict[Shape, list[Share]] = {}
    for share in _shares(plans, rules):
        found.setdefault(share.shape, []).append(share)
    most = rules.most_tasks or max(1, len(plans))
    return [
        SubmissionFile(
            shape=shape,
            shares=tuple(
                ShareEntry(task=task, runs=share.runs) for task, share in enumerate(shares[first : first + most])
            ),
        )
        for shape, shares in sorted(found.items(), key=lambda item: _width(item[0]), reverse=True)
        for first in range(0, len(shares), most)
    ]


def report_submission(
    rules: JobRules, *, seeds: bool = False, arguments: Mapping[str, str] | None = None
) -> SubmissionFile:
    """Return the submission of the report. seeds: of a matrix with adaptive seeds.  arguments: for their jobs."""
    # A longer one than the partition allows would never start.
    limit = min(REPORT_S, rules.most_seconds or REPORT_S)
    return SubmissionFile(
        kind=REPORT,
        shape=Shape(seconds=limit if rules.has_times else None),
        shares=(ShareEntry(task=0),),
        arguments=dict(arguments or {}),
        seeds=seeds,
    )


def _width(shape: Shape) -> tuple[int, int, float]:
    return shape.nodes * shape.gpus_per_node, shape.nodes * shape.cpus_per_node, shape.seconds or math.inf


def _shares(plans: Sequence[RunPlan], rules: JobRules) -> Iterator[Share]:
    groups: dict[bool, list[RunPlan]] = {}
    for plan in plans:
        if rules.pack and plan.nodes == 1 and _size(plan) < _room(plan, rules):
            groups.setdefault(plan.cuda, []).append(plan)
        else:
            yield Share(shape_of(plan, rules), (plan.name,))
    for group in groups.values():
        for node in _nodes(group, _room(group[0], rules)):
            yield _packed(node, rules)


def _size(plan: RunPlan) -> int:
    """Return the GPUs of a run, or its cores on the CPU."""
    return plan.ranks if plan.cuda else plan.ranks * plan.cpu_threads


def _room(plan: RunPlan, rules: JobRules) -> int:
    """Return the GPUs of a node for a run with GPUs, else its cores; 0 if unknown."""
    return rules.gpus_per_node if plan.cuda else rules.cpus_per_node or 0


def _nodes(plans: Sequence[RunPlan], room: int) -> list[list[RunPlan]]:
    """Return the runs of each node, so that all of a node train at the same time.

    room: GPUs or cores of a node, more than each run takes.
    """
    nodes: list[list[RunPlan]] = []
    left: dict[int, deque[list[RunPlan]]] = {}  # free GPUs or cores -> nodes
    # Runs of similar length together, so that the last one of a job does not keep its node alone for long.
    for plan in sorted(plans, key=lambda plan: (-(plan.expected_s or math.inf), -_size(plan))):
        size = _size(plan)
        free = min((free for free, open_nodes in left.items() if free >= size and open_nodes), default=0)
        node = left[free].popleft() if free else []
        if not node:
            nodes.append(node)
        node.append(plan)
        left.setdefault((free or room) - size, deque()).append(node)
    return nodes


def _packed(plans: Sequence[RunPlan], rules: JobRules) -> Share:
    """Return a share with a whole node. The times of its runs overlap, so the longest decides."""
    shapes = [shape_of(plan, rules) for plan in plans]
    times = [shape.seconds for shape in shapes]
    whole = replaced(
        shapes[0],
        gpus_per_node=rules.gpus_per_node if plans[0].cuda else 0,
        ranks_per_node=rules.gpus_per_node if plans[0].cuda else 1,  # equal for all, so that they are one array
        cpus_per_node=rules.cpus_per_node or sum(shape.cpus_per_node for shape in shapes),
        seconds=None if None in times else max(time for time in times if time is not None),
    )
    return Share(whole, tuple(plan.name for plan in plans))


def shape_of(plan: RunPlan, rules: JobRules) -> Shape:
    """Return what a run needs."""
    gpus = plan.ranks_per_node if plan.cuda else 0
    threads = plan.ranks_per_node * plan.cpu_threads
    cpus = gpus * rules.cpus_per_gpu if gpus and rules.cpus_per_gpu else threads
    if rules.whole_nodes and rules.cpus_per_node:
        cpus = max(threads if not gpus else 1, rules.cpus_per_node)
    return Shape(
        nodes=plan.nodes,
        gpus_per_node=gpus,
        ranks_per_node=plan.ranks_per_node,
        cpus_per_node=max(1, cpus),
        memory_mib=rules.memory_mib,
        seconds=_time_limit(plan, rules),
    )


def _time_limit(plan: RunPlan, rules: JobRules) -> float | None:
    """Return the time limit (s) of the job of a run: configured, from the estimate, or the longest that there is."""
    if not rules.has_times:
        return None
    if rules.seconds is not None:
        return rules.seconds
    longest = rules.most_seconds
    if plan.expected_s is None:
        return rules.default_seconds if longest is None else longest
    limit = rounded_up(plan.expected_s * rules.time_factor + rules.around_s)
    return limit if longest is None else min(limit, longest)


def rounded_up(seconds: float) -> float:
    """Return a time limit (s) that many runs share: at most 10 minutes, or half of the time, above a time.

    >>> rounded_up(1), rounded_up(3601), rounded_up(90_000)
    (600.0, 5400.0, 108000.0)
    """
    step = next(step for limit, step in STEPS if seconds <= limit)
    return math.ceil(seconds / step) * step


def time_notes(plans: Sequence[RunPlan], rules: JobRules) -> list[str]:
    """Return notes about time limits that do not follow from an estimate, or are shorter than it."""
    if not rules.has_times or not plans:
        return []
    notes = []
    unknown = sum(plan.expected_s is None for plan in plans)
    if unknown and rules.seconds is None:
        limit, why = "no limit", "to start earlier"
        if rules.most_seconds is not None:
            limit = f"the limit of the partition, {duration(rules.most_seconds)}"
        elif rules.default_seconds is not None:
            limit = f"the default limit of the partition, {duration(rules.default_seconds)}"
            why = "for another one"
        notes.append(
            f"{plural(unknown, 'run')} with {limit}, because no run like it was measured: pass SLURM_TIME=<time> {why}"
        )
    limit_s = rules.seconds if rules.seconds is not None else rules.most_seconds
    long = [plan.expected_s for plan in plans if plan.expected_s is not None and limit_s and plan.expected_s > limit_s]
    if long:
        notes.append(
            f"{plural(len(long), 'run')} of about {duration(max(long))} in jobs of {duration(limit_s)}: "
            "a run saves at the time limit, and its job starts again"
        )
    return notes


def parallel_notes(submissions: Sequence[SubmissionFile], parallel_jobs: int) -> list[str]:
    """Return a note if PARALLEL_JOBS does not limit all jobs together. parallel_jobs: 0 for no limit."""
    # A scheduler limits the tasks of one array; a limit over several needs a license of the administrator.
    if not parallel_jobs or len(submissions) < 2:
        return []
    return [
        f"PARALLEL_JOBS={parallel_jobs} limits each of {len(submissions)} submissions by itself: "
        f"up to {sum(min(parallel_jobs, len(one.shares)) for one in submissions):,} jobs may run at the same time"
    ]
