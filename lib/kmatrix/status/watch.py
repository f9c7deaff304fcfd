"""Watch a running attempt: its newest metrics and its alerts, read from its files as they grow."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import Recording, read_samples
from kmatrix.gpu.formats.events import GpuEvents
from kmatrix.own_file import open_to_read
from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.checkpoints import start_step
from kmatrix.records.files import LineTail, last_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import MetricLine, MetricValues, Status, metric_line, metric_line_of
from kmatrix.records.states import PhaseLine, read_run_status
from kmatrix.records.train_config import TrainConfig, budget_s
from kmatrix.stats import coefficient_of_variation
from kmatrix.status.alerts import (
    AT_ONCE,
    BELOW,
    CRITICAL,
    Alert,
    AlertKind,
    Finding,
    GpuState,
    RunSnapshot,
    Severity,
    Thresholds,
    alerts_of,
    findings,
)
from kmatrix.status.estimate import Phase, TrainingLine, rest_of_run
from kmatrix.status.stragglers import recent_ranks

T = TypeVar("T")

LOSSES = 64  # training losses that are kept
RECENT_LINES = 20  # training lines whose pace is that of the remaining steps
EVERY_S = 1.0  # between two evaluations of the alert rules
RANKS_EVERY_S = 10.0  # between two reads of the rank timings
WINDOW_S = 10.0  # utilization is averaged over this time, because it varies within a step
STRAGGLER_SHARE = 0.6  # a straggler is the slowest rank in at least this share of the steps; less may be chance
MOST_ALERTS = 100  # alerts of a run that are kept
MOST_PHASES = 200  # newest phases that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of one run, for the display. Unknown values are None."""

    run: str
    index: int  # from 1, in the order in which runs start
    total: int  # of the runs of this execution, as far as they are wanted now; never below an index
    status: Status
    reason: str = ""
    note: str = ""  # activity besides training, such as "stopping, saving a checkpoint"
    step: int | None = None
    start: int | None = None  # the step at which the attempt starts
    max_iters: int | None = None
    loss: float | None = None  # nats/token
    val_loss: float | None = None  # nats/token
    tokens_per_second: float | None = None
    elapsed_s: float | None = None
    left_s: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)  # status -> runs of the matrix
    reserve: int = 0  # planned runs that are not needed so far
    alerts: tuple[Alert, ...] = ()  # active ones


