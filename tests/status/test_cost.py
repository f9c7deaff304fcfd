import pytest

from kmatrix.records.runs import Status
from kmatrix.records.train_config import TrainFields, cost_limit_s
from kmatrix.status.cost import MatrixBudget, spent_in, spent_of, wall_s
from kmatrix.status.state import Attempt, RunState


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
    spent = spent_in(seconds, TrainFields(**train))
    assert (spent.gpu_hours, spent.dollars) == pytest.approx(expected)


def test_a_run_that_was_reused_or_never_ran_has_cost_nothing_and_one_of_unknown_time_is_unknown():
    train = TrainFields(**GPUS, gpu_hour_price=1.0)
    assert spent_of(RunState(status=Status.FINISHED, reused_from="m/r"), train).dollars == 0.0
    assert spent_of(RunState(status=Status.SKIPPED), train).dollars == 0.0
    assert spent_of(RunState(status=Status.FINISHED), train).dollars is None


def test_a_cost_budget_pays_for_what_an_attempt_holds():
    assert cost_limit_s(TrainFields(**GPUS, max_cost=2.0, gpu_hour_price=0.5)) == 3600
    machine = TrainFields(device="cpu", num_gpus=4, max_cost=2.0, machine_hour_price=0.5)
    assert cost_limit_s(machine) == 4 * 3600
    assert cost_limit_s(TrainFields(device="cpu", num_gpus=4, max_cost=2.0, gpu_hour_price=0.5)) == 3600  # version 0.1


def test_the_budget_of_a_matrix_counts_all_attempts_of_all_runs():
    train = TrainFields(num_gpus=2, gpu_hour_price=1.5)
    hour = Attempt(number=1, status=Status.FINISHED, started=0.0, ended=3600.0, seconds=3600.0)
    states = [RunState(status=Status.FINISHED, attempts=attempts) for attempts in ((hour,), (hour, hour))]
    runs = [(state, train) for state in (*states, RunState())]
    assert MatrixBudget(hours=3).spent(runs, 0.0) == "3 of 3 hours"
    assert MatrixBudget(hours=4).spent(runs, 0.0) == ""
    assert MatrixBudget(dollars=9).spent(runs, 0.0) == "$9.00 of $9.00"
    assert MatrixBudget(dollars=10).spent(runs, 0.0) == ""
    assert not MatrixBudget.of({})
    assert MatrixBudget.of({"BUDGET_HOURS": "2", "BUDGET_DOLLARS": "0"}) == MatrixBudget(hours=2.0)
