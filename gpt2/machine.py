"""GPUs and memory of a run. As a program: print what this machine can train with."""

from __future__ import annotations

import json
import resource
import socket
import warnings
from typing import Any

import torch

from gpt2.dist import World, gather


def machines(world: World) -> dict[str, Any]:
    """Return what result.json says of the machines of all ranks, which all have to call this."""
    gpu = None
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        # PyTorch omits the prefix of NVML's UUIDs, by which the recorder finds the GPU.
        gpu = {"name": properties.name, "uuid": f"GPU-{properties.uuid}"}
    devices, hosts, gpus = zip(*gather(world, (world.device_name, socket.gethostname(), gpu)), strict=True)
    return {"devices": devices, "hosts": hosts, "gpus": [gpu for gpu in gpus if gpu]}


def peak_memory_mib(world: World) -> float:
    """Return this rank's peak memory in MiB: its GPU's tensors, or the resident set on the CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def probe() -> dict[str, Any]:
    """Return versions, and whether CUDA is usable or why not."""
    # is_available never raises: it warns with the reason, such as a driver that is too old, and returns False.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,  # None: built for the CPU
        "available": available,
        "why": "" if available or not caught else str(caught[0].message).split("\n")[0],
        "bf16": available and torch.cuda.is_bf16_supported(),
        "nccl": ".".join(map(str, nccl)) or None,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
