"""The port between the runner and the places where jobs run. A job trains one run: its program is `kmatrix run`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from kmatrix.errors import LaunchError
from kmatrix.records.attempts import Exit


class UnreachableError(LaunchError):
    """The scheduler does not answer. It says nothing about its jobs, which go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run needs, per node. Runs of one shape are submitted together."""

    nodes: int = 1
    gpus: int = 0
    cpus: int = 1
    memory_mib: int | None = None  # None: the scheduler's default
    seconds: int | None = None  # time limit of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The runs of a submission: task -> run. Its folder has what the scheduler gets."""

    folder: Path  # jobs/N of the matrix, absolute
    label: str  # of the matrix
    shape: Shape
    runs: tuple[str, ...]
    is_last: bool = False  # not runs, but the job after them: the next seeds, or the report

    @property
    def name(self) -> str:
        """The name of its job, by which it is found again."""
        return f"{self.label}-{self.folder.name}"


class Phase(StrEnum):
    WAITS = "waits"
    RUNS = "runs"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A job of a matrix, as its scheduler shows it."""

    number: str  # of the submission: the name of its folder in jobs/
    task: int
    id: str  # as users know it: 12_3
    phase: Phase
    state: str  # in the scheduler's words
    reason: str = ""  # the same
    nodes: str = ""
    starts: float | None = None  # Unix seconds, expected


class Scheduler(Protocol):
    """This machine, Slurm or Kubernetes. Each call may raise UnreachableError; `submit` also LaunchError."""

    name: str
    most: int  # runs of a submission
    most_wide: int  # the same, for runs over several nodes

    def fit(self, planned: Shape) -> Shape:
        """Return what the job of a run asks for. planned: with the threads of its ranks, and its expected time."""

    @property
    def last(self) -> Shape:
        """Return what the job after all others asks for."""

    @property
    def whole_node(self) -> Shape | None:
        """Return the node into which smaller runs are packed, None to give each run a job."""

    def check(self, shapes: Sequence[Shape]) -> Iterator[LaunchError]:
        """Yield why jobs of these shapes would never start, each with the argument that fixes it."""

    def script(self, batch: Batch) -> tuple[str, str]:
        """Return the name and the text of the file that `submit` hands over."""

    def submit(self, batch: Batch, after: Sequence[str] = ()) -> str:
        """Submit a file that is written; return the id of the job. after: ids of jobs that have to end before."""

    def poll(self, label: str) -> list[Seen]:
        """Return the jobs of a matrix that the scheduler knows, also those that ended lately."""

    def cancel(self, jobs: Sequence[str]) -> None:
        """Ask jobs to save and end; those that wait never start."""


class Ranks(Protocol):
    """The processes of an attempt: those of this node, and what is known of the others."""

    @property
    def exits(self) -> Sequence[Exit]:
        """Return the exits of all ranks, in their order."""

    @property
    def trouble(self) -> tuple[str, str] | None:
        """Return kind and reason of what ended the attempt besides its ranks, such as a node that was lost."""

    def poll(self) -> bool:
        """Return whether all have exited, and nothing is left of them."""

    def stop(self, grace_s: float) -> None:
        """Ask them to save a checkpoint and exit; they are killed after the grace period."""

    def kill(self) -> None: ...

    def limit(self, seconds: float) -> None:
        """Kill what has not exited within some seconds, without asking."""


class Place(Protocol):
    """Where this process is."""

    job: str  # of a scheduler; empty on one machine
    host: str
    boot: str
    gpus: tuple[str, ...]  # UUIDs
    pulse_s: float  # 1 s on a disk of this machine, 10 s on shared storage
    replaces_nodes: bool  # a lost node comes back by itself

    def grace_of(self, signal: str) -> float:
        """Return the time (s) to save a checkpoint after a signal; empty: after a request."""

    def kind_of(self, signal: str) -> str:
        """Return what a signal means."""


def label_of(matrix: Path) -> str:
    """Return the label of the jobs of a matrix. A copy, or a matrix that was moved, has another one."""
    return f"km-{zlib.crc32(str(matrix.resolve()).encode()):08x}"
