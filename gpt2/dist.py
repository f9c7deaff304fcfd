"""The processes of a run: rank, device, process group, signals and exit."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed

from kmatrix.errors import LaunchError
from kmatrix.locks import try_lock
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import cpu_name

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TIMEOUT_S = 1800  # of collectives, like the watchdog's limit for a first step: ranks may compile for different times
PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_FINISHED, EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED = 0, 1, 2, 130  # 130: a shell's 128 + SIGINT


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the ranks, and its device."""

    rank: int
    size: int
    device: torch.device
    backend: str | None = None  # nccl or gloo; None: one process

    @property
    def main(self) -> bool:
        """Return whether this rank writes the run's files."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """The device name as its vendor writes it."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu_name()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. `values` is overwritten."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values


def environment() -> tuple[int, int, int, int, int]:
    """Return rank, local rank (on this node), world size, node and ranks on this node; 0, 0, 1, 0, 1 if it is alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    # Group is torchrun's word for a node: https://pytorch.org/docs/stable/elastic/run.html
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": size}
    rank, local_rank, ranks, node, here = (int(os.environ.get(name, value)) for name, value in alone.items())
    return rank, local_rank, ranks, node, here


def start(config: TrainConfig) -> World:
    """Select this rank's device and join the process group. Raises LaunchError if they do not match the run."""
    rank, local_rank, size, node, here = environment()
    each = config.ranks_per_node
    if (size, here, rank) != (config.num_gpus, each, node * each + local_rank):
        asked = f"the run asks for {config.num_gpus} ranks, {each} on each of {config.num_nodes} nodes"
        why = f"the launcher started {size}, {here} on node {node}, and rank {rank} as local rank {local_rank}"
        raise LaunchError(asked, why=why)
    # The order of additions depends on the number of threads: without it, a resumed run would differ in the last bits.
    torch.set_num_threads(config.cpu_threads)
    device = torch.device("cpu")
    if config.device != "cpu":  # CUDA_VISIBLE_DEVICES is the runner's: it decides which GPUs these are
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)  # else whatever says only "cuda" allocates on GPU 0, from every rank
    backend = config.ddp_backend if size > 1 else None
    if backend:
        # With a device the communicator is created now, on this GPU, instead of in the first collective.
        own = device if backend == "nccl" else None
        torch.distributed.init_process_group(backend, device_id=own, timeout=timedelta(seconds=TIMEOUT_S))
    return World(rank=rank, size=size, device=device, backend=backend)


def gather(world: World, value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks. Every rank calls it; the values are small objects."""
    if world.size == 1 or not torch.distributed.is_initialized():
        return [value]
    found: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(found, value)
    return found


class Stop:
    """A stop request: set by a signal, read by the loop. A rank that hangs is killed by its parent."""

    def __init__(self) -> None:
        self.signal: str | None = None
        for number in SIGNALS:
            signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (the signature of a handler)
        # Nothing but an assignment: a handler can interrupt the loop anywhere. The first signal names the reason.
        self.signal = self.signal or signal.Signals(number).name


def begin_by_hand(lock: Path) -> None:
    """Share the lock of a run until this process exits, and end with torchrun, which `kmatrix run` did not start.

    Raises LaunchError if somebody else trains the run.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)  # torchrun that is killed stops no rank
    if try_lock(lock, shared=True) is None:
        raise LaunchError(f"{lock.parent.name} is being trained", hint="run `make stop` first")


def finish(code: int) -> NoReturn:
    """Leave the process group and exit. Every trainer exits here.

    With gloo, torch 2.13 often aborts at interpreter exit, after correct training
    (https://github.com/pytorch/pytorch/issues/190489). Therefore os._exit skips the interpreter's own shutdown.
    """
    try:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    finally:
        exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Exit immediately with flushed output, without waiting for the process group."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk
            stream.flush()
    os._exit(code)
