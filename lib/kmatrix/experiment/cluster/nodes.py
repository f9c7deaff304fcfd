"""The nodes of a cluster, as a plan sees them: their GPUs, cores and memory, not those of the login node."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kmatrix.config import RunConfig
from kmatrix.errors import LaunchError
from kmatrix.plan.feasibility import GpuModel, model_of
from kmatrix.records.matrix import SLURM
from kmatrix.records.runs import Provenance

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a cluster that runs of a plan may use. None: unknown."""

    name: str  # of one, for messages
    cpus: int | None = None  # of a node
    memory: float | None = None  # bytes that a job has on a node
    gpus: int = 0  # of a node
    gpu_type: str = ""  # as the scheduler names it
    why_not: str = ""  # why the scheduler could not be asked; the other fields are then as configured

    @property
    def warning(self) -> str:
        """Return a sentence if the nodes are as configured, not as the scheduler describes them; else ""."""
        known = "nodes as configured (GPUS_PER_NODE, GPU type, memory)"
        return f"{self.why_not}: planned for {known}" if self.why_not else ""

    @property
    def model(self) -> GpuModel | None:
        """The model of the GPUs, None if their type is not a known model."""
        return model_of(self.gpu_type)

    @property
    def machine(self) -> tuple[str, int | None, tuple[str, ...]]:
        """The processor, cores and GPU models that the records of runs on these nodes have."""
        return self.name, self.cpus, (self.gpu_type,) if self.gpus else ()

    def devices(self, config: RunConfig) -> list[GpuModel]:
        """Return the devices that a run is planned for; empty if the model of the GPUs is unknown."""
        if config.train.device == "cpu":
            ranks = config.train.ranks_per_node
            memory = None if self.memory is None else self.memory / ranks
            return [GpuModel(name=self.name, memory=memory, watts=None, shared_by=ranks)]
        return [self.model] if self.model else []

    def cores(self, config: RunConfig) -> int | None:
        """Return the cores of all nodes of a run, None if unknown."""
        return None if self.cpus is None else self.cpus * config.train.num_nodes

    def provenance(self, origin: Provenance) -> Provenance:
        """Return a provenance with the planned nodes instead of the login node.

        result.json has the hosts and devices that a run used.
        """
        gpus = [{"index": index, "name": self.gpu_type, "uuid": ""} for index in range(self.gpus)]
        return {**origin, "cpu": self.name, "cores": self.cpus or origin["cores"], "driver": None, "gpus": gpus}


def cluster_nodes(engine: str, symbols: Mapping[str, str]) -> Nodes:
    """Return the nodes of a cluster with these settings; as configured if the scheduler does not describe them.

    symbols: symbol -> value.
    Raises LaunchError if a number of GPUs or nodes depends on an answer that is missing.
    """
    configured = Nodes(name="a node", gpus=int(symbols.get("GPUS_PER_NODE") or 0))
    if engine == SLURM:
        from kmatrix.engines.slurm import Slurm  # only here: a plan for this machine starts faster
        from kmatrix.engines.slurm_nodes import read_settings

        settings = read_settings(symbols, os.environ)
        memory = float(settings.memory_mib * MIB) if settings.memory_mib else None
        configured = replace(configured, gpu_type=settings.gpu_type, memory=memory)
        try:
            nodes = Slurm(settings).cluster().usable
        except LaunchError as error:
            nodes, why_not = [], ": ".join(filter(None, (error.what, error.why)))
            configured = replace(configured, why_not=why_not)
        if nodes:
            # Of those with most GPUs, that with the least memory.
            one = max(nodes, key=lambda node: (node.gpus, -node.memory_mib))
            return Nodes(
                name=f"a node of {one.partition}",
                cpus=one.cpus,
                memory=min(float(one.memory_mib * MIB), memory or math.inf),
                gpus=configured.gpus or one.gpus,
                gpu_type=settings.gpu_type or type_of(one.gres),
            )
    if not configured.gpus and "0" in (symbols.get("GPT2_NUM_GPUS"), symbols.get("GPT2_NUM_NODES")):
        raise LaunchError(
            configured.why_not or "the GPUs of a node are unknown",
            why="the number of GPUs or nodes depends on them",
            hint="pass GPUS_PER_NODE=<number>",
        )
    return configured


def type_of(gres: str) -> str:
    """Return the type of the first GPUs, "" if they have none.

    >>> type_of("gpu:a100:4(S:0-1)"), type_of("gpu:8"), type_of("(null)")
    ('a100', '', '')
    """
    found = re.search(r"(?:^|,)gpu:([^:,()]*[^:,()\d][^:,()]*)", gres)
    return found[1] if found else ""
