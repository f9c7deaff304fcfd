"""What others hold of GPUs that none of our runs has: asked of the driver before a run starts there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kmatrix.gpu.nvml.detect import MIB

PROC = Path("/proc")
NAMED = 3  # processes that are named


def occupied(uuids: Sequence[str], most_mib: int) -> dict[str, str]:
    """Return UUID -> what holds more than `most_mib` MiB of a GPU, in words; GPUs with less in use are not in it.

    All memory in use counts, since in a container the driver does not show the processes of others. A GPU that does
    not answer is in it, too. Without a driver the answer is empty.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        found = {uuid: _held(pynvml, uuid, most_mib) for uuid in uuids}
    finally:
        pynvml.nvmlShutdown()
    return {uuid: why for uuid, why in found.items() if why}


def _held(pynvml: Any, uuid: str, most_mib: int) -> str:
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        used = _used_mib(pynvml, handle)
        if used <= most_mib:
            return ""
        held = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        return f"it does not answer: {error}"
    names = [f"{_name(process.pid)} (pid {process.pid})" for process in held]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{used / 1024:.1f} GiB held by {', '.join(names[:NAMED]) or 'processes that cannot be seen here'}{more}"


def _used_mib(pynvml: Any, handle: Any) -> float:
    """MiB in use, without what the driver keeps for itself where it says so."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return float(memory.used) / MIB


def _name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"