class MetricsTail:
    """Follow the metrics.jsonl of one attempt. A call of `read` costs what was appended since the last one."""

    def __init__(
        self,
        path: Path,
        *,
        attempt: int = 1,
        max_iters: int | None = None,
        whole: bool = False,
        budget_s: float | None = None,
        start: int | None = None,
    ) -> None:
        """Start at the end of the file: create the tail before the attempt starts.

        whole: start at the beginning instead.  budget_s: time limit of all attempts together, None without one.
        start: the step at which this attempt starts, None if it is unknown.
        """
        self.start = start
        self._attempt, self.max_iters, self._budget_s = attempt, max_iters, budget_s
        # A resumed attempt appends to the file: the lines of earlier ones would only be parsed to be ignored.
        self._tail, self._whole = LineTail(path, MetricValues, from_end=not whole), whole
        self.recent: deque[TrainingLine] = deque(maxlen=RECENT_LINES)  # the newest training lines
        self.earlier: deque[TrainingLine] = deque(maxlen=RECENT_LINES)  # those of the attempts before
        if attempt > 1 and not whole:
            self._read_earlier(path)
        self._budget_left: float | None = None  # s of the budget at the newest line
        self._reads = 0
        self._seen: float | None = None  # monotonic seconds of the last read that found a line, from the second read on
        self.step: int | None = None
        self.loss: float | None = None  # nats/token
        self.val_loss: float | None = None  # nats/token
        self.tokens_per_second: float | None = None
        self.mfu: float | None = None  # percent
        self.newest: float | None = None  # Unix seconds of the newest line
        self.lines = 0  # of training
        self.elapsed_s: float | None = None  # of the trainer's clock, which counts no lost work
        self.losses: deque[float | None] = deque(maxlen=LOSSES)  # of the last training lines, None if not finite
        self.val_losses: list[float] = []  # of all evaluations

    def read(self, clock: float | None = None) -> None:
        """Read the complete lines that were appended. clock: monotonic seconds."""
        self._reads += 1
        try:
            while lines := self._tail.read():
                for _, values in lines:
                    line = metric_line_of(values)
                    if line is not None and line.attempt < self._attempt:
                        self._add_earlier(line)
                    elif line is not None and line.attempt == self._attempt:
                        self._add(line)
                        # Lines of the first read may have been written at any time before.
                        self._seen = (time.monotonic() if clock is None else clock) if self._follows else None
        except OSError:
            return  # unreadable for now: the run goes on

    def left_s(self, phases: Sequence[Phase], train: TrainConfig, since_s: float) -> float | None:
        """Return the time left (s) of the run: `rest_of_run`."""
        step = first_known(self.step, self.start)
        return rest_of_run(self.recent, phases, train, since_s, earlier=self.earlier, start=step)

    def _read_earlier(self, path: Path) -> None:
        """Read the newest lines of the attempts before."""
        with suppress(OSError), open_to_read(path) as file:
            for text in last_lines(file):
                line = metric_line(text)
                if line is not None:
                    self._add_earlier(line)

    def _add_earlier(self, line: MetricLine) -> None:
        if "train/loss" in line.values:
            if self.earlier and line.step <= self.earlier[-1].step:
                self.earlier.clear()  # an attempt began: the time before it was not spent on steps
            self.earlier.append(_training_line(line))

    @property
    def _follows(self) -> bool:
        """True if a line that is read now was written after the read before."""
        return self._reads > 1 or not self._whole

    def since_s(self, now: float, clock: float | None = None) -> float:
        """Return the seconds since the newest line. now: Unix seconds.  clock: monotonic seconds."""
        if self._seen is not None:
            return max(0.0, (time.monotonic() if clock is None else clock) - self._seen)
        # The time of the line is of the wall clock, which may have been set back since.
        return 0.0 if self.newest is None else max(0.0, now - self.newest)

    def budget_left_s(self, since_s: float) -> float | None:
        """Return the time (s) until the budget is spent, None without a budget. since_s: since the newest line."""
        return None if self._budget_left is None else max(0.0, self._budget_left - since_s)

    def _add(self, line: MetricLine) -> None:
        at, values = line.time, line.values
        self.step = line.step
        self.newest = at if at is not None else self.newest
        elapsed = values.get("elapsed_s")
        self.elapsed_s = first_known(elapsed, self.elapsed_s)
        if self._budget_s is not None and elapsed is not None:
            self._budget_left = self._budget_s - elapsed
        if "train/loss" in values:
            self.recent.append(_training_line(line))
            self.loss = values["train/loss"]
            self.tokens_per_second = values.get("throughput/tokens_per_s")
            share = values.get("throughput/mfu")
            self.mfu = None if share is None else 100.0 * share
            self.losses.append(self.loss)
            self.lines += 1
        if "val/loss" in values:
            self.val_loss = values["val/loss"]
            self.val_losses += [] if self.val_loss is None else [self.val_loss]


def _training_line(line: MetricLine) -> TrainingLine:
    step_ms = line.values.get("throughput/step_ms")
    return TrainingLine(line.step, line.time, None if step_ms is None else step_ms / 1e3)


def start_of(run: RunDir, resume: str) -> int | None:
    """Return the step at which an attempt starts, None if it is unknown. resume: its starting point."""
    try:
        return start_step(checkpoint_dir(run), resume)
    except RecordError:
        return None


def first_known(*values: T | None) -> T | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


