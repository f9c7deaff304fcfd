"""Which runs start now on one box, on which of its units, and when each will have ended: pure arithmetic.

A unit is a GPU, or a core where runs train on the CPU. A run takes all of its units at once and keeps them to its end.
The longest expected run goes first. Where it does not fit yet, others go ahead of it if that does not delay it
(EASY backfilling: Lifka, "The ANL/IBM SP scheduling system", 1995, with the longest first instead of the oldest).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run to come, or one that runs. width: units.  seconds: expected until its end, None where that is not known."""

    name: str
    width: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """jobs: at a time, 0 for as many as fit; one at a time go in the order in which they stand.

    exclusive: runs start together that fill the box as far as any do, and the next when all of them have ended.
    """

    jobs: int = 0
    exclusive: bool = False

    @classmethod
    def of(cls, symbols: Mapping[str, Any]) -> Limits:
        """Read them from a matrix's symbols; one that was made before there were any has one run at a time."""
        return cls(jobs=int(symbols.get("PARALLEL_JOBS", 1)), exclusive=symbols.get("EXCLUSIVE") == "y")

    def on(self, *, gpus: bool) -> Limits:
        """Return the limits for runs on GPUs or on the CPU, where as many as fit are one."""
        return self if gpus or self.jobs else Limits(jobs=1)


MOST_SETS = 2000  # of units that are compared one by one: 8 GPUs have 70 at most
ORDER = 1024  # a step of distance counts more than any difference in order
Distance = Callable[[str, str], int]  # how far two units are from each other, 0 for neighbours


@dataclass(frozen=True, slots=True)
class _Promise:
    """When the head of the queue can start at the latest, and what it leaves to others from then on."""

    seconds: float
    units: int
    jobs: float


def startable(queue: Sequence[Job], running: Sequence[Job], units: int, limits: Limits) -> list[str]:
    """Return the names of the jobs that start now, in the order in which they are given their units.

    units: of the whole box; a job that is wider than it would never start, and raises ValueError.
    """
    if wide := [job.name for job in queue if job.width > units]:
        raise ValueError(f"{wide[0]} is wider than the box of {units} units")
    order = list(queue) if limits.jobs == 1 else sorted(queue, key=_first)
    if limits.exclusive:
        return _together(order, units, limits.jobs) if order and not running else []
    free = units - sum(job.width for job in running)
    seats = (limits.jobs or math.inf) - len(running)
    begun: list[Job] = []
    while order and seats >= 1 and order[0].width <= free:
        job = order.pop(0)
        begun.append(job)
        free, seats = free - job.width, seats - 1
    if order and seats >= 1:
        promise = _promise(order[0], [*running, *begun], free, seats)
        begun += _backfill(order[1:], free, seats, promise)
    return [job.name for job in begun]


def ends(
    queue: Sequence[Job], running: Sequence[Job], units: int, limits: Limits
) -> Mapping[str, tuple[float, float]] | None:
    """Return name -> seconds from now until its start and its end; None where a job's time is not known."""
    if any(job.seconds is None for job in (*queue, *running)):
        return None
    now, waiting = 0.0, list(queue)
    active = {job.name: (job, float(job.seconds or 0.0)) for job in running}
    known = {name: (0.0, end) for name, (_, end) in active.items()}
    while waiting or active:
        left = [Job(name=job.name, width=job.width, seconds=end - now) for job, end in active.values()]
        names = set(startable(waiting, left, units, limits))
        for job in (job for job in waiting if job.name in names):
            known[job.name] = (now, now + float(job.seconds or 0.0))
            active[job.name] = (job, known[job.name][1])
        waiting = [job for job in waiting if job.name not in names]
        now = min(end for _, end in active.values())
        active = {name: (job, end) for name, (job, end) in active.items() if end > now}
    return known


def place(width: int, free: Sequence[str], box: Sequence[str], distance: Distance | None = None) -> tuple[str, ...]:
    """Return which free units a job gets: those nearest to each other, where it breaks up the least.

    box: all units in the driver's order.  distance: of two units; None: by their order, as pairs of bridged GPUs and
    the halves of a board mostly stand. Of equally near units those are taken whose free neighbours are the farthest:
    what is left over of a pair goes before a whole pair.
    """
    order = {unit: at for at, unit in enumerate(box)}
    there = sorted(free, key=order.__getitem__)

    def far(one: str, other: str) -> int:
        by_order = (order[one] ^ order[other]).bit_length()  # the least aligned block of 2, 4, 8 ... that holds both
        return by_order if distance is None else distance(one, other) * ORDER + by_order

    def cost(chosen: tuple[str, ...]) -> tuple[int, int]:
        within = sum(far(one, other) for one, other in itertools.combinations(chosen, 2))
        return within, -sum(far(one, other) for other in there if other not in chosen for one in chosen)

    sets: list[tuple[str, ...]]
    if math.comb(len(there), width) <= MOST_SETS:
        sets = list(itertools.combinations(there, width))
    else:  # around each unit its nearest ones
        sets = [tuple(sorted(there, key=functools.partial(far, unit))[:width]) for unit in there]
    chosen = min(sets, key=cost)
    return tuple(sorted(chosen, key=order.__getitem__))


def _first(job: Job) -> tuple[float, int]:
    """The order of the queue: what is expected to take longest, the unknown before it; then the widest."""
    return (-math.inf if job.seconds is None else -job.seconds, -job.width)


def _promise(head: Job, running: Sequence[Job], free: int, seats: float) -> _Promise:
    for job in sorted(running, key=_ends):
        free, seats = free + job.width, seats + 1
        if head.width <= free:
            return _Promise(_ends(job), free - head.width, seats - 1)
    return _Promise(math.inf, 0, 0)  # the box is empty by then, and the head would have started


def _ends(job: Job) -> float:
    return math.inf if job.seconds is None else max(0.0, job.seconds)


def _backfill(queue: Sequence[Job], free: int, seats: float, promise: _Promise) -> list[Job]:
    """Return the jobs that end before the head starts, or that it does not miss."""
    begun = []
    units, jobs = promise.units, promise.jobs
    for job in queue:
        if job.width > free or seats < 1:
            continue
        over = job.seconds is not None and job.seconds <= promise.seconds < math.inf
        if not over and (job.width > units or jobs < 1):
            continue
        begun.append(job)
        free, seats = free - job.width, seats - 1
        if not over:
            units, jobs = units - job.width, jobs - 1
    return begun


def _together(order: Sequence[Job], units: int, most: int) -> list[str]:
    """Return the first job and those that fill the box with it as far as any do; of equal sets the first in order."""
    head, *others = order
    reached: dict[tuple[int, int], tuple[str, ...]] = {(head.width, 1): (head.name,)}
    for job in others:
        for (width, count), names in list(reached.items()):
            more = (width + job.width, count + 1)
            if more[0] <= units and (not most or more[1] <= most) and more not in reached:
                reached[more] = (*names, job.name)
    return list(reached[max(reached, key=lambda key: key[0])])
