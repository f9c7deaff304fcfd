"""Runs on the device that are killed, stopped or fail, and how they go on."""

from __future__ import annotations

import pytest

from checkpoints import final_of
from factories import make_data, make_run
from gpt2.checkpoint.files import load_checkpoint
from kmatrix.plan.memory import memory
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.train_config import TrainConfig
from on_gpu_runs import FAULTS, ended, losses

pytestmark = pytest.mark.gpu
SEED = 1337
FOREVER = {"max_iters": 1_000_000, "eval_interval": 1_000_000}
KILLED = -9


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the fields of the tokens that all runs of this module read."""
    folder = tmp_path_factory.mktemp("endings") / "data"
    return {"data_path": folder, "data_sha256": make_data(folder)}


def events(run_dir, name):
    return [event["step"] for event in read_jsonl(run_dir.events) if event["event"] == name]


def faulty(device, run_dir, fault, *arguments, ok=True, attempt=1, **variables):
    return device.train(run_dir, *arguments, ok=ok, program=FAULTS, attempt=attempt, FAULT=fault, **variables)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "default"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_that_is_killed_and_continued_has_the_losses_of_one_that_was_not(
    device, *, sizes, data, tmp_path, dtype, deterministic
):
    common = {**data, **sizes, "dtype": dtype, "deterministic": deterministic, "dropout": 0.1, "max_iters": 20}
    common |= {"checkpoint_interval": 5, "eval_interval": 10}
    whole = device.trained(tmp_path, "whole", **common)
    killed = make_run(tmp_path, "killed", **device.fields(**common))
    process = device.start(killed, program=FAULTS, FAULT="kill:0:12")
    process.communicate(timeout=600)
    assert process.returncode == KILLED
    assert not killed.result.exists()
    device.train(killed, "--resume", "auto", attempt=2)
    assert events(killed, "resume") == [10]
    assert ended(killed) == ("finished", None, "max_iters")
    within = 0.0 if deterministic or not device.is_gpu else 1e-2  # without it, GPUs add in an order that varies
    assert losses(killed) == pytest.approx(losses(whole), abs=within, rel=0)
    if not within:
        ends = [load_checkpoint(final_of(run.path))["model"] for run in (whole, killed)]
        assert all(bool((ends[0][name] == ends[1][name]).all()) for name in ends[0])


def test_a_compiled_run_that_waits_at_a_step_continues_with_the_same_losses(device, *, sizes, data, tmp_path):
    common = {**data, **sizes, **device.compiled(), "deterministic": True, "max_iters": 12, "eval_interval": 6}
    whole = device.trained(tmp_path, "whole", **common)
    parts = make_run(tmp_path, "parts", **device.fields(**common))
    device.train(parts, "--until", "6")
    device.train(parts, "--resume", "auto", attempt=2)
    assert losses(parts) == losses(whole)


def test_sigterm_saves_a_checkpoint_within_two_steps(device, *, sizes, data, tmp_path):
    run_dir = make_run(tmp_path, **device.fields(**data, **sizes, **FOREVER))
    output = faulty(device, run_dir, "signal:0:7", ok=False)
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"]) == ("stopped", "signal"), output
    (item,) = Checkpoints(run_dir.checkpoints).all()
    assert not item.final
    assert load_checkpoint(run_dir.checkpoints / item.name)["step"] == item.step == result["step"]
    assert result["step"] in (8, 9)


def test_a_loss_that_is_not_a_number_ends_the_run_with_its_step(device, *, sizes, data, tmp_path):
    run_dir = make_run(tmp_path, **device.fields(**data, **sizes, **FOREVER))
    output = faulty(device, run_dir, "nan:0:5", ok=False)
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"], result["reason"]) == ("failed", "nan", "loss is nan at step 5"), output


def test_a_loss_that_stops_falling_ends_the_run(device, *, sizes, data, tmp_path):
    constant = {"learning_rate": 0.0, "min_lr": 0.0, "eval_interval": 2, "early_stopping_patience": 2}
    run_dir = device.trained(tmp_path, "run", **{**data, **sizes, **constant})
    assert ended(run_dir) == ("finished", None, "early_stopping")
    assert read_json(run_dir.result)["step"] == 4


def test_a_time_budget_ends_the_run_with_an_evaluation_and_a_checkpoint(device, *, sizes, data, tmp_path):
    seconds = 45.0 if device.is_gpu else 8.0  # of which the first use of a GPU takes some
    run_dir = device.trained(tmp_path, "run", **{**data, **sizes, **FOREVER, "max_time": seconds})
    result = read_json(run_dir.result)
    assert ended(run_dir) == ("finished", None, "time")
    assert 0 < result["step"] < FOREVER["max_iters"]
    assert result["final_val_loss"] is not None
    assert load_checkpoint(final_of(run_dir.path))["step"] == result["step"]


def micro_batches(device, fields):
    """Return a micro-batch that does not fit by the plan, and a divisor that does; by the memory of this GPU."""
    if not device.is_gpu:
        return 8, 2
    import torch

    total = torch.cuda.get_device_properties(0).total_memory

    def needs(batch):
        train = TrainConfig.from_json({**fields, "batch_size": batch, "global_batch": batch})
        return memory(train.shape, train).total

    most = 1
    while needs(most) < 1.3 * total:
        most *= 2
    fits = most
    while needs(fits) > 0.6 * total:
        fits //= 2
    return most, fits


def test_a_micro_batch_that_does_not_fit_fails_for_memory_and_a_smaller_one_finishes(device, *, large, tmp_path):
    """The micro-batch is too large by the plan, so that this also tests the plan. The runner halves it as often."""
    run = {**large, "max_iters": 2, "eval_interval": 2, "eval_samples": 2, "loss_chunk": -1, "dtype": "bf16"}
    probe = make_run(tmp_path, "probe", **device.fields(**run))
    too_many, fits = micro_batches(device, read_json(probe.run_json)["train"])
    fields = {**run, "batch_size": too_many, "data_path": tmp_path / "data"}
    fields["data_sha256"] = make_data(tmp_path / "data", train=3 * too_many * run["block_size"])
    run_dir = make_run(tmp_path, "run", **device.fields(**fields))
    fault = {"program": FAULTS, "FAULT": "oom:0:0", "FAULT_FITS": fits} if not device.is_gpu else {}
    output = device.train(run_dir, ok=False, **fault)
    assert ended(run_dir) == ("failed", "oom", None), output[-3000:]
    assert f"out of memory with micro-batches of {too_many}" in read_json(run_dir.result)["reason"]
    device.train(run_dir, "--resume", "auto", "--micro-batch", str(fits), attempt=2, **fault)
    assert ended(run_dir) == ("finished", None, "max_iters")
    used = read_json(run_dir.run_used)["train"]
    assert (used["batch_size"], used["global_batch"]) == (fits, too_many)
