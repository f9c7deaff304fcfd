"""Why a job is stopped: the signals that it got, and the question to its scheduler for their cause."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from types import FrameType

from kmatrix.engines.allocation import Allocation, StopCause
from kmatrix.runner.share.log import say

CAUSE_S = 15.0  # the question for the cause of a stop takes no longer


@dataclass(slots=True)
class Signals:
    """The signals of the scheduler. They stop the runs by SIGTERM, which the runner knows, whichever came."""

    noticed: bool = False  # SIGUSR1: the time limit, or a preemption, is near
    names: list[str] = field(default_factory=list)

    def listen(self) -> None:
        """Collect the signals instead of dying from them."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.names.append(signal.Signals(number).name)
        if number == signal.SIGUSR1:
            self.noticed = True
            os.kill(os.getpid(), signal.SIGTERM)  # the loop of the runner has its own handler for it


class Cause:
    """Why this job is stopped, asked once, in a thread: the scheduler may be slow, and the runs are being stopped."""

    def __init__(self, allocation: Allocation, signals: Signals) -> None:
        self._allocation, self._signals = allocation, signals
        self._found: StopCause | None = None
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Start the question, unless that has been done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._question, daemon=True, name="cause")
            self._thread.start()

    def get(self) -> StopCause:
        """Return the cause."""
        self.ask()
        if self._thread is not None:
            self._thread.join(CAUSE_S)
        return self._found or StopCause(kind="signal", reason=f"asked to stop, and {self._allocation.name} is silent")

    def _question(self) -> None:
        self._found = self._allocation.cause(noticed=self._signals.noticed)
        say(f"{self._signals.names[0] if self._signals.names else 'stop'}: {self._found.reason}")
