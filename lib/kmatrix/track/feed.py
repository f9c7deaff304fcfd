"""Read the metrics, device samples and alerts of a run as they are written, each of them once."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.gpu.balance import coefficient_of_variation
from kmatrix.gpu.formats.json_array import ArrayTail
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt
from kmatrix.records.events import EventLine
from kmatrix.records.files import LineTail, finite
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import MetricLine, MetricValues, Status, metric_line_of
from kmatrix.status.alerts import Alert, Severity, one_line, read_alerts
from kmatrix.status.fold import FINISHED, rule_of
from kmatrix.track.tracker import HOSTS, NODES, AlertLevel, DeviceValues, MetricPoint, TrackerAlert

Version = tuple[int, int]  # of a file that is replaced: modification time (ns) and inode
MOST_POINTS = 500  # per batch, so that no request of a tracker is very large


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedBatch:
    """The new data of a run since the last read."""

    config: Mapping[str, str] = field(default_factory=dict)  # nodes and hosts, if they changed
    points: Sequence[MetricPoint] = ()
    devices: Sequence[DeviceValues] = ()  # up to the time of the last point, or all if there is no later point
    alerts: Sequence[TrackedAlert] = ()

    def __bool__(self) -> bool:
        return bool(self.config or self.points or self.devices or self.alerts)


class RunFeed:
    """A cursor over the files of one run. Each tracker has its own cursor, so a slow one does not delay the others."""

    def __init__(self, run: RunDir) -> None:
        self._points = PointTail(run.metrics)
        self._devices = DeviceTail(run.gpu_stats_multi)
        self._alerts = AlertTail(run)
        self._nodes = NodesTail(run)
        self._waiting: list[MetricPoint] = []

    def read(self, *, ended: bool = False) -> FeedBatch:
        """Return the next batch of bounded size, empty if there is nothing new.

        `ended`: the attempt has ended, so the newest step is complete.
        """
        if not self._waiting:
            self._waiting = self._points.read(ended=ended)
        points = self._waiting[:MOST_POINTS]
        devices = self._devices.read(until=points[-1].time if points else math.inf)
        if len(devices) >= MOST_DEVICES:  # more device samples may precede the first point
            points = []
        self._waiting = self._waiting[len(points) :]
        # The nodes last: the trainer writes them before the first of these points.
        alerts = self._alerts.read()
        return FeedBatch(config=self._nodes.read(), points=points, devices=devices, alerts=alerts)


class NodesTail:
    """Read the nodes of a run over several nodes, which all have told their hosts before the first line of metrics."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.path
        self._number = 0  # of the attempt that was read
        self._known: dict[str, str] = {}

    def read(self) -> dict[str, str]:
        """Return the number of nodes and their hosts, that of rank 0 first; {} if they did not change, or for one."""
        newest = max(attempts.numbers(self._path), default=0)
        if newest == self._number:
            return {}
        try:
            attempt = attempts.read(self._path, newest)
            nodes = attempt.nodes if attempt else 1
            hosts = dict.fromkeys(attempts.host_of(self._path, node) for node in range(nodes))
        except (OSError, RecordError):
            return {}
        found = {NODES: str(nodes), HOSTS: ", ".join(hosts)}
        self._number = newest
        if nodes < 2 or found == self._known:
            return {}
        self._known = found
        return found


class PointTail:
    """Read metrics.jsonl as points. The lines of one step form one point.

    It is complete when a later step begins, or when it has the training loss and no line follows yet: the trainer
    evaluates the weights of a step before it trains with them.
    Steps that a resumed attempt repeats are dropped if they were not yet read. Points that were already returned stay,
    because a tracker cannot delete them.
    """

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path, MetricValues)
        # Known before the first line is returned: a tracker cannot delete a step.
        self._void = _resumes(path)
        self._open: MetricLine | None = None  # the merged lines of the newest step

    def read(self, *, ended: bool = False) -> list[MetricPoint]:
        """Return the complete points. `ended`: the newest step is complete as well."""
        found: list[MetricPoint] = []
        # A chunk may complete no point: then the next one is read, because an empty result means the end.
        while not found and (lines := self._tail.read()):
            for offset, values in lines:
                line = metric_line_of(values)
                if line is not None and not self._is_void(offset, line.step):
                    found += self._merge(line)
        # Not while lines follow: a later attempt may have repeated this step.
        if not found and self._open is not None and (ended or LOSSES[0] in self._open.values):
            found, self._open = _point(self._open), None
        return found

    def _is_void(self, offset: int, step: int) -> bool:
        return any(offset < later and step > resumed for later, resumed in self._void)

    def _merge(self, line: MetricLine) -> list[MetricPoint]:
        """Merge a line into the open step. Return the point that this line completes, if any."""
        before = self._open
        if line.resumed:
            if before is not None and before.step > line.step:
                self._open = None
            return []
        if before is not None and before.step == line.step:
            self._open = before.merged(line)
            return []
        self._open = line
        return [] if before is None else _point(before)


