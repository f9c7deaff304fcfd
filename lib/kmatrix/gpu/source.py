"""What a recorder asks of a kind of device: GPUs through their driver, or the ranks of a run on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

from kmatrix.gpu.formats import COLUMNS, GpuSample, Snapshot

WIDTH = len(COLUMNS)
AT = {name: position for position, name in enumerate(COLUMNS)}
UNKNOWN = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a recording. memory_total: MiB.  rank: of the run, where it is known."""

    gpu_index: int
    gpu_name: str
    uuid: str
    rank: int | None = None
    memory_total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """What changes rarely. throttled: why the clocks are held down now.  power_limit: watts."""

    power_limit: float | None = None
    throttled: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What costs more and changes slowly; None is unknown. fan: percent.  pcie_tx, pcie_rx: MiB/s.

    ecc_corrected, ecc_uncorrected: errors of memory since the driver was loaded.
    sm_active, sm_occupancy, tensor_active, dram_active: percent, means since the look before (NVML's GPM, from
    Hopper on).
    """

    fan: float | None = None
    pcie_tx: float | None = None
    pcie_rx: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None

    def known(self) -> tuple[tuple[str, float], ...]:
        """Return names and values of what is known."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        return tuple((name, value) for name, value in values if value is not None)


EXTRAS = tuple(one.name for one in fields(Extra) if not one.name.startswith("ecc_"))  # of which there are means


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process on a GPU. memory_mib: None where the driver does not say."""

    pid: int
    memory_mib: float | None


class Source(Protocol):
    """One kind of device. A device keeps its position for the whole recording, also when it is lost."""

    device_type: ClassVar[str]  # nvidia, amd or cpu
    devices: tuple[Device, ...]

    @property
    def energy_source(self) -> str | None:
        """Return where joules come from: counter, power (summed up) or rapl."""

    def read(self, values: list[float]) -> None:
        """Fill in COLUMNS of each device, one device after the other; NaN: not known."""

    def timed(self, device: int) -> Mapping[str, tuple[float, float]]:
        """Read one device; return column -> (value, seconds that the call took)."""

    def slow(self, device: int) -> Slow: ...

    def extra(self, device: int) -> Extra:
        """Ask what costs more. Called from a thread of its own: a call may take 20 ms, in which samples go on."""

    def processes(self, device: int) -> tuple[Process, ...]:
        """Return the processes on a device; nothing where that is not known."""

    def is_lost(self, device: int) -> bool: ...

    def recover(self, device: int) -> bool:
        """Look for a lost device again; return whether it answers."""

    def host_joules(self) -> float | None:
        """Return a counter of joules of the whole machine, for devices that have none of their own."""

    def close(self) -> None: ...


def snapshot(
    devices: Sequence[Device],
    values: Sequence[float],
    slow: Sequence[Slow],
    time: float,
    extra: Sequence[Extra] = (),
) -> Snapshot:
    """Return what was read as a value. slow, extra: for each device. time: Unix seconds."""
    samples = []
    for position, device in enumerate(devices):
        known = {name: None if math.isnan(value := values[position * WIDTH + at]) else value for name, at in AT.items()}
        samples.append(
            GpuSample(
                gpu_index=device.gpu_index,
                gpu_name=device.gpu_name,
                uuid=device.uuid,
                memory_total=device.memory_total,
                power_limit=slow[position].power_limit,
                utilization=known["utilization"],
                memory_used=known["memory_used"],
                power=known["power"],
                power_instant=known["power_instant"],
                temperature=known["temperature"],
                sm_clock=known["sm_clock"],
                energy_j=known["energy_j"],
                extra=extra[position].known() if extra else (),
            )
        )
    return Snapshot(time=time, samples=tuple(samples))
