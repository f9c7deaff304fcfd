"""Bind a rank to the processors next to its GPU: those of the GPU's NUMA node.

Memory of the other node is slower, for the copies to and from the GPU and for the threads that prepare batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys")
_UNBOUND: set[int] = set()  # the processors of this process before it was bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The NUMA node of a rank's GPU, and the processors that the rank is bound to."""

    node: int | None = None  # None: not known
    cpus: str = ""  # as the kernel lists them, such as 0-15,32-47; empty: not bound
    why: str = ""  # the reason, if it is not bound

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bind(device: torch.device, *, wanted: bool, sysfs: Path = SYSFS) -> Binding | None:
    """Bind this process to the node of its GPU and return what was done; None on the CPU.

    Before the process makes threads for its work: they inherit the processors. Threads that exist are bound as well.
    """
    if device.type != "cuda":
        return None
    if not wanted:
        return Binding(why="GPT2_NUMA_BINDING=n")
    address = pci_address(torch.cuda.get_device_properties(device))
    if address is None:
        return Binding(why="this PyTorch does not report the PCI address of a GPU")
    if not hasattr(os, "sched_setaffinity"):
        return Binding(why="this system cannot bind processes")
    before = frozenset(os.sched_getaffinity(0))
    found, cpus = binding(address, before, sysfs)
    try:
        if cpus:
            for thread in Path("/proc/self/task").iterdir():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread.name), cpus)
    except OSError as error:
        return Binding(node=found.node, why=f"the system refuses: {error.strerror}")
    if cpus:
        _UNBOUND.update(before)
    return found


def release(process: int) -> None:
    """Allow a child process, which serves all ranks, the processors that this one had before it was bound."""
    if _UNBOUND:
        with suppress(OSError):  # it has ended, which its parent will notice
            os.sched_setaffinity(process, _UNBOUND)


def binding(address: str, allowed: frozenset[int], sysfs: Path = SYSFS) -> tuple[Binding, frozenset[int]]:
    """Return the binding for the GPU at a PCI address, and its processors; none if it would not help.

    allowed: the processors that the process may use. A scheduler or taskset has chosen them, so they are not left.
    """
    nodes = [path for path in (sysfs / "devices/system/node").glob("node[0-9]*") if cpus_of(path / "cpulist")]
    if len(nodes) < 2:  # nodes of memory alone, such as that of a GPU, do not count
        return Binding(why="this machine has one NUMA node"), frozenset()
    device = sysfs / "bus/pci/devices" / address
    try:
        node = int((device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Binding(why=f"the system has no NUMA node for the GPU at {address}"), frozenset()
    if node < 0:  # many virtual machines
        return Binding(why=f"the system does not know the NUMA node of the GPU at {address}"), frozenset()
    cpus = cpus_of(device / "local_cpulist") & allowed
    if not cpus:
        return Binding(node=node, why=f"no processor of node {node} may be used"), frozenset()
    return Binding(node=node, cpus=listed(cpus)), cpus


def pci_address(properties: Any) -> str | None:
    """Return the PCI address of a GPU as sysfs writes it, such as 0000:3b:00.0; None if PyTorch does not report it."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def cpus_of(path: Path) -> frozenset[int]:
    """Return the processors in a list of the kernel, such as 0-3,8; none if the file is missing or damaged."""
    found: set[int] = set()
    try:
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1)) if part else set()
    except (OSError, ValueError):
        return frozenset()
    return frozenset(found)


def listed(cpus: Iterable[int]) -> str:
    """Return processors as the kernel lists them."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
