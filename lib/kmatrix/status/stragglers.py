"""Rank timings: the compute time of each rank, and the time that ranks wait for the slowest one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kmatrix.own_file import open_to_read
from kmatrix.records.decode import decode_line, decode_lines
from kmatrix.records.files import last_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.states import TimingLine

Lines = Mapping[int, tuple[int, float, float]]  # step -> steps, compute_ms, step_ms
RECENT = 4096  # bytes read of each rank's file while the run is running: about 40 lines


def read_ranks(run_dir: RunDir) -> RankNumbers | None:
    """Return the numbers of all ranks; None with fewer than two ranks, or without a common step.

    Load-balance efficiency is mean / max of the ranks' compute time: POP, co-design.pop-coe.eu.
    The share of waiting is, over the lines, sum of (max over ranks - mean over ranks) x steps / sum of step time.
    """
    return _numbers({rank: _lines(decode_lines(run_dir.timings(rank), TimingLine)) for rank in _ranks(run_dir)})


def recent_ranks(run_dir: RunDir) -> RankNumbers | None:
    """Return the same numbers for the last lines only, at a cost that does not grow with the run."""
    return _numbers({rank: _lines(_recent_lines(run_dir.timings(rank))) for rank in _ranks(run_dir)})


def _ranks(run_dir: RunDir) -> list[int]:
    return sorted(int(path.name) for path in run_dir.path.glob("ranks/*") if path.name.isdecimal())


def _recent_lines(path: Path) -> Iterable[TimingLine]:
    """Return the complete lines in the last bytes of an append-only log."""
    try:
        with open_to_read(path) as file:
            lines = last_lines(file, most_bytes=RECENT)
    except OSError:
        return
    for line in lines:
        if line.endswith("\n") and (value := decode_line(line, TimingLine)) is not None:
            yield value


def _numbers(ranks: Mapping[int, Lines]) -> RankNumbers | None:
    timed = {rank: lines for rank, lines in ranks.items() if lines}
    if len(timed) < 2:
        return None
    # Ranks write independently: the last lines of some may be missing, and waiting is defined over all ranks.
    common = sorted(set.intersection(*(set(lines) for lines in timed.values())))
    return rank_numbers(timed, common) if common else None


def rank_numbers(timed: Mapping[int, Lines], common: list[int]) -> RankNumbers:
    """Return the numbers of ranks over the lines that all of them wrote."""
    spent = dict.fromkeys(timed, 0.0)
    slowest: Counter[int] = Counter()
    waited = lasted = 0.0
    count = 0
    # Lines are means over several steps, so each counts with its number of steps.
    for step in common:
        compute = {rank: lines[step][1] for rank, lines in timed.items()}
        steps = min(lines[step][0] for lines in timed.values())
        for rank, value in compute.items():
            spent[rank] += value * steps
        slow = max(compute, key=lambda rank: compute[rank])
        slowest[slow] += steps
        waited += (compute[slow] - math.fsum(compute.values()) / len(compute)) * steps
        lasted += math.fsum(lines[step][2] for lines in timed.values()) / len(timed) * steps
        count += steps
    rank, times = slowest.most_common(1)[0]
    most = max(spent.values())
    return RankNumbers(
        compute_ms=tuple((rank, value / count) for rank, value in spent.items()),
        step_ms=lasted / count,
        efficiency=math.fsum(spent.values()) / len(spent) / most if most else 1.0,
        waiting=waited / lasted if lasted else 0.0,
        slowest=rank,
        slowest_share=times / count,
        steps=count,
    )


def _lines(lines: Iterable[TimingLine]) -> dict[int, tuple[int, float, float]]:
    """Return the lines of one rank by step; the last of a step counts, as after a resume."""
    return {line.step: (line.steps, line.compute_ms, line.step_ms) for line in lines if line.steps}


HIDDEN_STRAGGLER = 0.05  # share of a run's time, above which a straggler is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNumbers:
    """The compute time of each rank, before it waits for the others."""

    compute_ms: tuple[tuple[int, float], ...]  # rank and its mean per step
    step_ms: float  # mean
    efficiency: float  # mean / max of compute_ms, 1 is ideal
    waiting: float  # share of step time that ranks wait on average for the slowest one of each step, 0 to 1
    slowest: int  # rank that was the slowest in most steps
    slowest_share: float  # share of the steps in which it was the slowest, 0 to 1
    steps: int
