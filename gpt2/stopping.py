"""When a run ends: time and cost budgets, early stopping, and numbers that are not finite."""

from __future__ import annotations

import functools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from kmatrix.records.lock import start_of
from kmatrix.records.run_lock import SPENT, launched_at
from kmatrix.records.train_config import TrainConfig, cost_limit_s

RECENT_STEPS = 8  # the next step is expected to take as long as the longest of these
RECENT = 3  # the same for evaluations and checkpoints
MARGIN = 1.2  # the end is expected to take this much longer than measured: ending early costs less than exceeding
END_S = 0.5  # time to write the last files
EVALUATION, BENCHMARK, CHECKPOINT = PARTS = ("evaluation", "benchmark", "checkpoint")  # work between steps


class EndReason(StrEnum):
    """Why the training loop ends; `ended_by` in result.json, except STOP."""

    MAX_ITERS = "max_iters"
    TIME = "time"
    COST = "cost"
    EARLY_STOPPING = "early_stopping"
    STOP = "stop"  # a signal: the run is not finished


def limits_of(config: TrainConfig) -> dict[EndReason, float]:
    """Return the budgets of a run in seconds, over all its attempts. Money lasts max_cost / (price per hour) hours."""
    seconds = {EndReason.TIME: config.max_time, EndReason.COST: cost_limit_s(config)}
    return {reason: limit for reason, limit in seconds.items() if limit is not None}


class Budget:
    """The elapsed time of a run over all its attempts. Only rank 0's counts. A checkpoint stores it.

    It knows what evaluations and checkpoints took, so that the loop ends early enough for the last ones to fit.
    """

    def __init__(
        self, limits: Mapping[EndReason, float], *, ahead: int = 0, clock: Callable[[], float] | None = None
    ) -> None:
        """Start the clock. ahead: steps queued on the GPU when the loop finishes one; 0 on the CPU."""
        self.ended_by = min(limits, key=limits.__getitem__, default=None)  # the one that is used up first
        self._limit_s = limits[self.ended_by] if self.ended_by else math.inf
        self._ahead, self._clock = ahead, clock or process_age
        self._before = 0.0  # seconds of earlier attempts
        # A function, because the estimate changes: with each measured checkpoint, and while one is being written.
        self._final_s: Callable[[], float] = lambda: 0.0
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._known: dict[str, deque[float]] = {kind: deque(maxlen=RECENT) for kind in PARTS}
        self._warm = False

    def begin(self, *, spent_s: float, final_s: Callable[[], float]) -> None:
        """Add the time of earlier attempts, if it is known to be more than the checkpoint says.

        final_s: estimates the seconds that the final checkpoint will take.
        """
        # The larger one: the checkpoint does not know the work after it, and the state file may be missing.
        self._before, self._final_s = max(self._before, spent_s), final_s

    @property
    def spent_s(self) -> float:
        """Seconds that all attempts at the run have taken."""
        return self._before + self._clock()

    def stepped(self, seconds: float) -> None:
        """Add the time of a step. The first one includes warm-up and is ignored."""
        if self._warm:
            self._steps.append(seconds)
        self._warm = True

    def took(self, kind: str, seconds: float) -> None:
        """Add the time that work between two steps took."""
        self._known[kind].append(seconds)

    def is_up(self, next_due: Iterable[str] = ()) -> bool:
        """Return whether the loop must end now, because one more step and the end of the run would exceed the limit.

        next_due: what the loop does before its next step. Other ranks see the answer one step later: one more step runs
        anyway, and another one if the answer is no.
        """
        if self.ended_by is None:
            return False
        # The longest of the recent ones, not the mean: a single slow step must not exceed the limit.
        longest = {kind: max(known, default=0.0) for kind, known in self._known.items()}
        steps = (2 + self._ahead) * max(self._steps, default=0.0)
        end = longest[EVALUATION] + longest[BENCHMARK] + self._final_s()
        before = sum(longest[kind] for kind in next_due)
        return self.spent_s + steps + before + MARGIN * end + END_S > self._limit_s

    def state_dict(self) -> dict[str, Any]:
        return {"spent_s": self.spent_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = max(self._before, float(state["spent_s"]))


class EarlyStopping:
    """Counts consecutive evaluations without a lower loss. All ranks get the same losses, and so the same answer."""

    def __init__(self, config: TrainConfig) -> None:
        self._patience, self._min_delta = config.early_stopping_patience, config.early_stopping_min_delta or 0.0
        self.best, self.idle = math.inf, 0

    def should_stop(self, loss: float | None) -> bool:
        """Add a validation loss, and return whether the run has been without progress for too long."""
        # `best` is the best that counted, so several improvements below the minimum add up until they count.
        if loss is not None and loss < self.best - self._min_delta:
            self.best, self.idle = loss, 0
        else:
            self.idle += 1
        return bool(self._patience) and self.idle >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "idle": self.idle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.idle = float(state["best"]), int(state["idle"])


_IMPORTED = time.monotonic()  # without /proc, the earliest known time


@functools.cache  # at the first call, not when this is imported: a process may be forked from one that has imported it
def _started() -> float | None:
    """Return when this attempt was launched, or else this process, in seconds of CLOCK_BOOTTIME; None without /proc."""
    ticks = start_of(os.getpid())
    return launched_at() or (ticks / os.sysconf("SC_CLK_TCK") if ticks else None)


def process_age() -> float:
    """Return the seconds since this attempt was launched: importing torch takes some that are paid for."""
    started = _started()
    return time.monotonic() - _IMPORTED if started is None else time.clock_gettime(time.CLOCK_BOOTTIME) - started


def spent_before() -> float:
    """Return the seconds of the attempts before, as the runner measured them; 0 without a runner."""
    return float(os.environ.get(SPENT, "0"))


class NotFiniteError(Exception):
    """The training failed: a loss or a gradient is NaN or infinite. The message names it and the step."""


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raise NotFiniteError if one of the numbers of a step is not finite. Those of one rank survive the mean."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise NotFiniteError(f"{name} is {value} at step {step}")
