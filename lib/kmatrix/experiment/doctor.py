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

from kmatrix.errors import LaunchError
from kmatrix.gpu.nvml.detect import Detected, DriverState, detect, driver_state
from kmatrix.records.paths import program_environment
from kmatrix.text import disk_size, memory_size, time_of_day

PYTHON = (3, 11)
SHM = 1 << 30  # bytes of /dev/shm: NCCL uses tens of MB per pair of GPUs; containers have 64 MB by default
FILES = 4096  # open files
MEMORY = 4 << 30  # bytes available
CLOCK = 300.0  # s that the modification time of a file may be in the future

KEYS = {
    "HF_TOKEN": "Hugging Face: needed only for private or gated datasets",
    "WANDB_API_KEY": "Weights & Biases; `wandb login` works too",
}


def need_torch() -> None:
    """Raise LaunchError if torch is missing, before anything is made."""
    if find_spec("torch") is None:  # found, not imported: that takes seconds
        raise LaunchError(
            "torch is not installed", hint="run `make setup`, or pass PYTHON=<interpreter with all packages>"
        )


def machine_checks(root: Path, environment: Mapping[str, str]) -> Iterator[Check]:
    """Check the machine, except its GPUs. environment: of this process; its values are never printed."""
    yield _python()
    yield cores(Path("/sys/fs/cgroup/cpu.max"))
    yield from memory(Path("/proc/meminfo"))
    yield from shared_memory(Path("/dev/shm"))
    yield files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield clock(root / "Makefile", time.time())
    yield compiler(environment.get("PATH"))
    yield from keys(environment)


def _python() -> Check:
    message = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON:
        return broken("Python", message, "use Python 3.11 or newer: remove .venv and pass PYTHON=<interpreter>")
    return ok("Python", message)


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
    if share < there:
        found = f"{there}, limited to {share:.1f} by the container's CPU quota"
        return warning("cores", found, f"pass CPU_THREADS={max(1, int(share))} to avoid throttling")
    return ok("cores", str(there))


def memory(meminfo: Path) -> Iterator[Check]:
    """Check the available memory. meminfo: /proc/meminfo."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, KeyError):
        return
    message = f"{memory_size(free, total)} available"
    if free < MEMORY:
        yield warning("memory", message, "close other programs, or train a small model (make plan)")
    else:
        yield ok("memory", message)


def shared_memory(folder: Path) -> Iterator[Check]:
    """Check the size of /dev/shm, if it exists."""
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    message = f"{memory_size(usage.free, usage.total)} free"
    if usage.free < SHM:
        yield warning(
            str(folder), message, "NCCL may need more on several GPUs: start the container with --shm-size=8g"
        )
    else:
        yield ok(str(folder), message)


def files(limit: int) -> Check:
    """Check the limit of open files. limit: per process, -1 (RLIM_INFINITY) if unlimited."""
    if limit != resource.RLIM_INFINITY and limit < FILES:
        return warning("open files", f"at most {limit}", f"run `ulimit -n {FILES}` in this shell")
    return ok("open files", "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit}")


def clock(file: Path, now: float) -> Check:
    """Check the clock, because matrices are named by time. file: a file of the checkout, which must not be newer."""
    message = f"{time_of_day(now)} {time.strftime('%Z', time.localtime(now))}"
    # A few minutes of tolerance: the clock of a file server may differ.
    if file.exists() and file.stat().st_mtime > now + CLOCK:
        return warning("clock", f"{message}, but {file.name} was modified later", "set the system clock")
    return ok("clock", message)


def compiler(path: str | None) -> Check:
    """Check for a C compiler, which only simulated GPUs need."""
    found = shutil.which("gcc", path=path) or shutil.which("cc", path=path)
    if found:
        return ok("C compiler", found)
    return warning("C compiler", "not found (needed for SIMULATE=)", "install gcc (Debian: apt install gcc libc6-dev)")


def keys(environment: Mapping[str, str]) -> Iterator[Check]:
    """Check whether each key is set, without printing it."""
    for name, what in KEYS.items():
        yield ok(name, f"{'set' if environment.get(name) else 'not set'} ({what})")


LEAST_FREE = 10e9  # bytes of free disk space


class Level(StrEnum):
    """The outcome of a check."""

    OK = "OK"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of the machine and its outcome."""

    name: str
    level: Level
    message: str  # what was found
    hint: str = ""  # how to fix it, empty if OK


