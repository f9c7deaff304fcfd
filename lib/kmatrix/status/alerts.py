"""Alert rules: find the problems of a running run, with a hint for each. Pure: no file, no clock.

A rule matches a sample of a run. An alert begins after its rule has matched for `hold_s`, so that an evaluation or the
first compilation does not count. Conditions that do not recover by themselves (a lost GPU, a loss that is not finite)
are reported at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from kmatrix.gpu.xid import FAULTS, xids_text
from kmatrix.records.states import AlertEntry

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


ADVICE = {
    AlertKind.UTILIZATION: "find what it waits for: data loading, a small micro-batch, or another rank",
    AlertKind.VRAM: "reduce the micro-batch (accumulation keeps the global batch), or recompute activations",
    AlertKind.TEMPERATURE: "check cooling and air flow; a lower power limit costs little speed",
    AlertKind.THROTTLE: "check cooling and power supply: the clocks are below the requested ones",
    AlertKind.LOST: "check the kernel log (dmesg, Xid); the GPU needs a reset, then continue the run",
    AlertKind.XID_FAULT: "check the kernel log (dmesg): reset the GPU, or replace it if this comes back",
    AlertKind.XID: "most often an error of the program on this GPU: the kernel log (dmesg) has its process",
    AlertKind.BALANCE: "check that every rank has the same batch and model, and that no other process uses these GPUs",
    AlertKind.STRAGGLER: "check the GPU of that rank: temperature, clocks, PCIe link, other processes",
    AlertKind.MFU: "use bf16, torch.compile and a larger micro-batch; check data loading",
    AlertKind.SPEED: "check the data loader and other processes on this machine",
    AlertKind.LOSS: "possible overfitting: use the best checkpoint, stop early, add data or regularization",
    AlertKind.SPIKE: "if it does not recover: a lower learning rate, a longer warm-up, or stronger clipping",
    AlertKind.NOT_FINITE: "lower the learning rate or lengthen the warm-up; resume from an earlier checkpoint",
    AlertKind.STALL: "check the end of output.log: a rank may hang, or a disk may not respond",
}

AT_ONCE = frozenset(
    {
        *(AlertKind.LOST, AlertKind.XID_FAULT, AlertKind.XID),
        *(AlertKind.NOT_FINITE, AlertKind.LOSS, AlertKind.SPIKE, AlertKind.STALL),
    }
)
CRITICAL = frozenset({AlertKind.LOST, AlertKind.XID_FAULT, AlertKind.NOT_FINITE, AlertKind.STALL})


class Severity(StrEnum):
    """The severity of an alert."""

    WARNING = "warning"  # costs time, money or quality
    CRITICAL = "critical"  # the run is likely to be lost


PHRASES = {  # value: the worst one, limit: the threshold
    AlertKind.UTILIZATION: "utilization {value}%, below {limit}%",
    AlertKind.VRAM: "{value}% of its memory used, limit {limit}%",
    AlertKind.TEMPERATURE: "{value} C, limit {limit} C",
    AlertKind.THROTTLE: "throttled: {reason}",
    AlertKind.LOST: "lost: {reason}",
    AlertKind.XID_FAULT: "{reason}",
    AlertKind.XID: "{reason}",
    AlertKind.BALANCE: "memory imbalance: CV {value}%, limit {limit}%",
    AlertKind.STRAGGLER: "slow: other ranks wait {value}% of the time, limit {limit}%",
    AlertKind.MFU: "MFU {value}%, below {limit}%",
    AlertKind.SPEED: "{value} tokens/s, below {limit}",
    AlertKind.LOSS: "{value} evaluations in a row above the best: {reason}",
    AlertKind.SPIKE: "training loss {value} nats/token above the recent median, limit {limit}",
    AlertKind.NOT_FINITE: "{reason}",
    AlertKind.STALL: "no metrics for {value} s, limit {limit} s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of the alert rules; 0 switches a rule off. Field x is the symbol ALERT_X."""

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
    def of(cls, symbols: Mapping[str, object]) -> Thresholds:
        """Return the thresholds of a configuration: typed values or the texts of a .config, defaults if missing."""
        known: dict[str, Any] = {}
        for one in fields(cls):
            value = symbols.get(SYMBOLS[one.name])
            if value is not None:
                kind: Any = type(one.default)
                text = str(value).strip('"')
                known[one.name] = text in ("y", "True") if kind is bool else kind(text or 0)
        return cls(**known)


