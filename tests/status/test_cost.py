"""What runs cost, and when the budget of a matrix is spent."""

from __future__ import annotations

import pytest

from kmatrix.records.attempts import Attempt, End
from kmatrix.records.files import read_json
from kmatrix.status.cost import Spent, spent, spent_in, spent_of, total_dollars
from kmatrix.status.fold import Files, state_of
from kmatrix.status.look import look
from records_factory import FakeRun, make_matrix

GPUS = {"device": "cuda", "num_gpus": 4, "gpu_hour_price": 2.5, "machine_hour_price": 1.0}


def test_all_attempts_count_also_lost_ones_and_the_one_that_runs():
    lost, running = Attempt(number=1, seconds=600.0), Attempt(number=3, seconds=30.0)
    ended = Attempt(number=2, seconds=55.0, end=End(kind="error", seconds=60.0))
    state = state_of(Files(attempts=(lost, ended, running), is_live=True))
    assert spent_of(state, {"device": "cpu"}) == Spent(wall_s=690.0, gpu_hours=None, dollars=None)


@pytest.mark.parametrize(
    ("train", "gpu_hours", "dollars"),
    [
        (GPUS, 2.0, 5.0),
        ({**GPUS, "device": "cpu"}, None, 0.5),
        ({"device": "cuda", "num_gpus": 1}, 0.5, None),
    ],
)
def test_gpus_cost_each_and_the_cpu_as_a_machine(train, gpu_hours, dollars):
    assert spent_in(1800.0, train) == Spent(wall_s=1800.0, gpu_hours=gpu_hours, dollars=dollars)


def test_runs_without_a_price_are_left_out_of_a_sum():
    assert total_dollars([1.0, None, 2.0]) == 3.0
    assert total_dollars([None]) is None


def matrix_of(tmp_path, symbols):
    run = FakeRun(seconds=7236.0, train={"machine_hour_price": 2.5}, symbols=symbols)
    matrix = make_matrix(tmp_path, [run])
    plan = read_json(matrix.matrix_json)
    assert plan["common"]["symbols"] == symbols
    return look(matrix.path)


@pytest.mark.parametrize(
    ("symbols", "why"),
    [
        ({}, ""),
        ({"BUDGET_HOURS": "3"}, ""),
        ({"BUDGET_HOURS": "0"}, ""),
        ({"BUDGET_HOURS": "2"}, "the budget is spent: 2.01 of 2 hours (continue with a larger BUDGET_HOURS=)"),
        ({"BUDGET_DOLLARS": "5"}, "the budget is spent: $5.02 of $5.00 (continue with a larger BUDGET_DOLLARS=)"),
    ],
)
def test_a_budget_counts_all_runs(tmp_path, symbols, why):
    assert spent(matrix_of(tmp_path, symbols)) == why