def _resumes(path: Path) -> list[tuple[int, int]]:
    """Return the byte offset and the step of each line that resumes an earlier attempt."""
    tail, found = LineTail(path, MetricValues), []
    while lines := tail.read():
        for at, values in lines:
            line = metric_line_of(values)
            if line is not None and line.resumed:
                found.append((at, line.step))
    return found


LOSSES = ("train/loss", "val/loss")  # first: some pages show the keys in the order in which they arrive


def _point(line: MetricLine) -> list[MetricPoint]:
    """Return the point of a merged line, or an empty list if it has no time or no metrics."""
    known = {key: value for key, value in line.values.items() if value is not None}
    values = {key: known[key] for key in LOSSES if key in known} | known
    return [MetricPoint(step=line.step, time=line.time, values=values)] if values and line.time is not None else []


EVENTS = {  # events of the trainer that are alerts, in addition to those of the rules
    "checkpoint failed": AlertLevel.ERROR,
    "checkpoint left out": AlertLevel.WARN,
    "checkpoint refused": AlertLevel.WARN,
}

LEVELS = {Severity.WARNING: AlertLevel.WARN, Severity.CRITICAL: AlertLevel.ERROR}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedAlert:
    """An alert with a key that is stable over every read of the files."""

    key: str  # as in track.json
    alert: TrackerAlert


class AlertTail:
    """Read the alerts of one run: of rules, of attempts that failed, and of events of the trainer."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._events = LineTail(run.events, EventLine)
        self._seen: set[str] = set()
        self._version: tuple[int, Version | None, Version | None] | None = None

    def read(self) -> list[TrackedAlert]:
        """Return the alerts that are new since the last call."""
        found = [*self._of_run(), *self._of_events()]
        new = [tracked for tracked in found if tracked.key not in self._seen]
        self._seen.update(tracked.key for tracked in new)
        return sorted(new, key=lambda tracked: tracked.alert.time)

    def _of_run(self) -> Iterator[TrackedAlert]:
        """Yield the alerts of rules and the failures, if a file of them changed since the last call."""
        path, newest = self._run.path, max(attempts.numbers(self._run.path), default=0)
        version = newest, _version(attempts.path_of(path, newest)), _version(self._run.alerts)
        if version == self._version:
            return
        try:
            rules, made = read_alerts(path), attempts.read_all(path)
        except (OSError, RecordError):
            return
        self._version = version
        for rule in rules:
            yield TrackedAlert(key=f"{rule.kind}|{rule.about}|{rule.since}", alert=_of_rule(rule))
        yield from _failures(self._run.name, made)

    def _of_events(self) -> Iterator[TrackedAlert]:
        for _, line in self._events.read():
            if line.event in EVENTS:
                title, text = f"{self._run.name}: {line.event}", f"step {line.step}: {line.text}"
                alert = TrackerAlert(time=line.time, title=title, text=text, level=EVENTS[line.event])
                yield TrackedAlert(key=f"{line.event}|{line.time}", alert=alert)


def _version(path: Path) -> Version | None:
    """Return the version of a file that is replaced, None without one."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_ino  # the inode changes even if two writes have the same time


def _of_rule(rule: Alert) -> TrackerAlert:
    title = str(rule.kind).replace("_", " ") + (f" of {rule.about}" if rule.about else "")
    return TrackerAlert(time=rule.since, title=title, text=one_line(rule), level=LEVELS[rule.severity])


def status_of(attempt: Attempt) -> Status:
    """Return how an attempt ended; stopped, if it has not, or was killed."""
    if attempt.end is None:
        return Status.STOPPED
    return Status.FINISHED if attempt.end.kind == FINISHED else rule_of(attempt.end.kind).status


