"""How the processes of a run are started on its nodes: by torchrun alone on one node, by an agent on each of several.

torchrun gets a static rendezvous: rank numbers follow the order of the nodes in the job, with rank 0 next to the
runner, and no clocks of two hosts are compared. torchrun's usual one for several nodes (c10d) sorts the hosts by name,
and its heartbeats compare their clocks.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.records.jobs.files import NodeFile, read_node
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.lock import Process
from kmatrix.status.state import RunPlan

NODE = "@NODE@"  # replaced by the agent of each node with its number
RENDEZVOUS_S = 900  # nodes whose image or file system is slow come minutes after the first one
PORTS = range(20000, 32000)  # below the kernel's range for connections (ip_local_port_range), which may take any
PROBE_S = 10.0  # a host that does not answer within this time is lost
SRUN_WAIT_S = 60  # after the end of the first node: the others get this time for their own end


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What the agents of a run need to know from its engine."""

    grace_s: float  # time (s) that a stopped run has to save a checkpoint
    recorders: RecorderLauncher | None = None  # None: no recording
    stage_dir: str = ""  # for copies of the data on each node; "": none


class Spread(Protocol):
    """Starts the command of a run on all of its nodes, and stops it there."""

    def has_agents(self, run: RunPlan) -> bool:
        """Return whether an agent on each node starts the processes of a run, and records them."""

    def hosts_of(self, run: RunPlan) -> tuple[str, ...]:
        """Return the hosts of the nodes of a run, that of rank 0 first."""

    def argv(self, run: RunPlan, torchrun: Sequence[str], settings: AgentSettings) -> list[str]:
        """Return the command that trains a run on all of its nodes, and lasts as long."""

    def stop(self, run: RunPlan) -> bool:
        """Ask the ranks to save a checkpoint and exit; return False if only the command itself can be asked."""

    def kill(self, run: RunPlan) -> None:
        """Kill what the command has started on other hosts. The command itself is killed by the caller."""

    def lost(self, run: RunPlan) -> list[str]:
        """Return the hosts of a run that do not answer. It takes up to half a minute."""


@dataclass(frozen=True, slots=True)
class Local:
    """All ranks on this machine."""

    def has_agents(self, run: RunPlan) -> bool:  # noqa: ARG002  (the signature of the protocol)
        return False

    def hosts_of(self, run: RunPlan) -> tuple[str, ...]:  # noqa: ARG002
        return (socket.gethostname(),)

    def argv(self, run: RunPlan, torchrun: Sequence[str], settings: AgentSettings) -> list[str]:  # noqa: ARG002
        return [*torchrun, *alone(run), *run.command, *run.arguments]

    def stop(self, run: RunPlan) -> bool:  # noqa: ARG002
        return False

    def kill(self, run: RunPlan) -> None:
        pass

    def lost(self, run: RunPlan) -> list[str]:  # noqa: ARG002
        return []


@dataclass(slots=True)
class Srun:
    """The nodes of the Slurm job that this process runs in, one task on each."""

    python: Path
    job: str  # SLURM_JOB_ID
    hosts: tuple[str, ...]  # of the job, this one first
    run: Callable[..., subprocess.CompletedProcess[str]] = field(default=subprocess.run, repr=False)

    def has_agents(self, run: RunPlan) -> bool:
        """Return whether a run needs srun: it has several nodes."""
        return run.nodes > 1

    def hosts_of(self, run: RunPlan) -> tuple[str, ...]:
        """Return the first hosts of the job."""
        return self.hosts[: run.nodes]

    def argv(self, run: RunPlan, torchrun: Sequence[str], settings: AgentSettings) -> list[str]:
        """Return the command of srun, or that of torchrun for a run on this node alone."""
        if not self.has_agents(run):
            return Local().argv(run, torchrun, settings)
        inner = agent_argv(
            run,
            torchrun,
            python=str(self.python),
            settings=settings,
            address=self.hosts[0],
            port=free_port(),
        )
        return [*self._srun(run.nodes, self.hosts[: run.nodes]), *self._options(), *inner]

    def _srun(self, nodes: int, hosts: Sequence[str]) -> list[str]:
        command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        if len(hosts) < len(self.hosts):
            command.append(f"--nodelist={','.join(hosts)}")
        # --overlap: packed runs, and probes next to a run, share the CPUs, GPUs and memory of the job.
        return [*command, "--overlap", "--mpi=none", "--cpu-bind=none", "--export=ALL", "--unbuffered"]

    def _options(self) -> list[str]:
        # A node whose task has failed must not end the others: their ranks still write why, and a checkpoint.
        return ["--kill-on-bad-exit=0", f"--wait={SRUN_WAIT_S}", "--input=none"]

    def stop(self, run: RunPlan) -> bool:
        """Ask the agent of node 0, which is on this host; the ranks of all nodes agree on the step at which they stop.

        Not by srun: it answers SIGTERM by killing every task, and passes other signals to every process of a task.
        """
        return self.has_agents(run) and signal_agent(run)

    def kill(self, run: RunPlan) -> None:
        """Kill the step of a run on all nodes: without its srun, its tasks would train on."""
        agent = read_node(NodeDir(run.dir, 0))
        if self.has_agents(run) and agent is not None and agent.attempt == run.attempt and agent.step:
            self._ask(["scancel", "--signal=KILL", f"{self.job}.{agent.step}"])

    def lost(self, run: RunPlan) -> list[str]:
        """Return the hosts of a run that do not answer; none if the controller does not answer, which starts probes."""
        return self.silent(self.hosts[: run.nodes])

    def silent(self, hosts: Collection[str]) -> list[str]:
        """Return which of these hosts of the job do not start a program."""
        others = [host for host in hosts if host != self.hosts[0]]  # this process runs on the first one
        if not others or self._ask(["scontrol", "ping"]) != 0:
            return []
        probes = [(host, self._probe(host)) for host in others]
        deadline = time.monotonic() + PROBE_S
        return [host for host, probe in probes if not _succeeds(probe, deadline)]

    def _probe(self, host: str) -> subprocess.Popen[bytes]:
        command = [*self._srun(1, (host,)), f"--nodelist={host}", "--input=none", "true"]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)

    def _ask(self, command: Sequence[str]) -> int | None:
        """Return the exit status of a command of Slurm, None if it does not answer in time."""
        with suppress(OSError, subprocess.TimeoutExpired):
            return self.run(command, capture_output=True, text=True, check=False, timeout=PROBE_S).returncode
        return None


