"""Forecasts of the final validation loss of running runs, from their metrics and from the finished runs around them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kmatrix.errors import RecordError
from kmatrix.records.paths import MatrixDir, RunDir, matrix_dirs
from kmatrix.records.runs import VALIDATION_LOSS, Status, read_result, read_run_file_or_empty, validation_metrics
from kmatrix.records.train_config import CHOICES, TrainFields, budget_s
from kmatrix.text import plural
from kmatrix.verdict.forecast import Course, Forecaster, LossCurve, LossForecast, NoForecast
from kmatrix.verdict.recorded import recorded_curves

MOST_RUNS = 64  # finished ones that a forecast is checked with: their errors are compared with each other
MOST_READ = 1000  # finished runs that are looked at to find them: thousands of them would delay the answer
MOST_POINTS = 256  # of a curve
# What losses must share to be compared. Pruning changes the course of a loss.
SETTING = (
    *("dataset", "data_path", "data_sha256", "tokenizer", "vocab_size", "n_layer", "n_head", "n_embd", "block_size"),
    *("global_batch", "eval_samples", "pruning"),
)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A finished run, before its curve is read."""

    run: RunDir
    run_id: str | None
    train: TrainFields


def forecasts(matrix: MatrixDir, running: Collection[str]) -> dict[str, LossForecast | NoForecast]:
    """Return the forecast of each running run of a matrix, or why there is none.

    Finished runs of this matrix and of newer ones in its results directory count if they have the same setting.
    """
    trains = {name: read_run_file_or_empty(matrix.run(name)).train for name in running}
    courses = {name: course_of(train) for name, train in trains.items()}
    forecasters: dict[str, Forecaster] = {}  # by setting
    if any(courses.values()):
        finished = _finished(matrix, running, {_setting(train) for train in trains.values()}, {*courses.values()})
        forecasters = {setting: Forecaster(curves, recorded_curves()) for setting, curves in finished.items()}
    found: dict[str, LossForecast | NoForecast] = {}
    for name, train in trains.items():
        course = courses[name]
        if course is None:
            found[name] = NoForecast("its schedule is not recorded")
        elif reason := _open_end(train):
            found[name] = NoForecast(reason)
        else:
            found[name] = forecasters[_setting(train)].forecast(_curve(matrix.run(name), train, course))
    return found


def forecast_text(forecast: LossForecast | NoForecast) -> str:
    """Return "3.31 +- 0.02 (90 %, backtested on 12 runs, held 11)", or "unknown" with the reason."""
    if isinstance(forecast, NoForecast):
        return f"unknown ({forecast.reason})"
    checked = forecast.backtest
    runs = f"{checked.runs} recorded runs of a tiny model" if forecast.recorded else plural(checked.runs, "run")
    return f"{_with_error(forecast.loss, forecast.half)} (90 %, backtested on {runs}, held {checked.held})"


def forecast_json(forecast: LossForecast | NoForecast) -> Mapping[str, object]:
    """Return a forecast for programs; losses in nats/token."""
    if isinstance(forecast, NoForecast):
        return {"loss": None, "reason": forecast.reason}
    checked = forecast.backtest
    return {
        "loss": forecast.loss,
        "low": forecast.loss - forecast.half,
        "high": forecast.loss + forecast.half,
        "basis": forecast.basis,
        "step": forecast.step,
        "backtest": {"runs": checked.runs, "held": checked.held, "recorded": forecast.recorded},
    }


def course_of(train: TrainFields) -> Course | None:
    """Return the length and the schedule of a run, None if they are not recorded."""
    if not train.max_iters or train.schedule not in CHOICES["schedule"] or not train.learning_rate:
        return None
    least = 1.0 if train.schedule == "constant" else (train.min_lr or 0.0) / train.learning_rate
    return Course(
        steps=train.max_iters,
        schedule=train.schedule,
        least=round(least, 6),  # 0.0002 / 0.002 and 0.002 / 0.02 are the same
        warmup=min(train.warmup_steps or 0, train.max_iters),
        decay=min(1.0, train.wsd_decay_fraction or 0.0) if train.schedule == "wsd" else 0.0,
    )


def _open_end(train: TrainFields) -> str:
    """Return why a run may end before its last step, "" if it does not."""
    if budget_s(train) is not None:
        return "its time or cost budget may end it before its last step"
    if train.early_stopping_patience:
        return "early stopping may end it before its last step"
    return "pruning changes its loss" if train.pruning not in (None, "none") else ""


def _setting(train: TrainFields) -> str:
    return repr([getattr(train, name) for name in SETTING])


def _finished(
    matrix: MatrixDir, besides: Collection[str], settings: Collection[str], courses: Collection[Course | None]
) -> dict[str, list[LossCurve]]:
    """Return setting -> the curves of its finished runs, those with one of these courses first.

    besides: runs of the matrix that are not meant.
    """
    found: dict[str, dict[str | None, _Candidate]] = {setting: {} for setting in settings}
    for one in itertools.islice(_ended_runs(matrix, besides), MOST_READ):
        known = found.get(_setting(one.train))
        # By id: copies of a run would look like runs that agree.
        if known is not None and one.run_id not in known:
            known[one.run_id] = one
    curves: dict[str, list[LossCurve]] = {}
    for setting, known in found.items():
        nearest = sorted(known.values(), key=lambda one: course_of(one.train) not in courses)  # stable: newest first
        with_course = ((one, course_of(one.train)) for one in nearest[:MOST_RUNS])
        curves[setting] = [_curve(one.run, one.train, course) for one, course in with_course if course is not None]
    return curves


def _ended_runs(matrix: MatrixDir, besides: Collection[str]) -> Iterator[_Candidate]:
    """Yield the finished runs of a matrix, then of the others in its results directory, the newest first."""
    others: list[MatrixDir] = []
    with suppress(OSError):
        others = [other for other in reversed(matrix_dirs(matrix.path.parent)) if other.name != matrix.name]
    here = (run for run in matrix.runs() if run.name not in besides)
    for run in itertools.chain(here, (run for other in others for run in other.runs())):
        if not run.result.exists():  # of most runs of a large matrix that has just begun
            continue
        with suppress(RecordError):  # of a newer version
            record, result = read_run_file_or_empty(run), read_result(run)
            if result is not None and result.status == Status.FINISHED:
                yield _Candidate(run, record.run_id, record.train)


def _curve(run: RunDir, train: TrainFields, course: Course) -> LossCurve:
    """Return the validation losses of a run so far. A loss that is not finite is NaN."""
    lines = validation_metrics(run.metrics)
    thin = math.ceil(len(lines) / MOST_POINTS) or 1
    lines = [line for index, line in enumerate(lines) if index % thin == 0 or index == len(lines) - 1]
    losses = [line.values[VALIDATION_LOSS] for line in lines]
    return LossCurve(
        name=run.name,
        steps=tuple(line.step for line in lines),
        losses=tuple(math.nan if loss is None else float(loss) for loss in losses),
        course=course,
        setting=_setting(train),
        vocabulary=train.vocab_size,
    )


def _with_error(value: float, half: float) -> str:
    """Return 3.31 +- 0.02: the error with one digit, with two if it begins with 1, rounded up."""
    exponent = math.floor(math.log10(half)) if half > 0 else -4
    digits = min(6, max(0, -exponent + (half < 2 * 10.0**exponent)))
    return f"{value:.{digits}f} +- {math.ceil(half * 10**digits - 1e-9) / 10**digits:.{digits}f}"
