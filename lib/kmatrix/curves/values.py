"""The thinned curves of a run as values: what reports draw, and look numbers up in."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import overload

from kmatrix.curves.file import CurvesFile, EvaluationColumns, KnotColumns, TrainingColumns
from kmatrix.curves.thin import cells, evenly
from kmatrix.records.runs import RunResult


def no_steps() -> array[int]:
    """Return an empty column of steps or counts."""
    return array("q")


def no_values() -> array[float]:
    """Return an empty column of values."""
    return array("d")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One measured loss."""

    step: int
    tokens: float | None  # tokens trained on so far
    seconds: float | None  # of training, since the start of the run
    loss: float  # nats/token
    joules: float | None = None  # of all devices since the training began


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations(Sequence[CurvePoint]):
    """The validation losses of a run, as columns of equal length. NaN: unknown."""

    step: array[int] = field(default_factory=no_steps)
    loss: array[float] = field(default_factory=no_values)  # nats/token, with all digits
    tokens: array[float] = field(default_factory=no_values)
    seconds: array[float] = field(default_factory=no_values)
    joules: array[float] = field(default_factory=no_values)  # empty: unknown
    total: int = 0  # evaluations before they were thinned

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, index: int) -> CurvePoint: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CurvePoint, ...]: ...
    def __getitem__(self, index: int | slice) -> CurvePoint | tuple[CurvePoint, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        return CurvePoint(
            step=self.step[index],
            tokens=number(self.tokens[index]),
            seconds=_known(self.seconds[index]),
            loss=self.loss[index],
            joules=_known(self.joules[index]) if self.joules else None,
        )

    def first_within(self, target: float) -> CurvePoint | None:
        """Return the first evaluation whose loss is at or below the target (nats/token), None without one."""
        # Without a point per evaluation: a page asks a thousand runs.
        at = next((at for at, loss in enumerate(self.loss) if loss <= target), None)
        return None if at is None else self[at]

    def thinned(self, most: int) -> Evaluations:
        """Return at most `most` evaluations: every n-th, the last and the lowest."""
        if len(self) <= most:
            return self
        kept = evenly(self.loss, most)
        return Evaluations(
            step=array("q", (self.step[at] for at in kept)),
            loss=array("d", (self.loss[at] for at in kept)),
            tokens=array("d", (self.tokens[at] for at in kept)),
            seconds=array("d", (self.seconds[at] for at in kept)),
            joules=array("d", (self.joules[at] for at in kept if self.joules)),
            total=self.total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCurve:
    """The training loss of a run in columns of equal width: a spike of one step stays in the extremes."""

    width: int = 1  # steps
    step: array[int] = field(default_factory=no_steps)  # first step of each column
    mean: array[float] = field(default_factory=no_values)  # nats/token
    minimum: array[float] = field(default_factory=no_values)  # nats/token
    maximum: array[float] = field(default_factory=no_values)  # nats/token
    count: array[int] = field(default_factory=no_steps)  # points per column
    total: int = 0  # points before they were thinned

    def __len__(self) -> int:
        return len(self.step)

    def middle(self, at: int) -> float:
        """Return the step at the middle of a column; a column of width 1 is its step."""
        return self.step[at] + (self.width - 1) / 2

    def thinned(self, most: int) -> TrainingCurve:
        """Return the curve with at most `most` columns, each of them several of these."""
        if len(self) <= most:
            return self
        width = self.width * -(-(self.step[-1] // self.width + 1) // most)
        groups = list(cells(self.step, width))
        # Slices of arrays: their sums and extremes are computed in C.
        sums = array("d", map(mul, self.mean, self.count))
        counts = array("q", (sum(self.count[begin:end]) for begin, end in groups))
        return TrainingCurve(
            width=width,
            step=array("q", (self.step[begin] // width * width for begin, _ in groups)),
            mean=array("d", (math.fsum(sums[b:e]) / n for (b, e), n in zip(groups, counts, strict=True))),
            minimum=array("d", (min(self.minimum[begin:end]) for begin, end in groups)),
            maximum=array("d", (max(self.maximum[begin:end]) for begin, end in groups)),
            count=counts,
            total=self.total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Knots:
    """A quantity over steps as a piecewise straight line. Empty: unknown."""

    step: array[int] = field(default_factory=no_steps)
    value: array[float] = field(default_factory=no_values)

    def __len__(self) -> int:
        return len(self.step)

    def at(self, step: float) -> float | None:
        """Return the value at a step, that of the nearest end outside of the curve; None if it is unknown."""
        if not len(self):
            return None
        after = bisect_right(self.step, step)
        if after == 0 or after == len(self):
            return self.value[0 if after == 0 else -1]
        begin, end = self.step[after - 1], self.step[after]
        low, high = self.value[after - 1], self.value[after]
        return low + (high - low) * (step - begin) / (end - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """The thinned curves of one run, and the numbers that its log has without a result."""

    val: Evaluations = field(default_factory=Evaluations)
    train: TrainingCurve = field(default_factory=TrainingCurve)
    seconds: Knots = field(default_factory=Knots)  # of training, over all attempts
    tokens: Knots = field(default_factory=Knots)
    joules: Knots = field(default_factory=Knots)  # of all devices since the training began
    simulated: bool = False  # the joules are those of simulated GPUs
    measured: RunResult = field(default_factory=RunResult)
    first_steps: Mapping[int, int] = field(default_factory=dict)  # attempt -> step of its first line
    last_times: Mapping[int, float] = field(default_factory=dict)  # attempt -> Unix s of its last training line
    lines: int = 0  # sound lines of metrics.jsonl

    def training_points(self) -> list[CurvePoint]:
        """Return the mean training loss of each column, at its middle."""
        points = []
        for at, mean in enumerate(self.train.mean):
            step = self.train.middle(at)
            tokens = self.tokens.at(step)
            points.append(CurvePoint(int(step), tokens, self.seconds.at(step), mean, self.joules.at(step)))
        return points


def curves_of_file(file: CurvesFile) -> RunCurves:
    """Return the content of curves.json as values."""
    return RunCurves(
        val=_evaluations(file.val),
        train=_training(file.train),
        seconds=_knots(file.seconds),
        tokens=_knots(file.tokens),
        joules=_knots(file.joules),
        simulated=file.simulated,
        measured=file.measured,
        first_steps={span.attempt: span.first_step for span in file.attempts},
        last_times={span.attempt: span.last_time for span in file.attempts if span.last_time is not None},
        lines=file.lines,
    )


def _evaluations(val: EvaluationColumns) -> Evaluations:
    return Evaluations(
        step=array("q", val.step),
        loss=array("d", val.loss),
        tokens=_optional(val.tokens),
        seconds=_optional(val.seconds),
        joules=_optional(val.joules),
        total=val.total,
    )


def _training(train: TrainingColumns) -> TrainingCurve:
    mean = array("d", train.mean)
    return TrainingCurve(
        width=train.width,
        step=array("q", train.step),
        mean=mean,
        minimum=array("d", train.minimum) if train.minimum else mean,
        maximum=array("d", train.maximum) if train.maximum else mean,
        count=array("q", train.count or [1] * len(mean)),
        total=train.total,
    )


def _knots(line: KnotColumns) -> Knots:
    return Knots(step=array("q", line.step), value=array("d", line.value))


def _optional(values: Iterable[float | None]) -> array[float]:
    return array("d", (math.nan if value is None else value for value in values))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def number(value: float) -> float | None:
    """Return a count without a decimal point; None for NaN."""
    return int(value) if value.is_integer() else _known(value)
