"""Check this machine and suggest fixes: Python, CPU, memory, disks, compiler, GPUs, PyTorch."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from kmatrix.gpu.nvml.detect import Detected, driver_state
from kmatrix.packing import usable_cores
from kmatrix.records.paths import ROOT, program_environment
from kmatrix.text import disk_size, memory_size

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # CPU time of the container in microseconds per period, or "max"
SHARED = Path("/dev/shm")
LEAST_SHARED = 1 << 30  # bytes: NCCL uses tens of MB per pair of GPUs; containers have 64 MB by default
LEAST_MEMORY = 4 << 30  # bytes available
LEAST_FREE = 10e9  # bytes of free disk space
BUSY = 0.05  # share of a GPU's memory in use
TIMEOUT_S = 120.0  # importing PyTorch from a cold disk takes tens of seconds


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the machine and its outcome."""

    name: str
    message: str  # what was found
    hint: str = ""  # how to fix it, empty if OK
    is_broken: bool = False  # otherwise a hint makes it a warning

    @property
    def level(self) -> str:
        """The outcome: OK, warning or broken."""
        return "broken" if self.is_broken else "warning" if self.hint else "OK"


def warning(name: str, message: str, hint: str, *, unless: bool) -> Check:
    """Return a warning. unless: the condition that makes it OK."""
    return Check(name, message, "" if unless else hint)


def machine_checks() -> Iterator[Check]:
    """Check the machine, except its GPUs."""
    yield Check("Python", f"{platform.python_version()} at {sys.executable}")
    yield cores()
    memory = psutil.virtual_memory()
    message = f"{memory_size(memory.available, memory.total)} available"
    hint = "close other programs, or train a small model (make plan)"
    yield warning("memory", message, hint, unless=memory.available >= LEAST_MEMORY)
    if SHARED.is_dir():
        usage = shutil.disk_usage(SHARED)
        message = f"{memory_size(usage.free, usage.total)} free"
        hint = "NCCL may need more on several GPUs: start the container with --shm-size=8g"
        yield warning(str(SHARED), message, hint, unless=usage.free >= LEAST_SHARED)
    compiler = shutil.which("gcc") or shutil.which("cc")
    hint = "install gcc (Debian: apt install gcc libc6-dev)"
    yield warning("C compiler", compiler or "not found (needed for SIMULATE=)", hint, unless=bool(compiler))


def cores() -> Check:
    """Check the number of cores, which a container may restrict."""
    there = usable_cores()
    try:
        quota, period = map(float, QUOTA.read_text(encoding="ascii").split())
        share = quota / period
    except (OSError, ValueError):  # no quota
        share = there
    found = f"{there}, limited to {share:.1f} by the container's CPU quota" if share < there else str(there)
    hint = f"pass CPU_THREADS={max(1, int(share))} to avoid throttling"
    return warning("cores", found, hint, unless=share >= there)


def places(folders: Mapping[str, Path]) -> Iterator[Check]:
    """Check that each folder is writable and has free disk space. folders: symbol -> folder.

    A missing folder is not created: its nearest existing parent is checked.
    """
    for name, folder in folders.items():
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        try:  # tried, not asked: permissions do not show a full or read-only file system
            with tempfile.NamedTemporaryFile(dir=there, buffering=0) as file:
                file.write(b"x")
        except OSError:
            yield Check(name, f"{there} is not writable", f"set {name}= to a writable folder", is_broken=True)
            continue
        free = shutil.disk_usage(there).free
        hint = f"free some space, or set {name}= to another disk; `make plan` prints what a matrix needs"
        yield warning(name, f"{disk_size(free)} free in {there}", hint, unless=free >= LEAST_FREE)


def gpus(found: Detected) -> Iterator[Check]:
    """Check the driver and each GPU."""
    for note in found.notes:
        yield Check("NVIDIA driver", note, "check it with nvidia-smi; a reboot reloads it")
    if not found.gpus:
        yield Check("GPUs", "no NVIDIA GPU: runs train on the CPU; `make plan GPU=H100` plans for a GPU")
        return
    driver = driver_state(found.gpus)
    yield Check("NVIDIA driver", f"{driver.version or 'unknown'}, supports CUDA {driver.cuda or 'unknown'}")
    for gpu in found.gpus:
        total, free = gpu.memory_total, driver.free_mib.get(gpu.uuid)  # MiB
        message = f"{gpu.name}, {memory_size(free and free * 2**20, total * 2**20)} free"
        hint = "nvidia-smi lists the processes that use it; pass GPUS=<others> to exclude this GPU"
        yield warning(f"GPU {gpu.index}", message, hint, unless=free is None or total - free <= BUSY * total)


def torch(gpus: int) -> Iterator[Check]:
    """Check PyTorch in a process of its own. gpus: number of GPUs that the driver reports."""
    # Found without an import, which takes seconds; the test itself may hang in a driver, so it has its own process.
    if find_spec("torch") is None:
        message = "not installed: configuration, plans and reports work, training does not"
        yield Check("PyTorch", message, "run `make setup`")
        return
    command, environment = [sys.executable, "-m", "gpt2.machine"], program_environment()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        hint = "a GPU or its driver may hang: check nvidia-smi"
        yield Check("PyTorch", f"no answer within {TIMEOUT_S:g} s", hint, is_broken=True)
        return
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Check("PyTorch", f"import failed: {message}", "remove .venv, then run `make setup`", is_broken=True)
        return
    yield from torch_checks(json.loads(done.stdout.strip().splitlines()[-1]), gpus)


def torch_checks(found: Mapping[str, Any], gpus: int) -> Iterator[Check]:
    """Yield the checks of PyTorch. found: output of gpt2.machine. gpus: number of GPUs that the driver reports."""
    message = f"{found['torch']}, " + (f"built for CUDA {found['cuda']}" if found["cuda"] else "built for the CPU")
    if gpus and not found["cuda"]:
        hint = "install a CUDA build: make setup TORCH_INDEX=<index>"
        yield Check("PyTorch", f"{message}, but this machine has GPUs", hint, is_broken=True)
    elif gpus and not found["available"]:
        why = f": {found['why']}" if found["why"] else ""
        hint = "install a driver for this CUDA version or newer"
        yield Check("PyTorch", f"{message}, but CUDA is not available{why}", hint, is_broken=True)
    else:
        yield Check("PyTorch", message)
    if found["available"]:
        has_bf16, nccl = found["bf16"], found["nccl"]
        yield warning("bfloat16", "supported" if has_bf16 else "not supported", "pass DTYPE=fp32", unless=has_bf16)
        yield warning("NCCL", nccl or "not in this build", "pass DDP_BACKEND=gloo, which is slow", unless=bool(nccl))
