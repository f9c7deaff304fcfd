"""Schedule runs on one machine: which runs start now, on which units, and when each run ends. Pure arithmetic.

A unit is a GPU, or a core for runs on the CPU. A run takes all of its units when it starts and keeps them until it
ends. The run with the longest expected time starts first. While it does not fit, other runs start if they do not
delay it (EASY backfilling: Lifka, "The ANL/IBM SP scheduling system", 1995, with the longest first instead of the
oldest).
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LIMITS = ("PARALLEL_JOBS", "EXCLUSIVE")  # symbols of `Limits`


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedJob:
    """A run that is pending or running."""

    name: str
    width: int  # units
    seconds: float | None = None  # s, expected time until its end; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of runs at the same time."""

    jobs: int = 0  # runs at the same time; 0: as many as fit; 1: in the order of the matrix
    exclusive: bool = False  # start the set of runs that uses most units, then wait until all of them have ended

    @classmethod
    def of(cls, symbols: Mapping[str, str]) -> Limits:
        """Return the limits of a matrix, from its symbols."""
        return cls(jobs=int(symbols.get(LIMITS[0], "1")), exclusive=symbols.get(LIMITS[1]) == "y")

    def on(self, *, gpus: bool) -> Limits:
        """Return the limits for runs on GPUs or on the CPU, where 0 jobs means 1."""
        return self if gpus or self.jobs else Limits(jobs=1)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fewest_nodes(ranks: int, per_node: int) -> int:
    """Return the smallest number of nodes that divides the ranks and has at most `per_node` of them on each."""
    return next(nodes for nodes in range(1, ranks + 1) if ranks % nodes == 0 and ranks // nodes <= per_node)


MOST_SETS = 2000  # sets of units to compare exhaustively: 4 of 8 GPUs have 70
ORDER = 1024  # weight of one step of distance, more than any difference in order
Distance = Callable[[str, str], int]  # distance of two units, 0 for adjacent ones


@dataclass(frozen=True, slots=True)
class _Promise:
    """The latest start of the first job in the queue, and the units and jobs that are free from then on."""

    seconds: float  # s from now
    units: int
    jobs: float


def startable(queue: Sequence[PackedJob], running: Sequence[PackedJob], units: int, limits: Limits) -> list[str]:
    """Return the names of the jobs to start now, in the order in which they get their units.

    units: of the whole machine. Raises ValueError for a job that needs more, because it would never start.
    """
    if wide := [job.name for job in queue if job.width > units]:
        raise ValueError(f"{wide[0]} needs more than the {units} units of this machine")
    # One at a time: nothing is gained by another order than the matrix's.
    order = list(queue) if limits.jobs == 1 else sorted(queue, key=_first)
    if limits.exclusive:
        return _together(order, units, limits.jobs) if order and not running else []
    free = units - sum(job.width for job in running)
    seats = (limits.jobs or math.inf) - len(running)
    begun: list[PackedJob] = []
    # Start jobs in order, as long as the first one fits.
    while order and seats >= 1 and order[0].width <= free:
        job = order.pop(0)
        begun.append(job)
        free, seats = free - job.width, seats - 1
    if order and seats >= 1:
        # The first job has to wait: others may start if they do not delay it.
        promise = _promise(order[0], [*running, *begun], free, seats)
        begun += _backfill(order[1:], free, seats, promise)
    return [job.name for job in begun]


def ends(
    queue: Sequence[PackedJob], running: Sequence[PackedJob], units: int, limits: Limits
) -> Mapping[str, tuple[float, float]] | None:
    """Return the start and end of each job, s from now; None if the time of any job is unknown."""
    if any(job.seconds is None for job in (*queue, *running)):
        return None
    if wide := [job.name for job in queue if job.width > units]:
        raise ValueError(f"{wide[0]} needs more than the {units} units of this machine")
    waiting = _Waiting(list(queue) if limits.jobs == 1 else sorted(queue, key=_first))
    active = [(float(job.seconds or 0.0), number, job) for number, job in enumerate(running)]
    heapq.heapify(active)
    known = {job.name: (0.0, end) for end, _, job in active}
    now, free, number = 0.0, units - sum(job.width for job in running), len(running)
    # Simulate: start what fits now, then go to the next end.
    while waiting.left or active:
        for job in _started(waiting, active, now, free=free, units=units, limits=limits):
            end = now + float(job.seconds or 0.0)
            known[job.name] = (now, end)
            heapq.heappush(active, (end, number, job))
            free, number = free - job.width, number + 1
        now = active[0][0]
        while active and active[0][0] <= now:
            free += heapq.heappop(active)[2].width
    return known


def _started(
    waiting: _Waiting,
    active: Sequence[tuple[float, int, PackedJob]],
    now: float,
    *,
    free: int,
    units: int,
    limits: Limits,
) -> list[PackedJob]:
    """Remove the jobs from the queue that start now, by the rules of `startable`, and return them.

    active: end (s from the start of the simulation), number and job of each running job.
    """
    if limits.exclusive:
        return waiting.take_group(units, limits.jobs) if waiting.left and not active else []
    seats = (limits.jobs or math.inf) - len(active)
    begun = []
    while waiting.left and seats >= 1 and waiting.head.width <= free:
        begun.append(waiting.take_head())
        free, seats = free - begun[-1].width, seats - 1
    if waiting.left and seats >= 1 and free >= waiting.narrowest:
        left = [PackedJob(name=job.name, width=job.width, seconds=end - now) for end, _, job in sorted(active)]
        promise = _promise(waiting.head, [*left, *begun], free, seats)
        begun += waiting.take_backfill(free, seats, promise)
    return begun


class _Waiting:
    """The queue of a simulation, by width: a step costs a search per width, not a pass over all jobs."""

    def __init__(self, order: Sequence[PackedJob]) -> None:
        """Create a queue. order: unless jobs run one at a time, the longest first."""
        self._order = order
        self._begin = 0  # position of the first job that still waits
        self._taken = [False] * len(order)
        self._by_width: dict[int, list[int]] = {}  # width -> positions of its waiting jobs, ascending
        for at, job in enumerate(order):
            self._by_width.setdefault(job.width, []).append(at)
        self.left = len(order)

    @property
    def head(self) -> PackedJob:
        while self._taken[self._begin]:
            self._begin += 1
        return self._order[self._begin]

    @property
    def narrowest(self) -> int:
        return min(width for width, positions in self._by_width.items() if positions)

    def take_head(self) -> PackedJob:
        """Remove and return the first job."""
        head = self.head
        return self._take(self._by_width[head.width], 0)

    def take_backfill(self, free: int, seats: float, promise: _Promise) -> list[PackedJob]:
        """Remove and return the jobs after the head that may start before it: see `_backfill`."""
        begun = []
        first = self._begin  # of the head, which stays
        units, jobs = promise.units, promise.jobs
        while seats >= 1:
            found = None
            for width, positions in self._by_width.items():
                at = bisect.bisect_right(positions, first)
                if width > free or at == len(positions):
                    continue
                if width > units or jobs < 1:  # only a job that is over before the head starts
                    at = bisect.bisect_left(positions, -promise.seconds, lo=at, key=self._key)
                    if at == len(positions) or promise.seconds == math.inf:
                        continue
                if found is None or positions[at] < found[0][found[1]]:
                    found = (positions, at)
            if found is None:
                break
            first = found[0][found[1]]  # the rules only get stricter: a job that was passed over stays
            job = self._take(*found)
            begun.append(job)
            free, seats = free - job.width, seats - 1
            over = job.seconds is not None and job.seconds <= promise.seconds < math.inf
            if not over:
                units, jobs = units - job.width, jobs - 1
        return begun

    def take_group(self, units: int, most: int) -> list[PackedJob]:
        """Remove and return the group that starts together: see `_together`."""
        # Of equal widths, the first jobs are preferred, and only so many fit.
        near = sorted(at for width, positions in self._by_width.items() for at in positions[: units // width])
        names = set(_together([self._order[at] for at in near], units, most))
        found = [at for at in near if self._order[at].name in names]
        lists = [self._by_width[self._order[at].width] for at in found]
        return [self._take(positions, positions.index(at)) for at, positions in zip(found, lists, strict=True)]

    def _key(self, at: int) -> float:
        return -(self._order[at].seconds or 0.0)

    def _take(self, positions: list[int], at: int) -> PackedJob:
        position = positions.pop(at)
        self._taken[position] = True
        self.left -= 1
        return self._order[position]


def place(width: int, free: Sequence[str], units: Sequence[str], distance: Distance | None = None) -> tuple[str, ...]:
    """Return the free units for a job: the ones closest to each other, with the least fragmentation.

    units: all units of the machine, in the driver's order.  distance: of two units; None: by their order, because
    bridged GPUs mostly have adjacent numbers. Among equally close sets, the one farthest from the other free units
    wins: a single unit of a broken pair is used before a complete pair.
    """
    order = {unit: at for at, unit in enumerate(units)}
    there = sorted(free, key=order.__getitem__)

    def far(one: str, other: str) -> int:
        by_order = (order[one] ^ order[other]).bit_length()  # the smallest aligned block of 2, 4, 8 ... units with both
        return by_order if distance is None else distance(one, other) * ORDER + by_order

    def cost(chosen: tuple[str, ...]) -> tuple[int, int]:
        within = sum(far(one, other) for one, other in itertools.combinations(chosen, 2))
        return within, -sum(far(one, other) for other in there if other not in chosen for one in chosen)

    sets: list[tuple[str, ...]]
    if math.comb(len(there), width) <= MOST_SETS:
        sets = list(itertools.combinations(there, width))
    else:  # too many: compare only each unit with its nearest ones
        sets = [tuple(sorted(there, key=functools.partial(far, unit))[:width]) for unit in there]
    chosen = min(sets, key=cost)
    return tuple(sorted(chosen, key=order.__getitem__))


def _first(job: PackedJob) -> tuple[float, int]:
    """Return the sort key of the queue: unknown time first, then the longest, then the widest."""
    return (-math.inf if job.seconds is None else -job.seconds, -job.width)


def _promise(head: PackedJob, running: Sequence[PackedJob], free: int, seats: float) -> _Promise:
    for job in sorted(running, key=_ends):
        free, seats = free + job.width, seats + 1
        if head.width <= free:
            return _Promise(_ends(job), free - head.width, seats - 1)
    return _Promise(math.inf, 0, 0)  # unreachable: on an empty machine the first job would have started


def _ends(job: PackedJob) -> float:
    return math.inf if job.seconds is None else max(0.0, job.seconds)


def _backfill(queue: Sequence[PackedJob], free: int, seats: float, promise: _Promise) -> list[PackedJob]:
    """Return the jobs that end before the first job can start, or that use units it does not need."""
    begun = []
    units, jobs = promise.units, promise.jobs
    for job in queue:
        if job.width > free or seats < 1:
            continue
        # Over before the first job starts, or small enough to run next to it.
        over = job.seconds is not None and job.seconds <= promise.seconds < math.inf
        if not over and (job.width > units or jobs < 1):
            continue
        begun.append(job)
        free, seats = free - job.width, seats - 1
        if not over:
            units, jobs = units - job.width, jobs - 1
    return begun


def _together(order: Sequence[PackedJob], units: int, most: int) -> list[str]:
    """Return the first job and the others that use most units together with it; of equal sets the first in order."""
    head, *others = order
    # Subset sums: for each number of units and jobs, the first set of jobs that reaches it.
    reached: dict[tuple[int, int], tuple[str, ...]] = {(head.width, 1): (head.name,)}
    for job in others:
        for (width, count), names in list(reached.items()):
            more = (width + job.width, count + 1)
            if more[0] <= units and (not most or more[1] <= most) and more not in reached:
                reached[more] = (*names, job.name)
    return list(reached[max(reached, key=lambda key: key[0])])
