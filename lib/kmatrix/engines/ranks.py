"""The ranks of an attempt on this node: started with the variables that torch reads, stopped, killed with all below.

`kmatrix run` is their parent, and adopts what they leave behind. If it dies, the kernel kills them. It has one thread,
which the kernel means by "parent", and which makes a function between fork and exec safe.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import SO_REUSEADDR, SOL_SOCKET, gethostname, socket
from subprocess import DEVNULL, Popen
from typing import Any

import psutil

from kmatrix.clock import clock
from kmatrix.errors import LaunchError
from kmatrix.records.attempts import GRACE, SPENT, Attempt, Exit
from kmatrix.records.files import replacing
from kmatrix.records.paths import program_environment
from kmatrix.redaction.forms import is_key_name
from kmatrix.redaction.redactor import keys_in

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LIBC = ctypes.CDLL(None)
PEERS_S, KILL_S = 5.0, 10.0  # after a bad exit the others can write why; what outlives a kill is stuck in the kernel
PORTS = range(20000, 32000)  # below the kernel's range for connections (ip_local_port_range), which may take any

# On the CPU glibc keeps memory, up to 1 GiB, that the next step needs again; 32 MiB is the maximum of the first option.
# Without MKL_CBWR, MKL may divide a product differently from run to run (decision 0003).
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26)}
# Memory that is free in pieces can be used for a large tensor (PyTorch, CUDA semantics). NCCL as torchrun has it.
OF_GPUS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What the ranks of a run are started with, in each attempt and on each node."""

    code: Path  # the folder with gpt2/ and lib/ that they run
    ranks: int = 1  # on all nodes
    nodes: int = 1
    cuda: bool = False
    threads: int = 1  # per rank
    grace_s: float = 30.0  # at most, from a signal on: a checkpoint that would take longer is left out
    spent_s: float = 0.0  # of earlier attempts
    variables: Mapping[str, str] = field(default_factory=dict)  # of run.json
    command: tuple[str, ...] = (sys.executable, "-m", "gpt2.train")

    def environment(self, gpus: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of all ranks. gpus: UUIDs, as indices change when one is lost; (): the scheduler's."""
        # Keys do not reach a program whose output is a file. Other values that the user has set stay.
        found = {name: value for name, value in inherited.items() if name == "HF_TOKEN" or not _is_key(name, value)}
        if former := found.pop("PYTORCH_CUDA_ALLOC_CONF", ""):  # torch 2.13 still reads this name first
            found.setdefault("PYTORCH_ALLOC_CONF", former)
        for name, value in (OF_GPUS if self.cuda else {"MKL_CBWR": "AUTO"}).items():
            found[name] = found.get(name) or value
        found |= {**({} if self.cuda else {**MEMORY, "CUDA_VISIBLE_DEVICES": ""}), **self.variables}
        found |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus and self.cuda else {}
        # passive: spinning threads would take the cores of other ranks. Unbuffered: a log is complete after a kill.
        found |= {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
        return found | {
            "PYTHONPATH": program_environment(self.code)["PYTHONPATH"],
            GRACE: f"{self.grace_s:g}",
            SPENT: f"{self.spent_s:.3f}",
        }


def _is_key(name: str, value: str) -> bool:
    return is_key_name(name) or bool(keys_in(value))


def unshare(run: Path) -> None:
    """Replace each file of a run that has other names, in a copy by `cp -al`, by a copy: an attempt appends to some."""
    for path in run.rglob("[!.]*"):
        if path.suffix != ".pt" and path.is_file() and path.stat().st_nlink > 1:
            with replacing(path) as copy:
                shutil.copy2(path, copy)


class Ranks:
    """The ranks of one attempt on this node; `exits` has those that have ended, in their order."""

    trouble: tuple[str, str] | None = None  # of a run on several nodes

    def __init__(
        self, run: Path, attempt: Attempt, trainer: Trainer, variables: Mapping[str, str], *, lock: int, node: int = 0
    ) -> None:
        """Start them, from the main thread. run: absolute.  lock: descriptor that they keep. Raises LaunchError."""
        self.exits: list[Exit] = []
        self._running: dict[int, Popen[Any]] = {}  # rank -> its process
        self._deadline, self._host = float("inf"), gethostname()  # monotonic seconds
        words = [*trainer.command, str(run), "--attempt", str(attempt.number), "--resume", attempt.resume]
        words += ["--micro-batch", str(attempt.micro_batch)] if attempt.micro_batch else []
        here = trainer.ranks // trainer.nodes
        common = {**variables, "MASTER_ADDR": attempt.address or "127.0.0.1", "MASTER_PORT": str(attempt.port)}
        common |= {"WORLD_SIZE": str(trainer.ranks), "LOCAL_WORLD_SIZE": str(here), "GROUP_RANK": str(node)}
        # A session: Ctrl+C reaches the runner only. In the folder of the code: `-m` looks there first.
        start = partial(Popen, words, cwd=trainer.code, stdin=DEVNULL, pass_fds=(lock,), start_new_session=True)
        ends = partial(end_with, os.getpid(), signal.SIGKILL)
        try:
            with (run / ("output.log" if node == 0 else f"nodes/{node}.log")).open("ab") as log:
                for local, rank in enumerate(range(node * here, (node + 1) * here)):
                    own = {**common, "RANK": str(rank), "LOCAL_RANK": str(local)}
                    self._running[rank] = start(env=own, stdout=log, stderr=log, preexec_fn=ends)
        except OSError as error:
            self.kill()
            raise LaunchError(f"the ranks of {run.name} cannot be started", why=str(error)) from None

    def poll(self) -> bool:
        """Return whether all ranks have exited, and nothing is left of them."""
        now = clock.monotonic()
        ended = {rank: code for rank, one in self._running.items() if (code := one.poll()) is not None}
        if is_stuck := now > self._deadline + KILL_S:  # such as the ranks of a GPU that fell off the bus
            ended = dict.fromkeys(self._running, -signal.SIGKILL) | ended
        # Of those that are seen at once, one that was killed is the cause: its peers have lost it.
        for rank in sorted(ended, key=lambda rank: ended[rank] >= 0):
            self.exits.append(Exit(rank=rank, code=ended[rank], host=self._host))
            del self._running[rank]
        if any(ended.values()):
            self.limit(PEERS_S)
        if not self._running:
            self.limit(0.0)
            return not kill_below() or is_stuck
        if now > self._deadline:
            self.kill()
        return False

    def stop(self, grace_s: float) -> None:
        """Ask the ranks to save a checkpoint and exit; `poll` kills them after the grace period (s)."""
        self.limit(grace_s)
        for one in self._running.values():
            one.terminate()

    def kill(self) -> None:
        """Kill all ranks now."""
        self.limit(0.0)
        for one in self._running.values():
            one.kill()

    def limit(self, seconds: float) -> None:
        """Make `poll` kill what has not exited within some seconds, without asking."""
        self._deadline = min(self._deadline, clock.monotonic() + seconds)


def adopt_orphans() -> None:
    """Make this process the parent of all processes below it that lose theirs."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with(parent: int, number: signal.Signals) -> None:
    """Make the kernel send this process a signal when the thread that started it ends; exit if `parent` is gone."""
    LIBC.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it has died before the call
        os._exit(128 + number)


def kill_below() -> bool:
    """Kill what ranks have left behind; return whether there was any. Companions, such as the recorder, stay."""
    found = False
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if GRACE in child.environ():  # set for ranks alone
                child.kill()
                found = True
    return found


def reserve_port() -> socket:
    """Return a socket whose port only rank 0 can use until it is closed. Raises LaunchError if none is free."""
    for port in random.sample(PORTS, 100):
        holder = socket()
        with suppress(OSError):
            holder.bind(("", port))  # fails for a port that another attempt has reserved
            holder.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # rank 0 sets it, too: both may bind then
            return holder
        holder.close()
    raise LaunchError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")
