"""The machine or the cluster that runs are planned for: its devices, and the speed of earlier runs there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kmatrix.config import RunConfig, cpu_threads
from kmatrix.engines.ports import Shape
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.packing import usable_cores
from kmatrix.plan.cpu import CpuSpeed, cores_used, cpu_speed
from kmatrix.plan.feasibility import KNOWN, GpuModel, detected, expected_seconds, this_machine
from kmatrix.records.decode import convert
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import budget_s
from kmatrix.runner.requests import too_few_gpus
from kmatrix.shapes import cpu_name
from kmatrix.status.estimate import Measured, MeasuredRuns, measured_on, shape_of

ALIKE = 4.0  # models up to this factor smaller or larger tell the speed of a CPU: kernels of small ones are slower


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine or the cluster that runs are planned for."""

    gpus: tuple[Gpu, ...] = ()  # of this machine that runs may use; empty if no run needs one, and on a cluster
    nodes: Nodes | None = None  # of the cluster that executes the runs; None: this machine does
    asked: GpuModel | None = None  # the model of GPU=, whose machine is not here
    results_dir: Path  # with the earlier runs

    def lacks(self, train: TrainConfig) -> str:
        """Return why this machine has too few GPUs for a run, "" if it has enough."""
        if self.asked or self.nodes:  # the scheduler refuses what it will never have, when jobs are made
            return ""
        return too_few_gpus(train.device, train.num_gpus or 1, train.num_nodes or 1, len(self.gpus))

    def devices(self, config: RunConfig) -> list[GpuModel]:
        """Return the devices that a run is planned for, one of each model: all known ones without a GPU here."""
        if self.asked and config.device != "cpu":
            return [self.asked]
        if self.nodes:
            return self.nodes.devices(config) or list(KNOWN)
        if config.device == "cpu":
            return [this_machine(config.ranks)]
        here = {gpu.name: detected(gpu.name, gpu.memory_total) for gpu in self.gpus}
        return list(here.values()) or list(KNOWN)

    @cached_property
    def measured(self) -> list[Measured]:
        """The earlier runs on this kind of machine; reading them takes a while."""
        here = cpu_name(), usable_cores(), tuple(sorted({gpu.name for gpu in self.gpus}))
        return measured_on(self.results_dir, self.nodes.machine if self.nodes else here)

    @cached_property
    def _by_shape(self) -> MeasuredRuns:
        return MeasuredRuns((), self.measured)

    def whole_s(self, train: TrainConfig, planned_s: float | None = None) -> float | None:
        """Return the time (s) of a whole run by those of its shape, else planned_s."""
        known = self._by_shape.whole(train.to_json(), planned_s)
        return None if known is None else known[0]

    def speed(self, train: TrainConfig) -> tuple[float, str] | None:
        """Return the tokens/s of the newest run of this shape, and its name; None without one."""
        shape = shape_of(train.to_json())
        alike = (run for run in self.measured if run.tokens_per_second and shape_of(run.train) == shape)
        return next(((run.tokens_per_second or 0.0, run.name) for run in alike), None)

    def cpu_speed(self, config: RunConfig) -> CpuSpeed | None:
        """Return the expected speed of a run on the CPU: that of runs like it, or an assumption; None on GPUs."""
        if config.device != "cpu":
            return None
        train, params, found = config.train, config.shape.params, []
        for run in () if self.nodes else self.measured:
            if run.tokens_per_second and (run.train.get("device"), run.train.get("dtype")) == ("cpu", train.dtype):
                was = convert(dict(run.train), TrainConfig, run.name)
                if params / ALIKE <= was.shape.params <= params * ALIKE:
                    found.append(run.tokens_per_second * was.shape.flops_per_token / cores_used(was))
        return cpu_speed(train, found, there=self.nodes.cores(config) if self.nodes else None)

    def job(self, config: RunConfig) -> Shape:
        """Return what a run needs per node of the cluster, with its expected time (s)."""
        nodes, train = self.nodes, config.train
        assert nodes is not None  # the caller has checked
        each = train.ranks_per_node
        threads = cpu_threads(train.cpu_threads, device=config.device, cores=nodes.cpus or each, ranks=each)
        planned = None
        if config.device == "cuda" and nodes.model is not None:
            planned = expected_seconds(shape=config.shape, train=train, tokens=config.tokens, device=nodes.model)
        found = self.whole_s(replace(train, cpu_threads=threads, max_iters=config.steps), planned)
        times = [time for time in (found, budget_s(train)) if time is not None]
        return Shape(
            nodes=train.num_nodes,
            gpus=each if config.device == "cuda" else 0,
            cpus=each * (threads or 1),
            seconds=int(min(times)) if times else None,
        )
