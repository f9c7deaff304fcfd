"""The values that the screen shows: the newest sample, the history of the last minute, and the view of both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

from kmatrix.gpu.balance import Balance, balance_of
from kmatrix.gpu.formats.samples import GpuSample, Snapshot
from kmatrix.status.alerts import Alert, Thresholds

SPAN_S = 120.0  # length of the history on the screen
SPARKS = 12  # cells of the history in the table, of 10 s each: a change every 10 s keeps the traffic of a screen low


class Metric(StrEnum):
    """The metrics that can be charted. The value is the name on the screen."""

    UTILIZATION = "utilization"
    MEMORY = "memory"
    POWER = "power"
    TEMPERATURE = "temperature"
    CLOCK = "SM clock"


UNITS = {
    Metric.UTILIZATION: "%",
    Metric.MEMORY: "MiB",
    Metric.POWER: "W",
    Metric.TEMPERATURE: "C",
    Metric.CLOCK: "MHz",
}


FIELDS = {
    Metric.UTILIZATION: "utilization",
    Metric.MEMORY: "memory_used",
    Metric.POWER: "power",
    Metric.TEMPERATURE: "temperature",
    Metric.CLOCK: "sm_clock",
}


ORDER = {metric: place for place, metric in enumerate(FIELDS)}
VALUES = attrgetter(*FIELDS.values())  # all at once, in C: called for each GPU at each sample


# Values of which a responding GPU changes some at every sample: their age shows a driver that hangs.
MEASURED = attrgetter(*FIELDS.values(), "power_instant", "energy_j")


def value_of(sample: GpuSample, metric: Metric) -> float | None:
    """Return the value of a metric of one GPU, in UNITS[metric]."""
    value: float | None = getattr(sample, FIELDS[metric])
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """A process on a GPU. Unknown values are None."""

    gpu_index: int
    pid: int
    kind: str = "C"  # C: compute, G: graphics, X: both
    memory_mib: float | None = None  # MiB on the GPU
    sm: float | None = None  # percent of the multiprocessors
    bandwidth: float | None = None  # percent of the memory bandwidth
    user: str | None = None
    host_mib: float | None = None  # MiB of the machine's memory
    host_percent: float | None = None  # the same, percent of all
    cpu: float | None = None  # percent of one core
    seconds: float | None = None  # since its start
    command: str = ""
    run: str = ""  # name of the run that it is a rank of
    rank: int | None = None
    run_path: Path | None = None
    visible: bool = True  # False: not in this container, so only the driver knows it


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """The machine. Unknown values are None."""

    cpu: float  # percent of all cores
    memory_used: float | None  # MiB
    memory_total: float  # MiB
    load: tuple[float, float, float] | None  # mean number of runnable processes in 1, 5 and 15 min


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """How far a run is. Unknown values are None."""

    name: str
    step: int | None = None
    max_iters: int | None = None
    loss: float | None = None  # nats/token
    tokens_per_second: float | None = None
    mfu: float | None = None  # percent
    left_s: float | None = None
    kwh: float | None = None  # so far


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenSample:
    """One sample of all GPUs, with their events, ranks and runs. Keys are GPU indices; absent GPUs are unknown."""

    snapshot: Snapshot
    throttle: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # active throttle reasons
    xids: Mapping[int, Mapping[int, int]] = field(default_factory=dict)  # code -> number of XID errors until now
    ranks: Mapping[int, int] = field(default_factory=dict)  # rank on the GPU
    runs: Mapping[int, str] = field(default_factory=dict)  # name of the run on the GPU
    processes: tuple[ProcessRow, ...] | None = None  # None: not known in this mode
    host: HostState | None = None
    progress: tuple[RunLine, ...] = ()  # of the runs on these GPUs
    simulated: bool = False  # the driver is simulated; otherwise the names of simulated GPUs show it
    driver_version: str | None = None
    cuda_version: str | None = None  # the newest that the driver supports

    @property
    def driver(self) -> str:
        """The versions as text, empty without a driver."""
        parts = (("driver", self.driver_version), ("CUDA", self.cuda_version))
        return "  ".join(f"{name} {version}" for name, version in parts if version)

    def of(self, gpus: frozenset[int] | None) -> ScreenSample:
        """Return the sample restricted to these GPU indices; None: all."""
        if gpus is None:
            return self
        samples = tuple(sample for sample in self.snapshot.samples if sample.gpu_index in gpus)
        processes = self.processes and tuple(row for row in self.processes if row.gpu_index in gpus)
        return replace(self, snapshot=replace(self.snapshot, samples=samples), processes=processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One GPU on the screen."""

    sample: GpuSample
    rank: int | None = None
    run: str = ""  # name of the run, empty if unknown
    throttle: tuple[str, ...] | None = None  # active throttle reasons, None: unknown
    xids: Mapping[int, int] = field(default_factory=dict)  # code -> number of XID errors until now
    age: float | None = None  # s since any value last changed
    missing: str = ""  # why no value is known: "lost", or "not running" for a rank that has not started or has ended
    history: Mapping[Metric, tuple[float | None, ...]] = field(default_factory=dict)  # means per bucket, oldest first
    sparks: tuple[float | None, ...] = ()  # utilization, coarser than in `history`, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The content of one screen."""

    rows: tuple[DeviceRow, ...]
    mode: str  # live, attached, replay or paused
    clock: str  # time of the sample, as text
    title: str = ""
    noun: str = "GPU"  # what a row represents: "GPU" or "rank"
    notices: tuple[str, ...] = ()  # messages to the user
    metric: Metric = Metric.UTILIZATION  # of the charts
    selected: int | None = None  # GPU index
    large: bool = False  # show charts of `metric` instead of the table
    charts: bool = False  # show charts of `metric` below the table
    alerts: tuple[Alert, ...] = ()  # active alerts, critical ones first
    limits: Thresholds = field(default_factory=Thresholds)  # of the alerts, which the colours follow
    host: HostState | None = None
    progress: tuple[RunLine, ...] = ()
    simulated: bool = False  # the driver is simulated, also if no GPU has a name that shows it
    driver: str = ""  # versions
    processes: tuple[ProcessRow, ...] | None = None  # None: not known in this mode
    no_processes: str = ""  # why they are not known
    page: str = ""  # what covers the table: "help" or "alerts"
    page_at: int = 0  # its first line on the screen

    @property
    def position(self) -> int:
        """The index of the selected row, 0 if it is not shown."""
        return next((i for i, row in enumerate(self.rows) if row.sample.gpu_index == self.selected), 0)


