"""A matrix as it stands now, from its files: what `make status` shows, of a running matrix and of a finished one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmatrix.errors import RecordError, SchemaError
from kmatrix.launch.alarm import kept
from kmatrix.launch.standing import read_state, settle
from kmatrix.launch.state import RunState, overall
from kmatrix.launch.watch import MetricsTail, limit_s
from kmatrix.records import MatrixDir, RunDir, Status, read_json

SHAPE = ("model", "n_layer", "n_embd", "block_size", "global_batch", "num_gpus", "device", "dtype")
EMPTY: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run now. Unknown is None.

    step: the newest that is known.  loss: nats a token, of training; val_loss: the last that was measured.
    mfu: 0 to 1.  memory_mib: the most that one of its devices held; memory_total_mib: what that device has.
    elapsed_s: of all its attempts.  left_s: until its end; of a run to come, of all of it.
    ended_by: what ended a finished run early.  alerts: what holds now.
    """

    name: str
    status: Status
    kind: str | None = None
    reason: str = ""
    attempt: int = 0
    micro_batch: int | None = None
    step: int | None = None
    max_iters: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    ranks: int | None = None
    device: str = ""
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    elapsed_s: float | None = None
    left_s: float | None = None
    ended_by: str | None = None
    alerts: tuple[str, ...] = ()
    reused_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView:
    """A matrix now. running: a runner has it.  left_s: until its end, None while that is not known of every run."""

    name: str
    status: Status
    running: bool
    started: float | None
    ended: float | None
    left_s: float | None
    runs: tuple[RunView, ...]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(run.status for run in self.runs)
        return {status.value: found[status] for status in Status if found[status]}


class Overview:
    """Looks at a matrix again and again; each look reads what the metrics of its runs have grown by."""

    def __init__(self, matrix: MatrixDir) -> None:
        self._matrix = matrix
        self._tails: dict[tuple[str, int], MetricsTail] = {}
        self._records: dict[str, Mapping[str, Any]] = {}

    def look(self, now: float | None = None) -> MatrixView:
        """Return how the matrix stands. Raises SchemaError where a newer kmatrix wrote it."""
        now = time.time() if now is None else now
        running = self._matrix.is_held()
        found = [self._run(run, now, running=running) for run in self._matrix.runs()]
        paces = self._paces(found)
        views = tuple(self._expected(view, paces) for view in found)
        record = _readable(self._matrix)
        left = [view.left_s for view in views if view.status in (Status.RUNNING, Status.PLANNED)]
        return MatrixView(
            name=self._matrix.name,
            status=Status.RUNNING if running else overall([view.status for view in views]),
            running=running,
            started=record.get("started"),
            ended=None if running else record.get("ended"),
            left_s=sum(s for s in left if s is not None) if running and left and None not in left else None,
            runs=views,
        )

    def _run(self, run: RunDir, now: float, *, running: bool) -> RunView:
        state = _state(run, running=running)
        if run.name not in self._records:
            self._records[run.name] = read_json(run.run_json).get("train") or EMPTY
        train = self._records[run.name]
        result = _result(run, state)
        tail = self._tail(run, state, train)
        memory, total = _memory(run)
        last = state.last
        live = state.status is Status.RUNNING
        elapsed = _elapsed(state, now)
        return RunView(
            name=run.name,
            status=state.status,
            kind=last.kind if last else None,
            reason=state.reason,
            attempt=state.number,
            micro_batch=last.micro_batch if last else None,
            step=result.get("step") if result else tail.step,
            max_iters=train.get("max_iters"),
            loss=result.get("final_train_loss") if result else tail.loss,
            val_loss=_first(result.get("final_val_loss"), tail.val_loss),
            tokens_per_second=result.get("tokens_per_second") if result else tail.tokens_per_second,
            mfu=result.get("mfu") if result else (None if tail.mfu is None else tail.mfu / 100.0),
            ranks=train.get("num_gpus"),
            device=str(train.get("device") or ""),
            memory_mib=memory,
            memory_total_mib=total,
            elapsed_s=_first(elapsed, result.get("seconds")),
            left_s=_left(tail, train, elapsed, now) if live else None,
            ended_by=result.get("ended_by"),
            alerts=tuple(alert.text for alert in kept(run) if alert.until is None) if live else (),
            reused_from=state.reused_from,
        )

    def _tail(self, run: RunDir, state: RunState, train: Mapping[str, Any]) -> MetricsTail:
        number = max(state.number, 1)
        tail = self._tails.get((run.name, number))
        if tail is None:
            tail = MetricsTail(run.metrics, attempt=number, max_iters=train.get("max_iters"), whole=True)
            self._tails[run.name, number] = tail
        tail.read()
        return tail

    def _paces(self, views: Sequence[RunView]) -> dict[tuple[Any, ...], float]:
        """Return the seconds of a step of each shape of run that has shown them, evaluations included."""
        paces: dict[tuple[Any, ...], float] = {}
        for view in views:
            if view.status is Status.RUNNING and view.left_s is not None and view.elapsed_s and view.max_iters:
                pace = (view.elapsed_s + view.left_s) / view.max_iters
            elif view.status is Status.FINISHED and view.step and view.elapsed_s:
                pace = view.elapsed_s / view.step
            else:
                continue
            for shape in self._shapes(view):
                paces[shape] = pace
        return paces

    def _expected(self, view: RunView, paces: Mapping[tuple[Any, ...], float]) -> RunView:
        """Return a run that is to come with the time that runs of its shape take here, where one has shown it."""
        pace = next((paces[shape] for shape in self._shapes(view) if shape in paces), None)
        if view.status is not Status.PLANNED or pace is None or view.max_iters is None:
            return view
        return replace(view, left_s=pace * view.max_iters)

    def _shapes(self, view: RunView) -> tuple[tuple[Any, ...], ...]:
        """What decides the time of a step: with the optimizer, and without it where no run of that has shown one."""
        train = self._records[view.name]
        shape = tuple(train.get(name) for name in SHAPE)
        return (*shape, train.get("optimizer")), shape


