"""Finished runs on the machine of a plan: what they tell about its times and speeds."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from kmatrix.plan.cpu import cores_used
from kmatrix.records.decode import convert
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.estimate import EstimateSource, Machine, Measured, MeasuredRuns, measured_on, shape_of

ALIKE = 4.0  # models up to this factor smaller or larger tell the speed of a CPU: kernels of small ones are slower


class EarlierRuns:
    """The finished runs of a results directory on one kind of machine, read when they are needed first."""

    def __init__(self, results_dir: Path, machine: Machine) -> None:
        self._results_dir, self._machine = results_dir, machine

    @cached_property
    def runs(self) -> list[Measured]:
        return measured_on(self._results_dir, self._machine)

    @cached_property
    def _by_shape(self) -> MeasuredRuns:
        return MeasuredRuns(self.runs, EstimateSource.EARLIER)

    def whole_s(self, train: TrainConfig, planned_s: float | None = None) -> float | None:
        """Return the time (s) of a whole run by those of its shape, else planned_s."""
        known = self._by_shape.whole(train.to_json(), planned_s)
        return None if known is None else known[0]

    def speed(self, train: TrainConfig) -> tuple[float, str] | None:
        """Return the tokens/s of the newest run of this shape, and its name; None without one."""
        shape = shape_of(train.to_json())
        alike = (run for run in self.runs if run.tokens_per_second and shape_of(run.train) == shape)
        return next(((run.tokens_per_second or 0.0, run.name) for run in alike), None)

    def cpu_speeds(self, train: TrainConfig) -> list[float]:
        """Return the FLOP/s per core of runs like this one on the CPU."""
        found = []
        for run in self.runs:
            was = convert(dict(run.train), TrainConfig, run.name)
            size = was.shape.params / train.shape.params
            if run.tokens_per_second and (was.device, was.dtype) == ("cpu", train.dtype) and 1 / ALIKE <= size <= ALIKE:
                found.append(run.tokens_per_second * was.shape.flops_per_token / cores_used(was))
        return found
