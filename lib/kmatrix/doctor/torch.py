"""PyTorch as a process of its own sees it: its build against the driver, NCCL, GPUs that reach each other."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kmatrix.doctor.checks import Check, broken, ok, warning

LONGEST_S = 120.0  # importing PyTorch from a cold disk takes tens of seconds


def torch(python: Path, root: Path, gpus: int) -> Iterator[Check]:
    """Yield what PyTorch says of itself. gpus: how many the driver knows."""
    if find_spec("torch") is None:
        yield warning(
            "PyTorch", "not installed: configurations, plans and reports work, training does not", "make setup"
        )
        return
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), str(root / "lib")]))
    try:
        done = subprocess.run(
            [str(python), "-m", "gpt2.probe"],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        yield broken("PyTorch", f"it does not answer within {LONGEST_S:g} s", "a GPU or its driver hangs: nvidia-smi")
        return
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield broken("PyTorch", f"it cannot be used: {said}", "remove .venv, then make setup")
        return
    yield from judged(json.loads(done.stdout.strip().splitlines()[-1]), gpus)


def judged(found: Mapping[str, Any], gpus: int) -> Iterator[Check]:
    """Yield what the answer of gpt2.probe means on a machine whose driver knows so many GPUs."""
    said = f"{found['torch']}, " + (f"built for CUDA {found['cuda']}" if found["cuda"] else "built for the CPU")
    if gpus and not found["cuda"]:
        yield broken(
            "PyTorch", f"{said}, and there are GPUs", "install a CUDA build: make setup TORCH_INDEX=<its index>"
        )
    elif gpus and not found["available"]:
        why = f": {found['why']}" if found["why"] else ""
        yield broken("PyTorch", f"{said}, and it cannot use the GPUs{why}", "install a driver for that CUDA or newer")
    else:
        yield ok("PyTorch", said)
    if found["available"]:
        yield ok("bfloat16", "yes") if found["bf16"] else warning("bfloat16", "no", "DTYPE=fp32")
        nccl = found["nccl"]
        yield ok("NCCL", nccl) if nccl else warning("NCCL", "none in this build", "DDP_BACKEND=gloo, which is slow")
    if found["pairs"]:
        without = [f"{a}-{b}" for a, b, reached in found["pairs"] if not reached]
        if without:
            pairs = f"not between {', '.join(without)}"
            yield warning("peer access", pairs, "gradients go through the host's memory there: expect a lower MFU")
        else:
            yield ok("peer access", f"between all {len(found['pairs'])} pairs of GPUs")
