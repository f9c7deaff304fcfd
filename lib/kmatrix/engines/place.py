"""Where this process is: on one machine, in a Slurm task, in a pod, or on a host that ssh reached."""

from __future__ import annotations

import os
import re
import select
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGTERM
from socket import gethostname
from subprocess import PIPE, Popen, TimeoutExpired, run

from kmatrix.clock import clock
from kmatrix.engines.ranks import end_with
from kmatrix.errors import LaunchError
from kmatrix.gpu.nvml.detect import detect, usable
from kmatrix.records.attempts import boot_id

AGAIN = 143  # exit status: start this job again. A pod with it is replaced, and the local scheduler queues the run
EARLY_S = 180.0  # Slurm may be a minute early, and a job begins with the set-up file of its user
UUIDS = re.compile(r"((GPU|MIG)-[\w-]+(,|$))*")
HOST = re.compile(r"[A-Za-z0-9][\w.@:-]*")  # never an option of ssh
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15")


@dataclass(kw_only=True)
class Here:
    """One machine, or a pod, whose peers are pods: nothing is to be started there."""

    job: str = ""  # of a scheduler
    host: str = field(default_factory=gethostname)
    boot: str = field(default_factory=boot_id)
    gpus: tuple[str, ...] = ()  # UUIDs, of this node
    node: int = 0  # of this process in its run: 0 leads
    nodes: int = 1  # of the job
    address: str = ""  # of this node, for the ranks of all nodes; empty: one node
    pulse_s: float = 10.0  # of shared storage
    grace_s: float = 30.0  # to save a checkpoint after SIGTERM, less than the scheduler gives
    notice_s: float = 0.0  # SLURM_NOTICE: Slurm sends SIGUSR1 so long before the end
    limit_s: float = 0.0  # time limit of the job; 0: none, or unknown
    began: float = field(default_factory=clock.monotonic)
    replaces_nodes: bool = False  # a lost node comes back by itself: the leader waits for it
    by_ssh: bool = False  # the leader has started this process, on another host

    def grace_of(self, signal: str) -> float:
        """Return the time (s) to save a checkpoint after a signal, or "" for a request."""
        return max(self.grace_s, self.notice_s - 20) if signal == "SIGUSR1" else self.grace_s

    def kind_of(self, signal: str) -> str:
        """Return what a signal means: a kind of end. Only people read which one it is of those after SIGUSR1."""
        near = clock.monotonic() - self.began >= self.limit_s - self.notice_s - EARLY_S
        return "signal" if signal != "SIGUSR1" else "time limit" if near or not self.limit_s else "preempted"

    def start_followers(self, command: Sequence[str], nodes: int) -> list[Popen[bytes]]:
        """Start the program of the other nodes, with the number of its node, or "@", as its last word.

        It ends with this process. Raises LaunchError if there are too few nodes.
        """
        if nodes > self.nodes:
            hint = "submit it to a cluster, or pass HOSTS=a,b with names that ssh knows"
            raise LaunchError(f"the run needs {nodes} nodes, there are {self.nodes}", hint=hint)
        ends, commands = partial(end_with, os.getpid(), SIGTERM), self._followers(command, nodes)
        return [Popen(words, stdin=PIPE, start_new_session=True, preexec_fn=ends) for words in commands]  # noqa: PLW1509

    def again(self) -> int:
        """Ask the scheduler to start this job again; return the exit status."""
        return AGAIN

    def is_orphan(self) -> bool:
        """Return whether the leader that started this process is gone."""
        return self.by_ssh and bool(select.select([0], [], [], 0)[0]) and not os.read(0, 1)

    def _followers(self, command: Sequence[str], nodes: int) -> list[list[str]]:  # noqa: ARG002
        return []


