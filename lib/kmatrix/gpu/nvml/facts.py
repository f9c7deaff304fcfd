"""What does not change while a monitor runs: settings of each GPU, and versions of the driver.

Names and layouts: NVML API reference, nvml.h.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from kmatrix.gpu.nvml.detect import decoded
from kmatrix.gpu.nvml.source import NvmlSource

COMPUTE_MODES = ("Default", "Exclusive Thread", "Prohibited", "Exclusive Process")  # nvmlComputeMode_t, by its value


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Settings of a GPU. None: unknown, or the GPU has no such setting."""

    bus_id: str | None = None  # PCI: domain:bus:device.function
    persistence: bool | None = None
    display: bool | None = None  # a display is active
    compute_mode: str | None = None


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
    return DeviceFacts(
        bus_id=None if bus is None else decoded(bus.busId),
        persistence=None if persistence is None else bool(persistence),
        display=None if display is None else bool(display),
        compute_mode=COMPUTE_MODES[mode] if mode is not None and 0 <= mode < len(COMPUTE_MODES) else None,
    )
