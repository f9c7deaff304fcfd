"""ranks/<r>/timings.jsonl -> how long each rank computed, and what the others lost by waiting for the slowest."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kmatrix.records import RunDir, read_jsonl
from kmatrix.report.gpu_values import RankNumbers
from kmatrix.report.reading import finite

Lines = Mapping[int, tuple[int, float, float]]  # step -> steps, compute_ms, step_ms
RECENT = 4096  # bytes of each rank's file that a look at a running run reads: some 40 lines


def read_ranks(run_dir: RunDir) -> RankNumbers | None:
    """Return what the timings of two ranks or more say; None with fewer, or without a step in common.

    Load-balance efficiency is mean / max of the ranks' compute time: POP, co-design.pop-coe.eu.
    The share of waiting is, over the lines, sum of (max over ranks - mean over ranks) x steps / sum of step time.
    """
    return _numbers({rank: _lines(read_jsonl(run_dir.timings(rank))) for rank in _ranks(run_dir)})


def recent_ranks(run_dir: RunDir) -> RankNumbers | None:
    """Return the same of the last lines alone: a look costs the same however long the run has been."""
    return _numbers({rank: _lines(_last_lines(run_dir.timings(rank))) for rank in _ranks(run_dir)})


def _ranks(run_dir: RunDir) -> list[int]:
    return sorted(int(path.name) for path in run_dir.path.glob("ranks/*") if path.name.isdecimal())


def _last_lines(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the whole lines in the last bytes of an append-only log."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, 2) - RECENT)
            file.seek(begin)
            text = file.read()
    except OSError:
        return
    lines = text.split(b"\n")[1 if begin else 0 : -1]
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _numbers(ranks: Mapping[int, Lines]) -> RankNumbers | None:
    timed = {rank: lines for rank, lines in ranks.items() if lines}
    if len(timed) < 2:
        return None
    common = sorted(set.intersection(*(set(lines) for lines in timed.values())))
    return rank_numbers(timed, common) if common else None


def rank_numbers(timed: Mapping[int, Lines], common: list[int]) -> RankNumbers:
    """Compute the numbers of ranks over the lines that all of them wrote."""
    spent = dict.fromkeys(timed, 0.0)
    slowest: Counter[int] = Counter()
    waited = lasted = 0.0
    count = 0
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


def _lines(lines: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, float, float]]:
    """Return the lines of one rank by step; the last of a step counts, as after a resume."""
    found = {}
    for line in lines:
        step, steps = line.get("step"), line.get("steps")
        compute, whole = finite(line, "compute_ms"), finite(line, "step_ms")
        if isinstance(step, int) and isinstance(steps, int) and steps > 0 and compute is not None and whole is not None:
            found[step] = (steps, compute, whole)
    return found
