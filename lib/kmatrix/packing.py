"""Pack runs onto one machine: when each run ends. Pure arithmetic.

A unit is a GPU, or a core for runs on the CPU. A run takes all of its units when it starts, and keeps them until it
ends. The widest run starts first, of equally wide ones the longest; one that does not fit keeps nobody waiting.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kmatrix.text import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedJob:
    """A run that waits or runs."""

    name: str
    width: int  # units
    seconds: float | None = None  # s, expected time until its end; None if unknown


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fewest_nodes(ranks: int, per_node: int) -> int:
    """Return the smallest number of nodes that divides the ranks and has at most `per_node` of them on each."""
    return next(nodes for nodes in range(1, ranks + 1) if ranks % nodes == 0 and ranks // nodes <= per_node)


def too_few_gpus(device: str, ranks: int, nodes: int, there: int) -> str:
    """Return why a run cannot run on machines with this many GPUs each, "" if it can. ranks: on all nodes."""
    each = ranks // nodes
    if device != "cuda" or each <= there:
        return ""
    return f"needs {plural(each, 'GPU')}{' on each node' if nodes > 1 else ''}, found {there}"


def ends(
    queue: Sequence[PackedJob], running: Sequence[PackedJob], units: int, most: int = 0
) -> Mapping[str, tuple[float, float]] | None:
    """Return the start and end of each job, s from now; None if a time is unknown, or a job needs more units.

    units: of the whole machine.  most: jobs at a time; 0: as many as fit; 1: in the order of the queue.
    """
    if any(job.seconds is None for job in (*queue, *running)) or any(job.width > units for job in queue):
        return None
    order = list(queue) if most == 1 else sorted(queue, key=lambda job: (-job.width, -(job.seconds or 0.0)))
    waiting = {
        width: deque(jobs) for width, jobs in itertools.groupby(order, key=lambda job: 0 if most == 1 else job.width)
    }
    active = [(float(job.seconds or 0.0), number, job) for number, job in enumerate(running)]
    heapq.heapify(active)
    known = {job.name: (0.0, end) for end, _, job in active}
    now, free = 0.0, units - sum(job.width for job in running)
    # Start what fits now, then go to the next end.
    while active or any(waiting.values()):
        for jobs in waiting.values():
            while jobs and jobs[0].width <= free and len(active) < (most or math.inf):
                job = jobs.popleft()
                known[job.name] = (now, now + float(job.seconds or 0.0))
                heapq.heappush(active, (known[job.name][1], len(known), job))
                free -= job.width
        now = active[0][0]
        while active and active[0][0] <= now:
            free += heapq.heappop(active)[2].width
    return known
