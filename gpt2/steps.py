"""What each step says, agreed among the ranks and read one step late, so that the loop never waits for the GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from gpt2.dist import World
from kmatrix.records import append_jsonl

Mark = float | torch.cuda.Event  # a moment: of the CPU's clock in seconds, or in a GPU's stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One step, the same on every rank.

    loss: mean over the micro-batches of all ranks.  norm: of the gradients before clipping.
    stop: some rank was asked to stop.  enough: rank 0 says that the budget is up.  seconds: how long the step took.
    compute_s: how long this rank itself computed, before it waited for the gradients of others. It alone differs.
    """

    step: int
    lr: float
    loss: float
    norm: float
    stop: bool
    seconds: float
    compute_s: float
    enough: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One step whose numbers are on their way to this process."""

    step: int
    lr: float
    values: torch.Tensor  # (4,) loss, norm, stop, enough: sums over the ranks once they are here
    work: torch.distributed.Work | None
    start: Mark
    computed: Mark
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
        self._mark = self._computed = self._now()

    def computed(self) -> None:
        """Note that this rank has its own gradients of the step: what follows is waiting for those of others."""
        self._computed = self._now()

    def restart(self) -> None:
        """Begin to count time here: what came before was no step."""
        self._mark = self._now()

    def look(self, loss: torch.Tensor, norm: torch.Tensor) -> tuple[float, float]:
        """Wait for the loss and the norm of a step, before its update: the same numbers on every rank."""
        sums = self.world.sum(torch.stack([loss.double(), norm.double()]))
        mean_loss, mean_norm = (sums / self.world.size).tolist()
        return mean_loss, mean_norm

    def post(
        self, step: int, *, lr: float, loss: torch.Tensor, norm: torch.Tensor, stop: bool, enough: bool = False
    ) -> Reading | None:
        """Send the numbers of a step off, and return those of the step before, if they were not read yet.

        enough: the budget is up; rank 0's word counts, the others say nothing.
        """
        flags = [self._yes if flag else self._no for flag in (stop, enough)]
        values = torch.stack([loss.double(), norm.double(), *flags])
        work = torch.distributed.all_reduce(values, async_op=True) if self.world.size > 1 else None
        if self.world.device.type == "cuda" and self.world.backend != "gloo":
            if work:
                work.wait()  # makes the GPU's stream wait, not this process
                work = None
            values = torch.empty(4, dtype=torch.float64, pin_memory=True).copy_(values, non_blocking=True)
        end = self._now()
        posted = Posted(step=step, lr=lr, values=values, work=work, start=self._mark, computed=self._computed, end=end)
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
        seconds, compute_s = between(posted.start, posted.end), between(posted.start, posted.computed)
        loss, norm, stop, enough = posted.values.tolist()
        size = self.world.size
        return Reading(
            step=posted.step,
            lr=posted.lr,
            loss=loss / size,
            norm=norm / size,
            stop=stop > 0,
            enough=enough > 0,
            seconds=seconds,
            compute_s=compute_s,
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


class Timings:
    """One rank's own file: how long it computed, one line for each log interval."""

    def __init__(self, path: Path, every: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.every = path, every
        self._steps, self._compute_s, self._seconds = 0, 0.0, 0.0

    def add(self, reading: Reading) -> None:
        """Take in one step; the first is left out, because it sets everything up."""
        if reading.step == 0:
            return
        self._steps += 1
        self._compute_s += reading.compute_s
        self._seconds += reading.seconds
        if reading.step % self.every == 0:
            self._write(reading.step)

    def _write(self, step: int) -> None:
        per_step = 1e3 / self._steps
        line = {"step": step, "steps": self._steps}
        times = {"compute_ms": self._compute_s * per_step, "step_ms": self._seconds * per_step}
        append_jsonl(self.path, {**line, **times})
        self._steps, self._compute_s, self._seconds = 0, 0.0, 0.0
