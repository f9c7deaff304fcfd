"""What the runner in a job needs from the scheduler: who it is, why it has to stop, and a further start."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from kmatrix.engines.spread import Spread
from kmatrix.errors import LaunchError
from kmatrix.records.jobs.files import KUBERNETES, SLURM
from kmatrix.records.jobs.paths import ShareDir

# module:function, called with the environment of the job and the settings of engine.json
ALLOCATIONS = {
    SLURM: "kmatrix.engines.slurm.allocation:this_job",
    KUBERNETES: "kmatrix.engines.kubernetes.allocation:this_job",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCause:
    """Why the scheduler, or its user, stops a job."""

    kind: str  # in one word, as of the attempts that it ends: time limit, preempted, signal
    reason: str  # as a sentence without a full stop
    again: bool = False  # the job is to start again
    lost: tuple[str, ...] = ()  # hosts that the scheduler takes for dead


class Allocation(Protocol):
    """The job that this process runs in. No call raises an error if the scheduler does not answer."""

    name: str  # of the scheduler, as users read it: Slurm
    job: str  # with the task of an array: 12_3
    restart: int  # how often the scheduler has started this job again
    hosts: tuple[str, ...]  # of the job, this one first
    kill_s: float | None  # from the signal that ends the job to SIGKILL; None: unknown
    most_restarts: int | None  # None: no limit
    stage_dir: str  # for copies of the data on each node; "": none
    replaces_nodes: bool  # the scheduler ends and replaces single nodes of this job

    def follow(self, share: ShareDir, runs: Sequence[str], say: Callable[[str], object]) -> int | None:
        """Serve the runs as a further node, where each node of a job has this program; return the exit status.

        None: this process runs the share.
        """

    def spread(self) -> Spread:
        """Return what starts runs on the nodes of the job."""

    def left_s(self) -> float | None:
        """Return the time (s) until the limit of the job, None if it has none or it is unknown."""

    def cause(self, *, noticed: bool) -> StopCause:
        """Return why the job was signalled. noticed: by the signal that announces a limit or a preemption."""

    def is_cancelled(self) -> bool:
        """Return whether the user ends this start of the job, as far as the scheduler tells."""

    def requeue(self) -> str:
        """Queue the job again, which ends this start; return why that failed, "" if it did not."""

    def silent(self, hosts: Collection[str]) -> list[str]:
        """Return which of these hosts of the job do not answer."""

    def is_over(self, job: str, hosts: Collection[str]) -> bool:
        """Return whether no process of another job is left on these hosts of it; False if that is not certain."""


def task_of(environment: Mapping[str, str]) -> int:
    """Return the number of the share of a job: of the array's task, or of the pod's index; 0 without."""
    names = ("SLURM_ARRAY_TASK_ID", "KMATRIX_TASK", "JOB_COMPLETION_INDEX")
    return int(next((environment[name] for name in names if environment.get(name)), 0))


def find_allocation(engine: str, environment: Mapping[str, str], settings: Mapping[str, str]) -> Allocation:
    """Return the job that this process runs in. Raises LaunchError outside of one."""
    if engine not in ALLOCATIONS:
        raise LaunchError(f"ENGINE={engine} has no jobs", why=f"expected one of {', '.join(ALLOCATIONS)}")
    module, _, name = ALLOCATIONS[engine].partition(":")
    return cast("Allocation", getattr(importlib.import_module(module), name)(environment, settings))
