"""When a run ends: budgets on a simulated clock, early stopping, and numbers that are not finite."""

from __future__ import annotations

import itertools
import json
import math
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import final_of
from factories import make_run, train_fields
from gpt2 import stopping
from gpt2.checkpoint import load_checkpoint
from gpt2.stopping import (
    CHECKPOINT,
    END_S,
    EVALUATION,
    MARGIN,
    STEP,
    Budget,
    NotFiniteError,
    check_finite,
    stops_early,
)
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import read_json
from kmatrix.records.runs import merged_metrics
from kmatrix.records.train_config import TrainConfig
from recordings import read_jsonl
from training import train_here

FOREVER = {"max_iters": 1_000_000, "eval_interval": 1_000_000}


def config_of(**overrides):
    return TrainConfig.from_json(train_fields("nowhere", "", **overrides))


def budget_of(seconds, spent):
    """Return a budget of which some seconds are spent."""
    return Budget(config_of(max_time=seconds), spent, clock=lambda: 1e6)


@given(st.floats(60, 500), st.floats(0.05, 2.0), st.floats(0.1, 5.0), st.floats(0.1, 5.0), st.integers(3, 40))
def test_evaluation_and_checkpoint_end_inside_the_budget_and_close_to_its_end(
    seconds, step_s, evaluation, checkpoint, every
):
    now, took, requested = 0.0, {EVALUATION: [], STEP: []}, False
    budget = Budget(config_of(max_time=seconds), clock=lambda: now)
    for step in itertools.count():  # as the loop does
        if step % every == 0:
            if requested:
                break
            now += evaluation
            took[EVALUATION].append(evaluation)
        now += step_s
        took[STEP].append(step_s)
        if requested:
            break
        due = (EVALUATION,) if (step + 1) % every == 0 else ()
        requested = budget.is_up(took, due, lambda: checkpoint)
    now += evaluation + checkpoint
    assert now <= seconds
    slack = (MARGIN - 1) * (evaluation + checkpoint) + END_S
    assert now >= seconds - slack - 4 * step_s - evaluation - 1e-6  # an evaluation that no longer fits is skipped


BOTH = {"max_cost": 1.0, "machine_hour_price": 1.0, "max_time": 60.0}
GPUS = {"max_cost": 2.0, "gpu_hour_price": 0.5, "num_gpus": 4, "batch_size": 1, "device": "cuda"}


@pytest.mark.parametrize(
    ("fields", "limit", "ended_by"),
    [
        ({}, math.inf, None),
        (GPUS, 3600, "cost"),  # it pays for all GPUs
        (BOTH, 60, "time"),  # the first of both decides
        (BOTH | {"max_cost": 0.01}, 36, "cost"),
    ],
)
def test_the_budget_is_the_first_limit_that_is_reached(fields, limit, ended_by):
    for spent, is_up in ((limit - 1, False), (limit, ended_by is not None)):
        budget = Budget(config_of(**fields), before_s=spent, clock=lambda: 1e6)
        assert (budget.ended_by, budget.is_up({}, (), lambda: 0.0)) == (ended_by, is_up)


def test_an_attempt_begins_with_its_process_and_those_before_count(monkeypatch):
    spent = 50 + time.time() - psutil.Process().create_time()
    for limit, is_up in ((spent - 5, True), (spent + 5, False)):
        assert Budget(config_of(max_time=limit), before_s=50).is_up({}, (), lambda: 0.0) == is_up


@pytest.mark.parametrize(
    ("spent", "took", "final_s", "is_up"),
    [
        (50, {STEP: [40]}, 0, False),  # the first step includes warm-up
        (50, {STEP: [40, 20]}, 0, True),
        (90, {EVALUATION: [50, *[1] * 8]}, 0, False),  # the longest of the recent ones
        (90, {EVALUATION: [1, 9.5, 1]}, 0, True),
        (80, {}, 1, False),
        (80, {}, 30, True),
    ],
)
def test_the_end_is_expected_from_the_longest_of_the_recent_parts(spent, took, final_s, is_up):
    assert budget_of(100, spent).is_up(took, (), lambda: final_s) == is_up


def test_what_is_due_before_the_next_step_is_included():
    assert [budget_of(100, 90).is_up({CHECKPOINT: [20]}, due, lambda: 0) for due in ((), [CHECKPOINT])] == [False, True]


@pytest.mark.parametrize(
    ("patience", "min_delta", "losses", "stops"),
    [
        (2, 0.1, (3.0, 2.0, 1.95, 1.85, 1.8, 1.76), [False] * 5 + [True]),  # small steps add up until they count
        (3, 0.0, (2.0, 2.1, 2.1, 2.05), [False] * 3 + [True]),
        (0, 0.0, (3.0,) * 9, [False] * 9),  # no patience: never
    ],
)
def test_early_stopping_counts_evaluations_without_progress(patience, min_delta, losses, stops):
    config = config_of(early_stopping_patience=patience, early_stopping_min_delta=min_delta)
    assert [stops_early(config, losses[: number + 1]) for number in range(len(losses))] == stops


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
    return result["status"], result["kind"], result["ended_by"], result["step"]


def test_a_run_at_the_end_of_its_time_budget_has_a_final_evaluation_and_checkpoint(tmp_path, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(stopping, "boot_clock", lambda: next(seconds) / 10)
    monkeypatch.setattr(stopping, "launched_at", lambda: 0.0)
    run_dir = make_run(tmp_path, **FOREVER, max_time=2.5)
    trained = train_here(run_dir)
    step = ended(run_dir)[-1]
    assert ended(run_dir) == ("finished", None, "time", step), trained.stdout
    assert read_json(run_dir.result)["final_val_loss"] is not None
    assert merged_metrics(run_dir.metrics)[-1].step == load_checkpoint(final_of(run_dir.path))["step"] == step < 30
    assert f"time: ended after {step} of 1000000 steps of the learning rate schedule" in trained.stdout


def test_a_loss_that_stops_falling_ends_the_run_after_its_patience_also_over_a_resume(tmp_path):
    run_dir = make_run(tmp_path, learning_rate=0.0, min_lr=0.0, eval_interval=2, early_stopping_patience=3)
    train_here(run_dir, stop_after=4)
    train_here(run_dir, attempt=2, resume="auto")
    assert ended(run_dir) == ("finished", None, "early_stopping", 6)
    assert [(event["event"], event["step"]) for event in read_jsonl(run_dir.events)][-1] == ("early_stopping", 6)


@pytest.mark.parametrize(("stop_after", "step"), [(0, 0), (6, 7), (11, 12)])
def test_a_stop_request_ends_the_run_within_a_step_with_a_checkpoint_that_continues(tmp_path, stop_after, step):
    """It interrupts an evaluation, and ranks hear of it with the numbers of a step."""
    run_dir = make_run(tmp_path, eval_interval=1000, save_best=False)
    train_here(run_dir, stop_after=stop_after)
    assert ended(run_dir) == ("stopped", "signal", None, step)
    assert [item.step for item in Checkpoints(run_dir.checkpoints).all()] == [step]
    train_here(run_dir, attempt=2, resume="auto")
    assert ended(run_dir) == ("finished", None, "max_iters", 12)


def test_a_profile_covers_the_requested_steps(tmp_path):
    run_dir = make_run(tmp_path, max_iters=6, profile="2:4")
    assert train_here(run_dir).returncode == 0
    names = [event.get("name", "") for event in json.loads(run_dir.profile.read_text())["traceEvents"]]
    assert len([name for name in names if name.startswith("autograd::engine::evaluate_function: Nll")]) == 2
    assert not list(run_dir.path.glob(".profile*"))
