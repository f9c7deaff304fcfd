"""Estimate the time left of runs: from their own steps, from similar runs, from their FLOPs; and of a matrix, packed.

The estimate of a pending run includes start-up and evaluations, because it is measured on whole runs. For a running
run, remaining steps, evaluations and checkpoints are estimated separately.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

from kmatrix.errors import KmatrixError, RecordError, SchemaError
from kmatrix.packing import Limits, PackedJob, ends
from kmatrix.records.paths import MatrixDir, RunDir, matrix_dirs
from kmatrix.records.runs import Status, read_result, read_run_file, read_run_file_or_empty
from kmatrix.records.states import PhaseLine
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.state import Attempt
from kmatrix.status.status_file import recover_status

Shape = tuple[Any, ...]
# The fields that determine the time of a step, except for the optimizer.
_shape = attrgetter("model", "n_layer", "n_embd", "block_size", "global_batch", "num_gpus", "device", "dtype")
GUESS = {"cuda": 50e12, "cpu": 50e9}  # FLOP/s of a GPU or core: only orders runs, never displayed
SET_UP, EVALUATION, CHECKPOINT = "set-up", "evaluation", "checkpoint"  # names of phases in phases.jsonl


class EstimateSource(StrEnum):
    """What an estimate is based on, the best source first."""

    OWN = "its own steps"
    MATRIX = "runs like it here"
    EARLIER = "earlier runs like it"
    FLOPS = "its operations"
    PLAN = "the plan"


@dataclass(frozen=True, slots=True)
class Measured:
    """The duration of a finished run."""

    train: TrainConfig
    seconds: float  # including start-up, evaluations and checkpoints
    steps: int


@dataclass(frozen=True, slots=True)
class Expected:
    """An estimated duration and its source."""

    seconds: float
    source: EstimateSource


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch without training."""

    name: str
    begin: float  # Unix seconds
    end: float  # Unix seconds
    seconds: float | None = None  # its duration by the monotonic clock; None: not recorded

    @property
    def duration_s(self) -> float:
        """Its duration in seconds, 0 if only the wall clock is known, and was set back meanwhile."""
        return max(0.0, self.end - self.begin) if self.seconds is None else self.seconds

    @classmethod
    def of(cls, line: PhaseLine) -> Phase:
        """Return the phase of a line of phases.jsonl."""
        begin, end = line.begin_monotonic, line.end_monotonic
        return cls(line.phase, line.begin, line.end, None if begin is None or end is None else max(0.0, end - begin))


@dataclass(frozen=True, slots=True)
class TrainingLine:
    """A training line of metrics.jsonl."""

    step: int
    at: float | None  # Unix seconds
    step_s: float | None = None  # s per step since the line before, without evaluations and checkpoints; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The remaining work of one run."""

    name: str
    width: int  # GPUs or cores
    cuda: bool
    running: bool
    seconds: float | None  # None: unknown


class MeasuredRuns:
    """The durations of finished runs, by what decides the time of a step: an estimate costs a look-up."""

    def __init__(self, here: Iterable[Measured], earlier: Iterable[Measured] = ()) -> None:
        """Group the runs. here, earlier: of this matrix, and of earlier ones on this kind of machine."""
        self._paces: dict[EstimateSource, dict[Shape, dict[str | None, list[float]]]] = {}  # s per step, by optimizer
        self._speeds: dict[Shape, list[float]] = {}  # FLOP/s per GPU or core, by kind of device
        self._medians: dict[tuple[Shape, str | None], Expected | None] = {}  # of one step
        self._runs = (*here, *earlier)
        self._with_earlier: MeasuredRuns | None = None
        for runs, source in ((here, EstimateSource.MATRIX), (earlier, EstimateSource.EARLIER)):
            shapes = self._paces[source] = {}
            for run in runs:
                optimizers = shapes.setdefault(_shape(run.train), {})
                optimizers.setdefault(run.train.optimizer, []).append(run.seconds / run.steps)

    def with_earlier(self, earlier: Sequence[Measured]) -> MeasuredRuns:
        """Return the same runs with those of earlier matrices."""
        if self._with_earlier is None:
            self._with_earlier = MeasuredRuns(self._runs, earlier)
        return self._with_earlier

    def whole(self, train: TrainConfig, planned_s: float | None = None) -> Expected | None:
        """Return the estimated duration of a whole run, None without a basis.

        planned_s: the estimate of the plan, used if nothing was measured.
        """
        steps, planned = train.max_iters, None if planned_s is None else Expected(planned_s, EstimateSource.PLAN)
        if not steps:
            return planned
        key = (_shape(train), train.optimizer)
        if key not in self._medians:
            self._medians[key] = self._step(*key)
        step = self._medians[key]
        if step is not None:
            return Expected(steps * step.seconds, step.source)
        known, work = self._speeds_of(train), operations(train)
        if not known or not work:
            return planned
        return Expected(work / statistics.median(known), EstimateSource.FLOPS)

    def _step(self, shape: Shape, optimizer: str | None) -> Expected | None:
        """Return the duration of one step, None if no run of this shape was measured."""
        for source, shapes in self._paces.items():
            if found := shapes.get(shape):
                # Another optimizer on the same shape is close enough: most of a step is forward and backward.
                paces = found.get(optimizer) or [pace for paces in found.values() for pace in paces]
                return Expected(statistics.median(paces), source)
        return None

    def _speeds_of(self, train: TrainConfig) -> list[float]:
        kind = _kind(train)
        if kind not in self._speeds:
            speeds = [_speed(run) for run in self._runs if _kind(run.train) == kind]
            self._speeds[kind] = [speed for speed in speeds if speed]
        return self._speeds[kind]


