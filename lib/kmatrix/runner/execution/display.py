"""Display the runs of one execution: a RunProgress for each change, and why runs wait or end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from kmatrix.records.runs import Status
from kmatrix.records.train_config import TrainConfig
from kmatrix.runner.rounds import Reserve
from kmatrix.runner.status_writer import StatusWriter
from kmatrix.status.state import JobState, RunPlan
from kmatrix.status.watch import RunProgress, RunUpdate

T = TypeVar("T")


class RunDisplay:
    """The display of the runs of one execution; without one, nothing happens."""

    def __init__(
        self,
        on_progress: Callable[[RunProgress], None] | None,
        writer: StatusWriter,
        train: Mapping[str, TrainConfig],
        reserve: Reserve,
        planned: Mapping[str, RunPlan],
    ) -> None:
        """Create the display. planned: the runs of this execution, those in reserve included."""
        self._on_progress, self._writer, self._train = on_progress, writer, train
        self._reserve, self._planned = reserve, planned
        self._places: dict[str, int] = {}  # run -> its place in the order of starts, from 1

    def started(self, name: str) -> None:
        """Set the place of a run in the order of starts."""
        self._places.setdefault(name, len(self._places) + 1)

    def show(
        self,
        name: str,
        update: RunUpdate | None = None,
        *,
        job: JobState | None = None,
        reason: str = "",
        note: str = "",
    ) -> None:
        """Display a run. note: why it waits, or what it does instead of training."""
        if self._on_progress is None:
            return
        status = self._writer.states[name].status
        if note and status is not Status.RUNNING:
            status = Status.PLANNED  # it waits for its next attempt
        train = self._train.get(name)
        reserve = len(self._reserve.names)
        unstarted = sum(name not in self._places for name in self._reserve.names)  # others have their place, and wait
        self._on_progress(
            RunProgress(
                run=name,
                index=self._places.get(name, 0),
                total=len(self._planned) - unstarted,
                status=status,
                reason=reason,
                note=note,
                step=update.step if update else None,
                start=update.start if update else None,
                max_iters=(train.max_iters or None) if train else None,
                loss=update.loss if update else None,
                val_loss=update.val_loss if update else None,
                tokens_per_second=update.tokens_per_second if update else None,
                elapsed_s=_elapsed_s(job) if job else None,
                left_s=update.left_s if update and status is Status.RUNNING else None,
                counts=self._counts(),
                reserve=reserve,
                alerts=update.alerts.active if update else (),
            )
        )

    def _counts(self) -> dict[str, int]:
        """Return status -> number of runs; stopped ones in reserve are planned."""
        stopped = sum(self._writer.states[name].status is Status.STOPPED for name in self._reserve.names)
        found = Counter(self._writer.counts()) + Counter({Status.PLANNED.value: stopped})
        return dict(found - Counter({Status.STOPPED.value: stopped}))


def ignoring_errors(display: Callable[[T], None]) -> Callable[[T], None]:
    """Return a display that ignores OSError: a full disk or a closed terminal must not end a run."""

    def call(value: T) -> None:
        with suppress(OSError):
            display(value)

    return call


def with_retry(reason: str, again: RunPlan | None, micro_batch: int | None) -> str:
    """Return the reason of an end with what follows it: a retry, maybe with a smaller micro-batch."""
    if again is None:
        return reason
    smaller = again.micro_batch is not None and again.micro_batch != micro_batch
    return f"{reason}; retrying" + (f" with micro-batch {again.micro_batch}" if smaller else "")


def _elapsed_s(job: JobState) -> float | None:
    """Return the seconds since the start of a job, until its end if it has ended."""
    return job.seconds if job.seconds is not None or job.clock is None else job.clock.since()
