"""The machine or the cluster that runs are planned for: its devices, and the expected speed of a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kmatrix.config import RunConfig
from kmatrix.errors import ConfigError
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.packing import too_few_gpus, usable_cores
from kmatrix.plan.cpu import CpuSpeed, cpu_speed
from kmatrix.plan.feasibility import KNOWN, GpuModel, detected, rates, this_machine
from kmatrix.plan.risk import START_S, Risk, budget_warning, risks, warnings
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import budget_s
from kmatrix.shapes import cpu_name
from kmatrix.text import duration

if TYPE_CHECKING:
    from kmatrix.experiment.earlier import EarlierRuns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # compared by identity: kinds are keys
class RunKind:
    """What runs of the same shape share."""

    config: RunConfig  # of the first run of this kind
    warnings: tuple[str, ...]  # legal settings that are probably mistakes
    devices: tuple[GpuModel, ...]  # that it is planned for
    lacks: str  # why this machine has too few GPUs for it, "" if it has enough
    risks: tuple[Risk, ...]  # why it is impossible on these devices; empty without the GPUs that it needs


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine or the cluster that runs are planned for."""

    gpus: tuple[Gpu, ...] = ()  # of this machine that runs may use; empty if no run needs one, and on a cluster
    nodes: Nodes | None = None  # of the cluster that executes the runs; None: this machine does
    asked: GpuModel | None = None  # the model of GPU=, whose machine is not here
    results_dir: Path  # with the earlier runs

    def lacks(self, train: TrainConfig) -> str:
        """Return why this machine has too few GPUs for a run, "" if it has enough."""
        # The scheduler refuses what it will never have, when jobs are made.
        if self.asked or self.nodes:
            return ""
        return too_few_gpus(train.device, train.num_gpus or 1, train.num_nodes or 1, len(self.gpus))

    def devices(self, config: RunConfig) -> list[GpuModel]:
        """Return the devices that a run is planned for, one of each model: all known ones without a GPU here."""
        if self.asked and config.train.device != "cpu":
            return [self.asked]
        if self.nodes:
            return self.nodes.devices(config) or list(KNOWN)
        if config.train.device == "cpu":
            return [this_machine(config.train.num_gpus)]
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
        if config.train.device != "cpu":
            return None
        found = [] if self.nodes else self.earlier.cpu_speeds(config.train)
        return cpu_speed(config.train, found, there=self.nodes.cores(config) if self.nodes else None)

    def kind(self, config: RunConfig) -> RunKind:
        """Return what a run and those like it need here, and what speaks against them."""
        train, devices = config.train, self.devices(config)
        budget, cpu = budget_s(train), None
        found = warnings(train)
        if budget is not None:  # earlier runs are read only then: that takes a while
            cpu = self.cpu_speed(config)
            measured_s = None if self.nodes or self.asked else self.earlier.whole_s(train)
            found += filter(None, [budget_warning(train, devices, cpu, measured_s)])
        lacks = self.lacks(train)
        # Impossible on each device: in the words of the largest.
        ordered = sorted(devices, key=lambda device: device.memory or 0)
        each = [] if lacks else [risks(train, device, cpu) for device in ordered]
        reasons = each[-1] if each and all(each) else ()
        return RunKind(config=config, warnings=tuple(found), devices=tuple(devices), lacks=lacks, risks=reasons)

    def budget_alone(self, name: str, config: RunConfig) -> ConfigError:
        """Return the error that only a budget of time or money limits a run: a schedule needs a number of steps.

        The hint has the steps that fit, at the speed of the newest run like it, or at the lowest expected one.
        """
        train, budget = config.train, budget_s(config.train) or 0.0
        expected = [rates(train, device, self.cpu_speed(config)) for device in self.devices(config)]
        lowest = min((rate[0] for rate in expected if rate), default=0.0)
        measured = self.earlier.speed(train)
        rate, source = (measured[0], f"measured in {measured[1]}") if measured else (lowest, "")
        steps = max(1, int((budget - START_S[train.device]) * rate / train.tokens_per_step))
        fits = f"{steps}, which fits at {rate:,.0f} tokens/s, {source or 'the lowest that is expected'}"
        return ConfigError(
            f"{name} has a budget of {duration(budget)} and no number of steps",
            why="the learning rate schedule spans the steps; MAX_TIME and MAX_COST only end a run early",
            hint=f"pass MAX_ITERS={fits if rate else '<steps>'}",
        )
