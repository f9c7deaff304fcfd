"""Where a run comes from: code, versions, machine. Nothing of the environment's variables is written down."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kmatrix.gpu.nvml import Gpu

SHARED = ("errors", "shapes", "stats")  # modules of kmatrix that the trainer imports, beside records
PACKAGES = ("torch", "numpy", "kconfiglib", "nvidia-ml-py")


def provenance(root: Path, command: str, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return what is written to matrix.json and to each run.json."""
    return {
        "created": time.time(),
        "command": command,
        "host": socket.gethostname(),
        "git_commit": _git(root, "rev-parse", "HEAD"),
        "git_dirty": _dirty(root),
        "code": code_sha256(root),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "gpus": [{"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid} for gpu in gpus],
        "cpu": _cpu(),
        "cores": cores(),
    }


def cores() -> int:
    """Return the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def code_sha256(root: Path) -> str:
    """Return the hash of everything that a trainer is made of: gpt2/ and what it takes of kmatrix."""
    ours = root / "lib" / "kmatrix"
    files = [*(root / "gpt2").rglob("*.py"), *(ours / "records").rglob("*.py")]
    files += [ours / f"{name}.py" for name in SHARED]
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _dirty(root: Path) -> bool | None:
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if changes is None else bool(changes)


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
