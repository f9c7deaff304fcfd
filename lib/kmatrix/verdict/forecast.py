"""Forecast the final validation loss of a run that is still going, with an interval from a backtest on finished runs.

There are two ways to make a forecast, and each is tried out on runs that have finished: what would it have been
for them, at the same share of their steps? The errors of that backtest, in units of what the loss of a run had fallen
by then, correct the forecast and give its interval. Of two ways, the one with the narrower interval is used.

The interval is that of conformal prediction with errors that leave a run out: R. J. Barber, E. Candes, A. Ramdas,
R. Tibshirani, Annals of Statistics 49 (2021). It holds for runs like those of the backtest. No backtest, no forecast.
A run that diverges later is not covered: no curve shows it beforehand.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

COVERAGE = 0.9  # of the interval
# Fewer cannot give an interval of 90 % and check it: the 90 % quantile of 9 errors and a new one is the largest.
FEWEST_RUNS = 10
SIBLINGS = 2  # fewest finished runs like this one
EVALUATIONS = 4  # fewest after the warm-up, for the law
EARLIEST = 0.1  # share of the steps
NEAR = 0.02  # of the steps: a backtest that was made so little before serves, because many runs may be going on
RISEN = 0.1  # of what the loss had fallen: a last loss so far above the lowest one is a run that may diverge
LARGEST = 1e6  # nats/token: a larger loss is a damaged file, or as good as infinite
RANDOM = 0.8  # of ln(vocabulary): the first loss of a model with random weights is above this
WINDOW = 0.25  # of the steps so far: evaluations before it say little about the end
EXPONENT = 0.8  # of the law; of 0.4 to 1.6 the one with the narrowest intervals on the recorded runs


class ForecastBasis(StrEnum):
    """How a forecast was made."""

    SIBLINGS = "runs like it"  # the loss now, and what such runs still lost from this step on
    LAW = "its own curve"  # a power law of the sum of its learning rates so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The length of a run and the course of its learning rate, relative to the peak."""

    steps: int  # of the whole run
    schedule: str  # cosine, linear, constant or wsd
    least: float = 0.0  # minimum rate / peak
    warmup: int = 0  # steps
    decay: float = 0.0  # share of the steps in which wsd decays

    def area(self, step: float) -> float:
        """Return the sum of the relative rates of the steps before `step`, as an integral."""
        rise = min(step, self.warmup)
        area = rise * rise / (2 * (self.warmup + 1))
        start = self._start
        area += max(0.0, min(step, start) - self.warmup)
        if step <= start or start >= self.steps:
            return area
        length, x = self.steps - start, min(step, self.steps) - start
        if self.schedule == "cosine":
            above = 0.5 * (x + length / math.pi * math.sin(math.pi * x / length))
        else:
            above = x - x * x / (2 * length)
        return area + self.least * x + (1 - self.least) * above

    @property
    def _start(self) -> float:
        """The step from which the rate falls."""
        if self.schedule == "constant":
            return math.inf
        return max(self.warmup, self.steps * (1 - self.decay)) if self.schedule == "wsd" else self.warmup


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The validation losses of a run, in order of steps."""

    name: str
    steps: tuple[int, ...]  # optimizer steps done
    losses: tuple[float, ...]  # nats/token
    course: Course
    setting: str = ""  # what losses must share to be compared: data, model, batch
    vocabulary: int | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self.steps) and self.steps[-1] >= self.course.steps

    @property
    def is_finite(self) -> bool:
        return all(abs(loss) < LARGEST for loss in self.losses)  # also False for NaN

    def until(self, share: float) -> LossCurve:
        """Return the curve up to this share of the steps."""
        count = bisect.bisect_right(self.steps, share * self.course.steps + 1e-9)
        return replace(self, steps=self.steps[:count], losses=self.losses[:count])

    def at(self, step: float) -> float | None:
        """Return the loss at a step between two evaluations, by linear interpolation; None outside of them."""
        after = bisect.bisect_left(self.steps, step)
        if after < len(self.steps) and self.steps[after] == step:
            return self.losses[after]
        if after in (0, len(self.steps)):
            return None
        x, y = self.steps[after - 1 : after + 1], self.losses[after - 1 : after + 1]
        return y[0] + (y[1] - y[0]) * (step - x[0]) / (x[1] - x[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Backtest:
    """The forecasts that one way would have made of finished runs at the same share of their steps."""

    errors: tuple[float, ...]  # final loss - forecast, in units of what the loss had fallen by then
    held: int  # runs whose interval, made of the other runs, holds their final loss

    @property
    def runs(self) -> int:
        return len(self.errors)

    @property
    def centre(self) -> float:
        return statistics.median(self.errors)

    @property
    def half(self) -> float:
        """Half the width of the interval, in the units of the errors."""
        half = _half(self.errors)
        assert half is not None  # there are FEWEST_RUNS errors
        return half


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForecast:
    """The final validation loss of a run, as far as it can be known now. Losses in nats/token."""

    loss: float
    half: float  # of the interval: loss - half to loss + half
    basis: ForecastBasis
    step: int  # of the newest evaluation
    backtest: Backtest
    recorded: bool  # the backtest is on the runs that come with kmatrix, not on runs of this results directory


@dataclass(frozen=True, slots=True)
class NoForecast:
    """Why there is no forecast for a run: one sentence without its subject."""

    reason: str


class Forecaster:
    """Forecast runs from what finished runs did. A backtest is made once for each share of the steps."""

    def __init__(self, finished: Sequence[LossCurve], recorded: Sequence[LossCurve] = ()) -> None:
        """Keep the curves. recorded: of runs in another setting, for a backtest if too few runs have finished here."""
        self._finished, self._recorded = _usable(finished), _usable(recorded)
        self._backtests: dict[tuple[ForecastBasis, bool], dict[float, Backtest | None]] = {}  # by share of the steps

    def forecast(self, curve: LossCurve) -> LossForecast | NoForecast:
        """Return the forecast of a run, or why there is none."""
        if reason := unusable(curve):
            return NoForecast(reason)
        predicted = {basis: predict(basis, curve, self._finished) for basis in ForecastBasis}
        losses = {basis: loss for basis, loss in predicted.items() if not isinstance(loss, str)}
        if not losses:
            return NoForecast(str(predicted[ForecastBasis.LAW]))
        for recorded in (False, True):  # runs of this setting, if there are enough of them
            tried = {basis: self._backtest(basis, curve, recorded=recorded) for basis in losses}
            checked = {basis: found for basis, found in tried.items() if found is not None}
            if checked:
                basis = min(checked, key=lambda basis: checked[basis].half)
                return _forecast(curve, losses[basis], basis, checked[basis], recorded=recorded)
        return NoForecast(f"fewer than {FEWEST_RUNS} finished runs to check a forecast with")

    def _backtest(self, basis: ForecastBasis, curve: LossCurve, *, recorded: bool) -> Backtest | None:
        if recorded and not _is_random(curve):
            return None  # the recorded runs start from random weights
        share = curve.steps[-1] / curve.course.steps
        made = self._backtests.setdefault((basis, recorded), {})
        near = next((at for at in made if 0 <= share - at <= NEAR), None)
        if near is None:
            made[share] = backtest(basis, self._recorded if recorded else self._finished, share)
        return made[share if near is None else near]


def unusable(curve: LossCurve) -> str:
    """Return why the curve of a run cannot be forecast, "" if it can."""
    if not curve.steps:
        return "it has no evaluation yet"
    if curve.steps[0] != 0:
        return "it has no evaluation before its first step"
    first, last, lowest = curve.losses[0], curve.losses[-1], min(curve.losses)
    checks = (
        (curve.is_complete, "its last evaluation is done"),
        (not curve.is_finite, "its loss was not finite"),
        (curve.steps[-1] < EARLIEST * curve.course.steps, f"less than {EARLIEST:.0%} of its steps are done"),
        (curve.steps[-1] <= curve.course.warmup, "it has no evaluation after its warm-up"),
        (last >= first, "its loss has not fallen"),
        (last > lowest + RISEN * (first - lowest), "its loss has risen"),
    )
    return next((reason for holds, reason in checks if holds), "")


def predict(basis: ForecastBasis, curve: LossCurve, finished: Sequence[LossCurve]) -> float | str:
    """Return the final loss of a run as one way predicts it, or why that way cannot."""
    return _by_siblings(curve, finished) if basis is ForecastBasis.SIBLINGS else _by_law(curve)


def backtest(basis: ForecastBasis, finished: Sequence[LossCurve], share: float) -> Backtest | None:
    """Return the errors of one way for each finished run, forecast from the others; None with too few of them.

    share: of the steps, at which the curve of the run ends.
    """
    errors = []
    for run in finished:
        curve = run.until(share)
        others = [other for other in finished if other is not run]
        loss = "" if unusable(curve) else predict(basis, curve, others)
        if not isinstance(loss, str):
            errors.append((run.losses[-1] - loss) / fallen(curve))
    if len(errors) < FEWEST_RUNS:
        return None
    return Backtest(errors=tuple(errors), held=sum(map(_holds, errors, _without_each(errors))))


def fallen(curve: LossCurve) -> float:
    """Return by how much the loss has fallen so far: the unit of errors, so that they say something about other models.

    Of a curve that can be forecast it is above 0.
    """
    return curve.losses[0] - curve.losses[-1]


def _forecast(
    curve: LossCurve, loss: float, basis: ForecastBasis, checked: Backtest, *, recorded: bool
) -> LossForecast | NoForecast:
    unit = fallen(curve)
    centre, half = loss + checked.centre * unit, checked.half * unit
    if half == 0:
        return NoForecast("the finished runs are copies of one run")
    if centre - half <= 0:
        return NoForecast("its interval would reach below 0")
    return LossForecast(loss=centre, half=half, basis=basis, step=curve.steps[-1], backtest=checked, recorded=recorded)


def _usable(curves: Sequence[LossCurve]) -> tuple[LossCurve, ...]:
    """Return the curves that reached their last step and did not diverge."""
    return tuple(
        curve for curve in curves if curve.is_complete and curve.is_finite and curve.losses[-1] < curve.losses[0]
    )


def _by_siblings(curve: LossCurve, finished: Sequence[LossCurve]) -> float | str:
    """Return the loss now, less the median of what runs of the same length and schedule still lost from this step on.

    They differ in seed, optimizer or learning rate. The median: one of them may have gone wrong.
    """
    step = curve.steps[-1]
    like = [other for other in finished if (other.setting, other.course) == (curve.setting, curve.course)]
    there = [(other.losses[-1], at) for other in like if (at := other.at(step)) is not None]
    if len(there) < SIBLINGS:
        return f"fewer than {SIBLINGS} runs of its length and schedule have finished"
    return curve.losses[-1] + statistics.median(final - at for final, at in there)


def _by_law(curve: LossCurve) -> float | str:
    """Return a + b S^-c at the last step, a and b fitted by least squares to the evaluations after the warm-up.

    S is the sum of the learning rates so far, relative to its final value. Losses follow it better than the number of
    steps if the rate decays: H. Tissue, V. Wang, L. Wang, arXiv:2408.11029. The exponent c is fixed because a short,
    noisy curve does not determine one; the backtest corrects what it gets wrong on average.
    """
    first = max(curve.course.warmup, WINDOW * curve.steps[-1])
    whole = curve.course.area(curve.course.steps)
    points = [
        ((whole / curve.course.area(step)) ** EXPONENT, loss)
        for step, loss in zip(curve.steps, curve.losses, strict=True)
        if step > first
    ]
    if len(points) < EVALUATIONS:
        return f"fewer than {EVALUATIONS} evaluations after its warm-up"
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * y for x, y in points) / spread if spread else 0.0
    return mean_y + max(0.0, slope) * (1 - mean_x)  # a loss that rises is not expected to rise further


def _is_random(curve: LossCurve) -> bool:
    """Return whether a run starts from random weights: its first loss is near that of a uniform guess."""
    return curve.vocabulary is not None and curve.losses[0] > RANDOM * math.log(max(2, curve.vocabulary))


def _half(errors: Sequence[float]) -> float | None:
    """Return half the width of an interval around the median of errors that holds a new error with COVERAGE.

    Each error counts by its distance from the median of the others. None if there are too few for such an interval.
    """
    rank = math.ceil((len(errors) + 1) * COVERAGE)
    if rank > len(errors):
        return None
    distances = [
        abs(error - statistics.median(others)) for error, others in zip(errors, _without_each(errors), strict=True)
    ]
    return sorted(distances)[rank - 1]


def _holds(error: float, others: Sequence[float]) -> bool:
    """Return whether the interval made of other errors holds this one."""
    half = _half(others)
    return half is not None and abs(error - statistics.median(others)) <= half


def _without_each(errors: Sequence[float]) -> list[list[float]]:
    return [[*errors[:index], *errors[index + 1 :]] for index in range(len(errors))]