def guess(train: TrainConfig) -> float | None:
    """Return a rough duration (s) from FLOPs alone, which only orders runs without a measurement."""
    work = operations(train)
    return None if work is None else work / GUESS.get(train.device, GUESS["cpu"])


def operations(train: TrainConfig) -> float | None:
    """Return the FLOPs per GPU or core of a whole run, None if the record is incomplete."""
    try:
        flops = train.shape.flops_per_token
    except ValueError:
        return None
    threads = (train.cpu_threads or 1) if train.device == "cpu" else 1
    work = flops * train.max_iters * train.tokens_per_step
    return work / (train.num_gpus * threads) if work and train.num_gpus else None


def rest_of_run(
    recent: Sequence[TrainingLine],
    phases: Sequence[Phase],
    train: TrainConfig,
    since_s: float,
    *,
    earlier: Sequence[TrainingLine] = (),
    start: int | None = None,
) -> float | None:
    """Return the time left (s) of a running run, None before its second training line and without earlier ones.

    recent: the newest training lines of this attempt, whose pace is that of the remaining steps.
    phases: of this run. They are excluded from the pace, and the remaining ones are added.
    since_s: seconds since the newest line of this attempt.
    earlier: the newest training lines of the attempts before, which count until this one has two lines.
    start: the step at which this attempt starts; it may have no line yet.
    """
    measured = recent if len(recent) > 1 else earlier
    steps, pace = train.max_iters, pace_of(measured, phases)
    if pace is None or not steps:
        return None
    step = recent[-1].step if recent else start
    if step is None:
        return None
    interval = max(0, measured[-1].step - measured[-2].step)
    left, soon = pace * (steps - 1 - step), pace * interval
    # Evaluations and checkpoints have their own period, so they are not part of the pace of a step.
    for name, period in ((EVALUATION, train.eval_interval), (CHECKPOINT, train.checkpoint_interval)):
        seen = [phase.duration_s for phase in phases if phase.name == name]
        each = statistics.median(seen) if seen else 0.0
        left += _to_come(step, steps, period) * each
        soon += (_to_come(step, steps, period) - _to_come(min(step + interval, steps), steps, period)) * each
    # Between two lines the estimate counts down, instead of jumping at each line. A run that is stopped, hangs or waits
    # for a disk makes no progress: the estimate then stays at that of its next line.
    return max(0.0, left - min(max(0.0, since_s), max(0.0, soon)))


def rest_when_resumed(
    recent: Sequence[TrainingLine], phases: Sequence[Phase], train: TrainConfig, start: int | None
) -> float | None:
    """Return the time (s) that a stopped run takes once it continues, None without a pace or a known start.

    recent: the newest training lines of its last attempt with two of them.  phases: of this run.
    start: the step of the checkpoint that it continues from, 0 without one, None if it is unknown.
    """
    left = rest_of_run((), phases, train, 0.0, earlier=recent, start=start)
    set_ups = [phase.duration_s for phase in phases if phase.name == SET_UP]
    return None if left is None else left + (statistics.median(set_ups) if set_ups else 0.0)


def pace_of(recent: Sequence[TrainingLine], phases: Sequence[Phase]) -> float | None:
    """Return the median time (s) of a step between recent lines, None with fewer than two lines.

    The median, because the machine may have been suspended between two lines.
    """
    found = []
    for before, line in itertools.pairwise(recent):
        if line.step_s is not None:
            found.append(line.step_s)
        elif line.step > before.step and line.at is not None and before.at is not None:  # without the time of a step
            begin, end = before.at, line.at
            within = [min(phase.end, end) - max(phase.begin, begin) for phase in phases]
            found.append(max(0.0, end - begin - sum(max(0.0, part) for part in within)) / (line.step - before.step))
    return statistics.median(found) if found else None


