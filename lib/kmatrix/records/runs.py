"""Read the files of one run: run.json, result.json and the merged metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError, SchemaError
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import as_recorded, field_types

LOST = "its runner died"  # the reason of a run that says "running" and has no runner


class Status(StrEnum):
    """The status of a run or of a matrix; `kmatrix.status.status_file` determines that of a run."""

    PLANNED = "planned"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The numbers that the trainer writes to result.json when an attempt ends. None: missing, or of another type.

    A result.json may come from another version, or be damaged: readers must not assume that any value is present.
    """

    run_id: str | None = None
    attempt: int | None = None
    status: str | None = None
    kind: str | None = None  # failure or stop in one word
    reason: str | None = None
    ended_by: str | None = None  # max_iters, time, cost or early_stopping
    ended: float | None = None  # Unix seconds
    step: int | None = None  # optimizer steps done
    tokens: int | None = None  # trained on, all ranks
    seconds: float | None = None  # training time of all attempts
    initial_val_loss: float | None = None  # nats/token
    final_val_loss: float | None = None  # nats/token
    best_val_loss: float | None = None  # nats/token
    best_val_step: int | None = None
    final_train_loss: float | None = None  # nats/token
    bytes_per_token: float | None = None  # UTF-8 bytes of text per validation target
    hellaswag_accuracy: float | None = None  # 0 to 1
    hellaswag_accuracy_norm: float | None = None  # 0 to 1
    tokens_per_second: float | None = None
    mfu: float | None = None  # 0 to 1
    step_ms: float | None = None
    peak_memory_mib: float | None = None  # maximum over ranks
    params: int | None = None
    sparsity: float | None = None  # 0 to 1
    world_size: int | None = None  # ranks
    device: str | None = None  # "cuda" or "cpu"
    device_name: str | None = None

    @property
    def number(self) -> int:
        """The number of the attempt, which the first versions did not write."""
        return 1 if self.attempt is None else self.attempt

    def is_of(self, run_id: str | None, attempt: int) -> bool:
        """Return whether this attempt of the run wrote the result."""
        return self.run_id is not None and self.run_id == run_id and self.number == attempt

    def or_else(self, other: RunResult) -> RunResult:
        """Return the result with the values of another one for those that are missing here."""
        missing = [one.name for one in fields(self) if getattr(self, one.name) is None]
        return replace(self, **{name: getattr(other, name) for name in missing})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunResult:
        """Return the result in a JSON object. Unknown keys are ignored."""
        return cls(**{name: as_recorded(values.get(name), types) for name, types in field_types(RunResult)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The files of one run."""

    dir: RunDir
    run: Mapping[str, Any]  # run.json
    result: RunResult | None  # of any attempt, None without a result.json
    metrics: tuple[Mapping[str, Any], ...] = ()  # one mapping per step, in order of steps


def read_run(run_dir: RunDir) -> RunRecord:
    """Read one run, finished or not. Raises RecordError if run.json or result.json is damaged."""
    return RunRecord(
        dir=run_dir,
        run=read_json(run_dir.run_json),
        result=RunResult.from_json(read_json(run_dir.result)) if run_dir.result.exists() else None,
        metrics=tuple(merged_metrics(run_dir.metrics)),
    )


def read_result(run_dir: RunDir) -> RunResult | None:
    """Return result.json, or None if it is missing or unreadable. Raises SchemaError if it is too new."""
    try:
        return RunResult.from_json(read_json(run_dir.result))
    except SchemaError:
        raise
    except (RecordError, OSError):
        return None


def merged_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one mapping per step, merged from its lines; the last attempt at a step counts.

    A line with "resumed" starts an attempt at its step, and invalidates earlier lines of later steps.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(path):
        if not isinstance(line.get("step"), int):
            continue  # not a line of metrics
        step, attempt = int(line["step"]), int(line.get("attempt", 1))
        if line.get("resumed"):
            steps = {known: values for known, values in steps.items() if known <= step}
        elif attempt >= int(steps.get(step, line).get("attempt", 1)):
            steps.setdefault(step, {}).update(line)
    return [steps[step] for step in sorted(steps)]
