"""What the screen shows, as values: one moment of all GPUs, the last minute, and the view of both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter

from kmatrix.alerts import Alert
from kmatrix.gpu.formats import GpuSample, Snapshot
from kmatrix.stats import balance_quality, coefficient_of_variation

SPAN_S = 60.0  # how much of the past the screen shows


class Metric(StrEnum):
    """What can be drawn large; the value is its name on the screen."""

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
VALUES = attrgetter(*FIELDS.values())
MEASURED = attrgetter(*FIELDS.values(), "power_instant", "energy_j")  # what a GPU that lives tells at every moment


def value_of(sample: GpuSample, metric: Metric) -> float | None:
    """Return what one GPU says of a metric, in UNITS[metric]."""
    value: float | None = getattr(sample, FIELDS[metric])
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All GPUs at one moment, and what is known about them besides.

    throttle: GPU index -> reasons in force; a GPU that is absent does not say.  ranks: GPU index -> rank.
    runs: GPU index -> name of the run that has it.
    """

    snapshot: Snapshot
    throttle: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    runs: Mapping[int, str] = field(default_factory=dict)

    def of(self, gpus: frozenset[int] | None) -> Moment:
        """Return the moment with these GPU indices alone; None: all."""
        if gpus is None:
            return self
        samples = tuple(sample for sample in self.snapshot.samples if sample.gpu_index in gpus)
        return replace(self, snapshot=replace(self.snapshot, samples=samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One GPU on the screen.

    throttle: reasons in force, None where it does not say.  age: seconds since a value of it last changed.
    history: metric -> means of the last minute, the oldest first, None where nothing was measured.
    """

    sample: GpuSample
    rank: int | None = None
    run: str = ""
    throttle: tuple[str, ...] | None = None
    age: float | None = None
    history: Mapping[Metric, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that one screen shows.

    mode: "live", "attached", "replay", "paused".  clock: what stands for the time.  noun: what a row stands for,
    "GPU" or "rank".  selected: a GPU index.  large: whether the charts of `metric` take the place of the table.
    alerts: what is wrong now, the critical first.
    """

    rows: tuple[Row, ...]
    mode: str
    clock: str
    title: str = ""
    noun: str = "GPU"
    notices: tuple[str, ...] = ()
    metric: Metric = Metric.UTILIZATION
    selected: int | None = None
    large: bool = False
    alerts: tuple[Alert, ...] = ()

    @property
    def position(self) -> int:
        """The place of the selected GPU among the rows, 0 where it is not among them."""
        return next((i for i, row in enumerate(self.rows) if row.sample.gpu_index == self.selected), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly the GPUs share something. cv: percent.  Both are None with fewer than two GPUs that say it."""

    cv: float | None
    quality: str | None


def balance(samples: Iterable[GpuSample], metric: Metric) -> Balance:
    """Return the balance of a metric over the GPUs that say it."""
    told = (value_of(sample, metric) for sample in samples)
    values = [value for value in told if value is not None and math.isfinite(value)]
    if len(values) < 2:
        return Balance(cv=None, quality=None)
    cv = coefficient_of_variation(values)
    return Balance(cv=cv, quality=balance_quality(cv))


class History:
    """The last minute of every GPU: means of buckets of `bucket_s` seconds, and when a value last changed."""

    def __init__(self, bucket_s: float = 1.0) -> None:
        self._bucket_s = bucket_s
        self._buckets: dict[int, deque[_Bucket]] = {}
        self._changed: dict[int, tuple[tuple[float | None, ...], float | None]] = {}
        self._last: float | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Take in one moment. A clock that was set back starts the minute anew."""
        if self._last is not None and snapshot.time < self._last - self._bucket_s:
            self.clear()
        self._last = snapshot.time
        number = int(snapshot.time // self._bucket_s)
        for sample in snapshot.samples:
            self._bucket(sample.gpu_index, number).add(sample)
            self._note_change(sample, snapshot.time)

    def clear(self) -> None:
        """Forget everything."""
        self._buckets.clear()
        self._changed.clear()
        self._last = None

    def age(self, gpu: int, now: float) -> float | None:
        """Return for how many seconds no value of a GPU has changed; None where it never told one."""
        since = self._changed.get(gpu, ((), None))[1]
        return None if since is None else max(0.0, now - since)

    def series(self, gpu: int, metric: Metric, now: float) -> tuple[float | None, ...]:
        """Return the means of the minute that ends at `now`, the oldest first."""
        known = {bucket.number: bucket.mean(metric) for bucket in self._buckets.get(gpu, ())}
        newest = int(now // self._bucket_s)
        count = max(1, int(SPAN_S / self._bucket_s))
        return tuple(known.get(number) for number in range(newest - count + 1, newest + 1))

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
    """The sums of one bucket of one GPU."""

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


def rows_of(moment: Moment, history: History, now: float) -> tuple[Row, ...]:
    """Join a moment with its last minute. now: Unix seconds of the clock that the screen shows."""
    return tuple(
        Row(
            sample=sample,
            rank=moment.ranks.get(sample.gpu_index),
            run=moment.runs.get(sample.gpu_index, ""),
            throttle=moment.throttle.get(sample.gpu_index),
            age=history.age(sample.gpu_index, now),
            history={metric: history.series(sample.gpu_index, metric, now) for metric in Metric},
        )
        for sample in moment.snapshot.samples
    )
