"""What PyTorch says of itself and of the GPUs, as one line of JSON: for `make doctor`, in a process of its own.

python -m gpt2.probe
"""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import torch


def probe() -> dict[str, Any]:
    """Return versions, whether CUDA can be used and why not, and which pairs of GPUs reach each other's memory."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    nccl = torch.cuda.nccl.version() if available and torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    pairs = itertools.combinations(range(count), 2)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "available": available,
        "why": "" if available or not said else str(said[0].message).split("\n")[0],
        "bf16": available and torch.cuda.is_bf16_supported(),
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "pairs": [[a, b, torch.cuda.can_device_access_peer(a, b)] for a, b in pairs],
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
