"""Alerts: what is wrong with a running run, by a table of rules, and RUN/alerts.jsonl, which its program writes.

A rule matches a sample of a run. An alert begins after its rule has matched for `hold_s`, so that an evaluation or the
first compilation does not count. Conditions that do not recover by themselves (a lost GPU, a loss that is not finite)
are reported at once.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.gpu.xid import FAULTS, xids_text
from kmatrix.records.decode import Number, Record, UnixTime, decode_lines, replaced
from kmatrix.records.paths import RunDir

SPIKE_LINES = 16  # a spike is measured against the median of this many losses


class AlertKind(StrEnum):
    """The kinds of alerts; the value is the name in files and on the screen."""

    UTILIZATION = "gpu_utilization"
    VRAM = "vram"
    TEMPERATURE = "temperature"
    THROTTLE = "throttle"
    LOST = "gpu_lost"
    XID_FAULT = "xid_fault"
    XID = "xid"
    BALANCE = "balance"
    STRAGGLER = "straggler"
    MFU = "mfu"
    SPEED = "tokens_per_second"
    LOSS = "loss"
    SPIKE = "spike"
    NOT_FINITE = "not_finite"
    STALL = "stall"


class Severity(StrEnum):
    """The severity of an alert."""

    WARNING = "warning"  # costs time, money or quality
    CRITICAL = "critical"  # the run is likely to be lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of the alert rules; 0 switches a rule off. Those in SYMBOLS are settings."""

    gpu_utilization: float = 80.0  # percent; alert below
    vram: float = 98.0  # percent of a GPU's memory
    temperature: float = 87.0  # degrees C
    balance: float = 20.0  # percent: CV of memory over the GPUs
    straggler: float = 10.0  # percent of step time that ranks wait for a slow one
    mfu: float = 15.0  # percent; alert below
    tokens_per_second: float = 0.0  # alert below
    loss: int = 3  # evaluations in a row above the best one
    spike: float = 1.0  # nats/token of a training loss above the recent median
    stall: float = 600.0  # seconds without metrics
    throttle: bool = True  # alert on heat, hardware slowdown and power brake
    hold_s: float = 30.0  # seconds that a rule must match

    @classmethod
    def of(cls, symbols: Mapping[str, str]) -> Thresholds:
        """Return the thresholds of a configuration, defaults for missing symbols."""
        known: dict[str, Any] = {name: int(symbols[symbol]) for name, symbol in SYMBOLS.items() if symbol in symbols}
        return cls(**known)


