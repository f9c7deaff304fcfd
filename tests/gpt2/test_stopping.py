"""Budgets and early stopping, on a simulated clock."""

from __future__ import annotations

import math
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import train_fields
from gpt2.stopping import (
    CHECKPOINT,
    END_S,
    EVALUATION,
    MARGIN,
    Budget,
    EarlyStopping,
    Limit,
    NotFiniteError,
    check_finite,
    limit_of,
    process_age,
    spent_before,
)
from kmatrix.records.run_lock import LAUNCHER, SPENT, launched_at
from kmatrix.records.train_config import TrainConfig
from waiting import wait_until


def config_of(tmp_path, **overrides):
    return TrainConfig.from_json(train_fields(tmp_path, "", **overrides))


class Run:
    """A loop whose clock advances by the duration of its parts."""

    def __init__(self, seconds, *, step=1.0, evaluation=2.0, checkpoint=3.0, every=10, ahead=0):
        self.now = 0.0
        limit = Limit(seconds=seconds, ended_by="time")
        self.budget = Budget(limit, clock=lambda: self.now, ahead=ahead)
        self.budget.begin(spent_s=0.0, final_s=lambda: self.checkpoint)
        self.step, self.evaluation, self.checkpoint, self.every = step, evaluation, checkpoint, every

    def train_until_the_budget_ends(self, max_steps=10_000):
        """Train until the budget ends, as the loop does; return the seconds after everything is written."""
        requested = False
        for step in range(max_steps):
            if step % self.every == 0:
                if requested:
                    break
                self.evaluate()
            self.now += self.step
            self.budget.stepped(self.step)
            if requested:
                break
            due = (EVALUATION,) if (step + 1) % self.every == 0 else ()
            requested = self.budget.is_up(due)
        self.evaluate()
        return self.now + self.checkpoint

    def evaluate(self):
        self.now += self.evaluation
        self.budget.took(EVALUATION, self.evaluation)


@given(
    st.floats(60, 500),
    st.floats(0.05, 2.0),
    st.floats(0.1, 5.0),
    st.floats(0.1, 5.0),
    st.integers(3, 40),
)
def test_evaluation_and_checkpoint_end_inside_the_budget_and_close_to_its_end(
    seconds, step, evaluation, checkpoint, every
):
    run = Run(seconds, step=step, evaluation=evaluation, checkpoint=checkpoint, every=every)
    ended_at = run.train_until_the_budget_ends()
    slack = (MARGIN - 1) * (evaluation + checkpoint) + END_S
    assert ended_at <= seconds
    assert ended_at >= seconds - slack - 2 * step - evaluation - 1e-6  # an evaluation that no longer fits is skipped


def test_a_run_without_a_budget_never_ends_early(tmp_path):
    assert limit_of(config_of(tmp_path)) is None
    assert not Budget(None, clock=lambda: 1e12).is_up()


def test_a_cost_budget_pays_for_all_gpus(tmp_path):
    config = config_of(tmp_path, max_cost=2.0, gpu_hour_price=0.5, num_gpus=4, batch_size=1, device="cuda")
    assert limit_of(config) == Limit(seconds=3600, ended_by="cost")


def test_the_first_of_time_and_cost_budget_decides(tmp_path):
    both = {"max_cost": 1.0, "machine_hour_price": 1.0, "max_time": 60.0}
    assert limit_of(config_of(tmp_path, **both)) == Limit(seconds=60, ended_by="time")
    assert limit_of(config_of(tmp_path, **both | {"max_cost": 0.01})) == Limit(seconds=36, ended_by="cost")


def test_the_time_of_earlier_attempts_counts_including_lost_steps():
    limit = Limit(seconds=60, ended_by="time")
    first, second = Budget(limit, clock=lambda: 50.0), Budget(limit, clock=lambda: 5.0)
    second.load_state_dict(first.state_dict())
    assert second.spent_s == 55
    second.begin(spent_s=58.0, final_s=lambda: 0.0)  # the time of work after the checkpoint counts as spent
    assert second.spent_s == 63
    assert second.is_up()


