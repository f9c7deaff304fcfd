"""The cost of a run, its only definition: the wall time of all its attempts x ranks x the price of a GPU hour.

An attempt lasts from the start of its processes to the end of the last one: the GPUs are taken for all of this time,
for set-up, evaluations, checkpoints and lost work too. The time between two attempts is not counted. The training time
in result.json (`seconds`) describes the model instead: the time that led to its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from kmatrix.status.state import Attempt


def wall_s(attempts: Sequence[Attempt], now: float | None = None) -> float | None:
    """Return the wall time (s) of all attempts, without the time between them; None if none is known.

    now: Unix seconds, for a running attempt.
    """
    known = [seconds for attempt in attempts if (seconds := attempt.duration_s(now)) is not None]
    return sum(known) if known else None


def dollars(seconds: float | None, ranks: int | None, gpu_hour_price: float | None) -> float | None:
    """Return the cost of this wall time; None without a price, or if a factor is unknown."""
    if seconds is None or ranks is None or not gpu_hour_price:
        return None
    return seconds * ranks * gpu_hour_price / 3600
