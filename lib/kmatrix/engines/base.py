"""The interfaces of engines, which execute runs, and of schedulers, which are given jobs.

An engine reports the state of processes; it never decides how a run ended. That is determined from the run's
result.json (`kmatrix.status.classify`), because launchers change exit codes.

On a cluster there are both: a scheduler gets the shares of a matrix as jobs, on the side of the user; in each job, the
runner drives the local engine over the runs of its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kmatrix.errors import LaunchError
from kmatrix.records.jobs.files import JobView, SubmissionFile
from kmatrix.records.jobs.paths import SubmissionDir
from kmatrix.status.state import JobState, RunPlan

GRACE_S = 35.0  # torchrun gives its workers 30 s to save a checkpoint; then it kills them itself


class Engine(Protocol):
    """A place where the processes of runs are started: this machine, or the nodes of a job."""

    def check(self, runs: Sequence[RunPlan]) -> list[str]:
        """Return why these runs cannot run here, one sentence per problem."""

    def plan(self, runs: Sequence[RunPlan]) -> str:
        """Return the commands that would be run."""

    def submit(self, runs: Sequence[RunPlan]) -> dict[str, str]:
        """Queue runs; return run name -> job id. A run that was submitted before is not run twice."""

    def poll(self, jobs: Mapping[str, str] | None = None) -> dict[str, JobState]:
        """Start and watch processes, and return run name -> state, of all jobs or of these."""

    def cancel(self, jobs: Mapping[str, str] | None = None, *, now: bool = False) -> None:
        """Ask jobs to save a checkpoint and exit; `poll` reports when they have. now: kill them and wait."""


class UnreachableError(LaunchError):
    """The scheduler does not answer. It says nothing about its jobs, which go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Nodes of a cluster that are alike. None: unknown."""

    count: int = 1
    down: int = 0  # of them, nodes that take no jobs now
    cpus: int | None = None  # as the scheduler counts them, per node
    memory_mib: int | None = None  # per node
    gpus: int = 0  # per node
    gpu_type: str = ""  # as the scheduler names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A group of nodes of a cluster, or those of its nodes that a matrix may use. None: unknown, or without a limit."""

    name: str
    is_default: bool = False
    kinds: tuple[NodeKind, ...] = ()  # of nodes, those with most GPUs first, then with most CPUs
    seconds: float | None = None  # longest time limit of a job
    default_s: float | None = None  # time limit of a job that asks for none; None: the longest
    most_nodes: int | None = None  # of a job
    memory_mib: int | None = None  # most that a job may have per node
    is_up: bool = True  # False: jobs wait, or are refused
    preempts: bool = False  # its jobs may be preempted

    @property
    def nodes(self) -> int:
        """Return the number of nodes, also of those that are down."""
        return sum(kind.count for kind in self.kinds)

    @property
    def gpus_per_node(self) -> int:
        """Return the GPUs of the nodes that have most."""
        return max((kind.gpus for kind in self.kinds), default=0)

    @property
    def cpus_per_node(self) -> int | None:
        """Return the CPUs of the nodes that have most, None if unknown."""
        return max((kind.cpus for kind in self.kinds if kind.cpus is not None), default=None)

    @property
    def node_memory_mib(self) -> int | None:
        """Return the memory of the nodes that have most, None if unknown."""
        return max((kind.memory_mib for kind in self.kinds if kind.memory_mib is not None), default=None)


def node_kinds(nodes: Iterable[NodeKind]) -> tuple[NodeKind, ...]:
    """Return the kinds of single nodes, each with the number of its nodes; in the order of `Partition.kinds`."""
    nodes = list(nodes)
    count, down = (Counter(replace(node, down=0) for node in some) for some in (nodes, (n for n in nodes if n.down)))
    found = [replace(kind, count=number, down=down[kind]) for kind, number in count.items()]
    return tuple(sorted(found, key=lambda kind: (kind.gpus, kind.cpus or 0, kind.memory_mib or 0), reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a cluster has, and how it ends jobs."""

    partitions: tuple[Partition, ...] = ()  # empty: the user may not list nodes
    kill_s: float | None = None  # from SIGTERM to SIGKILL
    most_tasks: int | None = None  # of an array
    has_accounting: bool = False  # jobs are known for longer than some minutes after their end

    def partition(self, name: str) -> Partition | None:
        """Return the partition with this name, the default one for ""; None if there is none."""
        return next((one for one in self.partitions if (one.name == name if name else one.is_default)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRules:
    """How jobs are cut from the pending runs of a matrix. None: unknown, or the scheduler's default."""

    most_tasks: int | None = None  # shares of a submission
    memory_mib: int | None = None  # per node; 0: all of it
    cpus_per_gpu: int | None = None
    cpus_per_node: int | None = None  # of a node, for jobs that have whole nodes
    gpus_per_node: int = 0  # of a node; 0: unknown, or none
    whole_nodes: bool = False  # jobs have all CPUs of their nodes
    pack: bool = False  # runs that fill a part of a node share a job with the whole node
    has_times: bool = False  # jobs have a time limit
    seconds: float | None = None  # time limit of every job, as configured
    time_factor: float = 1.5  # of an estimate
    around_s: float = 0.0  # of a job in addition: to start and to save
    most_seconds: float | None = None  # longest time limit
    default_seconds: float | None = None  # without an estimate, if there is no longest one


class Scheduler(Protocol):
    """The scheduler of a cluster, as the user's side needs it. Each call raises UnreachableError without an answer."""

    name: str  # as users read it: Slurm, Kubernetes

    def capacity(self) -> Capacity:
        """Return what the cluster has."""

    def rules(self) -> JobRules:
        """Return how jobs are cut from the runs of a matrix, by its settings and by what the cluster has."""

    def check(self, submissions: Sequence[SubmissionFile]) -> list[str]:
        """Return why these submissions would be refused, or would never start: one sentence each, with the fix."""

    def check_paths(self, paths: Collection[Path]) -> list[str]:
        """Return which of these folders, of results and data, jobs would not see, as far as the settings tell."""

    def render(self, folder: SubmissionDir, submission: SubmissionFile) -> dict[str, str]:
        """Return file name -> text: exactly what `submit` hands over."""

    def submit(self, folder: SubmissionDir, submission: SubmissionFile, after: Sequence[str] = ()) -> str:
        """Submit the shares of a submission whose files are written; return the id of the job.

        after: ids of jobs that must have ended before.  A program that it starts inherits the inheritable descriptors
        (`close_fds=False`): the lock of the submitter is one, so that nobody else submits until the program has ended,
        also if the submitter is killed.
        Raises LaunchError if it is refused, UnreachableError if it may or may not have been submitted.
        """

    def find(self, labels: Collection[str]) -> Mapping[str, str]:
        """Return label -> job id, of those that the scheduler knows, also ended ones."""

    def poll(self, jobs: Mapping[str, str]) -> Mapping[str, JobView]:
        """Return share id -> view with the label of the job, for which nothing was checked: `polling.own_views` does.

        jobs: share id -> job, with the task of an array: 12_3. One question for all.
        """

    def cancel(self, jobs: Collection[str], *, now: bool = False) -> None:
        """Ask jobs to save checkpoints and end; pending ones end at once. now: kill them."""
