"""What a Slurm cluster has, and what the jobs of a matrix ask of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kmatrix.engines.jobs import START_S, time_limit
from kmatrix.engines.ports import Shape
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.forms import job_seconds, memory_mib, split_flags
from kmatrix.records.paths import below_root
from kmatrix.text import duration, plural

TIME_FACTOR = 1.5  # of an estimate: one of earlier runs is a few percent off, one from the FLOPs up to a factor of two
LAST_S = 1800  # time limit of the job after all others
SINFO = "%P|%l|%s|%D|%c|%m|%G"  # format of the lines of `read_nodes`
NAME_FLAGS = ("-J", "--j")  # getopt_long(3) takes --job for --job-name


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """The symbols of Kconfig.slurm, and two of all schedulers."""

    partition: str = ""  # one or several, separated by commas; "": the default one
    account: str = ""
    gpu_type: str = ""  # "": any
    memory_mib: int | None = None  # per node; None: the cluster's default, 0: all
    cpus_per_gpu: int = 0  # 0: the GPU's share of its node
    pack_nodes: bool = False
    seconds: int | None = None  # time limit of a job; None: from the estimate
    notice_s: int = 120
    setup: Path | None = None  # file that a job sources first
    flags: tuple[tuple[str, ...], ...] = ()  # further flags of sbatch, each with its value
    parallel: int = 0  # tasks of an array at a time; 0: all
    gpus_per_node: int = 0  # as configured; 0: ask the cluster


def read_settings(symbols: Mapping[str, str], environment: Mapping[str, str]) -> SlurmSettings:
    """Return the settings of symbols, whose forms Kconfig has checked. Missing ones have defaults.

    environment: SBATCH_PARTITION and SBATCH_ACCOUNT are defaults of a site.  Raises ConfigError for a flag of the name.
    """

    def get(name: str, default: str = "") -> str:
        return symbols.get(name) or default

    flags = split_flags(get("SLURM_EXTRA_FLAGS"))
    if named := next((flag[0] for flag in flags if flag[0].startswith(NAME_FLAGS)), None):
        what, why = f"SLURM_EXTRA_FLAGS has {named}", "jobs are found again by their name"
        raise ConfigError(what, why=why, hint=f"remove {named}")
    return SlurmSettings(
        partition=get("SLURM_PARTITION", environment.get("SBATCH_PARTITION", "")),
        account=get("SLURM_ACCOUNT", environment.get("SBATCH_ACCOUNT", "")),
        gpu_type=get("SLURM_GPU_TYPE"),
        memory_mib=memory_mib(get("SLURM_MEMORY")),
        cpus_per_gpu=int(get("SLURM_CPUS_PER_GPU", "0")),
        pack_nodes=get("PACK_NODES") == "y",
        seconds=job_seconds(get("SLURM_TIME")),
        notice_s=int(get("SLURM_NOTICE", "120")),
        setup=below_root(get("SLURM_SETUP")) if get("SLURM_SETUP") else None,
        flags=tuple(map(tuple, flags)),
        parallel=int(get("PARALLEL_JOBS", "0")),
        gpus_per_node=int(get("GPUS_PER_NODE", "0")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of a partition that are alike."""

    partition: str
    is_default: bool
    seconds: int | None  # longest time limit of a job; None: none
    most: int | None  # nodes of a job; None: all
    count: int
    cpus: int
    memory_mib: int
    gpus: int  # of the wanted type
    gres: str  # as Slurm names them: gpu:a100:4(S:0-1)


def read_nodes(lines: Iterable[str], gpu_type: str = "") -> tuple[Nodes, ...]:
    """Return the nodes of sinfo with the format SINFO. Other lines are messages of plugins."""
    return tuple(
        Nodes(
            partition=words[0].rstrip("*"),
            is_default=words[0].endswith("*"),
            seconds=job_seconds(words[1]),
            most=int(most) if (most := words[2].rpartition("-")[2]).isdecimal() else None,  # 1-infinite
            count=int(words[3]),
            cpus=int(words[4]),
            memory_mib=int(words[5]),
            gpus=gpus_of(words[6], gpu_type),
            gres=words[6],
        )
        for line in lines
        if len(words := line.split("|")) == 7
    )


