"""When a run ends: budgets on a simulated clock, early stopping, and numbers that are not finite."""

from __future__ import annotations

import itertools
import json
import math
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import final_of
from factories import make_run, train_fields
from gpt2 import stopping
from gpt2.checkpoint.files import load_checkpoint
from gpt2.stopping import (
    CHECKPOINT,
    END_S,
    EVALUATION,
    MARGIN,
    Budget,
    EarlyStopping,
    NotFiniteError,
    check_finite,
    limits_of,
    process_age,
    spent_before,
)
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.run_lock import LAUNCHER, SPENT, launched_at
from kmatrix.records.runs import merged_metrics
from kmatrix.records.train_config import TrainConfig
from training import train_here

FOREVER = {"max_iters": 1_000_000, "eval_interval": 1_000_000}


def config_of(tmp_path, **overrides):
    return TrainConfig.from_json(train_fields(tmp_path, "", **overrides))


def budget_at(now, seconds=100.0, **options):
    """Return a budget whose clock stands still."""
    return Budget({"time": seconds}, clock=lambda: now, **options)


class Run:
    """A loop whose clock advances by the duration of its parts."""

    def __init__(self, seconds, *, step=1.0, evaluation=2.0, checkpoint=3.0, every=10):
        self.now = 0.0
        self.budget = Budget({"time": seconds}, clock=lambda: self.now)
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


@given(st.floats(60, 500), st.floats(0.05, 2.0), st.floats(0.1, 5.0), st.floats(0.1, 5.0), st.integers(3, 40))
def test_evaluation_and_checkpoint_end_inside_the_budget_and_close_to_its_end(
    seconds, step, evaluation, checkpoint, every
):
    run = Run(seconds, step=step, evaluation=evaluation, checkpoint=checkpoint, every=every)
    ended_at = run.train_until_the_budget_ends()
    slack = (MARGIN - 1) * (evaluation + checkpoint) + END_S
    assert ended_at <= seconds
    assert ended_at >= seconds - slack - 2 * step - evaluation - 1e-6  # an evaluation that no longer fits is skipped


BOTH = {"max_cost": 1.0, "machine_hour_price": 1.0, "max_time": 60.0}
GPUS = {"max_cost": 2.0, "gpu_hour_price": 0.5, "num_gpus": 4, "batch_size": 1, "device": "cuda"}


@pytest.mark.parametrize(
    ("fields", "limits", "ended_by"),
    [
        ({}, {}, None),
        (GPUS, {"cost": 3600}, "cost"),  # it pays for all GPUs
        (BOTH, {"time": 60, "cost": 3600}, "time"),  # the first of both decides
        (BOTH | {"max_cost": 0.01}, {"time": 60, "cost": 36}, "cost"),
    ],
)
def test_the_budget_is_the_first_limit_that_is_reached(tmp_path, fields, limits, ended_by):
    found = limits_of(config_of(tmp_path, **fields))
    assert found == pytest.approx(limits)
    budget = Budget(found, clock=lambda: 1e12)
    assert (budget.ended_by, budget.is_up()) == (ended_by, bool(limits))


def test_the_time_of_earlier_attempts_counts_including_lost_steps():
    first, second = budget_at(50.0, 60), budget_at(5.0, 60)
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
    monkeypatch.setenv(SPENT, "61.5")
    assert spent_before() == 61.5
    monkeypatch.delenv(LAUNCHER)
    assert launched_at() is None
    assert 0 < process_age() < 86400


def test_the_end_is_expected_from_the_longest_of_the_recent_parts():
    budget = budget_at(50.0)
    budget.stepped(40.0)  # the first step includes warm-up
    assert not budget.is_up()
    budget.stepped(40.0)
    assert budget.is_up()

    budget = budget_at(90.0)
    for seconds in (50.0, 1.0, 2.0, 3.0):  # of the last three evaluations
        budget.took(EVALUATION, seconds)
    assert not budget.is_up()
    budget.took(EVALUATION, 9.5)
    assert budget.is_up()

    budget = budget_at(90.0)
    budget.took(CHECKPOINT, 20.0)
    assert not budget.is_up()
    assert budget.is_up([CHECKPOINT])  # due before the next step

    takes, budget = [30.0], budget_at(80.0)  # the last checkpoint, whose estimate changes
    budget.begin(spent_s=0.0, final_s=lambda: takes[0])
    assert budget.is_up()
    takes[0] = 1.0
    assert not budget.is_up()