SYMBOLS = {
    name: f"ALERT_{name.removesuffix('_s').upper()}"
    for name in ("gpu_utilization", "temperature", "tokens_per_second", "loss", "stall", "hold_s")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """The current state of one GPU. Unknown values are None."""

    name: str
    utilization: float | None = None  # percent
    memory_percent: float | None = None  # of its own memory
    temperature: float | None = None  # degrees C
    throttled: tuple[str, ...] = ()  # reasons
    lost: bool = False  # it does not answer
    xids: Mapping[int, int] = field(default_factory=dict)  # code -> number of XID errors


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A sample of a run, the input of the rules. Unknown values are None."""

    time: float  # Unix seconds
    clock: float | None = None  # seconds of the monotonic clock, which decides how long a rule matches; None: `time`
    gpus: tuple[GpuState, ...] = ()  # empty for a run on the CPU
    memory_cv: float | None = None  # percent, over the GPUs
    waiting: float | None = None  # percent of step time that ranks wait for `slowest`
    slowest: int | None = None  # rank
    mfu: float | None = None  # percent
    tokens_per_second: float | None = None
    losses: Sequence[float | None] = ()  # of training lines, newest last, None if not finite
    val_losses: Sequence[float] = ()  # of all evaluations
    quiet_s: float | None = None  # seconds since the newest metrics, None before the first


Found = Iterable[tuple[str, float | None, str]]  # about, value, reason


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: what it finds in a sample, and what to do about it."""

    find: Callable[[RunSnapshot, Thresholds], Found]
    text: str  # {value}: the worst one, {limit}: the threshold
    advice: str
    limit: str = ""  # field of Thresholds that switches the rule off, and that a value is compared with
    critical: bool = False
    at_once: bool = False
    below: bool = False  # low values match


def _gpus(value: Callable[[GpuState], float | None]) -> Callable[[RunSnapshot, Thresholds], Found]:
    return lambda seen, _: ((gpu.name, value(gpu), "") for gpu in seen.gpus if not gpu.lost)


def _run(value: Callable[[RunSnapshot], float | None]) -> Callable[[RunSnapshot, Thresholds], Found]:
    return lambda seen, _: [("", value(seen), "")]


def _straggler(seen: RunSnapshot, _: Thresholds) -> Found:
    return [("" if seen.slowest is None else f"rank {seen.slowest}", seen.waiting, "")]


def _throttle(seen: RunSnapshot, _: Thresholds) -> Found:
    for gpu in seen.gpus:
        held = sorted(set(gpu.throttled) - {"power cap"})  # the power limit is where a busy GPU works
        if held and not gpu.lost:
            yield gpu.name, None, ", ".join(held)


def _lost(seen: RunSnapshot, _: Thresholds) -> Found:
    return ((gpu.name, None, "it does not answer") for gpu in seen.gpus if gpu.lost)


def _xids(*, faults: bool) -> Callable[[RunSnapshot, Thresholds], Found]:
    def find(seen: RunSnapshot, _: Thresholds) -> Found:
        for gpu in seen.gpus:
            if known := {code: count for code, count in gpu.xids.items() if (code in FAULTS) is faults}:
                yield gpu.name, sum(known.values()), xids_text(known)

    return find


def _spike(seen: RunSnapshot) -> float | None:
    known = [loss for loss in seen.losses if loss is not None]
    before = known[-1 - SPIKE_LINES : -1]
    # The median of fewer lines is too noisy to call a loss above it a spike.
    return known[-1] - statistics.median(before) if len(before) >= SPIKE_LINES // 2 else None


def _not_finite(seen: RunSnapshot, _: Thresholds) -> Found:
    return [("", None, "the training loss is not finite")] if seen.losses and seen.losses[-1] is None else []


def _overfitting(seen: RunSnapshot, limits: Thresholds) -> Found:
    values = list(seen.val_losses)
    since_best = len(values) - 1 - values.index(min(values)) if values else 0
    if since_best >= limits.loss and len(values) > limits.loss and values[-1] > min(values):
        yield "", since_best, f"validation loss {values[-1]:.4f}, best {min(values):.4f}"


# fmt: off
RULES = {  # critical ones first
    AlertKind.XID_FAULT: Rule(
        _xids(faults=True), "{reason}", "check the kernel log (dmesg): reset the GPU, or replace it if this comes back",
        critical=True, at_once=True),
    AlertKind.LOST: Rule(
        _lost, "lost: {reason}", "check the kernel log (dmesg, Xid); the GPU needs a reset, then continue the run",
        critical=True, at_once=True),
    AlertKind.NOT_FINITE: Rule(
        _not_finite, "{reason}", "lower the learning rate or lengthen the warm-up; resume from an earlier checkpoint",
        critical=True, at_once=True),
    AlertKind.STALL: Rule(
        _run(lambda seen: seen.quiet_s), "no metrics for {value} s, limit {limit} s",
        "check the end of output.log: a rank may hang, or a disk may not respond", "stall",
        critical=True, at_once=True),
    AlertKind.XID: Rule(
        _xids(faults=False), "{reason}",
        "most often an error of the program on this GPU: the kernel log (dmesg) has its process", at_once=True),
    AlertKind.UTILIZATION: Rule(
        _gpus(lambda gpu: gpu.utilization), "utilization {value}%, below {limit}%",
        "find what it waits for: data loading, a small micro-batch, or another rank", "gpu_utilization", below=True),
    AlertKind.VRAM: Rule(
        _gpus(lambda gpu: gpu.memory_percent), "{value}% of its memory used, limit {limit}%",
        "reduce the micro-batch (accumulation keeps the global batch), or recompute activations", "vram"),
    AlertKind.TEMPERATURE: Rule(
        _gpus(lambda gpu: gpu.temperature), "{value} C, limit {limit} C",
        "check cooling and air flow; a lower power limit costs little speed", "temperature"),
    AlertKind.THROTTLE: Rule(
        _throttle, "throttled: {reason}",
        "check cooling and power supply: the clocks are below the requested ones", "throttle"),
    AlertKind.BALANCE: Rule(
        _run(lambda seen: seen.memory_cv), "memory imbalance: CV {value}%, limit {limit}%",
        "check that every rank has the same batch and model, and that no other process uses these GPUs", "balance"),
    AlertKind.STRAGGLER: Rule(
        _straggler, "slow: other ranks wait {value}% of the time, limit {limit}%",
        "check the GPU of that rank: temperature, clocks, PCIe link, other processes", "straggler"),
    AlertKind.MFU: Rule(
        _run(lambda seen: seen.mfu), "MFU {value}%, below {limit}%",
        "use bf16, torch.compile and a larger micro-batch; check data loading", "mfu", below=True),
    AlertKind.SPEED: Rule(
        _run(lambda seen: seen.tokens_per_second), "{value} tokens/s, below {limit}",
        "check the data loader and other processes on this machine", "tokens_per_second", below=True),
    AlertKind.SPIKE: Rule(
        _run(_spike), "training loss {value} nats/token above the recent median, limit {limit}",
        "if it does not recover: a lower learning rate, a longer warm-up, or stronger clipping", "spike", at_once=True),
    AlertKind.LOSS: Rule(
        _overfitting, "{value} evaluations in a row above the best: {reason}",
        "possible overfitting: use the best checkpoint, stop early, add data or regularization", "loss", at_once=True),
}
# fmt: on


class Alert(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A condition that was or is wrong with a run: a line of alerts.jsonl when it begins, and another at its end."""

    kind: AlertKind
    severity: Severity
    since: UnixTime
    about: str = ""  # "GPU 2", "rank 1", or "" for the run
    value: Number | None = None  # the worst one
    threshold: Number | None = None
    reason: str = ""  # more detail, such as why clocks are throttled
    until: UnixTime | None = None  # None while it is active

    @property
    def advice(self) -> str:
        return RULES[self.kind].advice

    @property
    def text(self) -> str:
        """The alert in one sentence: "GPU 2: 91 C, limit 87 C"."""
        value, limit = _number(self.value), _number(self.threshold)
        text = RULES[self.kind].text.format(value=value, limit=limit, reason=self.reason)
        return f"{self.about}: {text}" if self.about else text


def read_alerts(run: Path) -> tuple[Alert, ...]:
    """Return the alerts of all attempts of a run, in the order in which they began."""
    found: dict[tuple[AlertKind, str, float], Alert] = {}
    for alert in decode_lines(RunDir(run).alerts, Alert):
        found[alert.kind, alert.about, alert.since] = alert  # its end replaces its begin
    return tuple(found.values())


def one_line(alert: Alert) -> str:
    """Return the alert with its hint: "GPU 2: 91 C, limit 87 C (check cooling ...)"."""
    return f"{alert.text} ({alert.advice})"


def findings(seen: RunSnapshot, limits: Thresholds) -> Iterator[Alert]:
    """Yield what matches in a sample, as alerts that begin with it."""
    for kind, rule in RULES.items():
        limit = getattr(limits, rule.limit) if rule.limit else None
        severity = Severity.CRITICAL if rule.critical else Severity.WARNING
        for about, value, reason in rule.find(seen, limits) if limit or not rule.limit else ():
            if reason:  # the rule has compared it
                yield Alert(kind=kind, severity=severity, since=seen.time, about=about, value=value, reason=reason)
            elif value is not None and limit is not None and (value < limit if rule.below else value >= limit):
                yield Alert(kind=kind, severity=severity, since=seen.time, about=about, value=value, threshold=limit)


class AlertTracker:
    """Turn the findings at each sample into alerts that begin and end. Equal samples give equal alerts."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        # (kind, about) -> when its rule began to match: Unix, monotonic
        self._since: dict[tuple[AlertKind, str], tuple[float, float]] = {}
        self._active: dict[tuple[AlertKind, str], Alert] = {}

    @property
    def active(self) -> tuple[Alert, ...]:
        """The active alerts, critical ones first."""
        key = operator.attrgetter("severity", "since", "about")
        return tuple(sorted(self._active.values(), key=key))

    def update(self, seen: RunSnapshot) -> tuple[list[Alert], list[Alert]]:
        """Evaluate the rules on a sample; return the alerts that began and that ended.

        The times of its monotonic clock must not decrease.
        """
        found = {(one.kind, one.about): one for one in findings(seen, self._limits)}
        began = []
        for key, one in found.items():
            clock = seen.time if seen.clock is None else seen.clock
            since, began_at = self._since.setdefault(key, (seen.time, clock))
            if key in self._active:
                self._active[key] = _worse(self._active[key], one)
            elif RULES[one.kind].at_once or clock - began_at >= self._limits.hold_s:
                self._active[key] = replaced(one, since=since)
                began.append(self._active[key])
        # A rule that stops matching starts again from zero: short peaks do not add up.
        self._since = {key: since for key, since in self._since.items() if key in found}
        over = [key for key in self._active if key not in found]
        return began, [ended_at(self._active.pop(key), seen.time) for key in over]

    def end(self, time: float) -> tuple[Alert, ...]:
        """End all active alerts, and return them. time: Unix seconds."""
        ended = tuple(ended_at(alert, time) for alert in self._active.values())
        self._active.clear()
        return ended


def ended_at(alert: Alert, at: float) -> Alert:
    """Return the alert with its end, which is never before its start: the wall clock may have been set back."""
    return replaced(alert, until=max(alert.since, at))


def _worse(alert: Alert, one: Alert) -> Alert:
    """Return the alert with the worse of both values, and the newest reason."""
    values = [value for value in (alert.value, one.value) if value is not None]
    worst = (min if RULES[alert.kind].below else max)(values) if len(values) > 1 else alert.value
    return replaced(alert, value=worst, reason=one.reason)


def _number(value: float | None) -> str:
    """Return a number with at most three significant digits after rounding: 30,000, 91, 14.2."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
