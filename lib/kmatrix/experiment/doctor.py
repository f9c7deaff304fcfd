"""Check this machine and suggest fixes: Python, CPU, memory, disks, limits, clock, compiler, keys, GPUs, PyTorch."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kmatrix.gpu.nvml.detect import Detected, DriverState, detect, driver_state
from kmatrix.records.paths import program_environment
from kmatrix.text import disk_size, memory_size, time_of_day

PYTHON = (3, 11)
SHM = 1 << 30  # bytes of /dev/shm: NCCL uses tens of MB per pair of GPUs; containers have 64 MB by default
FILES = 4096  # open files
MEMORY = 4 << 30  # bytes available
CLOCK = 300.0  # s that the modification time of a file may be in the future: the clock of a file server may differ
LEAST_FREE = 10e9  # bytes of free disk space
BUSY = 0.05  # share of a GPU's memory in use
TIMEOUT_S = 120.0  # importing PyTorch from a cold disk takes tens of seconds
KEYS = {
    "HF_TOKEN": "Hugging Face: needed only for private or gated datasets",
    "WANDB_API_KEY": "Weights & Biases; `wandb login` works too",
}


class Level(StrEnum):
    """The outcome of a check."""

    OK = "OK"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the machine and its outcome."""

    name: str
    message: str  # what was found
    hint: str = ""  # how to fix it, empty if OK
    level: Level = Level.OK


def ok(name: str, message: str) -> Check:
    return Check(name, message)


def warning(name: str, message: str, hint: str, *, unless: bool = False) -> Check:
    """Return a warning, or an OK without the hint. unless: the condition that makes it OK."""
    return Check(name, message) if unless else Check(name, message, hint, Level.WARNING)


def broken(name: str, message: str, hint: str) -> Check:
    return Check(name, message, hint, Level.BROKEN)


def machine_checks(root: Path, environment: Mapping[str, str]) -> Iterator[Check]:
    """Check the machine, except its GPUs. environment: of this process; its values are never printed."""
    python = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON:
        yield broken("Python", python, "use Python 3.11 or newer: remove .venv and pass PYTHON=<interpreter>")
    else:
        yield ok("Python", python)
    yield cores(Path("/sys/fs/cgroup/cpu.max"))
    yield from memory(Path("/proc/meminfo"))
    yield from shared_memory(Path("/dev/shm"))
    yield files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield clock(root / "Makefile", time.time())
    yield compiler(environment.get("PATH"))
    for name, what in KEYS.items():
        yield ok(name, f"{'set' if environment.get(name) else 'not set'} ({what})")


def cores(limit: Path) -> Check:
    """Check the number of cores. limit: file with the CPU quota of the container, if there is one."""
    # The cores of this process: containers and batch systems restrict them.
    there = len(os.sched_getaffinity(0))
    try:
        quota, _, period = limit.read_text(encoding="ascii").partition(" ")
        # cgroup v2: the quota in microseconds per period, or max.
        share = there if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        share = there
    if share >= there:
        return ok("cores", str(there))
    found = f"{there}, limited to {share:.1f} by the container's CPU quota"
    return warning("cores", found, f"pass CPU_THREADS={max(1, int(share))} to avoid throttling")