SYMBOLS = {
    "gpu_utilization": "ALERT_GPU_UTILIZATION",
    "vram": "ALERT_VRAM",
    "temperature": "ALERT_TEMPERATURE",
    "balance": "ALERT_BALANCE",
    "straggler": "ALERT_STRAGGLER",
    "mfu": "ALERT_MFU",
    "tokens_per_second": "ALERT_TOKENS_PER_SECOND",
    "loss": "ALERT_LOSS",
    "spike": "ALERT_SPIKE",
    "stall": "ALERT_STALL",
    "throttle": "ALERT_THROTTLE",
    "hold_s": "ALERT_HOLD",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that was or is wrong with a run."""

    kind: AlertKind
    severity: Severity
    since: float  # Unix seconds
    about: str = ""  # "GPU 2", "rank 1", or "" for the run
    value: float | None = None  # the worst one
    threshold: float | None = None
    reason: str = ""  # more detail, such as why clocks are throttled
    until: float | None = None  # Unix seconds, None while it is active

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]

    @property
    def text(self) -> str:
        """The alert in one sentence: "GPU 2: 91 C, limit 87 C"."""
        text = PHRASES[self.kind].format(value=_number(self.value), limit=_number(self.threshold), reason=self.reason)
        return f"{self.about}: {text}" if self.about else text

    def to_json(self) -> dict[str, Any]:
        """Return its entry in status.json."""
        return {
            "kind": self.kind.value,
            "severity": self.severity.value,
            "about": self.about or None,
            "since": self.since,
            "until": self.until,
            "value": self.value,
            "threshold": self.threshold,
            "reason": self.reason or None,
            "text": self.text,
            "advice": self.advice,
        }

    @classmethod
    def from_entry(cls, entry: AlertEntry) -> Alert:
        """Return the alert of an entry in status.json. Raises ValueError for an unknown kind."""
        return cls(
            kind=AlertKind(entry.kind),
            severity=Severity(entry.severity),
            since=entry.since,
            about=entry.about or "",
            value=entry.value,
            threshold=entry.threshold,
            reason=entry.reason or "",
            until=entry.until,
        )


def alerts_of(entries: Sequence[AlertEntry]) -> tuple[Alert, ...]:
    """Return the alerts in the list `alerts` of a status.json, without those of unknown kinds."""
    found = []
    for entry in entries:
        with suppress(ValueError):
            found.append(Alert.from_entry(entry))
    return tuple(found)


def by_subject(alerts: Sequence[Alert]) -> list[tuple[Alert, ...]]:
    """Return alerts of one kind about one device together, each in order of time, critical ones first.

    An alert that comes and goes is one piece of news.
    """
    found: dict[tuple[AlertKind, str], list[Alert]] = {}
    for alert in sorted(alerts, key=lambda alert: (alert.severity is Severity.WARNING, alert.since)):
        found.setdefault((alert.kind, alert.about), []).append(alert)
    return [tuple(group) for group in found.values()]


def worst(alerts: Sequence[Alert]) -> Alert:
    """Return the alert whose value is farthest from its threshold, which works for limits from above and below."""
    return max(alerts, key=lambda alert: abs((alert.value or 0.0) - (alert.threshold or 0.0)))


def one_line(alert: Alert) -> str:
    """Return the alert with its hint: "GPU 2: 91 C, limit 87 C (check cooling ...)"."""
    return f"{alert.text} ({alert.advice})"


BELOW = frozenset({AlertKind.UTILIZATION, AlertKind.MFU, AlertKind.SPEED})  # alerts on low values


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A match of one rule in one sample."""

    kind: AlertKind
    about: str = ""
    value: float | None = None
    threshold: float | None = None
    reason: str = ""


def findings(state: RunSnapshot, limits: Thresholds) -> Iterator[Finding]:
    """Yield the matches of all rules in a sample."""
    for gpu in state.gpus:
        yield from _of_gpu(gpu, limits)
    yield from _above(AlertKind.BALANCE, state.memory_cv, limits.balance)
    slow = "" if state.slowest is None else f"rank {state.slowest}"
    yield from _above(AlertKind.STRAGGLER, state.waiting, limits.straggler, about=slow)
    yield from _below(AlertKind.MFU, state.mfu, limits.mfu)
    yield from _below(AlertKind.SPEED, state.tokens_per_second, limits.tokens_per_second)
    yield from _of_losses(state, limits)
    if state.quiet_s is not None and limits.stall and state.quiet_s >= limits.stall:
        yield Finding(kind=AlertKind.STALL, value=state.quiet_s, threshold=limits.stall)


def _of_gpu(gpu: GpuState, limits: Thresholds) -> Iterator[Finding]:
    for kind in (AlertKind.XID_FAULT, AlertKind.XID):
        known = {code: count for code, count in gpu.xids.items() if (code in FAULTS) is (kind is AlertKind.XID_FAULT)}
        if known:
            yield Finding(kind=kind, about=gpu.name, value=sum(known.values()), reason=xids_text(known))
    if gpu.lost:
        yield Finding(kind=AlertKind.LOST, about=gpu.name, reason="it does not answer")
        return
    yield from _below(AlertKind.UTILIZATION, gpu.utilization, limits.gpu_utilization, about=gpu.name)
    yield from _above(AlertKind.VRAM, gpu.memory_percent, limits.vram, about=gpu.name)
    yield from _above(AlertKind.TEMPERATURE, gpu.temperature, limits.temperature, about=gpu.name)
    held = [reason for reason in gpu.throttled if reason != "power cap"]  # the power limit is where a busy GPU works
    if held and limits.throttle:
        yield Finding(kind=AlertKind.THROTTLE, about=gpu.name, reason=", ".join(sorted(held)))


def _of_losses(state: RunSnapshot, limits: Thresholds) -> Iterator[Finding]:
    if state.losses and state.losses[-1] is None:
        yield Finding(kind=AlertKind.NOT_FINITE, reason="the training loss is not finite")
    known = [loss for loss in state.losses if loss is not None]
    before = known[-1 - SPIKE_LINES : -1]
    # The median of fewer lines is too noisy to call a loss above it a spike.
    if limits.spike and len(before) >= SPIKE_LINES // 2:
        yield from _above(AlertKind.SPIKE, known[-1] - statistics.median(before), limits.spike)
    if limits.loss and len(state.val_losses) > limits.loss:
        values = list(state.val_losses)
        since_best = len(values) - 1 - values.index(min(values))
        if since_best >= limits.loss and values[-1] > min(values):
            reason = f"validation loss {values[-1]:.4f}, best {min(values):.4f}"
            yield Finding(kind=AlertKind.LOSS, value=since_best, reason=reason)


def _above(kind: AlertKind, value: float | None, limit: float, *, about: str = "") -> Iterator[Finding]:
    if limit and value is not None and value >= limit:
        yield Finding(kind=kind, about=about, value=value, threshold=limit)


def _below(kind: AlertKind, value: float | None, limit: float, *, about: str = "") -> Iterator[Finding]:
    if limit and value is not None and value < limit:
        yield Finding(kind=kind, about=about, value=value, threshold=limit)


def _number(value: float | None) -> str:
    """Return a number with at most three significant digits after rounding: 30,000, 91, 14.2."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
