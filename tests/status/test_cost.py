"""One definition of cost: in the budgets, the status, the summary and the JSON files."""

import json

import pytest

from gpu_factory import FakeGpus, record
from kmatrix.records.files import read_json, write_json
from kmatrix.records.runs import Status, read_run_file
from kmatrix.records.train_config import TrainConfig, cost_limit_s
from kmatrix.report.analysis import analyse
from kmatrix.report.formats.ending import render_ending
from kmatrix.report.write import write_summary
from kmatrix.status.cost import MatrixBudget, SpentBudget, spent_in, spent_of, wall_s
from kmatrix.status.state import Attempt, RunState
from kmatrix.status.status_file import recover_status
from kmatrix.status.view.overview import Overview
from records_factory import FakeRun, make_matrix


def test_the_wall_time_is_that_of_all_attempts_without_the_gaps_between_them():
    killed = Attempt(number=1, status=Status.STOPPED, started=1000.0, ended=1060.0)
    resumed = Attempt(number=2, status=Status.FINISHED, started=9000.0, ended=9030.0, seconds=29.5)
    assert wall_s([killed, resumed]) == 89.5
    assert wall_s([killed, Attempt(number=2, started=9000.0)], now=9010.0) == 70.0
    assert wall_s([]) is None


GPUS = {"device": "cuda", "num_gpus": 4}


@pytest.mark.parametrize(
    ("seconds", "train", "expected"),
    [
        (1800.0, {**GPUS, "gpu_hour_price": 2.5}, (2.0, 5.0)),
        (1800.0, GPUS, (2.0, None)),
        (None, {**GPUS, "gpu_hour_price": 2.5}, (None, None)),
        (1800.0, {"device": "cpu", "num_gpus": 4, "gpu_hour_price": 2.5}, (None, None)),
        (1800.0, {"device": "cpu", "num_gpus": 4, "machine_hour_price": 2.5}, (None, 1.25)),
    ],
)
def test_the_cost_is_wall_time_x_the_price_of_the_gpus_or_of_the_machine(seconds, train, expected):
    spent = spent_in(seconds, TrainConfig(**train))
    assert (spent.gpu_hours, spent.dollars) == pytest.approx(expected)


def test_a_run_that_was_reused_or_never_ran_has_cost_nothing_and_one_of_unknown_time_is_unknown():
    train = TrainConfig(**GPUS, gpu_hour_price=1.0)
    assert spent_of(RunState(status=Status.FINISHED, reused_from="m/r"), train).dollars == 0.0
    assert spent_of(RunState(status=Status.SKIPPED), train).dollars == 0.0
    assert spent_of(RunState(status=Status.FINISHED), train).dollars is None


def test_the_budget_of_a_matrix_counts_all_attempts_of_all_runs():
    train = TrainConfig(num_gpus=2, gpu_hour_price=1.5)
    hour = Attempt(number=1, status=Status.FINISHED, started=0.0, ended=3600.0, seconds=3600.0)
    states = [RunState(status=Status.FINISHED, attempts=attempts) for attempts in ((hour,), (hour, hour))]
    runs = [(state, train) for state in (*states, RunState())]
    assert MatrixBudget(hours=3).spent(runs, 0.0) == SpentBudget(symbol="BUDGET_HOURS", more=6, text="3 of 3 hours")
    assert MatrixBudget(hours=4).spent(runs, 0.0) is None
    spent = SpentBudget(symbol="BUDGET_DOLLARS", more=18, text="$9.00 of $9.00")
    assert MatrixBudget(dollars=9).spent(runs, 0.0) == spent
    assert MatrixBudget(dollars=10).spent(runs, 0.0) is None
    assert not MatrixBudget.of({})
    assert MatrixBudget.of({"BUDGET_HOURS": "2", "BUDGET_DOLLARS": "0"}) == MatrixBudget(hours=2.0)


def test_every_place_shows_the_same_cost(tmp_path):
    price = {"gpu_hour_price": 3.6, "max_cost": 0.32}
    killed = FakeRun(device="cuda", gpus=2, train=price)  # 100 s and 60 s on 2 GPUs, an hour apart
    reused = FakeRun(optimizer="muon", device="cuda", gpus=2, train=price)
    pending = FakeRun(optimizer="sgd", device="cuda", gpus=2, train=price, status="planned")
    on_cpu = FakeRun(optimizer="soap", gpus=2, train=price | {"max_cost": None})
    matrix = make_matrix(tmp_path, [killed, reused, pending, on_cpu])
    run, other = matrix.run(killed.name), matrix.run(reused.name)
    attempts = [
        {"attempt": 1, "status": "stopped", "started": 1000.0, "ended": 1100.5, "seconds": 100.0},
        {"attempt": 2, "status": "finished", "started": 4700.0, "ended": 4760.5, "seconds": 60.0},
    ]
    write_json(run.status, read_json(run.status) | {"attempt": 2, "attempts": attempts})
    write_json(other.run_json, read_json(other.run_json) | {"reused_from": "m/r"})
    write_json(other.status, {"status": "finished", "attempt": 0, "attempts": [], "reused_from": "m/r"})
    for each in (run, other):
        record(each, FakeGpus(memory=(1.0, 1.0), power=(150.0, 150.0), utilization=(1.0, 1.0)))

    numbers = analyse(matrix)
    text = write_summary(numbers)
    view = Overview(matrix).poll(now=5000.0)
    views = {one.name: one for one in view.runs}
    results = {one["name"]: one for one in read_json(matrix.results)["runs"]}
    original = {one["test_id"]: one for one in json.loads(matrix.all_results.read_text())}
    states = [(recover_status(one, has_runner=False), read_run_file(one).train) for one in matrix.runs()]

    spent = {killed.name: (160.0, 320 / 3600, 0.32), reused.name: (0.0, 0.0, 0.0), pending.name: (0.0, 0.0, 0.0)}
    spent[on_cpu.name] = (60.0, None, None)
    for name, expected in spent.items():
        one = views[name]
        assert (one.wall_s, one.gpu_hours, one.dollars) == pytest.approx(expected)
        for entry in (results[name], original[name]):
            assert (entry["wall_s"], entry["gpu_hours"], entry["dollars"]) == pytest.approx(expected)
        if entry := results[name]["gpu"]:
            assert (entry["totals"]["gpu_hours"], entry["totals"]["gpu_cost"]) == pytest.approx(expected[1:])
    assert view.dollars == pytest.approx(0.32)
    assert view.all_dollars == pytest.approx(0.32 + spent_in(views[pending.name].left_s, states[2][1]).dollars)
    assert MatrixBudget(dollars=0.31).spent(states, 5000.0).text == "$0.32 of $0.31"
    assert MatrixBudget(dollars=0.33).spent(states, 5000.0) is None
    assert cost_limit_s(states[0][1]) == pytest.approx(160.0)
    assert "Cost: 0.0889 GPU-hours $0.32 at $3.6" in text
    assert "Cost: nothing in this matrix (reused)" in text
    assert "cost $0.32" in " ".join(render_ending(numbers, []).split())
