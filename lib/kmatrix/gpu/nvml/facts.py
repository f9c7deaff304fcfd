"""What does not change while a monitor runs: settings of each GPU, and versions of the driver.

Names and layouts: NVML API reference, nvml.h.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from kmatrix.gpu.nvml.detect import MIB, decoded
from kmatrix.gpu.nvml.source import NvmlSource

COMPUTE_MODES = ("Default", "Exclusive Thread", "Prohibited", "Exclusive Process")  # nvmlComputeMode_t, by its value


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """A slice of a GPU (MIG)."""

    uuid: str
    name: str  # with the profile, such as "NVIDIA H100 MIG 1g.10gb"
    instance: int | None  # number of the GPU instance
    memory_used: float | None  # MiB
    memory_total: float | None  # MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Settings of a GPU. None: unknown, or the GPU has no such setting."""

    bus_id: str | None = None  # PCI: domain:bus:device.function
    persistence: bool | None = None
    display: bool | None = None  # a display is active
    compute_mode: str | None = None
    mig: bool | None = None  # the GPU is divided into instances
    instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """Versions. None: unknown."""

    version: str | None = None
    cuda: str | None = None  # the newest version that the driver supports


def driver_facts(source: NvmlSource) -> DriverFacts:
    """Return the versions of the driver."""
    pynvml, _ = source.opened(0)
    version = cuda = None
    with contextlib.suppress(pynvml.NVMLError):
        version = decoded(pynvml.nvmlSystemGetDriverVersion())
    with contextlib.suppress(pynvml.NVMLError):
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040: CUDA 12.4
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    return DriverFacts(version=version, cuda=cuda)


def device_facts(source: NvmlSource, device: int) -> DeviceFacts:
    """Return the settings of a GPU, none of one that does not answer."""
    pynvml, handle = source.opened(device)
    if handle is None:
        return DeviceFacts()

    def ask(name: str) -> Any:
        try:
            return getattr(pynvml, name)(handle)
        except (pynvml.NVMLError, AttributeError):
            return None

    bus, mode = ask("nvmlDeviceGetPciInfo"), ask("nvmlDeviceGetComputeMode")
    persistence, display = ask("nvmlDeviceGetPersistenceMode"), ask("nvmlDeviceGetDisplayActive")
    mig = ask("nvmlDeviceGetMigMode")  # now and after the next reset
    divided = None if mig is None else bool(mig[0])
    return DeviceFacts(
        bus_id=None if bus is None else decoded(bus.busId),
        persistence=None if persistence is None else bool(persistence),
        display=None if display is None else bool(display),
        compute_mode=COMPUTE_MODES[mode] if mode is not None and 0 <= mode < len(COMPUTE_MODES) else None,
        mig=divided,
        instances=mig_instances(source, device),
    )


def mig_instances(source: NvmlSource, device: int) -> tuple[MigInstance, ...]:
    """Return the MIG instances of a GPU with their memory, none of one that is not divided or does not answer."""
    pynvml, handle = source.opened(device)
    if handle is None or not source.devices[device].slices:
        return ()
    found = []
    try:
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return ()
    for number in range(count):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            uuid, name = decoded(pynvml.nvmlDeviceGetUUID(part)), decoded(pynvml.nvmlDeviceGetName(part))
        except pynvml.NVMLError:
            continue
        instance = used = total = None
        with contextlib.suppress(pynvml.NVMLError):
            instance = int(pynvml.nvmlDeviceGetGpuInstanceId(part))
        with contextlib.suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(part)
            used, total = memory.used / MIB, memory.total / MIB
        found.append(MigInstance(uuid=uuid, name=name, instance=instance, memory_used=used, memory_total=total))
    return tuple(found)
