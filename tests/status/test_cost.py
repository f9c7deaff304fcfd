import pytest

from kmatrix.records.runs import Status
from kmatrix.records.train_config import TrainFields
from kmatrix.status.cost import MatrixBudget, dollars, wall_s
from kmatrix.status.state import Attempt


def test_the_wall_time_is_that_of_all_attempts_without_the_gaps_between_them():
    killed = Attempt(number=1, status=Status.STOPPED, started=1000.0, ended=1060.0)
    resumed = Attempt(number=2, status=Status.FINISHED, started=9000.0, ended=9030.0, seconds=29.5)
    assert wall_s([killed, resumed]) == 89.5
    assert wall_s([killed, Attempt(number=2, started=9000.0)], now=9010.0) == 70.0
    assert wall_s([]) is None


def test_the_cost_is_wall_time_x_ranks_x_price():
    assert dollars(1800.0, 4, 2.5) == pytest.approx(5.0)
    assert dollars(1800.0, 4, None) is None
    assert dollars(None, 4, 2.5) is None


def test_the_budget_of_a_matrix_counts_all_attempts_of_all_runs():
    train = TrainFields(num_gpus=2, gpu_hour_price=1.5)
    hour = Attempt(number=1, status=Status.FINISHED, started=0.0, ended=3600.0, seconds=3600.0)
    runs = [([hour], train), ([hour, hour], train), ([], train)]
    assert MatrixBudget(hours=3).spent(runs, 0.0) == "3 of 3 hours"
    assert MatrixBudget(hours=4).spent(runs, 0.0) == ""
    assert MatrixBudget(dollars=9).spent(runs, 0.0) == "$9.00 of $9.00"
    assert MatrixBudget(dollars=10).spent(runs, 0.0) == ""
    assert not MatrixBudget.of({})
    assert MatrixBudget.of({"BUDGET_HOURS": "2", "BUDGET_DOLLARS": "0"}) == MatrixBudget(hours=2.0)