def test_steps_queued_on_a_gpu_are_included():
    here, ahead = (budget_at(90.0, ahead=ahead) for ahead in (0, 2))
    for budget in (here, ahead):
        budget.stepped(0.0)
        budget.stepped(3.0)
    assert (here.is_up(), ahead.is_up()) == (False, True)


def early_of(tmp_path, patience, min_delta=0.0):
    return EarlyStopping(config_of(tmp_path, early_stopping_patience=patience, early_stopping_min_delta=min_delta))


def test_early_stopping_counts_evaluations_without_progress(tmp_path):
    early = early_of(tmp_path, 2, 0.1)
    assert [early.should_stop(loss) for loss in (3.0, 2.0, 1.95, 1.85, 1.8, 1.76)] == [False] * 5 + [True]
    assert early.best == 1.85
    early = early_of(tmp_path, 0)  # no patience: never
    assert not any(early.should_stop(3.0) for _ in range(100))


def test_early_stopping_continues_over_a_resume(tmp_path):
    early, restored = early_of(tmp_path, 3), early_of(tmp_path, 3)
    assert early.state_dict() == {"best": math.inf, "idle": 0}
    for loss in (2.0, 2.1, 2.1):
        early.should_stop(loss)
    restored.load_state_dict(early.state_dict())
    assert restored.should_stop(2.05)


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


# Runs


def ended(run_dir):
    result = read_json(run_dir.result)
    return result["status"], result["kind"], result["ended_by"]


def test_a_run_at_the_end_of_its_time_budget_has_a_final_evaluation_and_checkpoint(tmp_path, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(stopping, "process_age", lambda: next(seconds) / 10)
    run_dir = make_run(tmp_path, **FOREVER, max_time=2.5)
    trained = train_here(run_dir)
    result = read_json(run_dir.result)
    assert ended(run_dir) == ("finished", None, "time"), trained.stdout
    assert result["final_val_loss"] is not None
    assert merged_metrics(run_dir.metrics)[-1].step == result["step"] < 30
    assert load_checkpoint(final_of(run_dir.path))["step"] == result["step"]
    assert result["schedule_share"] == pytest.approx(result["step"] / 1_000_000)
    assert "steps of the learning rate schedule" in trained.stdout


def test_a_loss_that_stops_falling_ends_the_run_after_its_patience(tmp_path):
    run_dir = make_run(tmp_path, learning_rate=0.0, min_lr=0.0, eval_interval=2, early_stopping_patience=2)
    train_here(run_dir)
    result = read_json(run_dir.result)
    assert ended(run_dir) == ("finished", None, "early_stopping")
    assert (result["step"], result["final_val_loss"]) == (4, result["best_val_loss"])
    assert [(event["event"], event["step"]) for event in read_jsonl(run_dir.events)][-1] == ("early_stopping", 4)


@pytest.mark.parametrize(("stop_after", "step"), [(0, 0), (6, 7), (11, 12)])
def test_a_stop_request_ends_the_run_within_a_step_with_a_checkpoint_that_continues(tmp_path, stop_after, step):
    """It interrupts an evaluation, and ranks hear of it with the numbers of a step."""
    run_dir = make_run(tmp_path, eval_interval=1000, save_best=False)
    train_here(run_dir, stop_after=stop_after)
    result = read_json(run_dir.result)
    assert (*ended(run_dir), result["step"]) == ("stopped", "signal", None, step)
    assert [item.step for item in Checkpoints(run_dir.checkpoints).all()] == [step]
    train_here(run_dir, attempt=2, resume="auto")
    assert (*ended(run_dir), read_json(run_dir.result)["step"]) == ("finished", None, "max_iters", 12)


def test_a_micro_batch_that_is_not_a_divisor_is_refused(tmp_path):
    run_dir = make_run(tmp_path)
    train_here(run_dir, micro_batch=3)
    assert ended(run_dir) == ("failed", "error", None)
    assert "it does not divide the 4 sequences of a rank" in read_json(run_dir.result)["reason"]


def test_a_profile_covers_the_requested_steps(tmp_path):
    run_dir = make_run(tmp_path, max_iters=6, profile="2:4")
    assert train_here(run_dir).returncode == 0
    trace = json.loads(run_dir.profile.read_text())["traceEvents"]
    names = [event.get("name", "") for event in trace]
    assert len([name for name in names if name.startswith("autograd::engine::evaluate_function: Nll")]) == 2
    assert not list(run_dir.path.glob(".profile*"))
