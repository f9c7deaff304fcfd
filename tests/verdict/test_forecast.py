"""Forecasts of the final loss: their arithmetic, what they refuse, and their coverage on recorded real runs."""

from __future__ import annotations

import importlib
import itertools
import math
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2.loop.schedule import scale
from kmatrix.verdict.forecast import (
    EXPONENT,
    Course,
    ForecastBasis,
    Forecaster,
    LossCurve,
    LossForecast,
    NoForecast,
    backtest,
    predict,
    unusable,
)
from kmatrix.verdict.recorded import recorded_curves
from programs import ROOT

COSINE = Course(steps=400, schedule="cosine", least=0.1, warmup=20)


def curve(final, *, course=COSINE, size=2.0, noise=0.0, name="", every=10, setting="same"):
    """Return a curve that follows the law exactly, but for its noise, and starts at 5.2 before the first step."""
    whole, draw = course.area(course.steps), random.Random(name)
    steps = tuple(range(0, course.steps + 1, every))
    losses = [final + size * ((whole / course.area(step)) ** EXPONENT - 1) + noise * draw.gauss() for step in steps[1:]]
    losses = [min(5.0, loss) for loss in losses]
    return LossCurve(name=name, steps=steps, losses=(5.2, *losses), course=course, setting=setting, vocabulary=257)


def finished(count, noise=0.01, **fields):
    return [
        curve(2.0 + 0.05 * number, size=0.05 + 0.01 * number, noise=noise, name=f"run {number}", **fields)
        for number in range(count)
    ]


# The schedule


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(("warmup", "least"), [(0, 0.0), (30, 0.1), (400, 0.1)])
def test_the_area_is_the_sum_of_the_learning_rates_of_the_trainer(schedule, warmup, least):
    config = SimpleNamespace(schedule=schedule, warmup_steps=warmup, max_iters=400, wsd_decay_fraction=0.2)
    config.learning_rate, config.min_lr = 1.0, least
    course = Course(
        steps=400,
        schedule=schedule,
        least=1.0 if schedule == "constant" else least,
        warmup=warmup,
        decay=0.2 if schedule == "wsd" else 0.0,
    )

    areas = [0.0, *itertools.accumulate(scale(config, step) for step in range(400))]

    for step in range(0, 401, 10):
        assert course.area(step) == pytest.approx(areas[step], abs=1.6)
    assert all(course.area(step) <= course.area(step + 1) for step in range(450))


# The two ways


def test_siblings_say_what_is_still_lost_from_this_step_on():
    first, second, third = (curve(final, name=str(final)) for final in (2.0, 2.1, 2.2))
    running = replace(curve(2.5, name="running"), losses=tuple(loss + 0.7 for loss in first.losses)).until(0.4)

    predicted = predict(ForecastBasis.SIBLINGS, running, [first, second, third])

    assert predicted == pytest.approx(2.7)
    assert "fewer than 2 runs" in str(predict(ForecastBasis.SIBLINGS, running, [first]))


@pytest.mark.parametrize("other", [{"setting": "other"}, {"course": replace(COSINE, schedule="linear")}])
def test_siblings_have_the_same_setting_and_course(other):
    runs = [replace(curve(2.0), **other), replace(curve(2.1), **other)]

    assert isinstance(predict(ForecastBasis.SIBLINGS, curve(2.2).until(0.5), runs), str)


def test_a_sibling_that_was_evaluated_at_other_steps_counts():
    runs = [curve(2.0, size=0.1, every=7), curve(2.0, size=0.1, every=13)]

    predicted = predict(ForecastBasis.SIBLINGS, curve(2.0, size=0.1).until(0.5), [*runs, curve(2.0, size=0.1)])

    # The interpolation between two evaluations lies above the curve, by less than this.
    assert predicted == pytest.approx(2.0, abs=0.002)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_the_law_finds_the_end_of_a_curve_that_follows_it(schedule):
    course = replace(COSINE, schedule=schedule, decay=0.2, least=1.0 if schedule == "constant" else 0.1)

    predicted = predict(ForecastBasis.LAW, curve(2.3, size=0.1, course=course).until(0.5), [])

    assert predicted == pytest.approx(2.3, abs=1e-9)


def test_the_law_needs_four_evaluations_after_the_warm_up():
    assert "fewer than 4 evaluations" in str(predict(ForecastBasis.LAW, curve(2.0, every=50).until(0.4), []))


def test_a_plateau_stays_where_it_is():
    flat = replace(curve(2.0), losses=(5.2, *[2.5] * 40)).until(0.5)

    assert predict(ForecastBasis.LAW, flat, []) == pytest.approx(2.5)


# The interval


