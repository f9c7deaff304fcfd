"""Budgets, early stopping and numbers that are not finite in real trainers with one or two ranks."""

from __future__ import annotations

import json

import pytest
import torch

import forked
from checkpoints import final_of
from factories import environment, make_run, ranks_of, trainer
from gpt2.failure import TURN_S, kind_of
from kmatrix.errors import DataError
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.runs import merged_metrics
from kmatrix.status.classify import mismatch

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


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("Connection closed by peer"), "error"),
        (ValueError("a text about being out of memory"), "error"),
        (DataError("a shard is short"), "data"),
    ],
)
def test_out_of_memory_is_recognized_by_its_errors(error, kind):
    assert kind_of(error) == kind


@pytest.mark.nightly
def test_a_stalled_first_rank_is_reported_by_another(tmp_path):
    """Another rank writes the reason to its error.json; the engine reads it if rank 0 writes no result."""
    run_dir = make_run(tmp_path, num_gpus=2, **FOREVER, stall_factor=5.0, stall_floor=4)
    process = train(run_dir, fault="freeze:0:4", timeout=240 + TURN_S)
    assert process.returncode != 0
    error = read_json(run_dir.rank_error(1))
    assert error["kind"] == "stall", process.stdout
    assert error["reason"].startswith("no progress for")
    assert "rank 0 is late, last seen in" in error["reason"]
    if run_dir.result.exists():
        assert has_ended(run_dir) == ("failed", "stall", None)
        assert read_json(run_dir.result)["reason"] == f"rank 1: {error['reason']}"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "expected"),
    [("freeze:1:4", "rank 1 is late, last seen in"), ("hang:1:4", "rank 1 is late, in forward of step 4")],
)
def test_a_stalled_rank_is_reported_with_its_stack(tmp_path, fault, expected):
    run_dir = make_run(tmp_path, num_gpus=2, **FOREVER, stall_factor=5.0, stall_floor=4)
    process = train(run_dir, fault=fault, FAULT_HANGS=tmp_path / "hangs", timeout=240 + TURN_S)
    assert has_ended(run_dir) == ("failed", "stall", None), process.stdout
    reason = read_json(run_dir.result)["reason"]
    assert expected in reason
    assert ("(its process is stopped)" in reason) == ("freeze" in fault)
    assert ("trainer_faults.py" in reason) == ("hang" in fault)
    stacks = run_dir.rank_stacks(1).read_text()
    assert "in forward" in stacks or ("freeze" in fault and stacks)
    assert "backward" in run_dir.rank_stacks(0).read_text()
    assert events(run_dir, "stall")


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
