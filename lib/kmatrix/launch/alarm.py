"""What a run is warned of while it goes on: from its metrics, its recording and its ranks, each read as it grows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kmatrix.alerts import Alert, Change, GpuState, State, Thresholds, Watch, alerts_of
from kmatrix.errors import RecordError
from kmatrix.gpu.formats import Recording, read_samples
from kmatrix.gpu.top.events import Events
from kmatrix.launch.watch import MetricsTail
from kmatrix.records import RunDir, read_json
from kmatrix.report.stragglers import recent_ranks
from kmatrix.stats import coefficient_of_variation

EVERY_S = 1.0  # between two looks at a recording
RANKS_EVERY_S = 10.0  # between two looks at the timings of ranks
WINDOW_S = 10.0  # over which utilization is averaged: it swings within a step
NAMED = 0.6  # of the steps in which a rank must be the slowest to be a straggler: below, it is chance
MOST = 100  # alerts of a run that are kept


class Alarm:
    """The alerts of one attempt of a run. Make it when the attempt starts, look often: it reads once a second."""

    def __init__(self, run: RunDir, limits: Thresholds, tail: MetricsTail) -> None:
        self._run, self._tail = run, tail
        self._watch = Watch(limits)
        self._gpus = GpuTail(run, begun=time.time())
        self._ended = list(_of_earlier(run))
        self._active: tuple[Alert, ...] = ()
        self._due = self._ranks_due = 0.0
        self._waiting: tuple[float | None, int | None] = (None, None)

    @property
    def active(self) -> tuple[Alert, ...]:
        """What holds now, critical ones first."""
        return self._active

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Everything that was told of this run, those that hold now last."""
        return tuple([*self._ended, *self._active][-MOST:])

    def look(self, now: float | None = None) -> Change:
        """Return what changed since the last look. now: Unix seconds."""
        now = time.time() if now is None else now
        if now < self._due:
            return Change(self._active)
        self._due = now + EVERY_S
        change = self._watch.look(self._state(now))
        self._active = change.active
        self._ended += change.ended
        return change

    def end(self, now: float | None = None) -> None:
        """End what still holds: the attempt is over."""
        self._due = 0.0
        self.look(now)
        self._ended += self._watch.end(time.time() if now is None else now)
        self._active = ()

    def _state(self, now: float) -> State:
        tail = self._tail
        if now >= self._ranks_due:
            self._ranks_due = now + RANKS_EVERY_S
            self._waiting = _waiting(self._run)
        gpus, memory = self._gpus.read(now)
        steady = tail.lines > 1  # the first line holds the warming up
        return State(
            time=now,
            gpus=gpus,
            memory_cv=coefficient_of_variation(memory) if len(memory) > 1 else None,
            waiting=self._waiting[0],
            slowest=self._waiting[1],
            mfu=tail.mfu if steady else None,
            tokens_per_second=tail.tokens_per_second if steady else None,
            losses=tuple(tail.losses),
            val_losses=tuple(tail.val_losses),
            quiet_s=now - tail.newest if tail.newest is not None and tail.lines else None,
        )


class GpuTail:
    """The last seconds of a recording that grows. Each read costs what was recorded since the one before."""

    def __init__(self, run: RunDir, *, begun: float) -> None:
        self._run, self._begun = run, begun
        self._known = 0
        self._newest: Recording | None = None
        self._busy: list[list[tuple[float, float]]] = []  # of each GPU: time, utilization
        self._events: Events | None = None

    def read(self, now: float) -> tuple[tuple[GpuState, ...], list[float]]:
        """Return each GPU as it is now, and the memory of those that say it; nothing on the CPU, or of nothing new."""
        try:
            recording = read_samples(self._run.gpu_samples, first=self._known)
        except (RecordError, OSError):
            return (), []  # not there yet, or it cannot be read: the run goes on
        gpus = recording.header["gpus"]
        if recording.header.get("device_type") == "cpu":
            return (), []
        if len(self._busy) != len(gpus):
            self._busy = [[] for _ in gpus]
            self._events = Events(self._run.gpu_events, tuple(int(gpu["gpu_index"]) for gpu in gpus))
        self._known += len(recording)
        if len(recording):
            self._newest = recording
        newest = self._newest
        if newest is None or newest.times[-1] < max(self._begun, now - WINDOW_S):
            return (), []  # of an earlier attempt, or the recorder is gone
        reasons = self._events.throttle(now) if self._events else {}
        states, memory = [], []
        for at, gpu in enumerate(gpus):
            busy = self._add(at, recording, now)
            last = {name: _known(column[-1]) for name, column in newest.columns[at].items()}
            if last["memory_used"] is not None:
                memory.append(last["memory_used"])
            lost = bool(self._events and self._events.known) and int(gpu["gpu_index"]) not in reasons
            states.append(_state(gpu, last, busy=busy, throttled=reasons.get(int(gpu["gpu_index"]), ()), lost=lost))
        return tuple(states), memory

    def _add(self, at: int, recording: Recording, now: float) -> float | None:
        """Take in the new values of a GPU; return its mean utilization of the window, None until that is full."""
        column = recording.columns[at]["utilization"]
        values = [
            (time, value)
            for time, value in zip(recording.times, column, strict=True)
            if not math.isnan(value) and time >= self._begun
        ]
        window = [*self._busy[at], *values]
        full = bool(window) and window[0][0] <= now - WINDOW_S
        self._busy[at] = [pair for pair in window if pair[0] > now - WINDOW_S - EVERY_S]
        recent = [value for time, value in self._busy[at] if time > now - WINDOW_S]
        return sum(recent) / len(recent) if full and recent else None


def kept(run: RunDir) -> tuple[Alert, ...]:
    """Return the alerts in the status.json of a run; nothing where it has none."""
    try:
        return alerts_of(read_json(run.status))
    except RecordError:
        return ()


def _of_earlier(run: RunDir) -> tuple[Alert, ...]:
    """Return the alerts of earlier attempts; one that a killed runner left held until the status was written last."""
    told = kept(run)
    if all(alert.until is not None for alert in told):
        return told
    last = run.status.stat().st_mtime
    return tuple(replace(alert, until=max(alert.since, last)) if alert.until is None else alert for alert in told)


def _state(
    gpu: Mapping[str, Any],
    last: Mapping[str, float | None],
    *,
    busy: float | None,
    throttled: Sequence[str],
    lost: bool,
) -> GpuState:
    used, total = last["memory_used"], gpu.get("memory_total")
    return GpuState(
        name=f"GPU {gpu['gpu_index']}",
        utilization=busy,
        memory_percent=100.0 * used / total if used is not None and total else None,
        temperature=last["temperature"],
        throttled=tuple(throttled),
        lost=lost,
    )


def _waiting(run: RunDir) -> tuple[float | None, int | None]:
    """Return the share of time spent waiting for a slow rank, in percent, and the rank; None where there is no such."""
    ranks = recent_ranks(run)
    if ranks is None or ranks.slowest_share < NAMED:
        return None, None
    return 100.0 * ranks.waiting, ranks.slowest


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