def test_the_backtest_is_that_of_leaving_each_run_out():
    runs = finished(12)

    found = backtest(ForecastBasis.SIBLINGS, runs, 0.5)

    for run, error in zip(runs, found.errors, strict=True):
        then = run.until(0.5)
        predicted = predict(ForecastBasis.SIBLINGS, then, [other for other in runs if other is not run])
        assert error == pytest.approx((run.losses[-1] - predicted) / (run.losses[0] - then.losses[-1]))
    distances = sorted(
        abs(error - sorted([*found.errors[:i], *found.errors[i + 1 :]])[5]) for i, error in enumerate(found.errors)
    )
    assert found.half == pytest.approx(distances[math.ceil(13 * 0.9) - 1])
    assert found.held == sum(is_held(index, found.errors) for index in range(12))


def is_held(index, errors):
    """Return whether the interval that is made of the other errors holds this one."""
    others = [*errors[:index], *errors[index + 1 :]]
    distances = [abs(error - statistics.median([*others[:i], *others[i + 1 :]])) for i, error in enumerate(others)]
    half = sorted(distances)[math.ceil(12 * 0.9) - 1]
    return abs(errors[index] - statistics.median(others)) <= half


def test_a_run_unlike_the_others_is_not_held_by_the_interval_that_they_make():
    runs = [*finished(11), curve(1.0, size=0.5, noise=0.01, name="unlike")]

    assert backtest(ForecastBasis.SIBLINGS, runs, 0.5).held <= 11


def test_a_forecast_holds_the_truth_as_often_as_it_says():
    """Over 300 matrices of runs that differ by chance: 90 %, within 4 standard errors."""
    draw, held = random.Random(1), 0
    for _ in range(300):
        runs = [
            curve(draw.gauss(2.0, 0.1), size=draw.uniform(0.1, 0.3), noise=0.02, name=str(draw.random()))
            for _ in range(13)
        ]
        forecast = Forecaster(runs[1:]).forecast(runs[0].until(0.5))
        held += abs(runs[0].losses[-1] - forecast.loss) <= forecast.half
    assert 0.9 - 4 * math.sqrt(0.09 / 300) <= held / 300 <= 0.98


def test_the_narrower_of_two_ways_is_used():
    same = finished(12, noise=0.001)
    forecast = Forecaster(same).forecast(curve(2.4, size=0.1, noise=0.001, name="x").until(0.5))
    ways = {basis: backtest(basis, same, 0.5) for basis in ForecastBasis}

    assert forecast.basis is min(ways, key=lambda basis: ways[basis].half)
    assert forecast.backtest == ways[forecast.basis]
    assert not forecast.recorded


def test_too_few_runs_give_no_forecast_unless_recorded_ones_stand_in():
    running = curve(2.4, size=0.1, name="x").until(0.5)

    assert Forecaster(finished(9)).forecast(running) == NoForecast(
        "fewer than 10 finished runs to check a forecast with"
    )
    forecast = Forecaster(finished(9), recorded_curves()).forecast(running)
    assert forecast.recorded
    assert forecast.backtest in [backtest(basis, recorded_curves(), 0.5) for basis in ForecastBasis]


def test_recorded_runs_do_not_stand_in_for_a_run_that_continues_a_trained_model():
    trained = replace(curve(2.4, size=0.1), losses=(3.0, *curve(2.4, size=0.1).losses[1:])).until(0.5)

    assert isinstance(Forecaster([], recorded_curves()).forecast(trained), NoForecast)


def test_recorded_runs_do_not_stand_in_if_the_vocabulary_is_unknown():
    unknown = replace(curve(2.4, size=0.1, name="x"), vocabulary=None).until(0.5)

    assert isinstance(Forecaster([], recorded_curves()).forecast(unknown), NoForecast)


def test_a_backtest_serves_runs_that_are_a_little_further_and_no_others():
    runs = finished(12)
    forecaster = Forecaster(runs)

    def used(share):
        forecast = forecaster.forecast(curve(2.4, size=0.1, name="x", every=5).until(share))
        return forecast.basis, forecast.backtest

    basis, half_way = used(0.5)
    assert half_way == backtest(basis, runs, 0.5)
    assert used(0.5125) == (basis, half_way)
    for share in (0.4875, 0.6):  # less is known earlier: the interval of later would be too narrow
        basis, found = used(share)
        assert found == backtest(basis, runs, share) != half_way


def test_runs_that_diverged_or_did_not_end_do_not_count():
    runs = finished(10)
    nan = replace(runs[0], losses=(*runs[0].losses[:-1], math.nan))
    diverged = replace(runs[0], losses=(*runs[0].losses[:-1], 9.0))

    forecasts = [
        Forecaster([*more, *runs]).forecast(curve(2.2).until(0.5)) for more in ([], [nan, diverged, runs[0].until(0.9)])
    ]

    assert forecasts[0] == forecasts[1]


