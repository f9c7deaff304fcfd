"""Rules over what is known of a run right now -> alerts, each with what to do. Pure: no file, no clock.

A rule says what is wrong at one moment. An alert is told when its rule has held for `hold_s` of them, so that an
evaluation or the first compilation is no alert; what cannot heal by itself (a lost GPU, a loss that is no number)
is told at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

SPIKE_LINES = 16  # losses whose median a spike is measured against


class Severity(StrEnum):
    """warning: it costs time, money or quality.  critical: the run is likely to be lost."""

    WARNING = "warning"
    CRITICAL = "critical"


class Kind(StrEnum):
    """What an alert is about; the value is its name in files and on the screen."""

    UTILIZATION = "gpu_utilization"
    VRAM = "vram"
    TEMPERATURE = "temperature"
    THROTTLE = "throttle"
    LOST = "gpu_lost"
    BALANCE = "balance"
    STRAGGLER = "straggler"
    MFU = "mfu"
    SPEED = "tokens_per_second"
    LOSS = "loss"
    SPIKE = "spike"
    NOT_FINITE = "not_finite"
    STALL = "stall"


ADVICE = {
    Kind.UTILIZATION: "find what it waits for: data loading, a small micro-batch, or another rank",
    Kind.VRAM: "reduce the micro-batch (accumulation keeps the global batch), or recompute activations",
    Kind.TEMPERATURE: "look after cooling and air flow; a lower power limit costs little speed",
    Kind.THROTTLE: "look after cooling and power: the clocks are held below what is asked for",
    Kind.LOST: "see the kernel's log (dmesg, Xid); the GPU needs a reset, the run a resume",
    Kind.BALANCE: "check that every rank has the same batch and model, and that nothing else is on these GPUs",
    Kind.STRAGGLER: "look at that rank's GPU: temperature, clocks, PCIe link, other processes",
    Kind.MFU: "use bf16, torch.compile and a larger micro-batch; check what else the GPUs wait for",
    Kind.SPEED: "check the data loader and the other processes of the machine",
    Kind.LOSS: "it may be overfitting: take the best checkpoint, stop early, add data or regularization",
    Kind.SPIKE: "if it does not come back: a lower learning rate, a longer warm-up, or stronger clipping",
    Kind.NOT_FINITE: "lower the learning rate or lengthen the warm-up; resume from a checkpoint before it",
    Kind.STALL: "see the end of output.log: a rank may hang, or a disk does not answer",
}
AT_ONCE = frozenset({Kind.LOST, Kind.NOT_FINITE, Kind.LOSS, Kind.SPIKE, Kind.STALL})
CRITICAL = frozenset({Kind.LOST, Kind.NOT_FINITE, Kind.STALL})
PHRASES = {  # value: the worst that was seen, limit: the threshold
    Kind.UTILIZATION: "utilization {value}%, below {limit}%",
    Kind.VRAM: "{value}% of its memory used, from {limit}% on",
    Kind.TEMPERATURE: "{value} C, from {limit} C on",
    Kind.THROTTLE: "clocks held down by {reason}",
    Kind.LOST: "lost: {reason}",
    Kind.BALANCE: "memory differs by a CV of {value}%, from {limit}% on",
    Kind.STRAGGLER: "slow: the others wait {value}% of the time, from {limit}% on",
    Kind.MFU: "MFU {value}%, below {limit}%",
    Kind.SPEED: "{value} tokens a second, below {limit}",
    Kind.LOSS: "{value} evaluations in a row above the best: {reason}",
    Kind.SPIKE: "training loss {value} nats above the median of the lines before, from {limit} on",
    Kind.NOT_FINITE: "{reason}",
    Kind.STALL: "no line of metrics for {value} s, from {limit} s on",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where each rule begins; 0 switches it off. A field x is the symbol ALERT_X.

    gpu_utilization: percent, lower is told.  vram: percent of a GPU's memory.  temperature: degrees C.
    balance: CV of memory over the GPUs, percent.  straggler: share of step time spent waiting for a slow rank, percent.
    mfu: percent, lower is told.  tokens_per_second: lower is told.  loss: evaluations in a row above the best one.
    spike: nats of a training loss above the median of the lines before it.  stall: seconds without a line of metrics.
    throttle: whether heat, hardware slowdown and power brake are told.  hold_s: seconds that a rule has to hold.
    """

    gpu_utilization: float = 80.0
    vram: float = 98.0
    temperature: float = 87.0
    balance: float = 20.0
    straggler: float = 10.0
    mfu: float = 15.0
    tokens_per_second: float = 0.0
    loss: int = 3
    spike: float = 1.0
    stall: float = 600.0
    throttle: bool = True
    hold_s: float = 30.0

    @classmethod
    def of(cls, symbols: Mapping[str, Any]) -> Thresholds:
        """Return the thresholds of a configuration, as typed values or as the texts of a .config; absent: default."""
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
    """One GPU now; None is unknown. utilization: percent.  memory_percent: of its own.  temperature: C.

    throttled: why its clocks are held down.  lost: it answers nothing.
    """

    name: str
    utilization: float | None = None
    memory_percent: float | None = None
    temperature: float | None = None
    throttled: tuple[str, ...] = ()
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known of a run at one moment; None is unknown. time: Unix seconds.

    gpus: empty for a run on the CPU.  memory_cv: over the GPUs, percent.  waiting: share of step time that ranks wait
    for `slowest`, percent.  mfu: percent.  losses: of training lines, the newest last, None for one that is no number.
    val_losses: of every evaluation.  quiet_s: since the newest line of metrics, None before the first.
    """

    time: float
    gpus: tuple[GpuState, ...] = ()
    memory_cv: float | None = None
    waiting: float | None = None
    slowest: int | None = None
    mfu: float | None = None
    tokens_per_second: float | None = None
    losses: Sequence[float | None] = ()
    val_losses: Sequence[float] = ()
    quiet_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that is wrong. about: "GPU 2", "rank 1", or "" for the run.

    since, until: Unix seconds; until is None while it holds.  value: the worst that was seen.  threshold: in force.
    reason: what else is to be said, such as why clocks are held down.
    """

    kind: Kind
    severity: Severity
    since: float
    about: str = ""
    value: float | None = None
    threshold: float | None = None
    reason: str = ""
    until: float | None = None

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]

    @property
    def text(self) -> str:
        """Return "GPU 2: 91 C, from 87 C on"."""
        words = PHRASES[self.kind].format(value=_number(self.value), limit=_number(self.threshold), reason=self.reason)
        return f"{self.about}: {words}" if self.about else words

    def to_json(self) -> dict[str, Any]:
        """Return what status.json says of it."""
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
    def from_json(cls, value: Mapping[str, Any]) -> Alert:
        """Read what `to_json` gave. Raises KeyError or ValueError for anything else."""
        return cls(
            kind=Kind(value["kind"]),
            severity=Severity(value["severity"]),
            since=float(value["since"]),
            about=str(value.get("about") or ""),
            value=value.get("value"),
            threshold=value.get("threshold"),
            reason=str(value.get("reason") or ""),
            until=value.get("until"),
        )


