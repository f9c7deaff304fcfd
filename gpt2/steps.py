"""What each step says, agreed among the ranks and read one step late, so that the loop never waits for the GPU."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed

from gpt2.dist import World

Mark = float | torch.cuda.Event  # a moment: of the CPU's clock in seconds, or in a GPU's stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One step, the same on every rank.

    loss: mean over the micro-batches of all ranks.  norm: of the gradients before clipping.
    stop: some rank was asked to stop.  seconds: how long the step took.
    """

    step: int
    lr: float
    loss: float
    norm: float
    stop: bool
    seconds: float

    @property
    def not_finite(self) -> str:
        """What went wrong in this step, or "". A rank's nan or inf survives every mean over ranks."""
        if not math.isfinite(self.loss):
            return f"loss is {self.loss} at step {self.step}"
        return "" if math.isfinite(self.norm) else f"gradient norm is {self.norm} at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One step whose numbers are on their way to this process."""

    step: int
    lr: float
    values: torch.Tensor  # (3,) loss, norm, stop: sums over the ranks once they are here
    work: torch.distributed.Work | None
    start: Mark
    end: Mark


class Steps:
    """Posts the numbers of a step and reads those of the step before.

    So all ranks see a stop or a number that is not finite at the same point of the loop,
    two steps after it happened at the latest.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._no, self._yes = (torch.full((), value, device=world.device, dtype=torch.float64) for value in (0.0, 1.0))
        self._posted: Posted | None = None
        self._mark = self._now()

    def restart(self) -> None:
        """Begin to count time here: what came before was no step."""
        self._mark = self._now()

    def post(self, step: int, *, lr: float, loss: torch.Tensor, norm: torch.Tensor, stop: bool) -> Reading | None:
        """Send the numbers of a step off, and return those of the step before, if they were not read yet."""
        values = torch.stack([loss.double(), norm.double(), self._yes if stop else self._no])
        work = torch.distributed.all_reduce(values, async_op=True) if self.world.size > 1 else None
        if self.world.device.type == "cuda" and self.world.backend != "gloo":
            if work:
                work.wait()  # makes the GPU's stream wait, not this process
                work = None
            values = torch.empty(3, dtype=torch.float64, pin_memory=True).copy_(values, non_blocking=True)
        end = self._now()
        posted = Posted(step=step, lr=lr, values=values, work=work, start=self._mark, end=end)
        previous, self._mark = self.drain(), end
        self._posted = posted
        return previous

    def drain(self) -> Reading | None:
        """Wait for the step that was posted last and return it; None when it was read already."""
        posted, self._posted = self._posted, None
        if posted is None:
            return None
        if posted.work:
            posted.work.wait()
        seconds = between(posted.start, posted.end)
        loss, norm, stop = posted.values.tolist()
        size = self.world.size
        return Reading(
            step=posted.step, lr=posted.lr, loss=loss / size, norm=norm / size, stop=stop > 0, seconds=seconds
        )

    def _now(self) -> Mark:
        if self.world.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no type for it
        event.record()
        return event


def between(start: Mark, end: Mark) -> float:
    """Return the seconds from one moment to the next; waits for a moment that a GPU has not reached."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
