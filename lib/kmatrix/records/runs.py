"""Read the files of one run: run.json, result.json and the merged metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.paths import RunDir

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
class RunRecord:
    """The files of one run."""

    dir: RunDir
    run: Mapping[str, Any]  # run.json
    result: Mapping[str, Any] | None  # result.json of any attempt, None without one
    metrics: tuple[Mapping[str, Any], ...] = ()  # one mapping per step, in order of steps


def read_run(run_dir: RunDir) -> RunRecord:
    """Read one run, finished or not. Raises RecordError if run.json or result.json is damaged."""
    return RunRecord(
        dir=run_dir,
        run=read_json(run_dir.run_json),
        result=read_json(run_dir.result) if run_dir.result.exists() else None,
        metrics=tuple(merged_metrics(run_dir.metrics)),
    )


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
