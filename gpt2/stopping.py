"""When a run ends: time and cost budgets, early stopping, and numbers that are not finite."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path

from kmatrix.errors import KmatrixError
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import cost_limit_s

RECENT = 8  # the next piece of work is expected to take as long as the longest of these
MARGIN = 1.2  # the end is expected to take this much longer than measured: ending early costs less than exceeding
STEPS_LEFT = 4  # that run after the decision at most
END_S = 0.5  # time to write the last files
STEP, EVALUATION, CHECKPOINT = "step", "evaluation", "checkpoint"  # kinds of work


boot_clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # s


def launched_at() -> float:
    """Return when this process started, in seconds of `boot_clock`."""
    ticks = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]  # proc_pid_stat(5)
    return int(ticks) / os.sysconf("SC_CLK_TCK")


class EndReason(StrEnum):
    """Why the training loop ends; `ended_by` in result.json, except STOP."""

    MAX_ITERS = "max_iters"
    TIME = "time"
    COST = "cost"
    EARLY_STOPPING = "early_stopping"
    STOP = "stop"  # a signal: the run is not finished


class Budget:
    """The time and cost budgets of a run: seconds over all its attempts. Only rank 0's clock counts."""

    def __init__(self, config: TrainConfig, before_s: float = 0.0, clock: Callable[[], float] | None = None) -> None:
        """Start the clock at the launch of this attempt: importing torch takes some seconds that are paid for.

        before_s: time of earlier attempts.
        """
        limits = {EndReason.TIME: config.max_time, EndReason.COST: cost_limit_s(config)}
        known = {reason: limit for reason, limit in limits.items() if limit is not None}
        self.ended_by = min(known, key=known.__getitem__, default=None)  # the one that is used up first
        self._limit_s = min(known.values(), default=math.inf)
        self._clock = clock or boot_clock
        self._began = (self._clock() if clock else launched_at()) - before_s

    def is_up(
        self, took: Mapping[str, Collection[float]], next_due: Collection[str], final_s: Callable[[], float]
    ) -> bool:
        """Return whether the loop must end now, because one more step and the end of the run would exceed the limit.

        took: seconds of the pieces of work so far, by their kind.  next_due: what the loop does before its next step.
        final_s: estimates the final checkpoint.
        Other ranks see the answer one step later, and a GPU's queue has steps that the loop has finished.
        """
        if self.ended_by is None:
            return False
        # The longest of the recent ones, not the mean: a single slow step must not exceed the limit.
        longest = {kind: max(list(seconds)[-RECENT:], default=0.0) for kind, seconds in took.items()}
        steps = STEPS_LEFT * max(list(took.get(STEP, ()))[1:][-RECENT:], default=0.0)  # the first one compiles
        end = longest.get(EVALUATION, 0.0) + final_s()
        before = sum(longest.get(kind, 0.0) for kind in next_due)
        spent = self._clock() - self._began
        return spent + steps + before + MARGIN * end + END_S > self._limit_s


def stops_early(config: TrainConfig, losses: Sequence[float]) -> bool:
    """Return whether the run has been without progress for too long. losses: all validation losses, in their order."""
    best, idle = math.inf, 0
    for loss in losses:
        # `best` is the best that counted, so several improvements below the minimum add up until they count.
        better = loss < best - (config.early_stopping_min_delta or 0.0)
        best, idle = (loss, 0) if better else (best, idle + 1)
    return 0 < (config.early_stopping_patience or 0) <= idle


class NotFiniteError(KmatrixError):
    """The training failed: a loss or a gradient is NaN or infinite. The message names it and the step."""


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raise NotFiniteError if a number of a step is not finite. All ranks do: a mean keeps those of one rank."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise NotFiniteError(f"{name} is {value} at step {step}")
