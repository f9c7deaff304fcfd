"""What a Slurm cluster has: partitions, their nodes and limits, and how it ends jobs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kmatrix.engines.base import Capacity, NodeKind, Partition, node_kinds
from kmatrix.engines.slurm.commands import show, show_config

# States of nodes that take no jobs (sinfo(1), "NODE STATE CODES"). Nodes in the cloud that are off start for a job.
DOWN = frozenset(
    {"DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "INVAL", "NOT_RESPONDING", "MAINT"}
)
NO_NODE = "FUTURE"  # of nodes that do not exist yet
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})(?:\.\d+)?")


def capacity(gpu_type: str = "") -> Capacity:
    """Return what this cluster has. gpu_type: only nodes with GPUs of this type count, as their type is named there.

    Raises UnreachableError without an answer.
    """
    return capacity_of(show_config(), show("partition"), show("node"), gpu_type)


def capacity_of(
    config: Mapping[str, str],
    partitions: list[Mapping[str, str]],
    nodes: list[Mapping[str, str]],
    gpu_type: str = "",
) -> Capacity:
    """Return the capacity that scontrol describes."""
    members: dict[str, list[NodeKind]] = {}
    for node in nodes:
        if kind := _node(node, gpu_type):
            for name in node.get("Partitions", "").split(","):
                members.setdefault(name, []).append(kind)
    array = config.get("MaxArraySize", "")
    return Capacity(
        partitions=tuple(
            _partition(one, members.get(one["PartitionName"], [])) for one in partitions if "PartitionName" in one
        ),
        kill_s=_first_number(config.get("KillWait", "")),
        # The indices of an array are below MaxArraySize, and one task less is what every version accepts. 0: no arrays.
        most_tasks=max(1, int(array) - 1) if array.isdecimal() else None,
        has_accounting=config.get("AccountingStorageType", "").partition("/")[2] not in ("", "none"),
    )


def _partition(found: Mapping[str, str], nodes: list[NodeKind]) -> Partition:
    nodes_limit, memory = found.get("MaxNodes", ""), found.get("MaxMemPerNode", "")
    return Partition(
        name=found["PartitionName"],
        is_default=found.get("Default") == "YES",
        kinds=node_kinds(nodes),
        seconds=seconds_of(found.get("MaxTime", "")),
        default_s=seconds_of(found.get("DefaultTime", "")),
        most_nodes=int(nodes_limit) if nodes_limit.isdecimal() else None,
        memory_mib=int(memory) if memory.isdecimal() else None,
        is_up=found.get("State", "UP") == "UP",
        preempts=found.get("PreemptMode", "OFF") not in ("OFF", "GANG"),
    )


def _node(found: Mapping[str, str], gpu_type: str) -> NodeKind | None:
    """Return the kind of a node, None if it does not exist yet or has no GPU of this type."""
    words = set(re.split(r"[^A-Z_]+", found.get("State", "")))
    gpus = gpus_of(found.get("Gres", ""))
    if NO_NODE in words or (gpu_type and gpu_type not in gpus):
        return None
    most = gpu_type or max(gpus, key=lambda name: gpus[name], default="")
    cpus, memory = found.get("CPUEfctv") or found.get("CPUTot", ""), found.get("RealMemory", "")
    return NodeKind(
        down=0 if words.isdisjoint(DOWN) else 1,
        cpus=int(cpus) if cpus.isdecimal() else None,
        memory_mib=int(memory) if memory.isdecimal() else None,
        gpus=gpus.get(most, 0) if gpu_type else sum(gpus.values()),
        gpu_type=most,
    )


def gpus_of(gres: str) -> dict[str, int]:
    """Return type -> number of GPUs of a node's Gres; the type is "" if it has none.

    >>> gpus_of("gpu:a100:4(S:0-1),gpu:v100:2,nvme:1"), gpus_of("gpu:8"), gpus_of("(null)")
    ({'a100': 4, 'v100': 2}, {'': 8}, {})
    """
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = item.split(":")
        if name == "gpu":
            number = rest.pop() if rest and rest[-1].isdecimal() else "1"
            found[":".join(rest)] = found.get(":".join(rest), 0) + int(number)
    return found


def seconds_of(text: str) -> float | None:
    """Return a time of Slurm in seconds; None for UNLIMITED, and for what is not a time.

    >>> seconds_of("2-00:00:00"), seconds_of("01:30:00"), seconds_of("5:00"), seconds_of("30"), seconds_of("UNLIMITED")
    (172800.0, 5400.0, 300.0, 1800.0, None)
    """
    match = TIME.fullmatch(text)
    if not match:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"]:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) < 3:  # minutes[:seconds]
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    else:
        hours, minutes, seconds = parts
    return float(int(match["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def _first_number(text: str) -> float | None:
    match = re.match(r"\d+", text)
    return float(match[0]) if match else None
