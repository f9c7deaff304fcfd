"""The nodes of a cluster, as a plan sees them: their GPUs, cores and memory, not those of the login node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kmatrix.config import RunConfig
from kmatrix.engines.base import Capacity, NodeKind
from kmatrix.engines.schedulers import find_scheduler, settings_of
from kmatrix.errors import LaunchError
from kmatrix.plan.feasibility import GpuModel, of_type
from kmatrix.records.jobs.files import SLURM
from kmatrix.records.jobs.forms import memory_mib
from kmatrix.records.runs import Provenance
from kmatrix.text import plural

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
        if not self.why_not:
            return ""
        known = f"{plural(self.gpus, 'GPU')} per node" if self.gpus else "nodes without GPUs"
        return f"{self.why_not}: planned for {known}, as configured (GPUS_PER_NODE, GPU type, memory)"

    @property
    def model(self) -> GpuModel | None:
        """The model of the GPUs, None if their type is not a known model."""
        return of_type(self.gpu_type)

    @property
    def machine(self) -> tuple[str, int | None, tuple[str, ...]]:
        """The processor, cores and GPU models that the records of runs on these nodes have."""
        return self.name, self.cpus, (self.gpu_type,) if self.gpus else ()

    def devices(self, config: RunConfig) -> list[GpuModel]:
        """Return the devices that a run is planned for; empty if the model of the GPUs is unknown."""
        if config.device == "cpu":
            ranks = config.train.ranks_per_node
            memory = None if self.memory is None else self.memory / ranks
            return [GpuModel(name=self.name, memory=memory, watts=None, shared_by=ranks)]
        return [self.model] if self.model else []

    def cores(self, config: RunConfig) -> int | None:
        """Return the cores of all nodes of a run, None if unknown."""
        return None if self.cpus is None else self.cpus * config.train.num_nodes

    def provenance(self, origin: Provenance) -> Provenance:
        """Return a provenance with the planned nodes instead of the login node.

        run_used.json has the hosts and devices that a run used.
        """
        gpus = [{"index": index, "name": self.gpu_type, "uuid": ""} for index in range(self.gpus)]
        changed: Provenance = {**origin, "cpu": self.name, "driver": None, "gpus": gpus}  # type: ignore[typeddict-item]
        if self.cpus is not None:
            changed["cores"] = self.cpus
        return changed


def cluster_nodes(engine: str, symbols: Mapping[str, str]) -> Nodes:
    """Return the nodes of a cluster with these settings; as configured if the scheduler cannot be asked from here.

    symbols: symbol -> value.
    Raises LaunchError without an answer if a number of GPUs or nodes depends on it.
    """
    why_not = ""
    try:
        capacity = find_scheduler(engine, settings_of(engine, symbols)).capacity()
    except LaunchError as error:
        counts = {"GPT2_NUM_GPUS", "GPT2_NUM_NODES"}
        if any(symbols.get(name) == "0" for name in counts) and not int(symbols.get("GPUS_PER_NODE") or 0):
            raise LaunchError(
                error.what,
                why="; ".join(filter(None, (error.why, "the number of GPUs or nodes depends on it"))),
                hint="pass GPUS_PER_NODE=<number> to plan here; runs need a login node of the cluster",
            ) from None
        capacity, why_not = Capacity(), ": ".join(filter(None, (error.what, error.why)))
    partition = capacity.partition(symbols.get("SLURM_PARTITION", "") if engine == SLURM else "")
    gpus = int(symbols.get("GPUS_PER_NODE") or 0)
    asked = memory_mib(symbols.get("SLURM_MEMORY") or "") if engine == SLURM else None
    if partition is None or not partition.kinds:  # nodes are not shown to users here; `check` refuses an unknown name
        return Nodes(
            name="a node",
            gpus=gpus,
            gpu_type=symbols.get("SLURM_GPU_TYPE", "") if engine == SLURM else "",
            memory=_bytes(asked),
            why_not=why_not,
        )
    # Runs are planned for the nodes with most GPUs; of these, each resource is that of the smallest.
    kinds = [kind for kind in partition.kinds if kind.gpus == partition.gpus_per_node]
    limits = [size for size in (_least(kinds, "memory_mib"), partition.memory_mib, asked) if size]
    return Nodes(
        name=f"a node of {partition.name}" if engine == SLURM else "a node",
        cpus=_least(kinds, "cpus"),
        memory=_bytes(min(limits, default=None)),
        gpus=gpus or partition.gpus_per_node,
        gpu_type=kinds[0].gpu_type,
    )


def _bytes(mib: int | None) -> float | None:
    return float(mib * MIB) if mib else None


def _least(kinds: Sequence[NodeKind], field: str) -> int | None:
    return min((value for kind in kinds if (value := getattr(kind, field)) is not None), default=None)
