"""The tracker interface and the values that it exchanges with the feed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Protocol

from kmatrix.errors import RecordError
from kmatrix.forms import PROJECT_NAME, PROJECT_RULE
from kmatrix.records.checkpoint_dir import original_of
from kmatrix.records.paths import MATRIX_PREFIX, MatrixDir, RunDir
from kmatrix.records.runs import Status, read_run_file

NODES, HOSTS = "nodes", "hosts"  # keys of the configuration of a run over several nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerIdentity:
    """The identity of a run at a tracker."""

    dir: RunDir
    project: str
    name: str  # the name of its directory, with `-rerun<n>` after a rerun
    id: str  # unique per run and matrix, the same for all attempts
    group: str  # the matrix
    tags: tuple[str, ...]  # axis values, for example `optimizer=adamw`
    config: Mapping[str, str]  # the effective symbols, `run_id` and `matrix`
    tracking: Path  # results directory, below which a tracker may store local data
    job_type: str = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """All metrics of one step."""

    step: int
    time: float  # Unix s
    values: Mapping[str, float]  # keys as in metrics.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceValues:
    """One sample of all GPUs, or of all ranks of a CPU run.

    Keys of `values`: `gpu/<i>/<metric>` for each device i, `gpu_<i>_memory` (MiB), `gpu_total_memory` (MiB),
    `gpu_avg_utilization` (percent), `gpu_load_balance_cv` (percent). Unknown values are omitted.
    """

    time: float  # Unix s
    values: Mapping[str, float]


class AlertLevel(StrEnum):
    """The severity of an alert, in W&B's terms."""

    INFO = "info"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerAlert:
    """An alert as a tracker shows it."""

    time: float  # Unix s
    title: str
    text: str
    level: AlertLevel = AlertLevel.WARN


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The part of a run that a tracker already has, read from the tracker itself; it is not sent again."""

    steps: Mapping[int, Mapping[str, float]]  # step -> metrics; {} if the step is complete but cannot be read back
    devices_time: float = 0.0  # Unix s, the newest DeviceValues; 0.0 for none
    alerts: int = 0  # number of alerts
    link: str | None = None  # URL or directory of the run, None if it does not exist yet
    how: str | None = None  # command that shows or uploads the run, None if the link is enough


class Tracker(Protocol):
    """One tracker of one run. Every call may be slow, hang or raise any exception, so each tracker has its own thread.

    A call that returns has accepted its arguments. `close` returns when everything is stored or safely queued.
    """

    @property
    def name(self) -> str:
        """The name: wandb, trackio or tensorboard."""

    def open(self, run: TrackerIdentity) -> StoredRun:
        """Create the run at the tracker, or resume it. Return what the tracker already has."""

    def configure(self, values: Mapping[str, str]) -> None:
        """Add values to the configuration of the run, or replace them. Called before the points they belong to."""

    def points(self, points: Sequence[MetricPoint]) -> None:
        """Append points in time order. For a known step, only new keys are added."""

    def devices(self, devices: Sequence[DeviceValues]) -> None:
        """Append device samples in time order."""

    def alert(self, alert: TrackerAlert) -> None:
        """Send an alert."""

    def close(self, status: Status) -> None:
        """Close the run with its final status. A stopped run may be opened again later."""


DEFAULT_PROJECT = "gpt2"  # if run.json has no project
OTHER_PROJECT = "pass PROJECT=<name>"
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # part of file names at the trackers


def identity(run: RunDir, *, project: str = "") -> TrackerIdentity:
    """Return the identity of a run at its trackers. `project`: replaces the project of run.json.

    A rerun (`make test-rerun`) has a new identity, because trackers cannot delete the steps of the archived results.
    So has a run of a copied matrix: the original continues its own, and two writers of one run would mix their steps.
    Raises RecordError if run.json is missing, or its run_id or project is missing or invalid.
    """
    record = read_run_file(run)
    matrix = record.matrix or run.path.parent.name
    project = project or record.tracking.project or DEFAULT_PROJECT
    # A run.json may come from anywhere: neither name may lead out of a tracker's directory.
    if not record.run_id or not RUN_ID.fullmatch(record.run_id):
        raise RecordError(
            f"{run.run_json} does not describe a run",
            why=f"invalid run_id {record.run_id!r}" if record.run_id else "it has no run_id",
        )
    if not PROJECT_NAME.fullmatch(project):
        raise RecordError(f"invalid tracker project {project!r} of {run.name}", why=PROJECT_RULE, hint=OTHER_PROJECT)
    reruns = _reruns(run)
    copied = MatrixDir(run.path.absolute().parent)
    # The inode stays the same when the copy is renamed, and no other copy on this disk has it.
    copy = f"-copy{copied.path.stat().st_ino:x}" if original_of(copied) else ""
    suffix = copy + (f"-rerun{reruns}" if reruns else "")
    stamp = re.sub(r"\D", "", matrix.removeprefix(MATRIX_PREFIX))
    return TrackerIdentity(
        dir=run,
        project=project,
        name=run.name + suffix,
        id=f"{record.run_id}-{stamp}{suffix}",
        group=copied.name if copy else matrix,
        tags=tuple(f"{axis}={value}" for axis, value in record.axes.items()),
        config={**record.symbols, "run_id": record.run_id, "matrix": matrix},
        tracking=run.path.parent.parent,
    )


NUMBER = re.compile(r"-?(0|[1-9]\d*)(?P<point>\.\d+)?(?P<power>[eE][+-]?\d+)?")  # JSON numbers: not 007, not 1_000


def number_or_text(text: str) -> str | int | float:
    """Return the value of a symbol as a finite number if it is one, so that a tracker can sort and plot it."""
    found = NUMBER.fullmatch(text)
    if not found or not isfinite(float(text)):
        return text
    return float(text) if found["point"] or found["power"] else int(text)


def _reruns(run: RunDir) -> int:
    """Return the number of archived results of this run."""
    return sum(1 for path in run.archive.glob("*") if path.name.isdigit())
