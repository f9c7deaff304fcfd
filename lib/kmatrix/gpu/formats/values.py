"""One GPU at one moment, all GPUs at one moment, and the two JSON layouts and the CSV that show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

SIMULATED = "(simulated)"  # the names of simulated GPUs end so
CSV_FIELDS = (("power_w", "power"), ("temp_c", "temperature"))  # the columns of a GPU, and what they show


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU, or one rank of a run on the CPU, at one moment. None: not known, never 0.

    utilization: percent of the last sample period; of a rank: of all processors that it may use.
    memory_used, memory_total: MiB.  memory_percent: their ratio, filled in where both are known.
    power: watts, the average that the driver gives.  power_instant: watts.  power_limit: watts.
    temperature: degrees Celsius.  sm_clock: MHz.  energy_j: joules, a counter that only grows.
    extra: names and values of what is asked once a second and known, such as fan and pcie_tx.
    """

    gpu_index: int
    gpu_name: str
    uuid: str = ""
    utilization: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    memory_percent: float | None = None
    power: float | None = None
    power_instant: float | None = None
    power_limit: float | None = None
    temperature: float | None = None
    sm_clock: float | None = None
    energy_j: float | None = None
    extra: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.memory_percent is None and self.memory_used is not None and self.memory_total:
            object.__setattr__(self, "memory_percent", 100.0 * self.memory_used / self.memory_total)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured: a lost GPU has a sample in which nothing is known."""
        measured = (self.utilization, self.memory_used, self.power, self.temperature, self.sm_clock, self.energy_j)
        return any(value is not None for value in measured)

    @property
    def simulated(self) -> bool:
        return self.gpu_name.endswith(SIMULATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All GPUs at one moment. time: Unix seconds.  monotonic: seconds; None where a file did not keep it."""

    time: float
    samples: tuple[GpuSample, ...]
    monotonic: float | None = None

    @property
    def simulated(self) -> bool:
        return any(sample.simulated for sample in self.samples)


def legacy(sample: GpuSample, time: float) -> dict[str, Any]:
    """Return one GPU at one moment in the layout for a single GPU."""
    return {"timestamp": timestamp(time), **_gpu(sample)}


def multi(snapshot: Snapshot) -> dict[str, Any]:
    """Return all GPUs at one moment in the layout for several GPUs."""
    entry: dict[str, Any] = {
        "timestamp": timestamp(snapshot.time),
        "multi_gpu_data": [_gpu(sample) for sample in snapshot.samples],
        "aggregate_stats": aggregate(snapshot.samples),
    }
    if snapshot.simulated:
        entry["simulated"] = True
    return entry


def aggregate(samples: Sequence[GpuSample]) -> dict[str, Any]:
    """Return totals over the GPUs of which something is known; null where nothing is.

    Used and total memory, and their ratio, are of the GPUs of which both are known.
    """
    alive = [sample for sample in samples if sample.is_known]
    both = [(s.memory_used, s.memory_total) for s in alive if s.memory_used is not None and s.memory_total is not None]
    used, total = (_total(pair[side] for pair in both) for side in (0, 1))
    utilization = _known(sample.utilization for sample in alive)
    return {
        "total_memory_used": finite(used),
        "total_memory_total": finite(total),
        "total_memory_percent": finite(100.0 * used / total if used is not None and total else None),
        "average_utilization": finite(sum(utilization) / len(utilization) if utilization else None),
        "total_power": finite(_total(sample.power for sample in alive)),
        "max_temperature": finite(max(_known(sample.temperature for sample in alive), default=None)),
        "gpu_count": len(alive),
    }


def csv_header(gpus: Iterable[int]) -> list[str]:
    """Return the names of the columns for GPUs with these indices."""
    return ["timestamp", "elapsed_sec", *(f"gpu{index}_{name}" for index in gpus for name, _ in CSV_FIELDS)]


def csv_row(snapshot: Snapshot, started: float) -> list[str]:
    """Return one line of the CSV: times to the millisecond; what is not known is empty. started: Unix seconds."""
    row = [timestamp(snapshot.time, "milliseconds"), f"{snapshot.time - started:.3f}"]
    for sample in snapshot.samples:
        for _, field in CSV_FIELDS:
            value = getattr(sample, field)
            row.append("" if finite(value) is None else f"{value:.3f}".rstrip("0").rstrip("."))
    return row


def timestamp(time: float, precision: str = "microseconds") -> str:
    """Return Unix seconds as ISO 8601, in UTC with the offset written out."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec=precision)


def finite(value: float | None) -> float | None:
    """Return a number that JSON can hold, to the third decimal; None for none, infinite or not a number.

    Whole numbers are integers, as the original project writes them.
    """
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else round(value, 3)


def _gpu(sample: GpuSample) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "gpu_index": sample.gpu_index,
        "gpu_name": sample.gpu_name,
        "utilization": finite(sample.utilization),
        "memory_used": finite(sample.memory_used),
        "memory_total": finite(sample.memory_total),
        "power": finite(sample.power),
        "memory_percent": finite(sample.memory_percent),
        "temperature": finite(sample.temperature),
        "power_instant": finite(sample.power_instant),
        "power_limit": finite(sample.power_limit),
        "sm_clock": finite(sample.sm_clock),
        "energy_j": finite(sample.energy_j),
        "uuid": sample.uuid,
    }
    entry.update((name, finite(value)) for name, value in sample.extra)
    if sample.simulated:
        entry["simulated"] = True
    return entry


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _total(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None
