"""What one rank does between two steps and at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import nn

from gpt2 import dist
from gpt2.checkpoint.saver import Saver
from gpt2.checkpoint.state import TrainingState
from gpt2.data.batches import Batches
from gpt2.evaluate import Benchmarks, Validation
from gpt2.log import RunLog
from gpt2.model.base import LanguageModel
from gpt2.steps import StepNumbers, Steps, Timings
from gpt2.stopping import (
    BENCHMARK,
    CHECKPOINT,
    EVALUATION,
    Budget,
    EarlyStopping,
    EndReason,
    NotFiniteError,
    not_finite,
)
from gpt2.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenSteps:
    """What one rank does between two steps and at the end: log, evaluate, benchmark and save."""

    training: TrainingState
    log: RunLog
    stop: dist.Stop
    watchdog: Watchdog
    batches: Batches
    validation: Validation
    benchmarks: Benchmarks
    model: LanguageModel  # for benchmarks, whose inputs vary in length: compiled code would be compiled again for each
    compiled: nn.Module  # the same weights; not DDP, whose forward pass communicates
    early_stopping: EarlyStopping
    budget: Budget
    checkpoints: Saver
    steps: Steps
    timings: Timings

    def due(self, step: int) -> list[str]:
        """Return what happens before a step, for the budget's forecast."""
        parts = {
            EVALUATION: self._evaluation_due(step),
            BENCHMARK: self.benchmarks.due(step),
            CHECKPOINT: self.checkpoints.due(step),
        }
        return [part for part, is_due in parts.items() if is_due]

    def finish_step(self, numbers: StepNumbers | None) -> EndReason | None:
        """Check and log a step whose numbers have arrived. Return why the loop must end, if it must.

        Raises NotFiniteError if its loss or gradient norm is NaN or infinite, on all ranks alike.
        """
        if numbers is None:
            return None
        if text := not_finite(numbers.step, numbers.loss, numbers.norm):
            raise NotFiniteError(text)
        for line in self.batches.epochs_begun(numbers.step) if self.training.world.main else ():
            self.log.say(f"Iter {numbers.step} | {line}")
        self.log.training(numbers, self.batches.epoch(numbers.step))
        self.timings.add(numbers)
        self.budget.stepped(numbers.seconds)
        if numbers.stop:
            return EndReason.STOP
        return self.budget.ended_by if numbers.over_budget else None

    def wait_for_data(self) -> bool:
        """Wait until the data of the next step are there. Return False if a stop was requested meanwhile."""
        seconds = self.batches.wait(self._stopping, self.log.say)
        if seconds:
            self.steps.restart()  # the time of a step must not include the wait
        return seconds is not None

    def evaluate_and_save(self, step: int) -> EndReason | None:
        """Evaluate, benchmark and save, as far as it is due. Return why the loop must end, if it must."""
        ended_by = None
        if self._evaluation_due(step):
            if not self.evaluate(step):
                return EndReason.STOP
            ended_by = EndReason.EARLY_STOPPING if self.early_stopping.should_stop(self.log.last_val_loss) else None
        if self.benchmarks.due(step):
            self.benchmark(step)
        # Last, so that the checkpoint includes the losses above, and knows whether it is the best.
        with self._phase(CHECKPOINT):
            if self.checkpoints.wanted(step):
                self.checkpoints.save()
        self.steps.restart()  # none of this is part of the next step's time
        return ended_by

    def evaluate(self, step: int) -> bool:
        """Measure and log the validation loss, unless that was done. Return False if a stop interrupted it."""
        if self.log.evaluated(step):
            return True
        with self._phase(EVALUATION), self.training.optimizers.evaluation_weights():
            found = self.validation.measure(self.compiled, lambda: self.stop.requested)
        if found is None:
            return False
        if not np.isfinite(found.loss):
            raise NotFiniteError(f"validation loss is {found.loss} at step {step}")
        self.log.validation(step, found.loss, found.by_source, found.bits_per_byte)
        return True

    def benchmark(self, step: int, *, final: bool = False) -> None:
        """Run the benchmarks and write the sample texts that are due; all of them at the end of a run."""
        with self._phase(BENCHMARK), self.training.optimizers.evaluation_weights():
            self.benchmarks.measure(step, self.model, self._stopping, final=final)

    def end_stopped(self) -> int:
        """Save a checkpoint if there is time, write the result of a stopped attempt, and return the exit status."""
        log, signal = self.log, self.stop.signal
        steps = f"{log.step} of {self.training.config.max_iters} steps"
        log.event(log.step, "stop", f"stopped after {steps}: {signal or 'a peer'}")
        self.checkpoints.stop()
        log.end("stopped", "signal", f"stopped by {signal or 'a signal to another rank'} at step {log.step}")
        return dist.EXIT_STOPPED

    def end_finished(self, ended_by: EndReason | None) -> int:
        """Save the final checkpoint, write the result of a finished run, and return the exit status."""
        # Wait: result.json comes last, and a run whose final checkpoint cannot be written is not finished.
        with self.log.phase("checkpoint"):
            final = self.training.config.save_checkpoint
            if final or self.checkpoints.wanted(self.log.step):
                self.checkpoints.save(final=final)
                self.checkpoints.wait()
        self.log.finish(str(ended_by))
        return dist.EXIT_FINISHED

    def _evaluation_due(self, step: int) -> bool:
        return step % self.training.config.eval_interval == 0 and not self.log.evaluated(step)

    def _stopping(self) -> bool:
        """Return whether a stop was requested. What asks goes on: it has not stalled."""
        self.watchdog.progress()
        return self.stop.requested

    @contextmanager
    def _phase(self, kind: str) -> Iterator[None]:
        """Record a phase without training, for the watchdog, the budget and the log."""
        self.watchdog.work(kind, self.log.step)
        with self.budget.measure(kind), self.log.phase(EVALUATION if kind == BENCHMARK else kind):
            yield
