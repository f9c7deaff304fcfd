"""Estimate the time left of runs, from their own steps or from finished runs of the same shape; of a matrix, packed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kmatrix.errors import KmatrixError
from kmatrix.packing import PackedJob, ends
from kmatrix.records.decode import Scalar
from kmatrix.records.events import PhaseLine
from kmatrix.records.matrix import read_plan
from kmatrix.records.paths import matrix_dirs
from kmatrix.records.runs import MetricLine, Provenance, Status
from kmatrix.status.fold import spent_s
from kmatrix.status.look import Look, look

# The fields that determine the time of a step, except for the optimizer.
SHAPE = ("model", "n_layer", "n_embd", "block_size", "global_batch", "num_gpus", "device", "dtype")
SET_UP, EVALUATION, CHECKPOINT = "set-up", "evaluation", "checkpoint"  # names of phases in phases.jsonl
MOST_MATRICES = 20  # newest ones that are searched: reading thousands of them would delay every status

Train = Mapping[str, Scalar]  # the training fields of a run
Machine = tuple[object, ...]  # processor, cores and GPU models: times on another one say little about this one


class EstimateSource(StrEnum):
    """What an estimate is based on, the best source first."""

    OWN = "its own steps"
    MATRIX = "runs like it here"
    EARLIER = "earlier runs like it"
    PLAN = "the plan"


Expected = tuple[float, EstimateSource]  # a duration (s), and its source


@dataclass(frozen=True, slots=True)
class Measured:
    """The duration of a run that finished, or of one that trains, by its own estimate."""

    train: Train
    seconds: float  # including start-up, evaluations and checkpoints
    steps: int
    tokens_per_second: float | None = None
    name: str = ""  # <matrix>/<run>


class MeasuredRuns:
    """The time of a step by the shape of a run: an estimate costs a look-up."""

    def __init__(self, runs: Iterable[Measured], source: EstimateSource) -> None:
        self._source = source
        self._paces: dict[object, dict[Scalar, list[float]]] = {}  # s per step, by shape and optimizer
        self._medians: dict[object, float] = {}
        for run in runs:
            paces = self._paces.setdefault(shape_of(run.train), {}).setdefault(run.train.get("optimizer"), [])
            paces.append(run.seconds / run.steps)

    def whole(self, train: Train, planned_s: float | None = None) -> Expected | None:
        """Return the estimated duration (s) of a whole run and its source, None without a basis.

        planned_s: the estimate of the plan, used if nothing was measured.
        """
        shape, optimizer = shape_of(train), train.get("optimizer")
        if (found := self._paces.get(shape)) is None:
            return None if planned_s is None else (planned_s, EstimateSource.PLAN)
        if (shape, optimizer) not in self._medians:
            # Another optimizer on the same shape is close enough: most of a step is forward and backward.
            paces = found.get(optimizer) or [pace for paces in found.values() for pace in paces]
            self._medians[shape, optimizer] = statistics.median(paces)
        return whole_number(train, "max_iters") * self._medians[shape, optimizer], self._source


def shape_of(train: Train) -> tuple[Scalar, ...]:
    """Return what determines the time of a step."""
    return tuple(map(train.get, SHAPE))


def rest_of_run(
    recent: Sequence[MetricLine],
    phases: Sequence[PhaseLine],
    train: Train,
    since_s: float,
    *,
    earlier: Sequence[MetricLine] = (),
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
    steps, pace = whole_number(train, "max_iters"), pace_of(measured, phases)
    step = recent[-1].step if recent else start
    if pace is None or not steps or step is None:
        return None
    interval = max(0, measured[-1].step - measured[-2].step)
    left, soon = pace * (steps - 1 - step), pace * interval
    # Evaluations and checkpoints have their own period, so they are not part of the pace of a step.
    for name, period in ((EVALUATION, "eval_interval"), (CHECKPOINT, "checkpoint_interval")):
        seen = [phase.duration_s for phase in phases if phase.phase == name]
        each, every = statistics.median(seen) if seen else 0.0, whole_number(train, period)
        left += _to_come(step, steps, every) * each
        soon += (_to_come(step, steps, every) - _to_come(min(step + interval, steps), steps, every)) * each
    # Between two lines the estimate counts down, instead of jumping at each line. A run that is stopped, hangs or waits
    # for a disk makes no progress: the estimate then stays at that of its next line.
    return max(0.0, left - min(max(0.0, since_s), max(0.0, soon)))


def pace_of(recent: Sequence[MetricLine], phases: Sequence[PhaseLine]) -> float | None:
    """Return the median time (s) of a step between recent lines, None with fewer than two lines.

    The median, because the machine may have been suspended between two lines.
    """
    found = []
    for before, line in itertools.pairwise(recent):
        step_ms = line.values.get("throughput/step_ms")  # since the line before, without evaluations and checkpoints
        if step_ms is not None:
            found.append(step_ms / 1e3)
        elif line.step > before.step and line.time is not None and before.time is not None:
            begin, end = before.time, line.time
            within = [min(phase.end, end) - max(phase.begin, begin) for phase in phases]
            found.append(max(0.0, end - begin - sum(max(0.0, part) for part in within)) / (line.step - before.step))
    return statistics.median(found) if found else None


def ends_of(
    jobs: Mapping[bool, Sequence[PackedJob]], units: Mapping[bool, int], on_gpus: Collection[str], parallel: int
) -> Mapping[str, tuple[float, float]] | None:
    """Return run -> seconds from now until its start and its end, as this machine packs them; None if unknown.

    Runs on GPUs and runs on the CPU never run at the same time: the kind that runs now, else the first one, goes first.
    jobs: those that run, and those that wait.  units: number of GPUs, and of cores.  parallel: 0: as many as fit.
    """
    found: dict[str, tuple[float, float]] = {}
    after = 0.0
    for kind in dict.fromkeys(job.name in on_gpus for job in (*jobs[True], *jobs[False])):
        queue, active = ([job for job in jobs[now] if (job.name in on_gpus) is kind] for now in (False, True))
        known = ends(queue, active, units[kind], parallel or (0 if kind else 1))
        if known is None:
            return None
        found |= {name: (after + begin, after + end) for name, (begin, end) in known.items()}
        after = max(end for _, end in found.values())
    return found


def _to_come(step: int, steps: int, period: int) -> int:
    """Return how often a periodic action is due after `step`: at multiples of its period, and at the end."""
    if period < 1:
        return 1
    return steps // period - step // period + bool(steps % period)


def whole_number(train: Train, name: str) -> int:
    """Return a field of a run that is a number, 0 if it is not set."""
    value = train.get(name)
    return value if isinstance(value, int) else 0


# Runs that were measured


def measured_in(seen: Look) -> Iterator[Measured]:
    """Yield the durations of the finished runs of a matrix: without lost work, and with start-up if it is known."""
    for name, state in seen.states.items():
        files, result = seen.files[name], seen.files[name].result
        if state.status is Status.FINISHED and result is not None and result.step:
            seconds = (spent_s(state) if len(state.attempts) == 1 else 0.0) or result.seconds
            if seconds:
                where = f"{seen.path.name}/{name}"
                yield Measured(files.train, seconds, result.step, result.tokens_per_second, where)


def machine_of(about: Provenance) -> Machine:
    """Return the kind of machine that a matrix was planned for."""
    models = {gpu.get("name", "") for gpu in about.get("gpus") or []}
    return about.get("cpu"), about.get("cores"), tuple(sorted(models))


def measured_on(results_dir: Path, machine: Machine, *, without: str = "") -> list[Measured]:
    """Return the durations of finished runs that were planned for a kind of machine, newest matrix first.

    without: a matrix.
    """
    found: list[Measured] = []
    others = [other.path for other in matrix_dirs(results_dir) if other.name != without]
    for path in reversed(others[-MOST_MATRICES:]):
        with suppress(KmatrixError, OSError):  # of any matrix: one that cannot be read is left out
            if machine_of(read_plan(path).provenance) == machine:
                found += measured_in(look(path))
    return found
