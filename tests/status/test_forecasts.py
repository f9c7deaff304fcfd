"""Forecasts of running runs from the files of a results directory: which finished runs count, and what is printed."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from kmatrix.records.files import append_jsonl, read_json, write_json
from kmatrix.records.lock import held
from kmatrix.records.train_config import read_fields
from kmatrix.status.view.forecasts import MOST_POINTS, course_of, forecast_json, forecast_text, forecasts
from kmatrix.verdict.forecast import Backtest, ForecastBasis, LossForecast, NoForecast
from programs import run as kmatrix
from records_factory import FakeRun, make_matrix, runs_with_seeds, train_fields

RUNNING = FakeRun(optimizer="muon", status="running", stop_at=50, final_loss=3.2)
SEEDS = runs_with_seeds(12, [3.2 + 0.01 * number for number in range(12)])


def made(root, runs, **fields):
    """Return a matrix of these runs, each with an id of its own, as those of real runs are."""
    matrix = make_matrix(root, runs, **fields)
    for run in runs:
        path = matrix.run(run.name).run_json
        write_json(path, read_json(path) | {"run_id": run.name})
    return matrix


def forecast_of(matrix):
    (found,) = forecasts(matrix, [RUNNING.name]).values()
    return found


def test_a_running_run_is_forecast_from_the_finished_runs_of_its_matrix(tmp_path):
    forecast = forecast_of(made(tmp_path, [RUNNING, *SEEDS], took=None))

    assert isinstance(forecast, LossForecast)
    assert forecast.loss == pytest.approx(3.2, abs=forecast.half)
    assert forecast.half < 0.3
    assert (forecast.step, forecast.backtest.runs, forecast.recorded) == (50, 12, False)


def test_finished_runs_of_other_matrices_count_once(tmp_path):
    made(tmp_path, SEEDS[:10], name="test_matrix_results_20261101_000000")
    made(tmp_path, SEEDS[:8], name="test_matrix_results_20261102_000000")

    assert forecast_of(made(tmp_path, [RUNNING], took=None)).backtest.runs == 10


@pytest.mark.parametrize(
    "train",
    [{"data_sha256": "other"}, {"n_layer": 5}, {"global_batch": 16}, {"eval_samples": 7}, {"pruning": "magnitude"}],
)
def test_runs_of_another_setting_do_not_count(tmp_path, train):
    others = [replace(run, train=train) for run in SEEDS]

    forecast = forecast_of(made(tmp_path, [RUNNING, *others], took=None))

    assert not isinstance(forecast, LossForecast) or forecast.recorded


def test_without_finished_runs_the_recorded_ones_give_the_interval(tmp_path):
    forecast = forecast_of(made(tmp_path, [RUNNING], took=None))

    assert forecast.recorded
    assert "recorded runs of a tiny model" in forecast_text(forecast)


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ({"max_time": 600}, "its time or cost budget may end it before its last step"),
        ({"max_cost": 5, "gpu_hour_price": 2.0}, "its time or cost budget may end it before its last step"),
        ({"early_stopping_patience": 3}, "early stopping may end it before its last step"),
        ({"pruning": "magnitude"}, "pruning changes its loss"),
        ({"schedule": None}, "its schedule is not recorded"),
        ({"schedule": "other"}, "its schedule is not recorded"),
        ({"learning_rate": 0}, "its schedule is not recorded"),
    ],
)
def test_a_run_without_a_known_course_has_no_forecast(tmp_path, train, reason):
    matrix = made(tmp_path, [replace(RUNNING, train=train), *SEEDS], took=None)

    assert forecast_of(matrix) == NoForecast(reason)


def test_the_lost_steps_of_a_resumed_run_do_not_count(tmp_path):
    matrix = made(tmp_path, [RUNNING, *SEEDS], took=None)
    metrics = matrix.run(RUNNING.name).metrics
    append_jsonl(metrics, {"step": 30, "resumed": True, "attempt": 2})
    append_jsonl(metrics, {"step": 40, "attempt": 2, "val/loss": 4.25})

    assert forecast_of(matrix).step == 40


@pytest.mark.parametrize("loss", [None, 1e300, "x", -math.inf])
def test_a_damaged_or_infinite_loss_gives_no_certainty(tmp_path, loss):
    matrix = made(tmp_path, [RUNNING, *SEEDS], took=None)
    matrix.run(RUNNING.name).metrics.open("a").write(json.dumps({"step": 60, "attempt": 1, "val/loss": loss}) + "\n")

    forecast = forecast_of(matrix)

    assert forecast == NoForecast("its loss was not finite") or forecast.step == 50


def test_damaged_records_of_other_runs_are_left_out(tmp_path):
    matrix = made(tmp_path, [RUNNING, *SEEDS, replace(SEEDS[0], axes={"seed": "13"})], took=None)
    matrix.run(SEEDS[0].name).run_json.write_text("{")
    matrix.run(SEEDS[1].name).metrics.unlink()
    write_json(matrix.run(SEEDS[2].name).result, {"schema": 999, "status": "finished"})

    assert forecast_of(matrix).backtest.runs == 10


def test_a_long_curve_is_thinned_with_its_ends(tmp_path):
    long = {"eval_interval": 1, "steps": 1000}
    runs = [replace(run, **long) for run in SEEDS]
    matrix = made(tmp_path, [replace(RUNNING, **long, stop_at=500), *runs], took=None)

    assert forecast_of(matrix).step == 500
    assert MOST_POINTS < 500


def test_the_minimum_rate_is_relative_to_the_peak():
    rates = [(2e-3, 2e-4), (0.02, 0.002), (6e-4, 6e-5)]
    runs = [FakeRun(train={"learning_rate": peak, "min_lr": least}) for peak, least in rates]

    assert len({course_of(read_fields({"train": train_fields(run)})) for run in runs}) == 1


# What is printed


@pytest.mark.parametrize(
    ("loss", "half", "text"),
    [
        (3.3149, 0.0217, "3.31 +- 0.03"),
        (3.3149, 0.02, "3.31 +- 0.02"),
        (3.3149, 0.0131, "3.315 +- 0.014"),
        (3.3149, 0.1, "3.31 +- 0.10"),
        (10.2, 2.5, "10 +- 3"),
        (3.31491, 0.00042, "3.3149 +- 0.0005"),
    ],
)
def test_a_forecast_has_the_digits_of_its_interval(loss, half, text):
    checked = Backtest(errors=(0.0,) * 12, held=11)
    made = LossForecast(loss=loss, half=half, basis=ForecastBasis.LAW, step=50, backtest=checked, recorded=False)

    assert forecast_text(made) == f"{text} (90 %, backtested on 12 runs, held 11)"
    assert forecast_json(made)["high"] == pytest.approx(loss + half)


def test_make_estimate_prints_the_forecast_of_a_running_run(tmp_path):
    matrix = made(tmp_path, [RUNNING, *SEEDS], took=None)
    with held(matrix):
        printed = kmatrix("estimate", f"TARGET={matrix.path}").out
        found = json.loads(kmatrix("estimate", f"TARGET={matrix.path}", "JSON=1").out)

    forecast = forecast_of(matrix)
    assert f"validation loss of {RUNNING.name} at the end: {forecast_text(forecast)}" in printed
    assert found["forecasts"] == {RUNNING.name: json.loads(json.dumps(forecast_json(forecast)))}


def test_a_matrix_that_does_not_run_has_no_forecasts(tmp_path):
    matrix = made(tmp_path, SEEDS)

    assert json.loads(kmatrix("estimate", f"TARGET={matrix.path}", "JSON=1").out)["forecasts"] == {}
