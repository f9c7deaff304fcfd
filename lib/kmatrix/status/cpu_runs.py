"""Find the training speed of this machine's CPU in earlier runs, for the plan of a new one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import RecordError, SchemaError
from kmatrix.packing import usable_cores
from kmatrix.plan.cpu import CpuSpeed, cores_used, cpu_speed
from kmatrix.records.paths import RunDir, matrix_dirs
from kmatrix.records.runs import Status, read_result, read_run_file
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import ModelShape, cpu_name

MATRICES, RUNS = 20, 100  # the newest ones that are read: a plan must not read thousands of files
ALIKE = 4.0  # runs of models up to this factor smaller or larger count: kernels of small models are slower


@dataclass(frozen=True, slots=True, kw_only=True)
class _CpuRun:
    """The measured speed of a finished run on this machine."""

    dtype: str
    params: int
    flops: float  # FLOP/s per core, without evaluations and checkpoints


class CpuRuns:
    """The finished runs of a results directory on this kind of machine, read when a plan needs them first."""

    def __init__(self, results_dir: Path) -> None:
        self.results_dir = results_dir
        self._runs: list[_CpuRun] | None = None

    def speed(self, shape: ModelShape, train: TrainConfig) -> CpuSpeed:
        """Return the expected speed of a core for a run: that of runs like it, or an assumption."""
        if self._runs is None:
            self._runs = list(_read(self.results_dir))
        alike = [
            run.flops
            for run in self._runs
            if run.dtype == train.dtype and shape.params / ALIKE <= run.params <= shape.params * ALIKE
        ]
        return cpu_speed(train, alike)


def _read(results_dir: Path) -> Iterator[_CpuRun]:
    ours = cpu_name(), usable_cores()
    newest = itertools.islice(reversed(matrix_dirs(results_dir)), MATRICES)
    runs = itertools.islice((run for matrix in newest for run in matrix.runs()), RUNS)
    return (found for run in runs if (found := _cpu_run(run, ours)) is not None)


def _cpu_run(run: RunDir, ours: tuple[str, int]) -> _CpuRun | None:
    """Return the speed of a run, None if it has not finished on a CPU of this kind or is unreadable."""
    try:
        result, about = read_result(run), read_run_file(run)
    except (RecordError, SchemaError, OSError):
        return None
    train, rate = about.train, result and result.tokens_per_second
    machine = about.provenance.get("cpu"), about.provenance.get("cores")
    if result is None or result.status != Status.FINISHED or train.device != "cpu" or machine != ours or not rate:
        return None
    try:
        shape = train.shape
    except ValueError:
        return None
    return _CpuRun(dtype=train.dtype, params=shape.params, flops=rate * shape.flops_per_token / cores_used(train))
