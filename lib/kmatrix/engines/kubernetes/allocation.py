"""The pod that this process runs in, as part of its Job: pod 0 runs the share, and the others follow its orders."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kmatrix.engines.allocation import Allocation, StopCause, task_of
from kmatrix.engines.kubernetes.follow import Follower, Say
from kmatrix.engines.kubernetes.gather import Gathering
from kmatrix.engines.kubernetes.manifests import FOLDER, HEAD, HOST, INDEX, JOB, KILL, NODES, SHARES
from kmatrix.engines.kubernetes.orders import AGAIN, READY_S, Orders, Ready, read_orders, read_ready, write_orders
from kmatrix.engines.node import PULSE_S
from kmatrix.engines.spread import AgentSettings, Local, Spread, agent_argv, free_port, signal_agent
from kmatrix.errors import LaunchError
from kmatrix.records.decode import replaced
from kmatrix.records.jobs.claim import fresh_owner, is_listed
from kmatrix.records.jobs.files import (
    CANCELLED,
    CANCELLING,
    NodeFile,
    job_lines,
    read_node,
    read_node_end,
)
from kmatrix.records.jobs.paths import JobsDir, NodeDir, ShareDir, SubmissionDir
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.status.state import PREEMPTED, RunPlan

SILENT_S = 2.5 * max(PULSE_S, READY_S)  # a pod that does not rewrite its files for so long is gone
LOOK_S = 0.5  # between two looks at it


@dataclass(slots=True)
class Pods:
    """The pods of a Job over several nodes; this one is the first."""

    python: Path
    job: str
    restart: int
    head: str  # name of this pod in the DNS

    def has_agents(self, run: RunPlan) -> bool:
        """Return whether a run has other pods."""
        return run.nodes > 1

    def hosts_of(self, run: RunPlan) -> tuple[str, ...]:
        """Return the names of the pods of a run."""
        first = self.head.partition(".")[0].rpartition("-")[0]
        return tuple(f"{first}-{node}" for node in range(run.nodes))

    def argv(self, run: RunPlan, torchrun: Sequence[str], settings: AgentSettings) -> list[str]:
        """Return the command of this pod, after the others have got their orders. Raises OSError if that fails."""
        if not self.has_agents(run):
            return Local().argv(run, torchrun, settings)
        port, recorders = free_port(), settings.recorders
        orders = Orders(
            job=self.job,
            restart=self.restart,
            attempt=run.attempt,
            address=self.head,
            port=port,
            nodes=run.nodes,
            ranks=run.ranks,
            cuda=run.cuda,
            cpu_threads=run.cpu_threads,
            resume=run.resume,
            micro_batch=run.micro_batch,
            spent_s=run.spent_s,
            grace_s=settings.grace_s,
            hz=recorders.hz if recorders else 0,
            stage_dir=settings.stage_dir,
        )
        write_orders(run.dir, orders)
        return agent_argv(run, torchrun, python=str(self.python), settings=settings, address=self.head, port=port)

    def stop(self, run: RunPlan) -> bool:
        """Ask the agent of this pod; the ranks of all pods agree on the step at which they stop."""
        return self.has_agents(run) and signal_agent(run)

    def kill(self, run: RunPlan) -> None:
        """End the attempt in the other pods, through their orders."""
        orders = read_orders(run.dir) if self.has_agents(run) else None
        if orders is not None and orders.key == (self.restart, run.attempt):
            with suppress(OSError):
                write_orders(run.dir, replaced(orders, over=True))

    def lost(self, run: RunPlan) -> list[str]:
        """Return the pods that have not ended their part, and have not rewritten a file for some seconds."""
        silent = {node: _pulse(run, node) for node in range(1, run.nodes) if not _has_ended(run, node)}
        deadline = time.monotonic() + SILENT_S
        while silent and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            silent = {node: pulse for node, pulse in silent.items() if _pulse(run, node) == pulse}
        hosts = self.hosts_of(run)
        return [hosts[node] for node in silent]


def _pulse(run: RunPlan, number: int) -> NodeFile | Ready | None:
    """Return the file that a pod rewrites while it lives: its agent's if it trains this attempt, or its note."""
    node = NodeDir(run.dir, number)
    agent = read_node(node) if is_listed(node.node_json) else None
    # A pod that replaces a lost one writes notes, too: they do not make the agent alive.
    return agent if agent is not None and agent.attempt == run.attempt else read_ready(run.dir, number)


def _has_ended(run: RunPlan, number: int) -> bool:
    """Return whether the agent of a pod has written how this attempt ended there."""
    node = NodeDir(run.dir, number)
    end = read_node_end(node) if is_listed(node.end) else None
    return end is not None and end.attempt == run.attempt