def balance(samples: Iterable[GpuSample], metric: Metric) -> Balance | None:
    """Return the balance of a metric over the GPUs that report it; None for fewer than two."""
    values = [value_of(sample, metric) for sample in samples]
    return balance_of([value for value in values if value is not None and math.isfinite(value)])


class History:
    """The last minute of every GPU: means per bucket of `bucket_s` s, and the time of the last change."""

    def __init__(self, bucket_s: float = 1.0) -> None:
        self._bucket_s = bucket_s
        self._buckets: dict[int, deque[_Bucket]] = {}
        self._changed: dict[int, tuple[tuple[float | None, ...], float | None]] = {}
        self._last: float | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Add one snapshot. The history restarts if the clock was set back."""
        if self._last is not None and snapshot.time < self._last - self._bucket_s:
            self.clear()
        self._last = snapshot.time
        # Buckets are aligned to Unix time, so that the charts of all GPUs scroll together.
        number = int(snapshot.time // self._bucket_s)
        for sample in snapshot.samples:
            self._bucket(sample.gpu_index, number).add(sample)
            self._note_change(sample, snapshot.time)

    def clear(self) -> None:
        """Remove all samples."""
        self._buckets.clear()
        self._changed.clear()
        self._last = None

    def age(self, gpu: int, now: float) -> float | None:
        """Return the time since a value of a GPU last changed in s, or None without any value."""
        since = self._changed.get(gpu, ((), None))[1]
        return None if since is None else max(0.0, now - since)

    def series(self, gpu: int, metric: Metric, now: float) -> tuple[float | None, ...]:
        """Return the means per bucket of the minute that ends at `now`, oldest first."""
        known = {bucket.number: bucket.mean(metric) for bucket in self._buckets.get(gpu, ())}
        newest = int(now // self._bucket_s)
        count = max(1, int(SPAN_S / self._bucket_s))
        return tuple(known.get(number) for number in range(newest - count + 1, newest + 1))

    def sparks(self, gpu: int, metric: Metric, now: float) -> tuple[float | None, ...]:
        """Return SPARKS means up to `now`, oldest first. Their borders do not move with the time: only cells change."""
        each = max(1, round(SPAN_S / self._bucket_s / SPARKS))  # buckets
        newest = int(now // self._bucket_s) // each
        groups: dict[int, list[float]] = {}
        for bucket in self._buckets.get(gpu, ()):
            if (value := bucket.mean(metric)) is not None:
                groups.setdefault(bucket.number // each, []).append(value)
        found = (groups.get(number, ()) for number in range(newest - SPARKS + 1, newest + 1))
        return tuple(sum(values) / len(values) if values else None for values in found)

    def _bucket(self, gpu: int, number: int) -> _Bucket:
        buckets = self._buckets.setdefault(gpu, deque(maxlen=int(SPAN_S / self._bucket_s) + 1))
        if not buckets or buckets[-1].number != number:
            buckets.append(_Bucket(number))
        return buckets[-1]

    def _note_change(self, sample: GpuSample, time: float) -> None:
        values = MEASURED(sample)
        before, since = self._changed.get(sample.gpu_index, ((), None))
        if values != before and any(value is not None for value in values):
            since = time
        self._changed[sample.gpu_index] = (values, since)


class _Bucket:
    """Sums of one bucket of one GPU. Sums instead of samples: a minute of 100 Hz on 8 GPUs is 48,000 samples."""

    __slots__ = ("_counts", "_sums", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._sums = [0.0] * len(FIELDS)
        self._counts = [0] * len(FIELDS)

    def add(self, sample: GpuSample) -> None:
        for place, value in enumerate(VALUES(sample)):
            if value is not None:
                self._sums[place] += value
                self._counts[place] += 1

    def mean(self, metric: Metric) -> float | None:
        place = ORDER[metric]
        return self._sums[place] / self._counts[place] if self._counts[place] else None


def rows_of(sample: ScreenSample, history: History, now: float) -> tuple[DeviceRow, ...]:
    """Join a sample with its history. `now`: Unix s, the time that the screen shows."""
    return tuple(
        DeviceRow(
            sample=gpu,
            rank=sample.ranks.get(gpu.gpu_index),
            run=sample.runs.get(gpu.gpu_index, ""),
            throttle=sample.throttle.get(gpu.gpu_index),
            xids=sample.xids.get(gpu.gpu_index, {}),
            age=history.age(gpu.gpu_index, now),
            missing=_missing(gpu, sample.throttle),
            sparks=history.sparks(gpu.gpu_index, Metric.UTILIZATION, now),
            history={metric: history.series(gpu.gpu_index, metric, now) for metric in Metric},
        )
        for gpu in sample.snapshot.samples
    )


def _missing(gpu: GpuSample, throttle: Mapping[int, tuple[str, ...]]) -> str:
    """Return why no value of a GPU or rank is known. `throttle`: of a recording, has no entry of a lost one."""
    if gpu.is_known:
        return ""
    # The ranks of a run exit at its end. Only the recorder knows that one exited while others continued.
    is_lost = not gpu.is_rank or (bool(throttle) and gpu.gpu_index not in throttle)
    return "lost" if is_lost else "not running"
