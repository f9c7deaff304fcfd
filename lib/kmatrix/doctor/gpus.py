"""The GPUs as the driver knows them: names, memory, what others hold of it, versions."""

from __future__ import annotations

from collections.abc import Iterator

from kmatrix.doctor.checks import Check, ok, warning
from kmatrix.gpu.nvml import Detected, detect
from kmatrix.gpu.nvml.detect import State, state

BUSY = 0.05  # of a GPU's memory


def gpus(found: Detected | None = None, driver: State | None = None) -> Iterator[Check]:
    """Yield a finding for each GPU. found, driver: as NVML has them; asked where they are not given."""
    found = detect() if found is None else found
    for note in found.notes:
        yield warning("NVIDIA driver", note, "nvidia-smi shows whether it works; a reboot loads it anew")
    if not found.gpus:
        yield ok("GPUs", "none that NVIDIA's driver knows: runs train on the CPU, `make plan GPU=H100` plans for one")
        return
    driver = state(found.gpus) if driver is None else driver
    if driver.version:
        yield ok("NVIDIA driver", f"{driver.version}, for CUDA up to {driver.cuda}" if driver.cuda else driver.version)
    for gpu in found.gpus:
        name, free = f"GPU {gpu.index}", driver.free_mib.get(gpu.uuid)
        if free is None:
            yield ok(name, f"{gpu.name}, {gpu.memory_total:,} MiB")
            continue
        said = f"{gpu.name}, {free:,} of {gpu.memory_total:,} MiB free"
        if gpu.memory_total - free > BUSY * gpu.memory_total:
            yield warning(name, said, "nvidia-smi tells who holds the rest; GPUS=<others> leaves this one out")
        else:
            yield ok(name, said)
