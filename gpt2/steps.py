"""The numbers of each step, averaged over the ranks and read one step late, so that the loop never waits for a GPU.

And what else belongs to a step: DDP, clipping, and a profile of some steps.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule

from gpt2.dist import World
from kmatrix.records.train_config import TrainConfig

# DDP broadcasts buffers before each forward pass; the model's are constants. Newer PyTorch renamed the option.
IS_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if IS_NEW else "broadcast_buffers": False}


class StepNumbers(NamedTuple):
    """The numbers of one step. All but `compute_s` are the same on every rank."""

    step: int
    lr: float
    loss: float  # nats/token, mean over the micro-batches of all ranks
    norm: float  # of the gradients, before clipping
    stop: bool  # a rank was asked to stop
    seconds: float  # duration of the step
    compute_s: float  # time until this rank had its own gradients, without waiting for other ranks
    over_budget: bool = False  # rank 0: the budget is used up


class Steps:
    """Sends the numbers of a step and reads those of the step before.

    All ranks thus see a stop request or a non-finite number at the same point of the loop, at most two steps late.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        # Made once: a tensor from a Python number on each step would be a copy to the GPU that the loop waits for.
        self._no, self._yes = (torch.full((), value, device=world.device, dtype=torch.float64) for value in (0.0, 1.0))
        self._posted: Callable[[], StepNumbers] | None = None  # reads the step that was sent last
        self._mark = self._computed = self._now()

    def computed(self) -> None:
        """Record that this rank has computed its gradients; from here on it waits for other ranks."""
        self._computed = self._now()

    def restart(self) -> None:
        """Restart the step timer, after work that does not belong to a step."""
        self._mark = self._now()

    def post(
        self, step: int, *, lr: float, loss: torch.Tensor, norm: torch.Tensor, stop: bool, over_budget: bool
    ) -> StepNumbers | None:
        """Send the numbers of a step, and return those of the step before if they were not read yet.

        over_budget: the budget is used up; only rank 0 sets it.
        """
        # One reduction for numbers and requests: a separate one would cost its latency in each step.
        flags = [self._yes if flag else self._no for flag in (stop, over_budget)]
        values = torch.stack([loss.double(), norm.double(), *flags])  # (4,)
        work = torch.distributed.all_reduce(values, async_op=True) if self.world.size > 1 else None
        if self.world.device.type == "cuda" and self.world.backend != "gloo":
            if work:
                work.wait()  # the GPU's stream waits, not this process
                work = None
            # Without pinned memory, non_blocking has no effect. The event below comes after the copy in the stream.
            values = torch.empty(4, dtype=torch.float64, pin_memory=True).copy_(values, non_blocking=True)
        start, computed, self._mark = self._mark, self._computed, self._now()
        end = self._mark

        def read() -> StepNumbers:
            if work:
                work.wait()
            # Before `values` is read: on a GPU this waits for the event that follows their copy.
            seconds, compute_s = between(start, end), between(start, computed)
            mean_loss, mean_norm, stops, overs = (total / self.world.size for total in values.tolist())
            return StepNumbers(step, lr, mean_loss, mean_norm, stops > 0, seconds, compute_s, overs > 0)

        # Read the step before only now: while this process waits for it, the GPU has this whole step to compute.
        previous, self._posted = self.drain(), read
        return previous

    def drain(self) -> StepNumbers | None:
        """Wait for the step that was sent last and return it; None if it was read already."""
        read, self._posted = self._posted, None
        return read() if read else None

    def _now(self) -> Any:
        """Return the time: seconds on the CPU's clock, or an event in the GPU's stream."""
        if self.world.device.type == "cpu":
            return time.perf_counter()
        # The CPU runs ahead of the GPU: only an event in the stream has the time at which the work was done.
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no type for it
        event.record()
        return event


def between(start: Any, end: Any) -> float:
    """Return the seconds between two marks. Waits until the GPU has reached the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3  # elapsed_time is in ms


def distributed(model: nn.Module, config: TrainConfig, steps: Steps) -> DistributedDataParallel:
    """Return the model wrapped in DDP, which averages gradients after the last micro-batch of a step."""
    device = steps.world.device
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # gradients are views of the buckets: no copies, and less memory by their size
        **NO_BUFFERS,
        find_unused_parameters=bool(config.ddp_find_unused_params),
    )
    average = bf16_compress_hook if config.ddp_bf16_gradients else allreduce_hook

    # No annotations: register_comm_hook checks them at runtime, and refuses the strings that they are here.
    def hook(group, bucket):  # type: ignore[no-untyped-def]
        if bucket.is_last():  # buckets become ready in backward's order, so this rank has all its gradients now
            steps.computed()
        return average(group, bucket)

    ddp.register_comm_hook(torch.distributed.group.WORLD, hook)
    return ddp


def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip the gradients to `max_norm` (0: no clipping), and return the norm before clipping."""
    if max_norm:
        return nn.utils.clip_grad_norm_(parameters, max_norm)  # a tensor, like below: reading it would wait for the GPU
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def profiler(span: str, path: Path, *, done: int) -> profile | None:
    """Return a started profiler of steps i to j - 1 of a span "i:j", to be stepped after each step.

    None without a span, and for a run that begins behind i.  done: steps before this attempt.
    """
    first, last = map(int, span.split(":")) if span else (-1, -1)
    if first < done:
        return None
    warm_up = min(1, first - done)  # steps
    when = schedule(skip_first=first - done - warm_up, wait=0, warmup=warm_up, active=last - first, repeat=1)
    found = profile(schedule=when, on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)))
    found.start()
    return found