@dataclass(frozen=True, slots=True)
class AlertChange:
    """The alerts after an update, and what the update changed."""

    active: tuple[Alert, ...] = ()  # critical ones first
    began: tuple[Alert, ...] = ()
    ended: tuple[Alert, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUpdate:
    """The newest values of a running attempt, and its alerts. Unknown values are None."""

    step: int | None
    loss: float | None  # nats/token
    val_loss: float | None  # nats/token
    tokens_per_second: float | None
    left_s: float | None
    start: int | None = None  # the step at which the attempt starts
    alerts: AlertChange = AlertChange()


class RunWatch:
    """Watch one attempt of a run. Create it before the attempt starts, and call `poll` often."""

    def __init__(
        self,
        run: RunDir,
        limits: Thresholds,
        train: TrainConfig | None = None,
        *,
        attempt: int = 1,
        ranks: int = 1,
        resume: str = "none",
    ) -> None:
        train = train or TrainConfig()
        self._run, self._ranks = run, ranks
        start = start_of(run, resume)
        self._tail = MetricsTail(
            run.metrics, attempt=attempt, max_iters=train.max_iters or None, budget_s=budget_s(train), start=start
        )
        self._tracker = AlertTracker(limits)
        self._gpus: GpuTail | None = None
        self._ended = list(_earlier_alerts(run))
        self._active: tuple[Alert, ...] = ()
        self._train = train
        self._phases: list[Phase] = []
        self._phase_lines = LineTail(run.phases, PhaseLine)
        self._due = self._ranks_due = -math.inf  # monotonic seconds
        self._waiting: tuple[float | None, int | None] = (None, None)

    def start(self, *, records_gpus: bool) -> None:
        """Start to watch the GPUs, if they are recorded. The samples of earlier attempts are ignored."""
        self._gpus = GpuTail(self._run) if records_gpus else None

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All alerts of this run, active ones last."""
        return tuple([*self._ended, *self._active][-MOST_ALERTS:])

    def poll(self, now: float | None = None, clock: float | None = None) -> RunUpdate:
        """Read what was appended, and evaluate the alert rules at most once per second.

        now: Unix seconds.  clock: monotonic seconds; by default those of now.
        """
        now, clock = _times(now, clock)
        self._tail.read(clock)
        # Callers poll ten times per second, which the rules do not need.
        change = AlertChange(self._active)
        if clock >= self._due:
            self._due = clock + EVERY_S
            self._read_phases()
            change = self._tracker.update(self._snapshot(now, clock))
            self._active = change.active
            self._ended += change.ended
        return self._update(now, clock, change)

    def end(self, now: float | None = None, clock: float | None = None) -> RunUpdate:
        """Poll a last time, and end the alerts that are still active: the attempt is over."""
        now, clock = _times(now, clock)
        self._due = -math.inf
        last = self.poll(now, clock).alerts  # what ended the run may be news
        ended = self._tracker.end(now)
        self._ended += ended
        self._active = ()
        return self._update(now, clock, AlertChange(began=last.began, ended=(*last.ended, *ended)))

    def _read_phases(self) -> None:
        with suppress(OSError):  # unreadable for now
            self._phases += [Phase.of(line) for _, line in self._phase_lines.read()]
            del self._phases[:-MOST_PHASES]

    def _left_s(self, now: float, clock: float) -> float | None:
        since = self._tail.since_s(now, clock)
        left = [self._tail.left_s(self._phases, self._train, since), self._tail.budget_left_s(since)]
        return min((seconds for seconds in left if seconds is not None), default=None)

    def _update(self, now: float, clock: float, change: AlertChange) -> RunUpdate:
        tail = self._tail
        return RunUpdate(
            step=tail.step,
            loss=tail.loss,
            val_loss=tail.val_loss,
            tokens_per_second=tail.tokens_per_second,
            left_s=self._left_s(now, clock),
            start=tail.start,
            alerts=change,
        )

    def _snapshot(self, now: float, clock: float) -> RunSnapshot:
        tail = self._tail
        if self._ranks > 1 and clock >= self._ranks_due:
            self._ranks_due = clock + RANKS_EVERY_S
            self._waiting = _waiting(self._run)
        gpus, memory = self._gpus.read(now, clock) if self._gpus else ((), [])
        steady = tail.lines > 1  # the first line contains the warm-up
        return RunSnapshot(
            time=now,
            clock=clock,
            gpus=gpus,
            memory_cv=coefficient_of_variation(memory) if len(memory) > 1 else None,
            waiting=self._waiting[0],
            slowest=self._waiting[1],
            mfu=tail.mfu if steady else None,
            tokens_per_second=tail.tokens_per_second if steady else None,
            losses=tuple(tail.losses),
            val_losses=tuple(tail.val_losses),
            quiet_s=tail.since_s(now, clock) if tail.lines else None,
        )


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

    def read(self, now: float, clock: float) -> tuple[tuple[GpuState, ...], list[float]]:
        """Return the current state of each GPU, and the known values of used memory; both empty without new samples.

        now: Unix seconds.  clock: monotonic seconds.
        """
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

        # Keep the newest recording with a sample, and refuse it when it is too old.
        self._known += recording.records
        if len(recording):
            self._newest, self._seen = recording, clock
        newest = self._newest
        # The times of samples are of the wall clock; if it was set back, only the monotonic clock shows their age.
        if newest is None or newest.times[-1] < now - WINDOW_S or self._seen < clock - WINDOW_S:
            return (), []  # the recorder has exited

        # The state of each GPU: the last value of each quantity, and the mean utilization.
        reasons = self._events.throttle(math.inf) if self._events else {}
        xids = self._events.xids(math.inf) if self._events else {}
        states, memory = [], []
        for at, gpu in enumerate(gpus):
            busy = self._utilization(at, recording)
            last = newest.values(at, -1)
            if last["memory_used"] is not None:
                memory.append(last["memory_used"])
            # Before the first event, all GPUs count as present.
            lost = bool(self._events and self._events.known) and int(gpu["gpu_index"]) not in reasons
            index, total = int(gpu["gpu_index"]), gpu.get("memory_total")
            state = _state(index, total, last, busy=busy, throttled=reasons.get(index, ()), lost=lost)
            states.append(replace(state, xids=xids.get(index, {})))
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


def alerts_of_run(run: RunDir) -> tuple[Alert, ...]:
    """Return the alerts in the status.json of a run, empty without one."""
    record = read_run_status(run)
    return alerts_of(record.alerts) if record else ()


def _earlier_alerts(run: RunDir) -> tuple[Alert, ...]:
    """Return the alerts of earlier attempts; those that a killed runner left active end at its last write."""
    alerts = alerts_of_run(run)
    if all(alert.until is not None for alert in alerts):
        return alerts
    # Nobody knows when they ended: the runner died after its last write.
    last = run.status.stat().st_mtime
    return tuple(replace(alert, until=max(alert.since, last)) if alert.until is None else alert for alert in alerts)


def _state(
    index: int,
    total: float | None,
    last: Mapping[str, float | None],
    *,
    busy: float | None,
    throttled: Sequence[str],
    lost: bool,
) -> GpuState:
    """Return the state of a GPU. total: its memory, MiB.  last: the newest value of each quantity."""
    used = last["memory_used"]
    return GpuState(
        name=f"GPU {index}",
        utilization=busy,
        memory_percent=100.0 * used / total if used is not None and total else None,
        temperature=last["temperature"],
        throttled=tuple(throttled),
        lost=lost,
    )


def _times(now: float | None, clock: float | None) -> tuple[float, float]:
    """Return the wall clock and the monotonic clock; a given wall clock replaces both, unless both are given."""
    if clock is None:
        clock = time.monotonic() if now is None else now
    return time.time() if now is None else now, clock


def _waiting(run: RunDir) -> tuple[float | None, int | None]:
    """Return the share of step time (percent) that ranks wait for a straggler, and its rank; None without one."""
    ranks = recent_ranks(run)
    if ranks is None or ranks.slowest_share < STRAGGLER_SHARE:
        return None, None
    return 100.0 * ranks.waiting, ranks.slowest


class AlertTracker:
    """Turn the findings at each sample into alerts that begin and end. Equal samples give equal alerts."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._since: dict[
            tuple[AlertKind, str], tuple[float, float]
        ] = {}  # when a rule began to match: Unix, monotonic
        self._active: dict[tuple[AlertKind, str], Alert] = {}

    def update(self, state: RunSnapshot) -> AlertChange:
        """Evaluate the rules on a sample. The times of its monotonic clock must not decrease."""
        found = {(one.kind, one.about): one for one in findings(state, self._limits)}
        began = []
        for key, one in found.items():
            clock = state.time if state.clock is None else state.clock
            since, began_at = self._since.setdefault(key, (state.time, clock))
            if key in self._active:
                self._active[key] = _worse(self._active[key], one)
            elif one.kind in AT_ONCE or clock - began_at >= self._limits.hold_s:
                self._active[key] = _alert(one, since)
                began.append(self._active[key])
        # A rule that stops matching starts again from zero: short peaks do not add up.
        self._since = {key: since for key, since in self._since.items() if key in found}
        over = [key for key in self._active if key not in found]
        ended = [_ended(self._active.pop(key), state.time) for key in over]
        return AlertChange(_sorted(self._active.values()), tuple(began), tuple(ended))

    def end(self, time: float) -> tuple[Alert, ...]:
        """End all active alerts, and return them."""
        ended = tuple(_ended(alert, time) for alert in _sorted(self._active.values()))
        self._active.clear()
        return ended


def _ended(alert: Alert, at: float) -> Alert:
    """Return the alert with its end, which is never before its start: the wall clock may have been set back."""
    return replace(alert, until=max(alert.since, at))


def _alert(one: Finding, since: float) -> Alert:
    severity = Severity.CRITICAL if one.kind in CRITICAL else Severity.WARNING
    return Alert(
        kind=one.kind,
        severity=severity,
        since=since,
        about=one.about,
        value=one.value,
        threshold=one.threshold,
        reason=one.reason,
    )


def _worse(alert: Alert, one: Finding) -> Alert:
    """Return the alert with the worse of both values, and the newest reason."""
    if alert.value is None or one.value is None:
        return replace(alert, reason=one.reason)
    worst = min(alert.value, one.value) if alert.kind in BELOW else max(alert.value, one.value)
    return replace(alert, value=worst, reason=one.reason)


def _sorted(alerts: Collection[Alert]) -> tuple[Alert, ...]:
    return tuple(sorted(alerts, key=lambda alert: (alert.severity is Severity.WARNING, alert.since, alert.about)))
