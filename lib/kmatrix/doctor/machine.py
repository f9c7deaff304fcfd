"""The machine without its GPUs: Python, processors, memory, limits, clock, compiler, keys."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kmatrix.doctor.checks import Check, broken, ok, warning

PYTHON = (3, 11)
SHM = 1 << 30  # bytes of /dev/shm: NCCL takes some tens of MB for each pair of GPUs; containers have 64 MB by default
FILES = 4096  # open files
MEMORY = 4 << 30  # bytes that are available
CLOCK = 300.0  # seconds that a file may lie in the future
KEYS = {
    "HF_TOKEN": "Hugging Face: only private or gated data need it",
    "WANDB_API_KEY": "Weights & Biases; `wandb login` does as well",
}


def machine(root: Path, environment: Mapping[str, str]) -> Iterator[Check]:
    """Yield what is found. root: of the project.  environment: of this process; no value of it is ever told."""
    yield _python()
    yield cores(Path("/sys/fs/cgroup/cpu.max"))
    yield from memory(Path("/proc/meminfo"))
    yield from shared_memory(Path("/dev/shm"))
    yield files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield clock(root / "Makefile", time.time())
    yield compiler(environment.get("PATH"))
    yield from keys(environment)


def _python() -> Check:
    said = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON:
        return broken("Python", said, "use Python 3.11 or newer: remove .venv and pass PYTHON=<interpreter>")
    return ok("Python", said)


def cores(limit: Path) -> Check:
    """limit: the container's share of CPU time, where there is one."""
    there = len(os.sched_getaffinity(0))
    try:
        quota, _, period = limit.read_text(encoding="ascii").partition(" ")
        share = there if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        share = there
    if share < there:
        said = f"{there} cores, of which this container gets the time of {share:.1f}"
        return warning("cores", said, f"CPU_THREADS={max(1, int(share))} keeps threads from waiting for each other")
    return ok("cores", str(there))


def memory(meminfo: Path) -> Iterator[Check]:
    """Yield how much memory is available. meminfo: the kernel's table."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, KeyError):
        return
    said = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB available"
    if free < MEMORY:
        yield warning("memory", said, "end other programs, or train small models (make plan)")
    else:
        yield ok("memory", said)


def shared_memory(folder: Path) -> Iterator[Check]:
    """Yield how large /dev/shm is, where there is one."""
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    said = f"{usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free"
    if usage.free < SHM:
        yield warning(str(folder), said, "several GPUs may need more: start the container with --shm-size=8g")
    else:
        yield ok(str(folder), said)


def files(limit: int) -> Check:
    """limit: of open files in one process, -1 (RLIM_INFINITY) for none."""
    if limit != resource.RLIM_INFINITY and limit < FILES:
        return warning("open files", f"at most {limit}", f"ulimit -n {FILES} in this shell")
    return ok("open files", "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit}")


def clock(file: Path, now: float) -> Check:
    """Names of matrices are times: a clock that is behind makes them older than the project's own files."""
    said = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if file.exists() and file.stat().st_mtime > now + CLOCK:
        return warning("clock", f"{said}, and {file.name} was changed after that", "set the machine's clock")
    return ok("clock", said)


def compiler(path: str | None) -> Check:
    """A C compiler is needed for simulated GPUs only."""
    found = shutil.which("gcc", path=path) or shutil.which("cc", path=path)
    if found:
        return ok("C compiler", found)
    return warning("C compiler", "none: SIMULATE= needs one", "install gcc (Debian: apt install gcc libc6-dev)")


def keys(environment: Mapping[str, str]) -> Iterator[Check]:
    """Yield for each key whether it is there, never what it is."""
    for name, what in KEYS.items():
        yield ok(name, f"{'set' if environment.get(name) else 'not in the environment'} ({what})")
