"""Runs that train: their newest metrics and GPU samples, and the observer in their program, which writes alerts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from kmatrix.clock import clock
from kmatrix.errors import RecordError
from kmatrix.gpu.balance import coefficient_of_variation
from kmatrix.gpu.formats.binary import Recording, read_samples
from kmatrix.gpu.formats.events import GpuEvents
from kmatrix.gpu.formats.json_array import last_entry
from kmatrix.records.decode import Record, as_json
from kmatrix.records.files import LineTail, append_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import MetricLine, MetricValues, metric_line_of
from kmatrix.status.alerts import Alert, AlertTracker, GpuState, RunSnapshot, Thresholds, ended_at, read_alerts
from kmatrix.status.stragglers import read_ranks

BACK = 1 << 16  # bytes of metrics.jsonl that are read: some hundred lines
LOSSES = 64  # training losses that are kept
RECENT_LINES = 20  # training lines whose pace is that of the remaining steps
EVERY_S = 1.0  # between two evaluations of the alert rules
RANKS_EVERY_S, RANK_BYTES = 10.0, 4096  # between two reads of the rank timings; of each of them: about 40 lines
WINDOW_S = 10.0  # utilization is averaged over this time, because it varies within a step
STRAGGLER_SHARE = 0.6  # a straggler is the slowest rank in at least this share of the steps; less may be chance
MOST_ALERTS = 100  # alerts of an attempt that are written
STALE_S = 100.0  # a recording is written each second, and caches of network storage may be a minute old
CPU_RANK = "cpu-"  # prefix of the device names of ranks on the CPU in a recording


class MetricsTail:
    """The newest lines of metrics.jsonl. A call of `read` costs what was appended since the last one."""

    def __init__(self, path: Path, *, attempt: int = 1) -> None:
        """Begin a little before the end of the file. attempt: whose lines count; those before it are `earlier`."""
        self._attempt, self._tail = attempt, LineTail(path, MetricValues, last_bytes=BACK)
        self.recent: deque[MetricLine] = deque(maxlen=RECENT_LINES)  # the newest training lines
        self.earlier: deque[MetricLine] = deque(maxlen=RECENT_LINES)  # those of the attempts before
        self.step: int | None = None
        self.loss: float | None = None  # nats/token
        self.val_loss: float | None = None  # nats/token
        self.tokens_per_second: float | None = None
        self.mfu: float | None = None  # percent
        self.newest: float | None = None  # Unix seconds of the newest line, by the clock of its host
        self.seen: float | None = None  # monotonic seconds of the read that found it, from the second read on
        self.losses: deque[float | None] = deque(maxlen=LOSSES)  # of the last training lines, None if not finite
        self.val_losses: list[float] = []
        self._reads = 0

    def read(self) -> None:
        """Read the complete lines that were appended."""
        self._reads += 1
        with suppress(OSError):  # unreadable for now: the run goes on
            while lines := self._tail.read():
                for _, values in lines:
                    line = metric_line_of(values)
                    if line is not None:
                        self._add(line)

    def since_s(self) -> float:
        """Return the seconds since the newest line."""
        if self.seen is not None:
            return clock.monotonic() - self.seen
        return 0.0 if self.newest is None else max(0.0, clock.now() - self.newest)  # the clock may have been set back

    def _add(self, line: MetricLine) -> None:
        values = line.values
        if line.attempt != self._attempt:
            if line.attempt < self._attempt and "train/loss" in values:
                if self.earlier and line.step <= self.earlier[-1].step:
                    self.earlier.clear()  # an attempt began: the time before it was not spent on steps
                self.earlier.append(line)
            return
        self.step, self.newest = line.step, self.newest if line.time is None else line.time
        self.seen = clock.monotonic() if self._reads > 1 else None
        if "train/loss" in values:
            self.recent.append(line)
            self.loss = values["train/loss"]
            self.tokens_per_second = values.get("throughput/tokens_per_s")
            share = values.get("throughput/mfu")
            self.mfu = None if share is None else 100.0 * share
            self.losses.append(self.loss)
        if "val/loss" in values:
            self.val_loss = values["val/loss"]
            self.val_losses += [] if self.val_loss is None else [self.val_loss]


class GpuTail:
    """Follow the GPU recording of a running attempt. A call of `read` costs what was appended since the last one."""

    def __init__(self, run: RunDir) -> None:
        """Ignore the samples that the recording holds now: they are of earlier attempts."""
        self._run = run
        self._file: int | None = None  # its inode: another recording has the same name if the GPUs have changed
        self._known = 0  # samples
        with suppress(RecordError, OSError):
            self._known, self._file = read_samples(run.gpu_samples).records, run.gpu_samples.stat().st_ino
        self._newest: Recording | None = None
        self._seen = -math.inf  # monotonic seconds of the read that found the newest sample
        self._busy: list[list[tuple[float, float]]] = []  # per GPU: time, utilization
        self._events: GpuEvents | None = None

    def read(self) -> tuple[tuple[GpuState, ...], list[float]]:
        """Return the current state of each GPU, and the known values of used memory; both empty without new samples."""
        try:
            if (file := self._run.gpu_samples.stat().st_ino) != self._file:
                self._file, self._known = file, 0
            recording = read_samples(self._run.gpu_samples, first=self._known)
        except (RecordError, OSError):
            return (), []  # missing or unreadable: the run goes on
        gpus = recording.header["gpus"]  # a later attempt may have other GPUs
        if recording.header.get("device_type") == "cpu":
            return (), []
        if len(self._busy) != len(gpus):
            self._busy = [[] for _ in gpus]
            self._events = GpuEvents(self._run.gpu_events, tuple(int(gpu["gpu_index"]) for gpu in gpus))
        self._known += recording.records
        if len(recording):
            self._newest, self._seen = recording, clock.monotonic()
        newest = self._newest
        if newest is None or self._seen < clock.monotonic() - WINDOW_S:
            return (), []  # the recorder has exited

        # The state of each GPU: the last value of each quantity, and the mean utilization.
        reasons = self._events.throttle(math.inf) if self._events else {}
        xids = self._events.xids(math.inf) if self._events else {}
        states, memory = [], []
        for at, gpu in enumerate(gpus):
            index, total, busy = int(gpu["gpu_index"]), gpu.get("memory_total"), self._utilization(at, recording)
            last = newest.values(at, -1)
            used = last["memory_used"]
            memory += [] if used is None else [used]
            state = GpuState(
                name=f"GPU {index}",
                utilization=busy,
                memory_percent=100.0 * used / total if used is not None and total else None,
                temperature=last["temperature"],
                throttled=tuple(reasons.get(index, ())),
                # Before the first event, all GPUs count as present.
                lost=bool(self._events and self._events.known) and index not in reasons,
                xids=xids.get(index, {}),
            )
            states.append(state)
        return tuple(states), memory

    def _utilization(self, at: int, recording: Recording) -> float | None:
        """Add the new values of a GPU, and return its mean utilization over the window, None before it is full."""
        column, (low, high) = recording.columns[at]["utilization"], recording.limits[at]["utilization"]
        values = [(time, value) for time, value in zip(recording.times, column, strict=True) if low <= value <= high]
        window = [*self._busy[at], *values]
        if not window:
            return None
        now = window[-1][0]
        window = [pair for pair in window if pair[0] <= now]  # without those from before the clock was set back
        # The mean of less than a whole window depends on the phase of a step. One more second of samples is kept, so
        # that the next call finds the window full again.
        full = window[0][0] <= now - WINDOW_S
        self._busy[at] = [pair for pair in window if pair[0] > now - WINDOW_S - EVERY_S]
        recent = [value for time, value in self._busy[at] if time > now - WINDOW_S]
        return sum(recent) / len(recent) if full and recent else None


class Observer:
    """Watch an attempt in the program that trains it, and write its alerts. Create it when the attempt begins."""

    def __init__(self, run: Path, attempt: int, symbols: Mapping[str, str], *, ranks: int = 1) -> None:
        """Create it. symbols: of the run: the thresholds, and whether GPUs are recorded.  ranks: of the run."""
        self._run, self._ranks, self._left = RunDir(run), ranks, MOST_ALERTS
        self._tail = MetricsTail(self._run.metrics, attempt=attempt)
        self._tracker = AlertTracker(Thresholds.of(symbols))
        self._gpus = GpuTail(self._run) if symbols.get("GPU_MONITOR") == "y" else None
        self._due = self._ranks_due = -math.inf  # monotonic seconds
        self._waiting: tuple[float | None, int | None] = (None, None)
        if open_ones := [alert for alert in read_alerts(run) if alert.until is None]:  # of a process that was killed
            self._write([ended_at(alert, self._run.alerts.stat().st_mtime) for alert in open_ones])

    def poll(self) -> None:
        """Read what was appended, and evaluate the rules at most once per second. Call it often."""
        if clock.monotonic() >= self._due:
            self._due = clock.monotonic() + EVERY_S
            began, ended = self._tracker.update(self._snapshot())
            self._write([*began[: self._left], *ended])
            self._left = max(0, self._left - len(began))

    def end(self) -> None:
        """Evaluate the rules once more, because what ended the attempt may be news, and end what is active."""
        self._due = -math.inf
        self.poll()
        self._write(self._tracker.end(clock.now()))

    def _write(self, alerts: Sequence[Alert]) -> None:
        with suppress(OSError):  # a full disk: the run goes on
            for alert in alerts:
                append_jsonl(self._run.alerts, as_json(alert))

    def _snapshot(self) -> RunSnapshot:
        tail, now = self._tail, clock.monotonic()
        tail.read()
        if self._ranks > 1 and now >= self._ranks_due:
            self._ranks_due = now + RANKS_EVERY_S
            ranks = read_ranks(self._run, most_bytes=RANK_BYTES)
            self._waiting = (None, None)
            if ranks is not None and ranks.slowest_share >= STRAGGLER_SHARE:
                self._waiting = 100.0 * ranks.straggler_time_share, ranks.slowest_rank
        gpus, memory = self._gpus.read() if self._gpus else ((), [])
        steady = len(tail.losses) > 1  # the first line contains the warm-up
        return RunSnapshot(
            time=clock.now(),
            clock=now,
            gpus=gpus,
            memory_cv=coefficient_of_variation(memory) if len(memory) > 1 else None,
            waiting=self._waiting[0],
            slowest=self._waiting[1],
            mfu=tail.mfu if steady else None,
            tokens_per_second=tail.tokens_per_second if steady else None,
            losses=tuple(tail.losses),
            val_losses=tuple(tail.val_losses),
            quiet_s=tail.since_s() if tail.losses else None,
        )


class GpuView(Record, frozen=True, kw_only=True):
    """A GPU, by the newest sample of the run on it. Unknown values are None."""

    index: int | None
    name: str
    uuid: str
    run: str = ""  # the run that uses it, "" for none
    utilization: float | None = None  # percent
    memory_used: float | None = None  # MiB
    memory_total: float | None = None  # MiB
    power: float | None = None  # watts
    temperature: float | None = None  # degrees C
    host: str = ""  # on a cluster; "" on one machine


def newest_gpus(recording: RunDir, run: str, host: str = "") -> list[GpuView]:
    """Return the GPUs in the newest entry of a recording of a run; empty on the CPU, or if it is outdated."""
    entry = last_entry(recording.gpu_stats_multi) or {}
    try:
        age_s = abs(clock.now() - datetime.fromisoformat(str(entry.get("timestamp"))).timestamp())
    except ValueError:
        return []
    gpus: list[dict[str, Any]] = [gpu for gpu in entry.get("multi_gpu_data") or [] if isinstance(gpu, dict)]
    names = ("utilization", "memory_used", "memory_total", "power", "temperature")
    return [
        GpuView(
            index=gpu.get("gpu_index"),
            name=str(gpu.get("gpu_name") or ""),
            uuid=str(gpu.get("uuid") or f"{host} GPU {gpu.get('gpu_index')}".lstrip()),
            run=run,
            host=host,
            **{name: gpu.get(name) for name in names},
        )
        for gpu in gpus
        if age_s < STALE_S and not str(gpu.get("uuid")).startswith(CPU_RANK)
    ]
