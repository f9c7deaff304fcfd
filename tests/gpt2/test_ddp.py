"""Several ranks give the numbers of one rank and end together. gloo, CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import forked
from checkpoints import final_of
from factories import ROOT, environment, make_run, ranks_of, train_command, trainer
from gpt2.checkpoint.files import load_checkpoint
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.runs import merged_metrics
from kmatrix.status.stragglers import read_ranks
from running import is_alive
from waiting import wait_until

pytestmark = pytest.mark.process
FAULTS = ("tests/support/trainer_faults.py",)


def start_training(run_dir, *, fault="none:0:0", torchrun=False, **variables):
    """Start the ranks of a run with one fault in it. torchrun: by the real one, which takes seconds to start."""
    known = {**environment(), "FAULT": fault, **{name: str(value) for name, value in variables.items()}}
    if not torchrun:
        return forked.start(trainer(run_dir, program=FAULTS), known, ranks=ranks_of(run_dir))
    command = train_command(run_dir, program=FAULTS)
    return subprocess.Popen(command, cwd=ROOT, env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output_of(process, timeout=240):
    """Wait for the process and return its output."""
    try:
        return "".join(process.communicate(timeout=timeout))
    finally:
        process.kill()


def train_losses(run_dir):
    return [line.values["train/loss"] for line in merged_metrics(run_dir.metrics) if "train/loss" in line.values]


def test_gradients_that_are_averaged_in_bfloat16_train_nearly_the_same(tmp_path):
    common = {"num_gpus": 2, "batch_size": 2, "gradient_accumulation": 2, "data_path": tmp_path / "data"}
    exact, rounded = (make_run(tmp_path, str(half), ddp_bf16_gradients=half, **common) for half in (False, True))
    for run_dir in (exact, rounded):
        process = start_training(run_dir)
        output = output_of(process)
        assert process.returncode == 0, output
    assert train_losses(rounded) != train_losses(exact)
    assert train_losses(rounded) == pytest.approx(train_losses(exact), abs=2e-3)


def test_two_ranks_with_six_sequences_equal_one_rank_with_twelve(tmp_path):
    common = {"gradient_accumulation": 4, "max_iters": 8, "eval_samples": 25, "data_path": tmp_path / "data"}
    single = make_run(tmp_path, "one", batch_size=12, **common)
    double = make_run(tmp_path, "two", batch_size=6, num_gpus=2, **common)
    (tmp_path / "weights").mkdir()
    processes = [start_training(single), start_training(double, FAULT_DUMP=tmp_path / "weights")]
    outputs = [output_of(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert train_losses(double) == pytest.approx(train_losses(single), abs=1e-5)
    first, second = (read_json(run.result) for run in (single, double))
    for key in ("initial_val_loss", "final_val_loss"):
        assert second[key] == pytest.approx(first[key], abs=1e-5)
    assert second["world_size"] == 2
    replicas = [torch.load(tmp_path / f"weights/{rank}.pt", weights_only=True) for rank in (0, 1)]
    weights = load_checkpoint(final_of(single.path))["model"]
    assert replicas[0].keys() == replicas[1].keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(replicas[0][name], replicas[1][name]), f"replicas differ in {name}"
        assert torch.allclose(replicas[0][name], tensor, atol=1e-5), f"{name} is not that of one rank"


def test_two_ranks_prune_the_same_weights_without_communication(tmp_path):
    ramp = {"target_sparsity": 0.6, "pruning_warmup": 0.1, "pruning_ramp_end": 0.7, "pruning_frequency": 4}
    pruning = {"optimizer": "adamwprune", "adamwprune_base": "adamw", "pruning": "state"}
    run_dir = make_run(tmp_path, num_gpus=2, batch_size=2, max_iters=20, **pruning, **ramp)
    (tmp_path / "weights").mkdir()
    process = start_training(run_dir, FAULT_DUMP=tmp_path / "weights")
    output = output_of(process)
    assert process.returncode == 0, output
    first, second = (torch.load(tmp_path / f"weights/{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, weights in first.items():
        assert torch.equal(weights, second[name]), f"replicas differ in {name}"
    pruned = [weights for name, weights in first.items() if name.startswith("h.") and weights.ndim == 2]
    zeros, total = (sum(count) for count in zip(*((int((w == 0).sum()), w.numel()) for w in pruned), strict=True))
    assert zeros == round(0.6 * total)
    assert read_json(run_dir.result)["sparsity"] == zeros / total


def test_sigterm_to_the_launcher_stops_every_rank_with_a_checkpoint(tmp_path):
    run_dir = make_run(tmp_path, num_gpus=2, max_iters=1_000_000, eval_interval=1_000_000)
    process = start_training(run_dir)
    wait_until(lambda: len(merged_metrics(run_dir.metrics)) > 5)
    process.send_signal(signal.SIGTERM)  # the launcher sends it to its ranks, as torchrun does
    output = output_of(process)
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"]) == ("stopped", "signal"), output
    assert "SIGTERM" in result["reason"]
    assert result["final_val_loss"] is None
    (item,) = Checkpoints(run_dir.checkpoints).all()
    assert not item.final
    assert load_checkpoint(run_dir.checkpoints / item.name)["step"] == item.step == result["step"] > 5
    assert [event["event"] for event in read_jsonl(run_dir.events)] == ["stop", "checkpoint"]
    assert 'gpt2/train.py", line' not in output, "a rank ended with a traceback"


def test_a_signal_to_one_rank_stops_all_within_two_steps(tmp_path):
    run_dir = make_run(tmp_path, num_gpus=2, max_iters=1_000_000)
    output_of(start_training(run_dir, fault="signal:1:7"))
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"]) == ("stopped", "signal")
    assert result["step"] in (8, 9)  # the signal arrives in step 7: updates 0 to 7, or one more


def test_the_reason_is_that_of_the_rank_that_failed_first(tmp_path):
    run_dir = make_run(tmp_path, num_gpus=2, max_iters=1_000_000)
    output_of(start_training(run_dir, fault="raise:1:3"))
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"]) == ("failed", "error")
    assert result["reason"] == "rank 1: RuntimeError: the cable was pulled"
    assert read_json(run_dir.rank_state(1))["reason"] == "RuntimeError: the cable was pulled"


@pytest.mark.nightly
def test_a_rank_that_waits_for_a_hanging_one_reports_it_before_it_is_killed(tmp_path):
    run_dir = make_run(tmp_path, num_gpus=2, max_iters=1_000_000)
    process = start_training(run_dir, torchrun=True, fault="hang:1:4", FAULT_HANGS=tmp_path / "hangs", FAULT_GRACE_S=2)
    wait_until((tmp_path / "hangs").exists)
    process.terminate()
    output_of(process)
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"]) == ("stopped", "signal")
    assert "did not end" in result["reason"]


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    run_dir = make_run(tmp_path, num_gpus=2, max_iters=1_000_000, eval_interval=1_000_000)
    process = start_training(run_dir)
    wait_until(lambda: len(merged_metrics(run_dir.metrics)) > 5)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)))
    assert read_json(run_dir.result)["status"] == "stopped"
    assert Checkpoints(run_dir.checkpoints).newest().step > 5


@pytest.mark.nightly
def test_ctrl_c_works_in_any_order_of_its_signals(tmp_path):
    run_dir = make_run(tmp_path, num_gpus=2, max_iters=1_000_000, eval_interval=1_000_000)
    process = start_training(run_dir, torchrun=True)
    wait_until(lambda: len(merged_metrics(run_dir.metrics)) > 5)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        # The second signal must arrive while the first one is handled.
        time.sleep(0.1)
    output_of(process)
    assert read_json(run_dir.result)["status"] == "stopped"


@pytest.mark.nightly
def test_a_slower_rank_is_detected_although_all_steps_take_the_same_time(tmp_path):
    """The other ranks wait for its gradients, so step times are equal and compute times are not.

    A busy machine may slow down the other rank, too, but not by most of a quarter of a second in each step.
    """
    run_dir = make_run(tmp_path, num_gpus=2, batch_size=2, max_iters=13, log_interval=4, eval_interval=100)
    output = output_of(start_training(run_dir, fault="slow:1:250"))
    assert read_json(run_dir.result)["status"] == "finished", output
    fast, slow = (list(read_jsonl(run_dir.timings(rank))) for rank in (0, 1))
    assert [line["step"] for line in fast] == [line["step"] for line in slow] == [4, 8, 12]
    assert [line["steps"] for line in slow] == [4, 4, 4]
    assert all(line["compute_ms"] >= 250 for line in slow)
    # Over all lines: a busy machine delays one rank or the other, for a moment.
    compute = [sum(line["compute_ms"] for line in lines) for lines in (fast, slow)]
    assert compute[1] > compute[0] + 3 * 30
    steps = [sum(line["step_ms"] for line in lines) for lines in (fast, slow)]
    assert steps[0] == pytest.approx(steps[1], rel=0.3)


@pytest.mark.nightly
def test_a_straggler_among_four_ranks_is_named_with_its_share_of_time(tmp_path):
    """All four have the same step times, and three of them wait for one, however busy the machine is."""
    run_dir = make_run(tmp_path, num_gpus=4, batch_size=1, max_iters=9, log_interval=4, eval_interval=100)
    output = output_of(start_training(run_dir, fault="slow:2:400"))
    assert read_json(run_dir.result)["status"] == "finished", output
    ranks = read_ranks(run_dir)
    assert ranks is not None
    assert (ranks.slowest, ranks.slowest_share) == (2, 1.0)
    assert ranks.efficiency < 0.8
    assert ranks.waiting > 0.2