@dataclass(slots=True)
class PodJob:
    """The Job, or the index of a Job, that this pod belongs to."""

    job: str
    restart: int
    hosts: tuple[str, ...]
    folder: SubmissionDir
    index: int  # of this pod in a run over several nodes
    kill_s: float | None = None
    most_restarts: int | None = None  # Kubernetes counts them: K8S_RESTARTS
    head: str = ""
    stage_dir: str = ""  # for copies of the data in each pod
    replaces_nodes: bool = False  # over several nodes: each pod is evicted and replaced alone
    leaves: bool = False  # this pod is ended: it was signalled
    name: str = "Kubernetes"

    def spread(self) -> Spread:
        """Return what starts runs in the pods of this Job."""
        return Pods(Path(sys.executable), self.job, self.restart, self.head) if self.head else Local()

    def follow(self, share: ShareDir, runs: Sequence[str], say: Say) -> int | None:
        """Follow the orders of pod 0, and return the exit status; None in pod 0 when all others are ready for it."""
        if node := os.environ.get(HOST):
            say(f"pod {socket.gethostname()} on node {node}")
        if not self.head or not runs:
            return None
        run = RunDir(share.run(runs[0]).path.resolve())
        if self.index == 0:
            gathering = Gathering(share, run, self.job, len(self.hosts), say)
            gathering.listen()
            return gathering.wait()
        follower = Follower(share, run, self.job, self.index, say)
        follower.listen()
        return follower.follow()

    def left_s(self) -> float | None:
        """Return None: a pod does not know the deadline of its Job."""
        return None

    def cause(self, *, noticed: bool) -> StopCause:
        """Return why the pod was signalled: cancelled by its user, whose command notes it first, or evicted."""
        del noticed
        self.leaves = True
        jobs = JobsDir(self._matrix)
        lines = (
            [line for line in job_lines(jobs) if line.submission == self.folder.number] if is_listed(jobs.log) else ()
        )
        if lines and lines[-1].event in (CANCELLING, CANCELLED):
            return StopCause(kind="signal", reason=f"asked to stop: job {self.job} was cancelled")
        reason = (
            f"pod {socket.gethostname()} is ended: evicted, preempted, or its Job was deleted or reached its deadline"
        )
        return StopCause(kind=PREEMPTED, reason=reason, again=True)

    def is_cancelled(self) -> bool:
        """Return False: the user's command notes it first, which the runner reads."""
        return False

    def requeue(self) -> str:
        """Start the runner again: in this pod, or in one that replaces it if this one is ended. Does not return."""
        sys.stdout.flush()
        if not self.head or self.leaves:
            os._exit(AGAIN)
        # Another pod is lost, and Kubernetes replaces that one alone: this one keeps its node, image and caches.
        try:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        except OSError as error:
            return error.strerror or str(error)

    def silent(self, hosts: Collection[str]) -> list[str]:
        """Return none: a pod with the name of a lost one is another pod."""
        del hosts
        return []

    def is_over(self, job: str, hosts: Collection[str]) -> bool:
        """Return False: a pod may not ask for other Jobs."""
        del job, hosts
        return False

    @property
    def _matrix(self) -> MatrixDir:
        return MatrixDir(self.folder.path.parent.parent)


def this_job(environment: Mapping[str, str], settings: Mapping[str, str]) -> Allocation:
    """Return the Job that this process runs in. Raises LaunchError outside of a pod of kmatrix."""
    base, place = environment.get(JOB, ""), environment.get(FOLDER, "")
    if not base or not place:
        raise LaunchError(
            "this is not a pod of kmatrix", why=f"{JOB} or {FOLDER} is not set", hint="submit job.yaml: kubectl apply"
        )
    folder, task = SubmissionDir(Path(place)), task_of(environment)
    job = f"{base}_{task}" if int(environment.get(SHARES) or 1) > 1 else base
    share = ShareDir(folder.path.parent.parent, folder.number, task)
    before, head = fresh_owner(share), environment.get(HEAD, "")
    # A replacement only starts after the end of the pod before, so the claim is that one's.
    restart = before.restart + 1 if before is not None and before.job == job else 0
    nodes = int(environment.get(NODES) or 1)
    first = head.partition(".")[0].rpartition("-")[0]
    return PodJob(
        job=job,
        restart=restart,
        hosts=tuple(f"{first}-{node}" for node in range(nodes)) if head else (socket.gethostname(),),
        folder=folder,
        index=int(environment.get(INDEX) or 0) if head else 0,
        kill_s=float(environment[KILL]) if environment.get(KILL) else None,
        head=head,
        replaces_nodes=bool(head),
        stage_dir=settings.get("STAGE_DIR", ""),
    )
