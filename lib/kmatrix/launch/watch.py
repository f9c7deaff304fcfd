"""What a run does right now, from the lines that it appends to metrics.jsonl, each read once."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kmatrix.alerts import Alert
from kmatrix.records import Status

LOSSES = 64  # training lines whose losses are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One moment of a run, for the screen. Unknown is None.

    index, total: the run is the index-th of total, from 1.  losses: nats a token.  elapsed_s, left_s:
    seconds.  counts: status -> runs of the matrix.  note: what is going on besides training.
    alerts: those that hold now.
    """

    run: str
    index: int
    total: int
    status: Status
    reason: str = ""
    note: str = ""
    step: int | None = None
    max_iters: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    elapsed_s: float | None = None
    left_s: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()


class MetricsTail:
    """Follows metrics.jsonl. Each call of `read` costs what was appended since the one before.

    Make it before the attempt starts: lines that are there already belong to earlier ones. whole: read those, too.
    limit_s: seconds that the run may take, all attempts together, None for as long as it likes.
    losses: of the last training lines, None for one that is no number.  val_losses: of every evaluation.
    mfu: percent.  newest: Unix seconds of the newest line.  lines: of training.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int = 1,
        max_iters: int | None = None,
        whole: bool = False,
        limit_s: float | None = None,
    ) -> None:
        self._path, self._attempt, self.max_iters, self._limit_s = path, attempt, max_iters, limit_s
        self._offset = path.stat().st_size if path.exists() and not whole else 0
        self._half = b""
        self._first: tuple[int, float] | None = None  # step and Unix seconds
        self._last: tuple[int, float] | None = None
        self._due: float | None = None  # Unix seconds at which the budget is spent
        self.step: int | None = None
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.tokens_per_second: float | None = None
        self.mfu: float | None = None
        self.newest: float | None = None
        self.lines = 0
        self.losses: deque[float | None] = deque(maxlen=LOSSES)
        self.val_losses: list[float] = []

    def read(self) -> None:
        """Take in the complete lines that are new."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # rewritten: begin again, the attempt tells the lines apart
                    self._offset, self._half = 0, b""
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return  # not there yet
        self._offset += len(new)
        *lines, self._half = (self._half + new).split(b"\n")
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and value.get("attempt", 1) == self._attempt:
                self._take(value)

    def left_s(self, now: float | None = None) -> float | None:
        """Seconds until the last step at the mean pace of this attempt, or until the budget is spent; None: unknown."""
        now = time.time() if now is None else now
        left = [self._due - now] if self._due is not None else []
        if self._first and self._last and self.max_iters is not None and self._last[0] > self._first[0]:
            pace = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
            left.append(pace * (self.max_iters - self._last[0]) - max(0.0, now - self._last[1]))
        return max(0.0, min(left)) if left else None

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def span(self) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """Step and Unix seconds of the first and of the newest line of training; None before there is one."""
        return (self._first, self._last) if self._first and self._last else None

    def _take(self, line: Mapping[str, Any]) -> None:
        step, at = line.get("step"), _number(line.get("time"))
        self.newest = at if at is not None else self.newest
        elapsed = _number(line.get("elapsed_s"))
        if self._limit_s is not None and at is not None and elapsed is not None:
            self._due = at + self._limit_s - elapsed
        if isinstance(step, int):
            self.step = step
            if "train/loss" in line and at is not None:
                self._first, self._last = self._first or (step, at), (step, at)
        if "train/loss" in line:
            self.loss = _number(line["train/loss"])
            self.tokens_per_second = _number(line.get("throughput/tokens_per_s"))
            share = _number(line.get("throughput/mfu"))
            self.mfu = None if share is None else 100.0 * share
            self.losses.append(self.loss)
            self.lines += 1
        if "val/loss" in line:
            self.val_loss = _number(line["val/loss"])
            self.val_losses += [] if self.val_loss is None else [self.val_loss]


def limit_s(train: Mapping[str, Any]) -> float | None:
    """Return the seconds that a run's budgets of time and money allow, None without any. train: of run.json."""
    time_s, dollars, price = (_number(train.get(name)) for name in ("max_time", "max_cost", "gpu_hour_price"))
    limits = [] if time_s is None else [time_s]
    if dollars is not None and price:
        limits.append(3600 * dollars / (price * int(train.get("num_gpus") or 1)))
    return min(limits, default=None)


def _number(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None
