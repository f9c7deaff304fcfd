"""The parts of the time of a run, measured on a finished one, and the number of steps that fit into a budget."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.records.decode import decode_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status, read_result, read_run_file_or_empty
from kmatrix.records.states import PhaseLine
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.estimate import CHECKPOINT, EVALUATION
from kmatrix.text import duration

RESERVE = 0.06  # of the budget, at most: an interruption costs a second set-up, and the end stays near the budget
MOST_STEPS = 10**9  # upper limit of MAX_ITERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The parts of the time of a run, in seconds."""

    overhead_s: float  # launch, set-up, warm-up and end: whatever the number of steps
    step_s: float  # mean of the steady steps
    evaluation_s: float = 0.0
    benchmark_s: float = 0.0  # HellaSwag, CORE and sample texts at one step
    checkpoint_s: float = 0.0  # that training waits for a checkpoint which is not the last one
    final_s: float = 0.0  # of the last checkpoint, which is waited for

    def seconds(self, train: TrainConfig, steps: int) -> float:
        """Return the time of a run of this many steps, all of it included."""
        fixed = self.overhead_s + self.final_s + steps * self.step_s
        evaluations = (steps - 1) // train.eval_interval  # after step 0, and before the end
        fixed += (evaluations + 2) * self.evaluation_s + (_benchmarks(train, steps) + 1) * self.benchmark_s
        saved = sum((steps - 1) // every for every in (train.checkpoint_interval, train.keep_weights_every) if every)
        saved += evaluations if train.save_best else 0  # at most: the loss may rise
        fixed += saved * self.checkpoint_s
        by_time = fixed / (60 * train.checkpoint_minutes) if train.checkpoint_minutes else 0.0
        return fixed + by_time * self.checkpoint_s

    def steps_within(self, train: TrainConfig, seconds: float) -> int:
        """Return the largest number of steps whose run takes at most this time, 0 if none does."""
        low, high = 0, min(MOST_STEPS, math.ceil(seconds / self.step_s) + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.seconds(train, middle) <= seconds else (low, middle - 1)
        return low

    def target_s(self, budget: float) -> float:
        """Return the time to aim at: the budget without a reserve for one interruption."""
        return budget - min(self.overhead_s, RESERVE * budget)

    def describe(self) -> str:
        """Return `12.3 ms per step, 6.2s around them`."""
        step = f"{1e3 * self.step_s:.3g} ms" if self.step_s < 1 else f"{self.step_s:.3g} s"
        return f"{step} per step, {duration(self.overhead_s)} around them"


def _benchmarks(train: TrainConfig, steps: int) -> int:
    """Return how often benchmarks run before the end of a run."""
    intervals = [every for every in (train.hellaswag_interval, train.core_interval, train.sample_interval) if every]
    return sum((steps - 1) // every + 1 for every in intervals)


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Return the mean of several measurements."""
    names = Pace.__dataclass_fields__
    return Pace(**{name: statistics.fmean(getattr(pace, name) for pace in paces) for name in names})


def pace_of(run: RunDir, *, retried: bool = False) -> Pace | None:
    """Return the pace of a finished run of one attempt, None for other runs and without the numbers.

    retried: also of a run that was retried from its start with a smaller micro-batch, as an equal one will be.
    """
    result, train = read_result(run), read_run_file_or_empty(run).train
    if result is None or result.status != Status.FINISHED or (result.attempt_number != 1 and not retried):
        return None
    steps, tokens, speed, spent = result.step, train.tokens_per_step, result.tokens_per_second, result.spent_s
    if not steps or steps < 2 or not tokens or not speed or spent is None:
        return None
    lines = [line for line in decode_lines(run.phases, PhaseLine) if line.attempt == result.attempt_number]
    evaluations, checkpoints = (_by_step(lines, name) for name in (EVALUATION, CHECKPOINT))
    # The first line of a step is its validation, the second its benchmarks (gpt2/loop/between.py). The first
    # evaluation of a run includes warm-up, and compilation.
    later = [times[0] for step, times in evaluations.items() if step] or [times[0] for times in evaluations.values()]
    evaluation = statistics.median(later) if later else 0.0
    benchmark = sum(evaluations.get(steps, [])[1:])
    final = sum(checkpoints.pop(steps, []))
    others = [sum(times) for times in checkpoints.values()]
    counted = len(evaluations) * evaluation + sum(sum(times[1:]) for times in evaluations.values())
    around = spent - steps * tokens / speed - counted - final - sum(others)
    return Pace(
        overhead_s=max(0.0, around),
        step_s=tokens / speed,
        evaluation_s=evaluation,
        benchmark_s=benchmark,
        checkpoint_s=statistics.median(others) if others else 0.0,
        final_s=final,
    )


def _by_step(lines: Sequence[PhaseLine], name: str) -> dict[int, list[float]]:
    """Return step -> seconds of each of its phases of this name, in order."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for line in lines:
        begin, end = line.begin_monotonic, line.end_monotonic
        if line.phase == name and line.step is not None and begin is not None and end is not None:
            found[line.step].append(max(0.0, end - begin))
    return found