def ends_of(runs: Sequence[Rest], *, gpus: int, cores: int, limits: Limits) -> Mapping[str, tuple[float, float]] | None:
    """Return run -> seconds from now until its start and its end, as the engine packs them; None if unknown.

    Runs on GPUs and runs on the CPU never run at the same time: the kind that runs now, else the first one, goes first.
    """
    found: dict[str, tuple[float, float]] = {}
    # The sort is stable: the kind of a running run comes first, then the kind of the first pending one.
    kinds = list(dict.fromkeys(run.cuda for run in sorted(runs, key=lambda run: not run.running)))
    after = 0.0
    for cuda in kinds:
        units = gpus if cuda else cores
        jobs = [
            (run, PackedJob(name=run.name, width=run.width, seconds=run.seconds)) for run in runs if run.cuda == cuda
        ]
        if any(job.width > units for _, job in jobs):
            return None  # not on this machine
        queue, running = ([job for run, job in jobs if run.running is now] for now in (False, True))
        known = ends(queue, running, units, limits.on(gpus=cuda))
        if known is None:
            return None
        found |= {name: (after + begin, after + end) for name, (begin, end) in known.items()}
        after = max(end for _, end in found.values())
    return found


def _kind(train: TrainConfig) -> Shape:
    return train.device, train.dtype


def _speed(run: Measured) -> float | None:
    """Return the measured FLOP/s per GPU or core of a run."""
    work, steps = operations(run.train), run.train.max_iters
    if work is None or not steps:
        return None
    return work * run.steps / steps / run.seconds


def _to_come(step: int, steps: int, period: int) -> int:
    """Return how often a periodic action is due after `step`: at multiples of its period, and at the end."""
    if period < 1:
        return 1
    return steps // period - step // period + bool(steps % period)


MOST = 50  # newest matrices that are searched: reading thousands of them would delay every status


def measured_here(matrix: MatrixDir) -> list[Measured]:
    """Return the durations of the finished runs of a matrix; unreadable runs are omitted."""
    return [found for run in matrix.runs() if (found := measured(run)) is not None]


def measured_before(matrix: MatrixDir) -> list[Measured]:
    """Return the durations of finished runs of other matrices in the results directory, on the same kind of machine."""
    return measured_on(matrix.path.parent, _machine(matrix.runs()), without=matrix.name)


def measured_on(results_dir: Path, machine: tuple[Any, ...], *, without: str = "") -> list[Measured]:
    """Return the durations of finished runs that were planned for a kind of machine.

    machine: processor, cores and GPU models: times on another one say little about this one.  without: a matrix.
    """
    others = [other for other in matrix_dirs(results_dir) if other.name != without]
    return [
        found
        for other in others[-MOST:]
        for run in _runs(other)
        if _machine([run]) == machine and (found := measured(run)) is not None
    ]


def newest_speed(results_dir: Path, machine: tuple[Any, ...], train: TrainConfig) -> tuple[float, str] | None:
    """Return the tokens/s of the newest finished run of this shape on a kind of machine, and its name, if there is one.

    machine: as for `measured_on`.
    """
    for matrix in reversed(matrix_dirs(results_dir)[-MOST:]):
        for run in reversed(_runs(matrix)):
            with suppress(KmatrixError):  # of any matrix: an unreadable or newer run is skipped
                result, was = read_result(run), read_run_file(run).train
                alike = _shape(was) == _shape(train) and _machine([run]) == machine
                if alike and result is not None and result.status == Status.FINISHED and result.tokens_per_second:
                    return result.tokens_per_second, f"{matrix.name}/{run.name}"
    return None


def measured(run: RunDir) -> Measured | None:
    """Return the duration of a finished run, including start-up if it is known; None for other runs."""
    try:
        result, train = read_result(run), read_run_file_or_empty(run).train
        if result is None or result.status != Status.FINISHED or not result.step or train == TrainConfig():
            return None
        attempts = recover_status(run, has_runner=True).attempts
    except SchemaError:
        return None
    seconds = one_attempt_s(attempts) or result.seconds
    return Measured(train, seconds, result.step) if seconds else None


def one_attempt_s(attempts: Sequence[Attempt], now: float | None = None) -> float | None:
    """Return the time (s) of a run with a single attempt; None after a restart: some steps ran twice.

    now: Unix seconds, for a running attempt.
    """
    # The runner's times include start-up, which the trainer's own clock does not see.
    return attempts[0].duration_s(now) if len(attempts) == 1 else None


def _machine(runs: Iterable[RunDir]) -> tuple[Any, ...]:
    """Return the kind of machine that runs were planned for: processor, cores and GPU models."""
    for run in runs:
        with suppress(RecordError, OSError):  # of any matrix: an unreadable or newer run is skipped
            about = read_run_file(run).provenance
            models = {gpu.get("name", "") for gpu in about.get("gpus") or []}
            return about.get("cpu"), about.get("cores"), tuple(sorted(models))
    return ()


def _runs(matrix: MatrixDir) -> list[RunDir]:
    try:
        return matrix.runs()
    except (RecordError, KeyError, TypeError):
        return []
