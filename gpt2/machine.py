"""GPUs and software versions of a run. As a program: print what this machine can train with."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpt2.dist import World
from kmatrix.errors import LaunchError
from kmatrix.records.jobs.forms import VARIABLE


def machine_of(world: World) -> dict[str, Any]:
    """Return the host of this rank, its device's name, and name and UUID of its GPU, None on the CPU.

    Of a run over several nodes also what all of them must have alike: the code of the trainer and PyTorch.
    """
    own: dict[str, Any] = {"host": socket.gethostname(), "device": world.device_name, "gpu": None}
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        # PyTorch omits the prefix of NVML's UUIDs, by which the recorder finds the GPU.
        own["gpu"] = {"name": properties.name, "uuid": f"GPU-{properties.uuid}"}
    if world.nodes > 1:
        own |= {"code": code_of_trainer(), "torch": torch.__version__}
    return own


def code_of_trainer(folder: Path = Path(__file__).parent) -> str:
    """Return the hash of the sources of the trainer on this node."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def check_alike(machines: Sequence[Mapping[str, Any]]) -> None:
    """Raise LaunchError if the nodes of a run have different code or PyTorch. machines: of all ranks."""
    first = machines[0]
    for name, what in (("code", "trainers"), ("torch", "versions of PyTorch")):
        other = next((machine for machine in machines if machine.get(name) != first.get(name)), None)
        if other is not None:
            raise LaunchError(
                f"{first['host']} and {other['host']} have different {what}",
                why=f"{str(first.get(name))[:16]} and {str(other.get(name))[:16]}: the nodes of a run compute together",
                hint="use one checkout and one .venv that all nodes share; after a change, they may see it late",
            )


def variables() -> dict[str, str]:
    """Return the variables of NCCL, gloo, PyTorch and CUDA in the environment, whoever set them."""
    return {name: text for name, text in sorted(os.environ.items()) if VARIABLE.fullmatch(f"{name}={text}")}


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
