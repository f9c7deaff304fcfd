"""Which units of one machine, GPUs or cores, a run gets. Pure arithmetic."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

MOST_SETS = 2000  # sets of units to compare exhaustively: 4 of 8 GPUs have 70
ORDER = 1024  # weight of one step of distance, more than any difference in order
Distance = Callable[[str, str], int]  # distance of two units, 0 for adjacent ones


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
