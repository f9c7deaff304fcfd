"""The machine or the cluster that runs are planned for: its devices, and the expected speed of a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kmatrix.config import RunConfig
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.packing import too_few_gpus, usable_cores
from kmatrix.plan.cpu import CpuSpeed, cpu_speed
from kmatrix.plan.feasibility import KNOWN, GpuModel, detected, this_machine
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import cpu_name

if TYPE_CHECKING:
    from kmatrix.experiment.earlier import EarlierRuns


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
    def earlier(self) -> EarlierRuns:
        """The finished runs on this kind of machine."""
        from kmatrix.experiment.earlier import EarlierRuns  # only a plan with times needs to read runs

        here = cpu_name(), usable_cores(), tuple(sorted({gpu.name for gpu in self.gpus}))
        return EarlierRuns(self.results_dir, self.nodes.machine if self.nodes else here)

    def cpu_speed(self, config: RunConfig) -> CpuSpeed | None:
        """Return the expected speed of a run on the CPU: that of runs like it, or an assumption; None on GPUs."""
        if config.device != "cpu":
            return None
        found = [] if self.nodes else self.earlier.cpu_speeds(config)
        return cpu_speed(config.train, found, there=self.nodes.cores(config) if self.nodes else None)