def alerts_of(status: Mapping[str, Any]) -> tuple[Alert, ...]:
    """Return the alerts in a status.json; nothing where they are not there, or not as we write them."""
    try:
        return tuple(Alert.from_json(value) for value in status.get("alerts") or [])
    except (KeyError, ValueError, TypeError):
        return ()


BELOW = frozenset({Kind.UTILIZATION, Kind.MFU, Kind.SPEED})  # what is told when it is too low


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule says of one moment."""

    kind: Kind
    about: str = ""
    value: float | None = None
    threshold: float | None = None
    reason: str = ""


def findings(state: State, limits: Thresholds) -> Iterator[Finding]:
    """Yield everything that is wrong at this moment."""
    for gpu in state.gpus:
        yield from _of_gpu(gpu, limits)
    yield from _above(Kind.BALANCE, state.memory_cv, limits.balance)
    slow = "" if state.slowest is None else f"rank {state.slowest}"
    yield from _above(Kind.STRAGGLER, state.waiting, limits.straggler, about=slow)
    yield from _below(Kind.MFU, state.mfu, limits.mfu)
    yield from _below(Kind.SPEED, state.tokens_per_second, limits.tokens_per_second)
    yield from _of_losses(state, limits)
    if state.quiet_s is not None and limits.stall and state.quiet_s >= limits.stall:
        yield Finding(kind=Kind.STALL, value=state.quiet_s, threshold=limits.stall)


def _of_gpu(gpu: GpuState, limits: Thresholds) -> Iterator[Finding]:
    if gpu.lost:
        yield Finding(kind=Kind.LOST, about=gpu.name, reason="it answers nothing any more")
        return
    yield from _below(Kind.UTILIZATION, gpu.utilization, limits.gpu_utilization, about=gpu.name)
    yield from _above(Kind.VRAM, gpu.memory_percent, limits.vram, about=gpu.name)
    yield from _above(Kind.TEMPERATURE, gpu.temperature, limits.temperature, about=gpu.name)
    held = [reason for reason in gpu.throttled if reason != "power cap"]  # at its limit is where a GPU should work
    if held and limits.throttle:
        yield Finding(kind=Kind.THROTTLE, about=gpu.name, reason=", ".join(sorted(held)))


def _of_losses(state: State, limits: Thresholds) -> Iterator[Finding]:
    if state.losses and state.losses[-1] is None:
        yield Finding(kind=Kind.NOT_FINITE, reason="the training loss is no number")
    known = [loss for loss in state.losses if loss is not None]
    before = known[-1 - SPIKE_LINES : -1]
    if limits.spike and len(before) >= SPIKE_LINES // 2:
        yield from _above(Kind.SPIKE, known[-1] - statistics.median(before), limits.spike)
    if limits.loss and len(state.val_losses) > limits.loss:
        values = list(state.val_losses)
        since_best = len(values) - 1 - values.index(min(values))
        if since_best >= limits.loss and values[-1] > min(values):
            reason = f"validation loss {values[-1]:.4f}, the best was {min(values):.4f}"
            yield Finding(kind=Kind.LOSS, value=since_best, reason=reason)


def _above(kind: Kind, value: float | None, limit: float, *, about: str = "") -> Iterator[Finding]:
    if limit and value is not None and value >= limit:
        yield Finding(kind=kind, about=about, value=value, threshold=limit)


def _below(kind: Kind, value: float | None, limit: float, *, about: str = "") -> Iterator[Finding]:
    if limit and value is not None and value < limit:
        yield Finding(kind=kind, about=about, value=value, threshold=limit)


@dataclass(frozen=True, slots=True)
class Change:
    """What a look changed. active: everything that holds now, critical ones first."""

    active: tuple[Alert, ...] = ()
    began: tuple[Alert, ...] = ()
    ended: tuple[Alert, ...] = ()


class Watch:
    """Turns what is found at each look into alerts that begin and end. The same looks give the same alerts."""

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._since: dict[tuple[Kind, str], float] = {}  # when a rule began to hold
        self._active: dict[tuple[Kind, str], Alert] = {}

    def look(self, state: State) -> Change:
        """Take in one moment. Times must not go back."""
        found = {(one.kind, one.about): one for one in findings(state, self._limits)}
        began = []
        for key, one in found.items():
            since = self._since.setdefault(key, state.time)
            if key in self._active:
                self._active[key] = _worse(self._active[key], one)
            elif one.kind in AT_ONCE or state.time - since >= self._limits.hold_s:
                self._active[key] = _alert(one, since)
                began.append(self._active[key])
        self._since = {key: since for key, since in self._since.items() if key in found}
        gone = [key for key in self._active if key not in found]
        ended = [replace(self._active.pop(key), until=state.time) for key in gone]
        return Change(_sorted(self._active.values()), tuple(began), tuple(ended))

    def end(self, time: float) -> tuple[Alert, ...]:
        """End every alert that still holds, and return them."""
        ended = tuple(replace(alert, until=time) for alert in _sorted(self._active.values()))
        self._active.clear()
        return ended


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


def _sorted(alerts: Any) -> tuple[Alert, ...]:
    return tuple(sorted(alerts, key=lambda alert: (alert.severity is Severity.WARNING, alert.since, alert.about)))


def _number(value: float | None) -> str:
    """Return a number with as many figures as one reads: 30,000, 91, 14.2."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