@dataclass(kw_only=True)
class SlurmTask(Here):
    """A job of Slurm, or a task of an array."""

    grace_s: float = 25.0  # KillWait is 30 s by default

    def again(self) -> int:
        words = ["scontrol", "requeue", self.job]
        with suppress(OSError, TimeoutExpired):
            done = run(words, capture_output=True, text=True, errors="replace", check=False, timeout=60)
            if done.returncode == 0 or "pending" in done.stderr:  # pending: Slurm has queued it by itself
                return 0
            print(done.stderr.strip(), flush=True)
        print(f"`{shlex.join(words)}` failed: `make continue` submits the run again", flush=True)
        return AGAIN

    def _followers(self, command: Sequence[str], nodes: int) -> list[list[str]]:
        others = nodes - 1
        words = ["srun", f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1", "--relative=1", "--overlap"]
        words += ["--kill-on-bad-exit=0", "--wait=0", "--input=none", "--unbuffered", "--mpi=none", "--cpu-bind=none"]
        return [[*words, "--export=ALL", *command, "@"]] if others else []


@dataclass(kw_only=True)
class Hosts(Here):
    """The first of some hosts that ssh reaches."""

    hosts: tuple[str, ...] = ()

    def _followers(self, command: Sequence[str], nodes: int) -> list[list[str]]:
        words = ["env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", *command]
        line = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"
        return [[*SSH, host, f"{line} {node}"] for node, host in enumerate(self.hosts[1:nodes], 1)]


def place_of(environment: Mapping[str, str], node: str = "") -> Here:
    """Return where this process is. node: its number in the run, or "@" for that of srun; "" leads.

    Raises LaunchError for an invalid name in KMATRIX_HOSTS.
    """
    get, job = environment.get, environment.get("KMATRIX_JOB", "")
    gpus = visible_gpus(get("CUDA_VISIBLE_DEVICES"))
    if address := get("KMATRIX_ADDRESS"):  # job.yaml
        index, nodes = get("JOB_COMPLETION_INDEX", "0"), int(get("KMATRIX_NODES") or 1)
        grace_s = float(get("KMATRIX_GRACE") or 90) - 10
        pod = partial(Here, nodes=nodes, grace_s=grace_s, gpus=gpus, replaces_nodes=True)
        # One node: a run per index.
        return pod(job=f"{job}/{index}") if nodes == 1 else pod(job=job, node=int(index), address=address)
    if job and get("SLURM_JOB_ID"):  # job.sbatch; not a shell of salloc
        array, task = get("SLURM_ARRAY_JOB_ID"), get("SLURM_ARRAY_TASK_ID")
        name = f"{array}_{task}" if array and task else get("SLURM_JOB_ID", "")  # a number may be that of the array
        number, nodes = int(get("SLURM_PROCID") or 0) + 1 if node == "@" else 0, int(get("SLURM_JOB_NUM_NODES") or 1)
        found = SlurmTask(job=name, node=number, nodes=nodes, address=gethostname(), gpus=gpus)
        found.notice_s, found.limit_s = float(get("KMATRIX_NOTICE_S") or 0), float(get("KMATRIX_LIMIT_S") or 0)
        return found
    if node:
        return Here(node=int(node), gpus=gpus, by_ssh=True)
    hosts = hosts_of(get("KMATRIX_HOSTS", ""))
    if len(hosts) > 1:
        return Hosts(nodes=len(hosts), hosts=hosts, address=hosts[0].rpartition("@")[2], gpus=gpus)
    return Here(pulse_s=1.0, gpus=gpus, notice_s=float(get("KMATRIX_NOTICE_S") or 0))  # a notice of a packed job


def hosts_of(text: str) -> tuple[str, ...]:
    """Return the names of HOSTS=. Raises LaunchError for an invalid one."""
    hosts = tuple(filter(None, text.split(",")))
    if wrong := [name for name in hosts if not HOST.fullmatch(name)]:
        raise LaunchError(f"HOSTS has the invalid name {wrong[0]!r}", hint="pass names that ssh knows: HOSTS=a,b")
    return hosts


def visible_gpus(visible: str | None) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in CUDA_VISIBLE_DEVICES (None: not set), () if the driver does not tell."""
    if visible is not None and UUIDS.fullmatch(visible):
        return tuple(visible.split(",")) if visible else ()
    try:
        return tuple(gpu.uuid for gpu in usable(detect(), visible=visible, asked=None))
    except LaunchError:
        return ()
