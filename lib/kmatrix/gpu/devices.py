"""The device interface of the recorder: GPUs through their driver, or the ranks of a run on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Protocol

from kmatrix.gpu.formats.binary import COLUMNS
from kmatrix.gpu.formats.samples import GpuSample, Snapshot

WIDTH = len(COLUMNS)  # values per device in a flat list of samples
COLUMN_INDEX = {name: position for position, name in enumerate(COLUMNS)}
UNKNOWN = math.nan  # not None: samples are packed as floats, and a NaN stays unknown in every sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a recording."""

    gpu_index: int  # NVML's index, or the rank on the CPU
    gpu_name: str
    uuid: str  # empty if unknown
    rank: int | None = None  # rank of the run that uses the device, None if unknown
    memory_total: float | None = None  # MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """The limits of a device, sampled once per second."""

    power_limit: float | None = None  # W
    throttled: frozenset[str] = frozenset()  # reasons that reduce the clocks now


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraMetrics:
    """Metrics that are expensive to read and change slowly. None: unknown.

    The last three come from NVML's GPU performance monitoring (GPM, Hopper and newer).
    """

    fan: float | None = None  # percent
    memory_temperature: float | None = None  # degrees Celsius, of memory next to the GPU (HBM)
    pcie_tx: float | None = None  # MiB/s
    pcie_rx: float | None = None  # MiB/s
    nvlink_tx: float | None = None  # MiB/s over all links
    nvlink_rx: float | None = None  # MiB/s over all links
    ecc_uncorrected: int | None = None  # memory errors since the driver was loaded
    xid: int | None = None  # code of the newest XID error since the driver was opened, 0: none
    xids: int | None = None  # number of XID errors since the driver was opened
    xid_counts: Mapping[int, int] = field(default_factory=dict)  # code -> number of those, the newest code last
    sm_active: float | None = None  # percent, mean since the previous read, as the next two
    tensor_active: float | None = None
    dram_active: float | None = None

    def known(self) -> tuple[tuple[str, float], ...]:
        """Return the names and values of the known metrics."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        return tuple((name, value) for name, value in values if isinstance(value, int | float))


EXTRA_NAMES = tuple(one.name for one in fields(ExtraMetrics) if one.name != "xid_counts")  # those that are numbers
# Averaged over the recording. The others are counters or states, of which a mean says nothing.
EXTRA_METRICS = (
    *("fan", "memory_temperature", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx"),
    *("sm_active", "tensor_active", "dram_active"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process that uses a GPU."""

    pid: int
    memory_mib: float | None  # MiB, None if the driver does not report it
    kind: str = "C"  # C: compute, G: graphics, X: both


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """The use of a GPU by one process, in percent of the last sample period."""

    sm: float
    memory: float  # of the bandwidth


class DeviceSource(Protocol):
    """A source of samples for one type of device. A device keeps its position, even while it is lost."""

    device_type: ClassVar[str]  # nvidia or cpu
    devices: tuple[Device, ...]

    @property
    def energy_source(self) -> str | None:
        """The source of energy values: counter, or power (integrated); None without both."""

    def read(self, values: list[float]) -> None:
        """Read COLUMNS of all devices into `values`, one device after the other. NaN: unknown."""

    def read_timed(self, device: int) -> Mapping[str, tuple[float, float]]:
        """Read one device. Return column -> (value, duration of the call in s)."""

    def limits(self, device: int) -> DeviceLimits: ...

    def extra_metrics(self, device: int) -> ExtraMetrics:
        """Read the expensive metrics. Called from a separate thread, because a call may take 20 ms."""

    def processes(self, device: int) -> tuple[DeviceProcess, ...]:
        """Return the processes on a device, empty if unknown."""

    def process_shares(self, device: int) -> Mapping[int, ProcessShare]:
        """Return pid -> use of a device, as far as the driver reports it."""

    def is_lost(self, device: int) -> bool:
        """Return whether a device has to be reopened."""

    def failure(self, device: int) -> str:
        """Return the last error of a device of which every query failed, empty if there is none."""

    def recover(self, device: int) -> bool:
        """Try to reopen a lost device, and read its facts, which `devices` then has. Return whether it answers."""

    def close(self) -> None: ...


def snapshot(
    devices: Sequence[Device],
    values: Sequence[float],
    limits: Sequence[DeviceLimits],
    time: float,
    extra: Sequence[ExtraMetrics] = (),
) -> Snapshot:
    """Return raw values as a snapshot. `limits`, `extra`: one per device. `time`: Unix s."""
    samples = []
    for position, device in enumerate(devices):
        known = {
            name: None if math.isnan(value := values[position * WIDTH + at]) else value
            for name, at in COLUMN_INDEX.items()
        }
        # Field by field, not **known: the type checker then finds a column that has no field.
        samples.append(
            GpuSample(
                gpu_index=device.gpu_index,
                gpu_name=device.gpu_name,
                uuid=device.uuid,
                memory_total=device.memory_total,
                power_limit=limits[position].power_limit,
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
