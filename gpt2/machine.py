"""What a run computes with: its GPUs, and the versions of torch and of what torch is built on."""

from __future__ import annotations

from typing import Any

import torch

from gpt2.dist import World


def gpus(world: World) -> list[dict[str, Any]]:
    """Return name and UUID of the GPU of each rank, as the driver writes them; [] on the CPU."""
    if world.device.type != "cuda":
        return []
    found = [torch.cuda.get_device_properties(rank) for rank in range(world.size)]
    return [{"name": one.name, "uuid": f"GPU-{one.uuid}"} for one in found]


def software() -> dict[str, str | None]:
    """Return the versions of what computes; None for what this build of torch does not have."""
    cuda = torch.version.cuda is not None
    there = cuda and torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if there else None  # type: ignore[no-untyped-call]  # torch's
    cudnn = torch.backends.cudnn.version() if cuda else None  # type: ignore[no-untyped-call]  # torch's
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