def alone(run: RunPlan) -> list[str]:
    """Return torchrun's options for a run on one node."""
    # --standalone picks a free port, so that runs at the same time do not share a rendezvous.
    return ["--standalone", f"--nproc-per-node={run.ranks}"]


def agent_argv(
    run: RunPlan, torchrun: Sequence[str], *, python: str, settings: AgentSettings, address: str, port: int
) -> list[str]:
    """Return the command of the agent, the same on each node of a run. address, port: of the rendezvous, on node 0."""
    recorders = settings.recorders
    command = [python, "-m", "kmatrix.engines.node", str(run.dir.path), f"--attempt={run.attempt}"]
    command += [f"--nodes={run.nodes}", f"--ranks={run.ranks}", f"--grace={settings.grace_s:g}"]
    command += ["--cuda"] if run.cuda else []
    command += [f"--stage={settings.stage_dir}"] if settings.stage_dir else []
    command += [f"--gpus={','.join(run.gpus)}"] if run.gpus else []
    if recorders is not None:
        command += [f"--hz={recorders.hz}"]
    rendezvous = [f"--nnodes={run.nodes}", f"--nproc-per-node={run.ranks_per_node}", f"--node-rank={NODE}"]
    rendezvous += [f"--master-addr={address}", f"--master-port={port}", f"--rdzv-conf=timeout={RENDEZVOUS_S}"]
    return [*command, "--", *torchrun, *rendezvous, *run.command, *run.arguments]


def signal_agent(run: RunPlan) -> bool:
    """Ask the agent of node 0 to stop, if it is a process of this host; return whether it was asked."""
    agent = read_node(NodeDir(run.dir, 0))
    if agent is None or agent.attempt != run.attempt or not process_of(agent).lives_here():
        return False
    with suppress(ProcessLookupError):
        os.kill(agent.pid or 0, signal.SIGTERM) if agent.pid else None
        return bool(agent.pid)
    return False


def process_of(agent: NodeFile) -> Process:
    """Return the process of an agent."""
    return Process(pid=agent.pid, host=agent.host, pid_started=agent.pid_started, boot_id=agent.boot_id)


def node_number(environment: Mapping[str, str]) -> int:
    """Return the number of this node in its run: the task of the Slurm step, or the index of the pod; 0 without."""
    found = environment.get("SLURM_PROCID") or environment.get("JOB_COMPLETION_INDEX") or "0"
    return int(found) if found.isascii() and found.isdecimal() else 0


def free_port() -> int:
    """Return a port of this host that is free now; torchrun takes it within seconds. Raises OSError if none is."""
    for port in random.sample(PORTS, 100):
        with suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            return port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")


def _succeeds(probe: subprocess.Popen[bytes], deadline: float) -> bool:
    """Return whether a probe succeeds until a deadline (monotonic seconds); one that does not is killed."""
    try:
        return probe.wait(max(0.1, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        os.killpg(probe.pid, signal.SIGKILL)
        probe.wait()
        return False
