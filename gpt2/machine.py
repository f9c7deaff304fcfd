"""GPUs and software versions of a run. As a program: print what this machine can train with."""

from __future__ import annotations

import itertools
import json
import resource
import socket
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpt2.dist import World


def machine_of(world: World) -> dict[str, Any]:
    """Return the host of this rank, its device's name, and name and UUID of its GPU, None on the CPU."""
    gpu = None
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        # PyTorch omits the prefix of NVML's UUIDs, by which the recorder finds the GPU.
        gpu = {"name": properties.name, "uuid": f"GPU-{properties.uuid}"}
    return {"host": socket.gethostname(), "device": world.device_name, "gpu": gpu}


def about_machines(machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what run_used.json says of the machines of all ranks."""
    return {
        "devices": [machine["device"] for machine in machines],
        "hosts": [machine["host"] for machine in machines],
        "gpus": [machine["gpu"] for machine in machines if machine["gpu"]],
        "software": software(),
    }


def peak_memory_mib(world: World) -> float:
    """Return this rank's peak memory in MiB: its GPU's tensors, or the resident set on the CPU."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def software() -> dict[str, str | None]:
    """Return the versions of PyTorch and its libraries; None if this build of PyTorch lacks one."""
    cuda = torch.version.cuda is not None  # of this build of PyTorch; others have no libraries to ask
    cudnn = torch.backends.cudnn.version() if cuda else None  # type: ignore[no-untyped-call]  # torch's
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": ".".join(map(str, nccl)) or None,
    }


def probe() -> dict[str, Any]:
    """Return versions, whether CUDA is usable or why not, and which pairs of GPUs have peer access."""
    # is_available never raises: it warns with the reason, such as a driver that is too old, and returns False.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    pairs = itertools.combinations(range(torch.cuda.device_count() if available else 0), 2)
    versions = software()
    return {
        "torch": versions["torch"],
        "cuda": versions["cuda"],
        "available": available,
        "why": "" if available or not caught else str(caught[0].message).split("\n")[0],
        "bf16": available and torch.cuda.is_bf16_supported(),
        "nccl": versions["nccl"],
        "pairs": [[a, b, torch.cuda.can_device_access_peer(a, b)] for a, b in pairs],
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
