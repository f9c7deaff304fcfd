"""When a run ends: time and cost budgets, early stopping, and numbers that are not finite."""

from __future__ import annotations

import functools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A budget of time or money."""

    seconds: float  # all attempts at the run together
    ended_by: EndReason  # TIME or COST


def limit_of(config: TrainConfig) -> Limit | None:
    """Return the budget that cuts the run and is used up first, or None without one.

    A cost budget lasts max_cost / (price per hour) hours.
    """
    limits: list[Limit] = []
    if config.max_time is not None:
        limits.append(Limit(seconds=config.max_time, ended_by=EndReason.TIME))
    if (seconds := cost_limit_s(config)) is not None:
        limits.append(Limit(seconds=seconds, ended_by=EndReason.COST))
    return min(limits, key=lambda limit: limit.seconds, default=None)


class Budget:
    """The elapsed time of a run over all its attempts. Only rank 0's counts.

    It measures evaluations and checkpoints, so that the loop ends early enough for the last ones to fit.
    A checkpoint stores the elapsed seconds.
    """

    def __init__(self, limit: Limit | None, *, ahead: int = 0, clock: Callable[[], float] | None = None) -> None:
        """Start the clock. ahead: steps queued on the GPU when the loop finishes one; 0 on the CPU."""
        self.limit, self._ahead, self._clock = limit, ahead, clock or process_age
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
    def ended_by(self) -> EndReason | None:
        """Return why a run ends whose budget is used up; None without a budget."""
        return self.limit.ended_by if self.limit else None

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
        """Add the time that an evaluation or a periodic checkpoint took."""
        self._known[kind].append(seconds)

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measure the time inside the context as that of an evaluation or a periodic checkpoint."""
        start = time.perf_counter()
        yield
        self.took(kind, time.perf_counter() - start)

    def is_up(self, next_due: Iterable[str] = ()) -> bool:
        """Return whether the loop must end now, because one more step and the end of the run would exceed the limit.

        next_due: what the loop does before its next step. Other ranks see the answer one step later: one more step runs
        anyway, and another one if the answer is no.
        """
        if self.limit is None:
            return False
        # The longest of the recent ones, not the mean: a single slow step must not exceed the limit.
        steps = (2 + self._ahead) * max(self._steps, default=0.0)
        before = sum(self._longest(kind) for kind in next_due)
        end = self._longest(EVALUATION) + self._longest(BENCHMARK) + self._final_s()
        return self.spent_s + steps + before + MARGIN * end + END_S > self.limit.seconds

    def state_dict(self) -> dict[str, Any]:
        return {"spent_s": self.spent_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from an earlier attempt."""
        self._before = max(self._before, float(state["spent_s"]))

    def _longest(self, kind: str) -> float:
        return max(self._known[kind], default=0.0)


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


def process_age() -> float:
    """Return the seconds since torchrun, or else this process, started; without /proc, since this import."""
    if (started := _started()) is None:
        return time.monotonic() - _IMPORTED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


@functools.cache  # at the first call, not when this is imported: a process may be forked from one that has imported it
def _started() -> float | None:
    """Return when this attempt was launched, in seconds of CLOCK_BOOTTIME, None without /proc."""
    ticks = start_of(os.getpid())
    own = None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")
    return own if (launched := launched_at()) is None else launched


def spent_before() -> float:
    """Return the seconds of the attempts before, as the runner measured them; 0 without a runner."""
    try:
        return max(0.0, float(os.environ.get(SPENT, "0")))
    except ValueError:
        return 0.0


# Read now: importing torch takes seconds that are paid for, and without /proc this is the earliest known time.
_IMPORTED = time.monotonic()


class NotFiniteError(Exception):
    """The training failed: a loss or a gradient is NaN or infinite. The message names it and the step."""


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raise NotFiniteError if one of the numbers of a step is not finite. Those of one rank survive the mean."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise NotFiniteError(f"{name} is {value} at step {step}")
