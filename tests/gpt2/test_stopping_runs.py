"""Budgets, early stopping and numbers that are not finite in real trainers with one or two ranks."""

from __future__ import annotations

import json

import pytest
import torch

import forked
from checkpoints import final_of
from factories import environment, make_run, ranks_of, trainer
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.runs import Status, merged_metrics
from kmatrix.status.classify import classify, mismatch
from kmatrix.status.state import Attempt, JobPhase, JobState

pytestmark = pytest.mark.process
FAULTS = ("tests/support/trainer_faults.py",)
FOREVER = {"max_iters": 1_000_000, "eval_interval": 1_000_000}


def train(run_dir, *arguments, fault="none:0:0", attempt=1, timeout=240, **variables):
    """Train with a fault; return the process and its output."""
    program = [*trainer(run_dir, attempt=attempt, program=FAULTS), *arguments]
    variables = {"FAULT": fault, **{name: str(value) for name, value in variables.items()}}
    process = forked.run(program, environment() | variables, ranks=ranks_of(run_dir), timeout=timeout)
    process.stdout += process.stderr
    return process


def events(run_dir, *names):
    return [(event["event"], event["step"]) for event in read_jsonl(run_dir.events) if event["event"] in names]


def has_ended(run_dir):
    result = read_json(run_dir.result)
    return result["status"], result["kind"], result["ended_by"]


def test_a_run_at_the_end_of_its_time_budget_has_a_final_evaluation_and_checkpoint(tmp_path):
    run_dir = make_run(tmp_path, **FOREVER, max_time=2.5)
    process = train(run_dir)
    result = read_json(run_dir.result)
    assert process.returncode == 0, process.stdout
    assert has_ended(run_dir) == ("finished", None, "time")
    assert result["final_val_loss"] is not None
    assert merged_metrics(run_dir.metrics)[-1].step == result["step"] < 1_000_000
    final = torch.load(final_of(run_dir.path), weights_only=True)
    assert final["step"] == result["step"]
    assert result["schedule_share"] == pytest.approx(result["step"] / 1_000_000)
    assert "steps of the learning rate schedule" in process.stdout


def test_a_loss_that_stops_falling_ends_the_run_after_its_patience(tmp_path):
    run_dir = make_run(tmp_path, learning_rate=0.0, min_lr=0.0, eval_interval=2, early_stopping_patience=2)
    train(run_dir)
    result = read_json(run_dir.result)
    assert has_ended(run_dir) == ("finished", None, "early_stopping")
    assert result["step"] == 4
    assert result["final_val_loss"] == result["best_val_loss"]
    assert events(run_dir, "early_stopping") == [("early_stopping", 4)]


def test_a_loss_that_is_nan_on_one_rank_ends_the_run_on_all_ranks_with_its_reason(tmp_path):
    run_dir = make_run(tmp_path, num_gpus=2, checkpoint_interval=3)
    process = train(run_dir, fault="nan:1:5")
    assert process.returncode != 0, process.stdout
    assert has_ended(run_dir) == ("failed", "nan", None)
    assert read_json(run_dir.result)["reason"] == "loss is nan at step 5"
    assert [item.step for item in Checkpoints(run_dir.checkpoints).all() if item.step > 5] == []
    losses = [line.step for line in merged_metrics(run_dir.metrics) if "train/loss" in line.values]
    assert losses == [0, 1, 2, 3, 4]


def test_half_the_micro_batch_after_out_of_memory_on_one_rank_gives_the_same_losses(tmp_path):
    common = {"num_gpus": 2, "batch_size": 4, "max_iters": 6, "data_path": tmp_path / "data"}
    reference, run_dir = make_run(tmp_path, "whole", **common), make_run(tmp_path, "sick", **common)
    train(run_dir, fault="oom:1:0", FAULT_FITS=2)
    result = read_json(run_dir.result)
    assert has_ended(run_dir) == ("failed", "oom", None)
    assert "out of memory with micro-batches of 4" in result["reason"]
    process = train(run_dir, "--resume", "auto", "--micro-batch", "2", attempt=2, fault="oom:1:0", FAULT_FITS=2)
    assert has_ended(run_dir) == ("finished", None, "max_iters"), process.stdout
    used = read_json(run_dir.run_used)
    assert [(c["field"], c["from"], c["to"]) for c in used["adjusted"]] == [
        ("batch_size", 4, 2),
        ("gradient_accumulation", 1, 2),
    ]
    assert used["train"]["global_batch"] == 8
    assert mismatch(run_dir) == ""
    train(reference)
    losses = [
        [line.values["train/loss"] for line in merged_metrics(run.metrics) if "train/loss" in line.values]
        for run in (reference, run_dir)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_micro_batch_that_is_not_a_divisor_is_refused(tmp_path):
    run_dir = make_run(tmp_path)
    process = train(run_dir, "--micro-batch", "3")
    assert has_ended(run_dir) == ("failed", "error", None)
    assert "it does not divide the 4 sequences of a rank" in process.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "line"),
    [("hang:1:4", "trainer_faults.py:"), ("spin:1:4", "in match"), ("freeze:1:4", ""), ("freeze:0:4", "")],
)
def test_a_rank_that_hangs_ends_the_run_and_is_named_with_its_place(tmp_path, fault, line):
    """A rank that is stopped writes no stacks; the ranks that wait for it do."""
    run_dir = make_run(tmp_path, num_gpus=2, **FOREVER, stall_factor=5.0)
    process = train(run_dir, fault=fault, FAULT_HANGS=tmp_path / "hangs", FAULT_FLOOR_S=4)
    assert process.returncode != 0, process.stdout
    end = classify(run_dir, Attempt(number=1), JobState(phase=JobPhase.ENDED, exit_code=1, started=1.0))
    assert (end.status, end.kind) == (Status.FAILED, "stall"), process.stdout
    assert f"rank {fault.split(':')[1]} is in " in end.reason
    assert ("forward of step 4" in end.reason) >= fault.startswith("hang")  # the others write no state any more
    assert line in end.reason
    if run_dir.result.exists():
        assert has_ended(run_dir) == ("failed", "stall", None)


def test_a_profile_covers_the_requested_steps(tmp_path):
    run_dir = make_run(tmp_path, max_iters=6, profile="2:4")
    process = train(run_dir)
    assert process.returncode == 0, process.stdout
    trace = json.loads(run_dir.profile.read_text())["traceEvents"]
    backward = [
        event for event in trace if event.get("name", "").startswith("autograd::engine::evaluate_function: Nll")
    ]
    assert len(backward) == 2
    assert not list(run_dir.path.glob(".profile*"))
