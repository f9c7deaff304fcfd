"""What is wrong on the screen: what the runner told of a run at that moment, else the rules held against the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kmatrix.alerts import Alert, GpuState, Severity, State, Thresholds, Watch, alerts_of
from kmatrix.errors import RecordError
from kmatrix.gpu.top.values import Metric, Row, balance
from kmatrix.records import RunDir, read_json

WINDOW = 10  # buckets of history, seconds mostly, over which utilization is averaged
OF_A_MACHINE = Thresholds(gpu_utilization=0, balance=0)  # an idle GPU, or one of another job, is well


def of_run(run: RunDir, now: float) -> tuple[Alert, ...] | None:
    """Return what was told of a run and held at a Unix time; None where no runner has kept a status."""
    try:
        told = alerts_of(read_json(run.status))
    except RecordError:
        return None
    held = [alert for alert in told if alert.since <= now and (alert.until is None or now < alert.until)]
    return tuple(sorted(held, key=lambda alert: (alert.severity is Severity.WARNING, alert.since)))


def limits_of(run: RunDir) -> Thresholds:
    """Return the limits in a run's configuration; the defaults where it has none."""
    try:
        return Thresholds.of(read_json(run.run_json).get("symbols") or {})
    except (RecordError, ValueError):
        return Thresholds()


def of_rows(rows: Sequence[Row], limits: Thresholds, now: float) -> tuple[Alert, ...]:
    """Return what is wrong with these GPUs now."""
    samples = [row.sample for row in rows if row.sample.is_known]
    state = State(
        time=now,
        gpus=tuple(_state(row) for row in rows),
        memory_cv=balance(samples, Metric.MEMORY).cv,
    )
    return Watch(replace(limits, hold_s=0)).look(state).active


def _state(row: Row) -> GpuState:
    recent = row.history.get(Metric.UTILIZATION, ())[-WINDOW:]
    known = [value for value in recent if value is not None]
    return GpuState(
        name=f"GPU {row.sample.gpu_index}",
        utilization=sum(known) / WINDOW if len(known) == WINDOW else None,
        memory_percent=row.sample.memory_percent,
        temperature=row.sample.temperature,
        throttled=row.throttle or (),
        lost=not row.sample.is_known,
    )
