"""When a run has had enough: the time and the money it may take, and a validation loss that falls no more."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.config import TrainConfig

RECENT_STEPS = 8  # the next step is reckoned as long as the longest of these
RECENT = 3  # evaluations and checkpoints: likewise
MARGIN = 1.2  # the end is reckoned this much longer than it was measured: a machine is not always as fast
END_S = 0.5  # writing the last files
EVALUATION, JUDGING, CHECKPOINT = PARTS = ("evaluation", "judging", "checkpoint")  # what a loop does between steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """seconds: that all attempts at a run may take together.  ended_by: "time" or "cost"."""

    seconds: float
    ended_by: str


def limit_of(config: TrainConfig) -> Limit | None:
    """Return which of the time and the money is spent first; None where there is no such budget.

    A dollar buys 3600 / (price of a GPU and hour x GPUs) seconds.
    """
    limits = []
    if config.max_time is not None:
        limits.append(Limit(seconds=config.max_time, ended_by="time"))
    if config.max_cost is not None and config.gpu_hour_price:
        per_second = config.gpu_hour_price * config.num_gpus / 3600
        limits.append(Limit(seconds=config.max_cost / per_second, ended_by="cost"))
    return min(limits, key=lambda limit: limit.seconds, default=None)


class Budget:
    """The clock of a run, over all its attempts; rank 0's is the one that counts.

    It knows what the end of the run will take, because evaluations and checkpoints were measured
    before, and says when the loop must end so that they lie inside the limit. A sum of seconds is
    what goes on over a resume.
    """

    def __init__(
        self, limit: Limit | None, attempt: int, *, ahead: int = 0, clock: Callable[[], float] | None = None
    ) -> None:
        """ahead: steps that are under way when the loop comes to one's end, 0 on the CPU."""
        self.limit, self._attempt, self._ahead, self._clock = limit, attempt, ahead, clock or age
        self._before = 0.0  # seconds that earlier attempts took
        self._final_s: Callable[[], float] = lambda: 0.0
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._known: dict[str, deque[float]] = {kind: deque(maxlen=RECENT) for kind in PARTS}
        self._warm = False

    def begin(self, *, spent_s: float, final_s: Callable[[], float]) -> None:
        """Say what earlier attempts are known to have spent, though no checkpoint of theirs tells.

        final_s: seconds that the last checkpoint is going to take.
        """
        self._before, self._final_s = max(self._before, spent_s), final_s

    @property
    def ended_by(self) -> str:
        """What a run that it ends has ended by: "time" or "cost"."""
        return self.limit.ended_by if self.limit else ""

    @property
    def spent_s(self) -> float:
        """Seconds that the run has taken, in all its attempts."""
        return self._before + self._clock()

    def stepped(self, seconds: float) -> None:
        """Take the time of a step. That of the first, which warms up, is no measure of the others."""
        if self._warm:
            self._steps.append(seconds)
        self._warm = True

    def took(self, kind: str, seconds: float) -> None:
        """Take the time for which an evaluation or a periodic checkpoint held up the loop."""
        self._known[kind].append(seconds)

    @contextmanager
    def taking(self, kind: str) -> Iterator[None]:
        """Measure what is done inside as an evaluation or a periodic checkpoint."""
        start = time.perf_counter()
        yield
        self.took(kind, time.perf_counter() - start)

    def is_up(self, next_due: Iterable[str] = ()) -> bool:
        """Whether the loop must end now, because one more step and the end would pass the limit.

        next_due: what the loop does before its next step. The word is heard one step after it is
        said: so one step more is still taken now, and another one if nothing is said.
        """
        if self.limit is None:
            return False
        steps = (2 + self._ahead) * max(self._steps, default=0.0)
        before = sum(self._longest(kind) for kind in next_due)
        end = self._longest(EVALUATION) + self._longest(JUDGING) + self._final_s()
        return self.spent_s + steps + before + MARGIN * end + END_S > self.limit.seconds

    def state_dict(self) -> dict[str, Any]:
        return {"attempt": self._attempt, "spent_s": self.spent_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an earlier attempt. A rollback within one gives no time back."""
        if state["attempt"] != self._attempt:
            self._before = max(self._before, float(state["spent_s"]))

    def _longest(self, kind: str) -> float:
        return max(self._known[kind], default=0.0)


class EarlyStopping:
    """Counts the evaluations in a row that brought no lower loss. The same losses give the same answer on each rank."""

    def __init__(self, config: TrainConfig) -> None:
        self._patience, self._least = config.early_stopping_patience, config.early_stopping_min_delta or 0.0
        self.best, self.idle = math.inf, 0

    def enough(self, loss: float | None) -> bool:
        """Take the validation loss of an evaluation, and say whether the run has gone without progress long enough."""
        if loss is not None and loss < self.best - self._least:
            self.best, self.idle = loss, 0
        else:
            self.idle += 1
        return bool(self._patience) and self.idle >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "idle": self.idle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.idle = float(state["best"]), int(state["idle"])


def age() -> float:
    """Return the seconds since this process began, its imports included; without /proc, since this module was read."""
    if _BEGAN is None:
        return time.monotonic() - _READ
    return time.clock_gettime(time.CLOCK_BOOTTIME) - _BEGAN


def _began() -> float | None:
    """Return when this process began, on the clock that counts from the machine's start."""
    try:
        ticks = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
        return int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


_READ, _BEGAN = time.monotonic(), _began()
