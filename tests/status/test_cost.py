import pytest

from kmatrix.records.runs import Status
from kmatrix.status.cost import dollars, wall_s
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
