"""GPUs and software versions of a run. As a program: print what this machine can train with."""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import torch

from gpt2.dist import World


def gpus(world: World) -> list[dict[str, Any]]:
    """Return name and UUID of the GPU of each rank, as the driver reports them; [] on the CPU."""
    if world.device.type != "cuda":
        return []
    found = [torch.cuda.get_device_properties(rank) for rank in range(world.size)]
    # PyTorch omits the prefix of NVML's UUIDs, by which the recorder finds the GPU.
    return [{"name": one.name, "uuid": f"GPU-{one.uuid}"} for one in found]


def software() -> dict[str, str | None]:
    """Return the versions of PyTorch and its libraries; None if this build of PyTorch lacks one."""
    cuda = torch.version.cuda is not None  # of this build of PyTorch; others have no libraries to ask
    has_nccl = cuda and torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if has_nccl else None  # type: ignore[no-untyped-call]  # torch's
    cudnn = torch.backends.cudnn.version() if cuda else None  # type: ignore[no-untyped-call]  # torch's
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def probe() -> dict[str, Any]:
    """Return versions, whether CUDA is usable or why not, and which pairs of GPUs have peer access."""
    # is_available never raises: it warns with the reason, such as a driver that is too old, and returns False.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    nccl = torch.cuda.nccl.version() if available and torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    pairs = itertools.combinations(range(count), 2)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "available": available,
        "why": "" if available or not caught else str(caught[0].message).split("\n")[0],
        "bf16": available and torch.cuda.is_bf16_supported(),
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "pairs": [[a, b, torch.cuda.can_device_access_peer(a, b)] for a, b in pairs],
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