def memory(meminfo: Path) -> Iterator[Check]:
    """Check the available memory. meminfo: /proc/meminfo."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, KeyError):
        return
    hint = "close other programs, or train a small model (make plan)"
    yield warning("memory", f"{memory_size(free, total)} available", hint, unless=free >= MEMORY)


def shared_memory(folder: Path) -> Iterator[Check]:
    """Check the size of /dev/shm, if it exists."""
    if folder.is_dir():
        usage = shutil.disk_usage(folder)
        hint = "NCCL may need more on several GPUs: start the container with --shm-size=8g"
        yield warning(str(folder), f"{memory_size(usage.free, usage.total)} free", hint, unless=usage.free >= SHM)


def files(limit: int) -> Check:
    """Check the limit of open files. limit: per process, -1 (RLIM_INFINITY) if unlimited."""
    if limit == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    return warning("open files", f"at most {limit}", f"run `ulimit -n {FILES}` in this shell", unless=limit >= FILES)


def clock(file: Path, now: float) -> Check:
    """Check the clock, because matrices are named by time. file: a file of the checkout, which must not be newer."""
    message = f"{time_of_day(now)} {time.strftime('%Z', time.localtime(now))}"
    if file.exists() and file.stat().st_mtime > now + CLOCK:
        return warning("clock", f"{message}, but {file.name} was modified later", "set the system clock")
    return ok("clock", message)


def compiler(path: str | None) -> Check:
    """Check for a C compiler, which only simulated GPUs need."""
    if found := shutil.which("gcc", path=path) or shutil.which("cc", path=path):
        return ok("C compiler", found)
    return warning("C compiler", "not found (needed for SIMULATE=)", "install gcc (Debian: apt install gcc libc6-dev)")


def places(folders: Mapping[str, Path]) -> Iterator[Check]:
    """Check that each folder is writable and has free disk space. folders: symbol -> folder.

    A missing folder is not created: its nearest existing parent is checked.
    """
    for name, folder in folders.items():
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        try:  # tried, not asked: permissions do not show a full or read-only file system
            with tempfile.NamedTemporaryFile(dir=there) as file:
                file.write(b"x")
                file.flush()
                # A full or remote disk may refuse the data only here.
                os.fsync(file.fileno())
        except OSError:
            yield broken(name, f"{there} is not writable", f"set {name}= to a writable folder")
            continue
        free = shutil.disk_usage(there).free
        hint = f"free some space, or set {name}= to another disk; `make plan` prints what a matrix needs"
        yield warning(name, f"{disk_size(free)} free in {there}", hint, unless=free >= LEAST_FREE)


def gpus(found: Detected | None = None, driver: DriverState | None = None) -> Iterator[Check]:
    """Check each GPU. found, driver: of NVML; queried if None."""
    found = detect() if found is None else found
    for note in found.notes:
        yield warning("NVIDIA driver", note, "check it with nvidia-smi; a reboot reloads it")
    if not found.gpus:
        yield ok("GPUs", "no NVIDIA GPU: runs train on the CPU; `make plan GPU=H100` plans for a GPU")
        return
    driver = driver_state(found.gpus) if driver is None else driver
    if driver.version:
        yield ok("NVIDIA driver", f"{driver.version}, supports CUDA {driver.cuda}" if driver.cuda else driver.version)
    for gpu in found.gpus:
        name, total, free = f"GPU {gpu.index}", gpu.memory_total, driver.free_mib.get(gpu.uuid)
        if free is None:
            yield ok(name, f"{gpu.name}, {memory_size(total * 2**20)}")
            continue
        message = f"{gpu.name}, {memory_size(free * 2**20, total * 2**20)} free"
        hint = "nvidia-smi lists the processes that use it; pass GPUS=<others> to exclude this GPU"
        yield warning(name, message, hint, unless=total - free <= BUSY * total)


def torch(python: Path, root: Path, gpus: int) -> Iterator[Check]:
    """Check PyTorch in a process of its own. gpus: number of GPUs that the driver reports."""
    # Found without an import, which takes seconds; the test itself may hang in a driver, so it has its own process.
    if find_spec("torch") is None:
        message = "not installed: configuration, plans and reports work, training does not"
        yield warning("PyTorch", message, "run `make setup`")
        return
    command = [str(python), "-m", "gpt2.machine"]
    environment = program_environment(root)
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        yield broken("PyTorch", f"no answer within {TIMEOUT_S:g} s", "a GPU or its driver may hang: check nvidia-smi")
        return
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield broken("PyTorch", f"import failed: {message}", "remove .venv, then run `make setup`")
        return
    yield from torch_checks(json.loads(done.stdout.strip().splitlines()[-1]), gpus)


def torch_checks(found: Mapping[str, Any], gpus: int) -> Iterator[Check]:
    """Yield the checks of PyTorch. found: output of gpt2.machine. gpus: number of GPUs that the driver reports."""
    message = f"{found['torch']}, " + (f"built for CUDA {found['cuda']}" if found["cuda"] else "built for the CPU")
    if gpus and not found["cuda"]:
        hint = "install a CUDA build: make setup TORCH_INDEX=<index>"
        yield broken("PyTorch", f"{message}, but this machine has GPUs", hint)
    elif gpus and not found["available"]:
        why = f": {found['why']}" if found["why"] else ""
        hint = "install a driver for this CUDA version or newer"
        yield broken("PyTorch", f"{message}, but CUDA is not available{why}", hint)
    else:
        yield ok("PyTorch", message)
    if found["available"]:
        has_bf16, nccl = found["bf16"], found["nccl"]
        yield warning("bfloat16", "supported" if has_bf16 else "not supported", "pass DTYPE=fp32", unless=has_bf16)
        yield warning("NCCL", nccl or "not in this build", "pass DDP_BACKEND=gloo, which is slow", unless=nccl)
    if found["pairs"]:
        without = [f"{a}-{b}" for a, b, reached in found["pairs"] if not reached]
        hint = "gradients are copied through host memory there: expect a lower MFU"
        where = f"not available between {', '.join(without)}"
        every = f"available between all {len(found['pairs'])} pairs of GPUs"
        yield warning("peer access", where if without else every, hint, unless=not without)