def _failures(name: str, made: Sequence[Attempt]) -> Iterator[TrackedAlert]:
    """Yield an alert for each failed attempt."""
    for attempt in made:
        if attempt.end is not None and attempt.what == attempts.TRAIN and status_of(attempt) is Status.FAILED:
            text = attempt.end.reason or attempt.end.kind
            alert = TrackerAlert(time=attempt.end.at, title=f"{name} failed", text=text, level=AlertLevel.ERROR)
            yield TrackedAlert(key=f"failed|{attempt.number}", alert=alert)


NOT_DEVICE_METRICS = frozenset({"gpu_index"})

# After FINE_S, samples are averaged over COARSE_S: one sample/s would be 86,400 rows per GPU and day.
FINE_S, COARSE_S = 600.0, 10.0
MOST_DEVICES = 2000  # samples per batch


class DeviceTail:
    """Read gpu_stats_<run>_multi_gpu.json from its start: every sample for 10 minutes, then means over 10 s.

    The result is deterministic: it does not depend on when, or in which parts, the file is read.
    """

    def __init__(self, path: Path) -> None:
        self._tail = ArrayTail(path)
        self._first: float | None = None
        self._window: list[DeviceValues] = []
        self._ready: list[DeviceValues] = []

    def read(self, *, until: float = math.inf) -> list[DeviceValues]:
        """Return the new samples up to a Unix time, at most MOST_DEVICES."""
        while len(self._ready) < MOST_DEVICES and (not self._ready or self._ready[-1].time < until):
            entries = self._tail.read()
            if not entries:
                break
            for entry in entries:
                self._add(_devices(entry))
        count = 0
        while count < min(len(self._ready), MOST_DEVICES) and self._ready[count].time <= until:
            count += 1
        found, self._ready = self._ready[:count], self._ready[count:]
        return found

    def _add(self, devices: DeviceValues | None) -> None:
        if devices is None:
            return
        self._first = devices.time if self._first is None else self._first
        if devices.time - self._first < FINE_S:
            self._ready.append(devices)
            return
        if self._window and self._window_index(self._window[0]) != self._window_index(devices):
            self._ready.append(DeviceValues(time=self._window[-1].time, values=means(self._window)))
            self._window = []
        self._window.append(devices)

    def _window_index(self, devices: DeviceValues) -> int:
        """Return the index of the averaging window of a sample."""
        return int((devices.time - (self._first or 0.0)) // COARSE_S)


def means(devices: Sequence[DeviceValues]) -> dict[str, float]:
    """Return the mean of each value over the samples that have it."""
    found: dict[str, list[float]] = {}
    for sample in devices:
        for name, value in sample.values.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


COPY = re.compile(r"gpu_\d+_memory")  # of gpu/<i>/memory_used, under the key of the original project for W&B


def without_copies(values: Mapping[str, float]) -> dict[str, float]:
    """Return device values without those that have a second key."""
    return {key: value for key, value in values.items() if not COPY.fullmatch(key)}


def _devices(entry: Mapping[str, Any]) -> DeviceValues | None:
    """Return one entry of gpu_stats_<run>_multi_gpu.json, or None if it has no time or no values."""
    found, total = entry.get("multi_gpu_data"), entry.get("aggregate_stats")
    gpus = [gpu for gpu in found if _is_gpu(gpu)] if isinstance(found, list) else []
    try:
        time = datetime.fromisoformat(entry["timestamp"]).timestamp()
    except (KeyError, ValueError, TypeError, OverflowError, OSError):  # the last two: a year without a Unix time
        return None
    values = {f"gpu/{gpu['gpu_index']}/{name}": value for gpu in gpus for name, value in _device_numbers(gpu)}
    values |= _aggregates(gpus, total if isinstance(total, dict) else {})
    return DeviceValues(time=time, values=values) if values else None


def _is_gpu(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("gpu_index"), int)


def _aggregates(gpus: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> dict[str, float]:
    """Return the known values under the keys that the original project logged to W&B."""
    used = {gpu["gpu_index"]: finite(gpu.get("memory_used")) for gpu in gpus}
    memory = {index: number for index, number in used.items() if number is not None}
    values: dict[str, float] = {f"gpu_{index}_memory": used for index, used in memory.items()}
    for key, name in (("gpu_total_memory", "total_memory_used"), ("gpu_avg_utilization", "average_utilization")):
        if (number := finite(total.get(name))) is not None:
            values[key] = number
    if len(memory) > 1:
        values["gpu_load_balance_cv"] = coefficient_of_variation(list(memory.values()))
    return values


def _device_numbers(gpu: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    return (
        (name, number)
        for name, value in gpu.items()
        if name not in NOT_DEVICE_METRICS and (number := finite(value)) is not None
    )