def test_copies_of_one_run_give_no_forecast():
    assert Forecaster([curve(2.0)] * 12).forecast(curve(2.0).until(0.5)) == NoForecast(
        "the finished runs are copies of one run"
    )


@given(st.floats(0.01, 1e3))
def test_a_forecast_scales_with_the_losses(factor):
    def scaled(run):
        return replace(run, losses=tuple(loss * factor for loss in run.losses))

    runs, running = finished(11), curve(2.3, name="x", noise=0.01).until(0.5)
    one, other = Forecaster(runs).forecast(running), Forecaster(map(scaled, runs)).forecast(scaled(running))

    assert (other.loss, other.half) == pytest.approx((one.loss * factor, one.half * factor))


# Curves that cannot be forecast


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"steps": (), "losses": ()}, "it has no evaluation yet"),
        ({"steps": (50, 100), "losses": (3.0, 2.9)}, "it has no evaluation before its first step"),
        ({"steps": (0, 20), "losses": (5.2, 3.0)}, "less than 10 % of its steps are done"),
        ({"steps": (0, 200), "losses": (5.2, math.nan)}, "its loss was not finite"),
        ({"steps": (0, 200), "losses": (5.2, math.inf)}, "its loss was not finite"),
        ({"steps": (0, 200), "losses": (5.2, 1e300)}, "its loss was not finite"),
        ({"steps": (0, 200), "losses": (5.2, 5.2)}, "its loss has not fallen"),
        ({"steps": (0, 100, 200), "losses": (5.2, 2.5, 3.5)}, "its loss has risen"),
        ({"steps": (0, 400), "losses": (5.2, 2.0)}, "its last evaluation is done"),
        ({"course": replace(COSINE, warmup=390), "steps": (0, 200), "losses": (5.2, 2.0)}, "after its warm-up"),
    ],
)
def test_no_forecast_has_its_reason(changed, reason):
    running = replace(curve(2.0), **changed)

    assert reason in unusable(running).replace("%", " %").replace("  ", " ")
    assert Forecaster(finished(12)).forecast(running) == NoForecast(unusable(running))


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.floats() | st.floats(0, 12)), max_size=12, unique_by=lambda pair: pair[0]
    ),
    st.builds(
        Course,
        steps=st.integers(1, 500),
        schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
        least=st.floats(0, 2),
        warmup=st.integers(0, 500),
        decay=st.floats(0, 1),
    ),
)
def test_no_curve_breaks_a_forecast(points, course):
    points = [(0, 5.0), *((step, loss) for step, loss in sorted(points) if step)]
    steps, losses = zip(*points, strict=True)
    running = LossCurve(name="x", steps=steps, losses=losses, course=course, setting="same", vocabulary=257)

    for known in (finished(11), finished(2)):
        forecast = Forecaster([*known, running], recorded_curves()[:12]).forecast(running)
        assert isinstance(forecast, NoForecast) or (0 < forecast.half < forecast.loss < math.inf)


# Recorded real runs


def test_the_recorded_runs_are_varied():
    curves = recorded_curves()

    assert len(curves) >= 24
    assert {run.course.schedule for run in curves} == {"cosine", "linear", "constant", "wsd"}
    assert len({run.name.partition(" ")[0] for run in curves}) >= 4
    assert len({run.course.steps for run in curves}) >= 3
    assert all(run.is_complete and len(run.steps) > 20 for run in curves)


def test_the_table_in_the_documentation_is_that_of_the_benchmark(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))

    importlib.import_module("forecast").main()

    table = capsys.readouterr().out.partition("\n")[2]
    assert table.count("\n") == 2 + 3 * 3
    assert table in (ROOT / "docs" / "reading-results.md").read_text(encoding="utf-8")


def same_but_seed(run, other):
    return run.name.rpartition(" seed")[0] == other.name.rpartition(" seed")[0]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(
    "may_use",
    [
        lambda run, other: other is not run,
        lambda run, other: not same_but_seed(run, other),
        lambda run, other: other.course != run.course,  # neither seeds nor siblings: the law alone
    ],
    ids=["all others", "other configurations", "other courses"],
)
def test_the_interval_holds_the_final_loss_of_recorded_runs(share, may_use):
    """No run takes part in its own forecast, nor in the interval of it."""
    curves, held = recorded_curves(), []
    for run in curves:
        forecast = Forecaster([other for other in curves if may_use(run, other)]).forecast(run.until(share))
        assert isinstance(forecast, LossForecast), run.name
        held.append(abs(run.losses[-1] - forecast.loss) <= forecast.half)

    assert 0.8 <= sum(held) / len(held) <= 1.0