def test_an_attempt_begins_with_its_launch_and_those_before_count_with_their_launch_and_end(monkeypatch):
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setenv(LAUNCHER, f"1:{int((now - 100) * os.sysconf('SC_CLK_TCK'))}")
    assert now - launched_at() == pytest.approx(100, abs=0.1)
    assert spent_before() == 0.0
    for text, seconds in (("61.5", 61.5), ("x", 0.0)):
        monkeypatch.setenv(SPENT, text)
        assert spent_before() == seconds
    monkeypatch.delenv(LAUNCHER)
    assert launched_at() is None


def test_the_first_step_is_not_used_to_predict_the_others():
    budget = Budget(Limit(seconds=100, ended_by="time"), clock=lambda: 50.0)
    budget.stepped(40.0)
    assert not budget.is_up()
    budget.stepped(40.0)
    assert budget.is_up()


def test_the_expected_duration_of_the_last_checkpoint_is_updated():
    takes = [30.0]
    budget = Budget(Limit(seconds=100, ended_by="time"), clock=lambda: 80.0)
    budget.begin(spent_s=0.0, final_s=lambda: takes[0])
    assert budget.is_up()
    takes[0] = 1.0
    assert not budget.is_up()


def test_steps_queued_on_a_gpu_are_included():
    here, ahead = (Budget(Limit(seconds=100, ended_by="time"), clock=lambda: 90.0, ahead=ahead) for ahead in (0, 2))
    for budget in (here, ahead):
        budget.stepped(0.0)
        budget.stepped(3.0)
    assert not here.is_up()
    assert ahead.is_up()


@pytest.mark.process
def test_the_clock_starts_with_the_process():
    assert 0 < process_age() < 86400
    before = process_age()
    wait_until(lambda: process_age() - before >= 0.03)


def early_of(tmp_path, patience, min_delta=0.0):
    return EarlyStopping(config_of(tmp_path, early_stopping_patience=patience, early_stopping_min_delta=min_delta))


def test_early_stopping_counts_evaluations_without_progress(tmp_path):
    early = early_of(tmp_path, 2, 0.1)
    assert [early.should_stop(loss) for loss in (3.0, 2.0, 1.95, 1.85, 1.8, 1.76)] == [False] * 5 + [True]
    assert early.best == 1.85


def test_without_patience_there_is_no_early_stopping(tmp_path):
    early = early_of(tmp_path, 0)
    assert not any(early.should_stop(3.0) for _ in range(100))


def test_early_stopping_continues_over_a_resume(tmp_path):
    early, restored = early_of(tmp_path, 3), early_of(tmp_path, 3)
    assert early.state_dict() == {"best": math.inf, "idle": 0}
    for loss in (2.0, 2.1, 2.1):
        early.should_stop(loss)
    restored.load_state_dict(early.state_dict())
    assert restored.should_stop(2.05)


def test_the_longest_of_the_last_three_evaluations_is_used():
    budget = Budget(Limit(seconds=100, ended_by="time"), clock=lambda: 90.0)
    for seconds in (50.0, 1.0, 2.0, 3.0):
        budget.took(EVALUATION, seconds)
    assert not budget.is_up()
    budget.took(EVALUATION, 9.5)
    assert budget.is_up()


def test_work_due_before_the_next_step_is_included():
    budget = Budget(Limit(seconds=100, ended_by="time"), clock=lambda: 90.0)
    budget.took(CHECKPOINT, 20.0)
    assert not budget.is_up()
    assert budget.is_up([CHECKPOINT])


@pytest.mark.parametrize(
    ("loss", "norm", "message"),
    [
        (math.nan, 1.0, "loss is nan at step 7"),
        (math.inf, math.nan, "loss is inf at step 7"),
        (3.0, math.inf, "gradient norm is inf at step 7"),
    ],
)
def test_a_number_that_is_not_finite_ends_the_run_with_its_step(loss, norm, message):
    check_finite(7, {"loss": 3.0, "gradient norm": 1.0})
    with pytest.raises(NotFiniteError, match=message):
        check_finite(7, {"loss": loss, "gradient norm": norm})