def _state(run: RunDir, *, running: bool) -> RunState:
    """How a run stands; what says running is believed only while the matrix has a runner."""
    if not running:
        return settle(run)
    try:
        return read_state(run)
    except SchemaError:
        raise
    except (RecordError, KeyError, ValueError, TypeError) as error:
        return RunState(status=Status.FAILED, reason=str(error).splitlines()[0])


def _result(run: RunDir, state: RunState) -> Mapping[str, Any]:
    """The result of the last attempt; empty while it goes on, or where it left none."""
    if state.status in (Status.RUNNING, Status.PLANNED, Status.SKIPPED):
        return EMPTY
    try:
        result = read_json(run.result)
    except RecordError:
        return EMPTY
    return result if state.reused_from or result.get("attempt", 1) == state.number else EMPTY


def _memory(run: RunDir) -> tuple[float | None, float | None]:
    """The most MiB that one device of the run held, and what that device has, from its recording's summary."""
    try:
        gpus = read_json(run.gpu_summary).get("gpus") or []
    except RecordError:
        return None, None
    peaks = [
        (float(gpu["memory_used"]["max"]), gpu.get("memory_total"))
        for gpu in gpus
        if isinstance(gpu.get("memory_used"), dict) and gpu["memory_used"].get("max") is not None
    ]
    return max(peaks, key=lambda peak: peak[0], default=(None, None))


def _elapsed(state: RunState, now: float) -> float | None:
    """Seconds of all attempts together."""
    spans = [
        (attempt.ended or now) - attempt.started
        for attempt in state.attempts
        if attempt.started is not None and (attempt.ended is not None or attempt.status is Status.RUNNING)
    ]
    return sum(spans) if spans else None


def _left(tail: MetricsTail, train: Mapping[str, Any], elapsed: float | None, now: float) -> float | None:
    """Seconds until the last step, or until the run's budget is spent where that comes first."""
    left, limit = tail.left_s(now), limit_s(train)
    if limit is not None and elapsed is not None:
        rest = max(0.0, limit - elapsed)
        return rest if left is None else min(left, rest)
    return left


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _readable(matrix: MatrixDir) -> Mapping[str, Any]:
    try:
        return read_json(matrix.status)
    except SchemaError:
        raise
    except RecordError:
        return EMPTY
