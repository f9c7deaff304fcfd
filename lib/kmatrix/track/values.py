"""What trackers are given, and what a tracker is: the seam between the feed and W&B, Trackio, TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from kmatrix.records import RunDir, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a run is to a tracker.

    name: its directory's.  id: one for each run of each matrix, kept over its attempts.  group: the matrix.
    tags: axis values as `optimizer=adamw`.  config: every symbol in force and its text, and run_id, matrix.
    tracking: the folder below which a tracker may keep what it stores on this machine.
    """

    dir: RunDir
    project: str
    name: str
    id: str
    group: str
    tags: tuple[str, ...]
    config: Mapping[str, str]
    tracking: Path
    job_type: str = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """All values of one step. time: Unix seconds.  values: metrics.jsonl's keys and numbers."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """All GPUs (on the CPU: all ranks) at one moment.

    time: Unix seconds.  values: `gpu/<i>/<metric>` for each device i, `gpu_<i>_memory` (MiB), `gpu_total_memory` (MiB),
    `gpu_avg_utilization` (percent), `gpu_load_balance_cv` (percent). What is not known is left out.
    """

    time: float
    values: Mapping[str, float]


class Level(StrEnum):
    """How bad what an alert tells is."""

    INFO = "info"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that a person should look at. time: Unix seconds."""

    time: float
    title: str
    text: str
    level: Level = Level.WARN


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a tracker holds of a run already, by its own store: nothing of it is sent again.

    steps: what its points say, {} for one that is held whole and cannot be read.  alerts: how many.
    devices_time: the newest Devices, Unix seconds, 0.0 for none.
    link: where a person can look at the run: a URL, a folder; None where there is no such place yet.
    how: the command that shows it, or that sends it on; None where a link is enough.
    """

    steps: Mapping[int, Mapping[str, float]]
    devices_time: float = 0.0
    alerts: int = 0
    link: str | None = None
    how: str | None = None


class Tracker(Protocol):
    """One tracker of one run. Every call may be slow, hang or raise anything: it is made in a thread of its own.

    A call that returns has handed over what it was given; `close` returns when it is stored (or on its way for good).
    """

    @property
    def name(self) -> str:
        """wandb, trackio or tensorboard."""

    def open(self, run: Identity) -> Stored:
        """Begin, or go on with a run that was begun before."""

    def points(self, points: Sequence[Point]) -> None:
        """Take points, in order of time; a step that is there already comes again only with keys that it has not."""

    def devices(self, devices: Sequence[Devices]) -> None:
        """Take what the GPUs did, in order of time."""

    def alert(self, alert: Alert) -> None:
        """Tell a person."""

    def close(self, status: Status) -> None:
        """End: the run finished, failed or was stopped. A stopped run may be opened again later."""