def ok(name: str, message: str) -> Check:
    return Check(name=name, level=Level.OK, message=message)


def warning(name: str, message: str, hint: str) -> Check:
    return Check(name=name, level=Level.WARNING, message=message, hint=hint)


def broken(name: str, message: str, hint: str) -> Check:
    return Check(name=name, level=Level.BROKEN, message=message, hint=hint)


def places(folders: Mapping[str, Path]) -> Iterator[Check]:
    """Check that each folder is writable and has free disk space. folders: symbol -> folder.

    A missing folder is not created: its nearest existing parent is checked.
    """
    for name, folder in folders.items():
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir() or not _can_write(there):
            yield broken(name, f"{there} is not writable", f"set {name}= to a writable folder")
            continue
        free = shutil.disk_usage(there).free
        message = f"{disk_size(free)} free in {there}"
        if free < LEAST_FREE:
            yield warning(
                name,
                message,
                f"free some space, or set {name}= to another disk; `make plan` prints what a matrix needs",
            )
        else:
            yield ok(name, message)


def _can_write(folder: Path) -> bool:
    """Return whether a file can be written there: permissions alone do not show a full or read-only file system."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
            # A full or remote disk may refuse the data only here.
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


BUSY = 0.05  # share of a GPU's memory in use


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
        name, free = f"GPU {gpu.index}", driver.free_mib.get(gpu.uuid)
        if free is None:
            yield ok(name, f"{gpu.name}, {memory_size(gpu.memory_total * 2**20)}")
            continue
        message = f"{gpu.name}, {memory_size(free * 2**20, gpu.memory_total * 2**20)} free"
        if gpu.memory_total - free > BUSY * gpu.memory_total:
            yield warning(
                name, message, "nvidia-smi lists the processes that use it; pass GPUS=<others> to exclude this GPU"
            )
        else:
            yield ok(name, message)


TIMEOUT_S = 120.0  # importing PyTorch from a cold disk takes tens of seconds


def torch(python: Path, root: Path, gpus: int) -> Iterator[Check]:
    """Check PyTorch in a process of its own. gpus: number of GPUs that the driver reports."""
    # Found without an import, which takes seconds; the test itself may hang in a driver, so it has its own process.
    if find_spec("torch") is None:
        yield warning(
            "PyTorch", "not installed: configuration, plans and reports work, training does not", "run `make setup`"
        )
        return
    try:
        done = subprocess.run(
            [str(python), "-m", "gpt2.machine"],
            cwd=root,
            env=program_environment(root),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
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
        yield broken(
            "PyTorch", f"{message}, but this machine has GPUs", "install a CUDA build: make setup TORCH_INDEX=<index>"
        )
    elif gpus and not found["available"]:
        why = f": {found['why']}" if found["why"] else ""
        yield broken(
            "PyTorch", f"{message}, but CUDA is not available{why}", "install a driver for this CUDA version or newer"
        )
    else:
        yield ok("PyTorch", message)
    if found["available"]:
        yield ok("bfloat16", "supported") if found["bf16"] else warning("bfloat16", "not supported", "pass DTYPE=fp32")
        nccl = found["nccl"]
        yield ok("NCCL", nccl) if nccl else warning("NCCL", "not in this build", "pass DDP_BACKEND=gloo, which is slow")
    if found["pairs"]:
        without = [f"{a}-{b}" for a, b, reached in found["pairs"] if not reached]
        if without:
            pairs = f"not available between {', '.join(without)}"
            yield warning("peer access", pairs, "gradients are copied through host memory there: expect a lower MFU")
        else:
            yield ok("peer access", f"available between all {len(found['pairs'])} pairs of GPUs")