def gpus_of(gres: str, gpu_type: str = "") -> int:
    """Return the GPUs of a node: those of a type, or of all.

    >>> gpus_of("gpu:a100:4(S:0-1),gpu:v100:2,nvme:1"), gpus_of("gpu:8"), gpus_of("(null)"), gpus_of("gpu:a:4", "b")
    (6, 8, 0, 0)
    """
    found = re.findall(r"(?:^|,)gpu(?::([^:,]*[^:,\d][^:,]*))?(?::(\d+))?(?=,|$)", re.sub(r"\([^)]*\)", "", gres))
    return sum(int(number or 1) for kind, number in found if gpu_type in ("", kind))


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes of all partitions, and the settings of a matrix."""

    settings: SlurmSettings
    nodes: tuple[Nodes, ...]  # empty if users may not see them

    @property
    def partitions(self) -> dict[str, list[Nodes]]:
        """The nodes of each partition of SLURM_PARTITION, else of the default one; empty for one that is unknown."""
        asked = self.settings.partition.split(",") if self.settings.partition else []
        asked = asked or [one.partition for one in self.nodes if one.is_default]
        return {name: [one for one in self.nodes if one.partition == name] for name in asked}

    @property
    def usable(self) -> list[Nodes]:
        """The nodes that jobs may use."""
        return [one for nodes in self.partitions.values() for one in nodes]

    @property
    def limit_s(self) -> int | None:
        """The longest time limit (s) of a job, None if there is none."""
        limits = [one.seconds for one in self.usable]
        return None if None in limits else max((limit for limit in limits if limit is not None), default=None)

    def fit(self, planned: Shape) -> Shape:
        """Return what the job of a run asks for. See the port."""
        settings, limit, gpus = self.settings, self.limit_s, planned.gpus
        # The share where CPUs are fewest, so that a job may start on each of the nodes.
        share = settings.cpus_per_gpu or min((one.cpus // one.gpus for one in self.usable if one.gpus), default=0)
        if settings.seconds is not None:
            seconds: int | None = -(-settings.seconds // 60) * 60
        elif planned.seconds is not None:
            seconds = time_limit(planned.seconds, TIME_FACTOR, START_S + settings.notice_s)
            seconds = seconds if limit is None else min(seconds, limit)
        else:
            seconds = limit
        cpus = max(1, gpus * share or planned.cpus)
        return replace(planned, cpus=cpus, memory_mib=settings.memory_mib, seconds=seconds)

    @property
    def last(self) -> Shape:
        """What the job after all others asks for."""
        return Shape(seconds=min(LAST_S, self.limit_s or LAST_S))

    @property
    def whole_node(self) -> Shape | None:
        """The node into which smaller runs are packed, None without PACK_NODES."""
        gpus = self.settings.gpus_per_node or max((one.gpus for one in self.usable), default=0)
        cpus = min((one.cpus for one in self.usable if one.gpus >= gpus), default=1)
        return Shape(gpus=gpus, cpus=cpus) if self.settings.pack_nodes else None

    def problems(self, shapes: Sequence[Shape]) -> Iterator[LaunchError]:
        """Yield why jobs of these shapes would never start. Slurm accepts them: 5 days on 2, or 9 nodes of 3."""
        setup, partitions = self.settings.setup, self.partitions
        if setup is not None and not setup.is_file():
            yield LaunchError(f"SLURM_SETUP={setup} not found", hint="pass SLURM_SETUP=<a file>")
        if not self.nodes:
            return  # users may not see them: Slurm decides
        unknown = [name for name, nodes in partitions.items() if not nodes]
        if unknown or not partitions:
            what = f"no partition {unknown[0]}" if unknown else "no default partition"
            why = f"the cluster has {', '.join(sorted({one.partition for one in self.nodes}))}"
            yield LaunchError(what, why=why, hint="pass SLURM_PARTITION=")
            return
        for shape in shapes:
            found = [next(self._problems(shape, name, nodes), None) for name, nodes in partitions.items()]
            if (first := found[0]) and all(found):  # of several partitions, one is enough
                yield first

    def _problems(self, shape: Shape, name: str, nodes: Sequence[Nodes]) -> Iterator[LaunchError]:
        """Yield why a job of a shape never starts in a partition."""
        where, limit, notice = f"the partition {name}", nodes[0].seconds, self.settings.notice_s
        fitting = [one for one in nodes if one.gpus >= shape.gpus]
        if not fitting:
            most, total = max(one.gpus for one in nodes), shape.gpus * shape.nodes
            fewest = next((n for n in range(1, total + 1) if total % n == 0 and total // n <= most), 0)
            fix = f"NUM_NODES={fewest}" if fewest else "SLURM_PARTITION= or SLURM_GPU_TYPE=, see sinfo -o '%P %G'"
            gpus = plural(shape.gpus, f"{self.settings.gpu_type} GPU".strip())
            yield LaunchError(f"{gpus} on one node", why=f"nodes of {where} have {most}", hint=f"pass {fix}")
            return
        there = sum(one.count for one in fitting)
        there = min(there, nodes[0].most or there)
        if shape.nodes > there:
            gpus = f" with {plural(shape.gpus, 'GPU')}" if shape.gpus else ""
            fix = f"NUM_GPUS={shape.gpus * there} NUM_NODES={there}" if shape.gpus else f"NUM_NODES={there}"
            fix = fix if there else "SLURM_PARTITION=<another one>"
            why = f"a job in {where} gets at most {there}"
            yield LaunchError(f"{plural(shape.nodes, 'node')}{gpus}", why=why, hint=f"pass {fix}")
        if shape.cpus > (cpus := max(one.cpus for one in fitting)):
            fix = f"SLURM_CPUS_PER_GPU={max(1, cpus // shape.gpus)}" if shape.gpus else "a smaller CPU_THREADS="
            yield LaunchError(
                f"{plural(shape.cpus, 'CPU')} on one node", why=f"nodes of {where} have {cpus}", hint=f"pass {fix}"
            )
        if shape.seconds and limit is not None and shape.seconds > limit:
            why = f"the limit of {where} is {duration(limit)}"
            hint = f"pass SLURM_TIME={limit // 60}m: runs save at the limit, and their jobs start again"
            yield LaunchError(f"a time limit of {duration(shape.seconds)}", why=why, hint=hint)
        if shape.seconds and shape.seconds <= notice and shape != self.last:
            why = f"runs save {notice} s before it: at their start"
            hint = "pass a longer SLURM_TIME= or a smaller SLURM_NOTICE="
            yield LaunchError(f"a time limit of {duration(shape.seconds)}", why=why, hint=hint)
