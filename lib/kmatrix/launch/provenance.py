"""Where a run comes from: code, versions, machine, and those variables of the environment that may change a result.

Variables are taken by name from a list, and never one that looks like a secret.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kmatrix.gpu.nvml import Gpu
from kmatrix.gpu.nvml.detect import state
from kmatrix.launch.code import Code

PACKAGES = (  # the first four may change a result; the others what is recorded, or where it is sent
    *("torch", "numpy", "tiktoken", "pytorch_optimizer"),
    *(
        "tokenizers",
        "pyarrow",
        "kconfiglib",
        "nvidia-ml-py",
        "msgspec",
        "matplotlib",
        "wandb",
        "trackio",
        "tensorboardX",
    ),
)
VARIABLES = (  # how the names begin
    *("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_"),
    *("TORCH_", "TORCHINDUCTOR_", "TRITON_", "PYTORCH_", "MALLOC_", "KMATRIX_"),
)
SECRET = re.compile(r"TOKEN|KEY|PASS|SECRET|CREDENTIAL|AUTH", re.IGNORECASE)
LOGIN = re.compile(r"://[^/\s]*@")  # https://user:password@host


def provenance(code: Code, command: str, gpus: Sequence[Gpu], patch: str | None = None) -> dict[str, Any]:
    """Return what is written to matrix.json and to each run.json.

    gpus: those that runs may use; what a run really had, it says itself.  patch: the name of the file with the patch.
    """
    driver = state(()) if gpus else None
    return {
        "created": time.time(),
        "command": command,
        "host": socket.gethostname(),
        "git_commit": code.commit,
        "git_dirty": code.dirty,
        "patch": patch,
        "no_patch": code.no_patch or None,
        "untracked": list(code.untracked),
        "code": code.sha256,
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "environment": variables(os.environ),
        "driver": {"version": driver.version, "cuda": driver.cuda} if driver else None,
        "gpus": [{"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid} for gpu in gpus],
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": cores(),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change a result, without any whose name or value looks like a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(VARIABLES) and not SECRET.search(name) and not LOGIN.search(value)
    }


def cores() -> int:
    """Return the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
