"""Rank timings: the compute time of each rank, and the time that ranks wait for the slowest one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from kmatrix.records.decode import Meta, Record, decode_line, decode_lines
from kmatrix.records.events import TimingLine
from kmatrix.records.files import last_lines
from kmatrix.records.paths import RunDir

HIDDEN_STRAGGLER = 0.05  # share of a run's time, above which a straggler is reported


class Ranks(Record, frozen=True, kw_only=True):
    """The compute time of each rank, before it waits for the others."""

    compute_ms: Annotated[dict[str, float], Meta(description="rank -> mean per step, ms")]
    step_ms: Annotated[float, Meta(description="mean time of a step, ms")]
    steps: Annotated[int, Meta(description="steps that all ranks have timed")]
    load_balance_efficiency: Annotated[float, Meta(description="mean / maximum of compute_ms, 1 is ideal")]
    straggler_time_share: Annotated[float, Meta(description="time spent waiting for the slowest rank, 0 to 1")]
    slowest_rank: Annotated[int, Meta(description="rank that was the slowest in most steps")]
    slowest_share: Annotated[float, Meta(description="share of the steps in which it was, 0 to 1")]
    hidden: Annotated[bool, Meta(description="ranks wait, although the balance of memory is excellent")] = False


def read_ranks(run_dir: RunDir, *, most_bytes: int | None = None) -> Ranks | None:
    """Return the numbers of all ranks; None with fewer than two ranks, or without a common step.

    Load-balance efficiency is mean / max of the ranks' compute time: POP, co-design.pop-coe.eu.
    The share of waiting is, over the lines, sum of (max over ranks - mean over ranks) x steps / sum of step time.
    most_bytes: read the last lines alone, at a cost that does not grow with the run.
    """
    ranks = sorted(int(path.name) for path in run_dir.path.glob("ranks/*") if path.name.isdecimal())
    # The last line of a step counts, as after a resume.
    lines = {rank: {one.step: one for one in _lines(run_dir.timings(rank), most_bytes) if one.steps} for rank in ranks}
    timed = {rank: known for rank, known in lines.items() if known}
    # Ranks write independently: the last lines of some may be missing, and waiting is defined over all ranks.
    common = sorted(set.intersection(*map(set, timed.values()))) if len(timed) > 1 else []
    return _numbers(timed, common) if common else None


def _lines(path: Path, most_bytes: int | None) -> list[TimingLine]:
    if most_bytes is None:
        return decode_lines(path, TimingLine)
    try:
        with path.open("rb") as file:
            texts = last_lines(file, most_bytes=most_bytes)
    except OSError:
        return []
    found = (decode_line(text, TimingLine) for text in texts if text.endswith("\n"))
    return [line for line in found if line is not None]


def _numbers(timed: Mapping[int, Mapping[int, TimingLine]], common: Sequence[int]) -> Ranks:
    """Return the numbers of ranks over the steps of which all of them wrote a line."""
    spent = dict.fromkeys(timed, 0.0)
    slowest: Counter[int] = Counter()
    waited = lasted = 0.0
    # Lines are means over several steps, so each counts with its number of steps.
    for step in common:
        compute = {rank: lines[step].compute_ms for rank, lines in timed.items()}
        steps = min(lines[step].steps for lines in timed.values())
        for rank, value in compute.items():
            spent[rank] += value * steps
        slow = max(compute, key=lambda rank: compute[rank])
        slowest[slow] += steps
        waited += (compute[slow] - math.fsum(compute.values()) / len(compute)) * steps
        lasted += math.fsum(lines[step].step_ms for lines in timed.values()) / len(timed) * steps
    (rank, times), count, most = slowest.most_common(1)[0], slowest.total(), max(spent.values())
    return Ranks(
        compute_ms={str(rank): value / count for rank, value in spent.items()},
        step_ms=lasted / count,
        load_balance_efficiency=math.fsum(spent.values()) / len(spent) / most if most else 1.0,
        straggler_time_share=waited / lasted if lasted else 0.0,
        slowest_rank=rank,
        slowest_share=times / count,
        steps=count,
    )
