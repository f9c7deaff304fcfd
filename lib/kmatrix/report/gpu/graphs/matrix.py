"""Draw the memory and the load balance of a matrix as PNG: four graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kmatrix.report.figure import draw_jobs
from kmatrix.report.gpu.graphs.balance import load_balance
from kmatrix.report.gpu.graphs.device_memory import memory_by_device
from kmatrix.report.gpu.graphs.memory_timeline import memory_over_time
from kmatrix.report.gpu.graphs.run_memory import memory_by_run
from kmatrix.report.gpu.numbers import RunGpus

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(name: str, runs: Sequence[RunGpus], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the graphs of a matrix into `folder`; return the files, and the reason for each that was not drawn.

    Both are empty if no run has a recording. name: of the matrix.
    """
    if not any(run.gpu and run.gpu.evidence for run in runs):
        return [], []
    jobs: list[tuple[str, Callable[[], Figure | str]]] = [
        ("gpu_memory_comparison.png", partial(memory_by_run, name, runs)),
        ("per_gpu_memory_breakdown.png", partial(memory_by_device, name, runs)),
        ("gpu_load_balance_analysis.png", partial(load_balance, name, runs)),
        ("gpu_memory_timeline.png", partial(memory_over_time, name, runs)),
    ]
    return draw_jobs(jobs, folder)
