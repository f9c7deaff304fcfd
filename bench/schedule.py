"""Compute how long matrices take on nodes of 4 and 8 GPUs: packed, in exclusive groups, and one run at a time.

    python bench/schedule.py

A run of 500 steps takes 15 minutes on 4 GPUs. Efficiency is assumed, not measured: 1, 0.93, 0.85 and 0.78 on 1, 2, 4
and 8 GPUs. Optimizers differ by 8 %; each run has one minute of start-up. The bound is max(longest run, work / GPUs):
no schedule is faster. The result is arithmetic, so it is the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from kmatrix.packing import Limits, PackedJob, ends

EFFICIENCY = {1: 1.0, 2: 0.93, 4: 0.85, 8: 0.78}
GPU_SECONDS = 15 * 60 * 4 * EFFICIENCY[4]  # of work in a run
START_S = 60.0
SPREAD = 0.08  # between the fastest and the slowest optimizer
WITHIN = 1.10  # of the bound: goal for CASES


def runs(optimizers: int, widths: Sequence[int], seeds: int = 1, sizes: Sequence[float] = (1.0,)) -> list[PackedJob]:
    """Return the runs of a matrix of optimizers x GPU counts x seeds x sizes of the model."""
    found = []
    for optimizer in range(optimizers):
        slower = 1 + SPREAD * (optimizer / max(1, optimizers - 1) - 0.5)
        for width in widths:
            for size in sizes:
                seconds = START_S + GPU_SECONDS * size * slower / (width * EFFICIENCY[width])
                names = [f"{optimizer}_{width}_{size:g}_{seed}" for seed in range(seeds)]
                found += [PackedJob(name=name, width=width, seconds=seconds) for name in names]
    return found


# name -> (GPUs of the node, runs): matrices that packing finishes within WITHIN of the bound
CASES: Mapping[str, tuple[int, list[PackedJob]]] = {
    "3 optimizers on 4 GPUs": (4, runs(3, [4])),
    "6 optimizers x {1,2,4} GPUs x 3 seeds": (4, runs(6, [1, 2, 4], 3)),
    "6 optimizers x 1 GPU x 6 seeds": (4, runs(6, [1], 6)),
    "3 optimizers x {2,4} GPUs x 2 sizes": (4, runs(3, [2, 4], sizes=(1.0, 2.6))),
    "6 optimizers x {1,2} GPUs x 3 seeds": (4, runs(6, [1, 2], 3)),
    "3 optimizers on 8 GPUs": (8, runs(3, [8])),
    "6 optimizers x {1,2,4,8} GPUs x 3 seeds": (8, runs(6, [1, 2, 4, 8], 3)),
    "12 optimizers x {2,4} GPUs x 3 seeds": (8, runs(12, [2, 4], 3)),
    "6 optimizers x {1,8} GPUs x 4 seeds": (8, runs(6, [1, 8], 4)),
}
# small matrices, for which a schedule within WITHIN may not exist
OTHERS: Mapping[str, tuple[int, list[PackedJob]]] = {
    "3 optimizers x {1,2,4} GPUs": (4, runs(3, [1, 2, 4])),
    "1 optimizer x {1,2,4} GPUs x 5 seeds": (4, runs(1, [1, 2, 4], 5)),
    "5 optimizers x 1 GPU": (4, runs(5, [1])),
    "3 optimizers x {1,2,4,8} GPUs": (8, runs(3, [1, 2, 4, 8])),
}


def bound(jobs: Sequence[PackedJob], units: int) -> float:
    """Return the lower bound of any schedule in seconds."""
    work = sum(job.width * seconds_of(job) for job in jobs)
    return max(*map(seconds_of, jobs), work / units)


def makespan(jobs: Sequence[PackedJob], units: int, limits: Limits) -> float:
    """Return the seconds until the last run has ended."""
    known = ends(jobs, [], units, limits)
    assert known is not None
    return max(end for _, end in known.values())


def seconds_of(job: PackedJob) -> float:
    assert job.seconds is not None
    return job.seconds


def main() -> None:
    """Print one line per matrix: hours, and the packed time relative to the bound."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    print(
        "hours until the last run has ended: one run at a time, in exclusive groups, packed; the bound; packed over it"
    )
    print(f"{'matrix':42}{'GPUs':>5}{'runs':>6}{'one':>8}{'groups':>8}{'packed':>8}{'bound':>8}{'over':>7}")
    for name, (units, jobs) in {**CASES, **OTHERS}.items():
        one = sum(map(seconds_of, jobs))
        groups = makespan(jobs, units, Limits(exclusive=True))
        packed, least = makespan(jobs, units, Limits()), bound(jobs, units)
        hours = "".join(f"{seconds / 3600:8.2f}" for seconds in (one, groups, packed, least))
        mark = "" if name in CASES else "  (no goal)"
        print(f"{name:42}{units:5}{len(jobs):6}{hours}{100 * (packed / least - 1):6.1f}%{mark}")


if __name__ == "__main__":
    main()
