"""What the numbers of a step say of its health, and what the run's policies do about it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpt2.config import TrainConfig


class Policy(StrEnum):
    """What is done about a bad step."""

    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"
    RECORD = "record"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A bad step. kind: "nan" or "spike".  text: what was seen, in words."""

    step: int
    kind: str
    text: str
    policy: Policy


class NotFiniteError(Exception):
    """The training is lost: a loss or a gradient is nan or infinite. The text says which, and at which step."""


class Guard:
    """Judges each step once. The numbers are the same on every rank, and so are the answers: nothing is sent.

    data_ahead: steps by which the data are ahead of the updates, because rollbacks left bad ones out.
    """

    def __init__(self, config: TrainConfig, attempt: int = 1) -> None:
        self._attempt = attempt
        self._nan, self._limit = Policy(config.nan_policy), config.bad_steps_limit or 0
        self._spike = Policy(config.spike_policy) if config.spike_policy else None
        self._threshold = config.spike_zscore
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._skipped_in_row = self._rollbacks = self.data_ahead = 0

    @property
    def waits(self) -> bool:
        """Whether a step must be judged before its update, which costs a wait for its numbers."""
        return Policy.SKIP in (self._nan, self._spike)

    def judge(self, step: int, loss: float, norm: float) -> Fault | None:
        """Return what is wrong with a step, if anything.

        Raises NotFiniteError where more steps were skipped in a row than the limit allows.
        """
        fault = self._fault(step, loss, norm)
        if fault is None or fault.policy is Policy.RECORD:
            self._skipped_in_row = 0
            if self._spike and math.isfinite(loss):
                self._losses.append(loss)
        elif fault.policy is Policy.SKIP:
            self._skipped_in_row += 1
            if self._skipped_in_row > self._limit:
                raise NotFiniteError(f"{fault.text}: more than {self._limit} bad steps in a row")
        return fault

    def went_back(self, fault: Fault, step: int) -> None:
        """Note that the run goes on from `step`, with the data behind the step of the fault.

        Raises NotFiniteError where that happened too often.
        """
        self._rollbacks += 1
        if self._rollbacks > self._limit:
            raise NotFiniteError(f"{fault.text}, after {self._limit} rollbacks")
        self.data_ahead += fault.step + 1 - step
        self._losses.clear()
        self._skipped_in_row = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "attempt": self._attempt,
            "losses": list(self._losses),
            "skipped_in_row": self._skipped_in_row,
            "rollbacks": self._rollbacks,
            "data_ahead": self.data_ahead,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an earlier attempt. What a rollback within one has left out stays left out."""
        if state["attempt"] == self._attempt:
            return
        self._losses = deque(state["losses"], self._losses.maxlen)
        self._skipped_in_row, self._rollbacks = int(state["skipped_in_row"]), int(state["rollbacks"])
        self.data_ahead = int(state["data_ahead"])

    def _fault(self, step: int, loss: float, norm: float) -> Fault | None:
        if text := not_finite(step, loss, norm):
            return Fault(step=step, kind="nan", text=text, policy=self._nan)
        score = zscore(self._losses, loss) if self._spike and len(self._losses) == self._losses.maxlen else 0.0
        if self._spike is None or score <= self._threshold:
            return None
        text = f"loss {loss:.4f} at step {step} is {score:.1f} standard deviations above that of the steps before it"
        return Fault(step=step, kind="spike", text=text, policy=self._spike)


def not_finite(step: int, loss: float, norm: float) -> str:
    """Return what is not finite in a step, or "". A rank's nan or inf survives every mean over ranks."""
    if not math.isfinite(loss):
        return f"loss is {loss} at step {step}"
    return "" if math.isfinite(norm) else f"gradient norm is {norm} at step {step}"


def zscore(losses: deque[float], loss: float) -> float:
    """Return by how many sample standard deviations a loss is above the mean of others; 0 where they do not vary."""
    deviation = statistics.stdev(losses)
    return (loss - statistics.fmean(losses)) / deviation if deviation else 0.0
