"""Samples of one GPU and of all GPUs, and their two JSON layouts and CSV layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict

from kmatrix.records.files import finite

SIMULATED = "(simulated)"  # suffix of the names of simulated GPUs
RANK_UUID = "cpu-rank-"  # prefix of the `uuid` of a rank on the CPU
CsvFields = tuple[tuple[str, str], ...]
CSV_FIELDS: CsvFields = (("power_w", "power"), ("temp_c", "temperature"))  # column suffix, field
CSV_SIMULATED = "simulated"  # last column of tables of simulated GPUs
LIVE_FIELDS: CsvFields = (  # of `gputop --csv`
    *CSV_FIELDS,
    *(("util_pct", "utilization"), ("mem_used_mb", "memory_used"), ("sm_clock_mhz", "sm_clock")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One sample of a GPU, or of a rank of a run on the CPU. None: unknown, never 0."""

    gpu_index: int
    gpu_name: str
    uuid: str = ""
    utilization: float | None = None  # percent of the driver's last sample period; of a rank: percent of one core
    memory_used: float | None = None  # MiB
    memory_total: float | None = None  # MiB
    memory_percent: float | None = None  # percent, computed from the two above if not given
    power: float | None = None  # W, the driver's average
    power_instant: float | None = None  # W
    power_limit: float | None = None  # W
    temperature: float | None = None  # degrees Celsius
    sm_clock: float | None = None  # MHz
    energy_j: float | None = None  # J, a monotonic counter
    extra: tuple[tuple[str, float], ...] = ()  # name, value of the known ExtraMetrics

    def __post_init__(self) -> None:
        if self.memory_percent is None and self.memory_used is not None and self.memory_total:
            # The only way to set a derived field of a frozen dataclass.
            object.__setattr__(self, "memory_percent", 100.0 * self.memory_used / self.memory_total)

    @property
    def is_known(self) -> bool:
        """True if any value was measured: all values of a lost GPU are unknown."""
        measured = (self.utilization, self.memory_used, self.power, self.temperature, self.sm_clock, self.energy_j)
        return any(value is not None for value in measured)

    @property
    def simulated(self) -> bool:
        return self.gpu_name.endswith(SIMULATED)

    @property
    def is_rank(self) -> bool:
        """True for a rank on the CPU: its total memory is that of the host, which all ranks share."""
        return self.uuid.startswith(RANK_UUID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One sample of all GPUs."""

    time: float  # Unix s
    samples: tuple[GpuSample, ...]
    monotonic: float | None = None  # s; None if the file does not contain it

    @property
    def simulated(self) -> bool:
        return any(sample.simulated for sample in self.samples)


class AggregateStats(TypedDict):
    """The totals in `aggregate_stats` of gpu_stats_<run>_multi_gpu.json. None: unknown."""

    total_memory_used: float | None  # MiB
    total_memory_total: float | None  # MiB
    total_memory_percent: float | None  # percent
    average_utilization: float | None  # percent
    total_power: float | None  # W
    max_temperature: float | None  # degrees Celsius
    gpu_count: int  # GPUs with a known value


def legacy(sample: GpuSample, time: float) -> dict[str, Any]:
    """Return a sample in the layout for a single GPU (gpu_stats_<run>.json)."""
    return {"timestamp": timestamp(time), **_gpu(sample)}


def multi(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot in the layout for several GPUs (gpu_stats_<run>_multi_gpu.json)."""
    entry: dict[str, Any] = {
        "timestamp": timestamp(snapshot.time),
        "multi_gpu_data": [_gpu(sample) for sample in snapshot.samples],
        "aggregate_stats": aggregate(snapshot.samples),
    }
    if snapshot.simulated:
        entry["simulated"] = True
    return entry


def aggregate(samples: Sequence[GpuSample]) -> AggregateStats:
    """Return totals over the known GPUs. A total without any known value is None.

    Used memory, total memory and their ratio cover the GPUs for which both are known. The memory of the host, which is
    the total of each rank on the CPU, counts once.
    """
    # A lost GPU is left out, not counted with 0, which would lower every mean.
    alive = [sample for sample in samples if sample.is_known]
    both = [(s.memory_used, s.memory_total) for s in alive if s.memory_used is not None and s.memory_total is not None]
    used, total = (_total(pair[side] for pair in both) for side in (0, 1))
    if any(sample.is_rank for sample in alive):
        total = max((total for _, total in both), default=None)
    utilization = _known(sample.utilization for sample in alive)
    return {
        "total_memory_used": rounded(used),
        "total_memory_total": rounded(total),
        "total_memory_percent": rounded(100.0 * used / total if used is not None and total else None),
        "average_utilization": rounded(sum(utilization) / len(utilization) if utilization else None),
        "total_power": rounded(_total(sample.power for sample in alive)),
        "max_temperature": rounded(max(_known(sample.temperature for sample in alive), default=None)),
        "gpu_count": len(alive),
    }


def csv_header(gpus: Iterable[int], fields: CsvFields = CSV_FIELDS, *, simulated: bool = False) -> list[str]:
    """Return the column names for GPUs with these indices; tables of simulated GPUs have a column that says so."""
    columns = (f"gpu{index}_{name}" for index in gpus for name, _ in fields)
    return ["timestamp", "elapsed_sec", *columns, *([CSV_SIMULATED] if simulated else [])]


def csv_row(
    snapshot: Snapshot, elapsed: float, fields: CsvFields = CSV_FIELDS, *, simulated: bool = False
) -> list[str]:
    """Return one CSV row, with times in ms resolution and empty cells for unknown values. `elapsed`: s."""
    row = [timestamp(snapshot.time, "milliseconds"), f"{elapsed:.3f}"]
    for sample in snapshot.samples:
        for _, field in fields:
            value = getattr(sample, field)
            row.append("" if rounded(value) is None else f"{value:.3f}".rstrip("0").rstrip("."))
    return [*row, "1"] if simulated else row


def timestamp(time: float, precision: str = "microseconds") -> str:
    """Return a Unix time as ISO 8601 in UTC, with its offset."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec=precision)


def time_of(value: Any) -> float | None:
    """Return Unix s from ISO 8601 (local time without an offset) or from a number, also as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
        try:
            return datetime.fromisoformat(value.strip()).timestamp()
        except (ValueError, OverflowError, OSError):  # OverflowError, OSError: a year outside the system's range
            return None
    return finite(value)


def rounded(value: float | None) -> float | None:
    """Return a number rounded to three decimals, as JSON can hold it, or None if it is missing or not finite.

    Integral values are written as integers, as the original project does.
    """
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else round(value, 3)


def _gpu(sample: GpuSample) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "gpu_index": sample.gpu_index,
        "gpu_name": sample.gpu_name,
        "utilization": rounded(sample.utilization),
        "memory_used": rounded(sample.memory_used),
        "memory_total": rounded(sample.memory_total),
        "power": rounded(sample.power),
        "memory_percent": rounded(sample.memory_percent),
        "temperature": rounded(sample.temperature),
        "power_instant": rounded(sample.power_instant),
        "power_limit": rounded(sample.power_limit),
        "sm_clock": rounded(sample.sm_clock),
        "energy_j": rounded(sample.energy_j),
        "uuid": sample.uuid,
    }
    entry.update((name, rounded(value)) for name, value in sample.extra)
    if sample.simulated:
        entry["simulated"] = True
    return entry


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _total(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None
