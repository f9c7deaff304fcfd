"""Several ranks give the numbers of one rank, and end together with one reason. gloo, CPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

import forked
from checkpoints import final_of
from factories import environment, make_run, ranks_of, trainer
from gpt2.checkpoint import load_checkpoint
from kmatrix.engines.failures import first_failure
from kmatrix.records.attempts import Attempt, Exit
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import read_json
from kmatrix.records.runs import merged_metrics
from kmatrix.runner.ends import Evidence, end_of
from kmatrix.status.stragglers import read_ranks
from recordings import read_jsonl
from waiting import wait_until

pytestmark = pytest.mark.process
FAULTS = ("tests/support/trainer_faults.py",)
FOREVER = {"num_gpus": 2, "max_iters": 1_000_000, "eval_interval": 1_000_000}


def start_training(run_dir, *arguments, fault="none:0:0", attempt=1, **variables):
    """Start the ranks of a run with one fault in it."""
    known = {**environment(), "FAULT": fault, **{name: str(value) for name, value in variables.items()}}
    program = [*trainer(run_dir, attempt=attempt, program=FAULTS), *arguments]
    return forked.start(program, known, ranks=ranks_of(run_dir))


def output_of(process, timeout=240):
    """Wait for the process and return its output."""
    try:
        return "".join(process.communicate(timeout=timeout))
    finally:
        process.kill()


def train(run_dir, *arguments, **options):
    """Train, and return how the run ended and the output of its ranks."""
    output = output_of(start_training(run_dir, *arguments, **options))
    return ended(run_dir), output


def ended(run_dir):
    result = read_json(run_dir.result)
    return result["status"], result["kind"], result["ended_by"]


def train_losses(run_dir):
    return [line.values["train/loss"] for line in merged_metrics(run_dir.metrics) if "train/loss" in line.values]


def weights_of_ranks(folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_gradients_that_are_averaged_in_bfloat16_train_nearly_the_same(tmp_path):
    common = {"num_gpus": 2, "batch_size": 2, "gradient_accumulation": 2, "data_path": tmp_path / "data"}
    runs = [make_run(tmp_path, str(half), ddp_bf16_gradients=half, **common) for half in (False, True)]
    assert [train(run)[0][0] for run in runs] == ["finished"] * 2
    exact, rounded = map(train_losses, runs)
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=2e-3)


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
    replicas = weights_of_ranks(tmp_path / "weights")
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
    end, output = train(run_dir, FAULT_DUMP=tmp_path / "weights")
    assert end == ("finished", None, "max_iters"), output
    first, second = weights_of_ranks(tmp_path / "weights")
    assert all(torch.equal(weights, second[name]) for name, weights in first.items())
    pruned = torch.cat([w.flatten() for name, w in first.items() if name.startswith("h.") and w.ndim == 2])
    share = round(0.6 * len(pruned)) / len(pruned)
    assert read_json(run_dir.result)["sparsity"] == (pruned == 0).double().mean() == share


# How all ranks end


def test_sigterm_to_the_launcher_stops_every_rank_with_a_checkpoint(tmp_path):
    run_dir = make_run(tmp_path, **FOREVER)
    process = start_training(run_dir)
    wait_until(lambda: len(merged_metrics(run_dir.metrics)) > 5)
    process.send_signal(signal.SIGTERM)  # the launcher sends it to its ranks, as torchrun does
    output = output_of(process)
    result = read_json(run_dir.result)
    assert ended(run_dir) == ("stopped", "signal", None), output
    assert "SIGTERM" in result["reason"]
    assert result["final_val_loss"] is None
    (item,) = Checkpoints(run_dir.checkpoints).all()
    assert not item.final
    assert load_checkpoint(run_dir.checkpoints / item.name)["step"] == item.step == result["step"] > 5
    assert [event["event"] for event in read_jsonl(run_dir.events)] == ["stop", "checkpoint"]
    assert 'gpt2/train.py", line' not in output, "a rank ended with a traceback"


@pytest.mark.parametrize(
    ("fault", "end", "reason", "steps"),
    [  # of rank 1; the signal arrives in step 7: updates 0 to 7, or one more
        ("signal:1:7", ("stopped", "signal", None), "stopped by a signal to another rank at step", (8, 9)),
        ("raise:1:3", ("failed", "error", None), "rank 1: RuntimeError: the cable was pulled", (3,)),
        ("nan:1:5", ("failed", "nan", None), "loss is nan at step 5", (6, 7)),
    ],
)
def test_what_happens_on_one_rank_ends_all_with_its_reason(tmp_path, fault, end, reason, steps):
    run_dir = make_run(tmp_path, **FOREVER, checkpoint_interval=3)
    found, output = train(run_dir, fault=fault)
    result = read_json(run_dir.result)
    assert found == end, output
    # What rank 0 says of itself; rank 1, which is the cause, has written its own reason.
    assert (first_failure(run_dir, 1)[2] if end[1] == "error" else result["reason"]).startswith(reason)
    assert result["step"] in steps
    if end[1] == "nan":
        assert [item.step for item in Checkpoints(run_dir.checkpoints).all()] == [3]
        assert [line.step for line in merged_metrics(run_dir.metrics)] == [0, 1, 2, 3, 4]


def test_half_the_micro_batch_after_out_of_memory_on_one_rank_gives_the_same_losses(tmp_path):
    common = {"num_gpus": 2, "batch_size": 4, "max_iters": 6, "data_path": tmp_path / "data"}
    reference, run_dir = make_run(tmp_path, "whole", **common), make_run(tmp_path, "sick", **common)
    assert train(run_dir, fault="oom:1:0", FAULT_FITS=2)[0][0] == "failed"
    rank, kind, reason = first_failure(run_dir, 1)
    assert (rank, kind) == (1, "oom")
    assert "CUDA out of memory" in reason
    again = ("--resume", "auto", "--micro-batch", "2")
    end, output = train(run_dir, *again, attempt=2, fault="oom:1:0", FAULT_FITS=2)
    assert end == ("finished", None, "max_iters"), output
    adjusted = [(change["field"], change["from"], change["to"]) for change in read_json(run_dir.result)["adjusted"]]
    assert adjusted == [("batch_size", 4, 2), ("gradient_accumulation", 1, 2)]
    train(reference)
    assert train_losses(reference) == pytest.approx(train_losses(run_dir), abs=1e-5)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    run_dir = make_run(tmp_path, **FOREVER)
    process = start_training(run_dir)
    wait_until(lambda: len(merged_metrics(run_dir.metrics)) > 5)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(lives, ranks)))
    assert read_json(run_dir.result)["status"] == "stopped"
    assert Checkpoints(run_dir.checkpoints).newest().step > 5


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "line"),
    [("hang:1:4", "trainer_faults.py:"), ("spin:1:4", "in match"), ("freeze:1:4", ""), ("freeze:0:4", "")],
)
def test_a_rank_that_hangs_ends_the_run_and_is_named_with_its_place(tmp_path, fault, line):
    """A rank that is stopped writes no stacks; the ranks that wait for it do."""
    run_dir = make_run(tmp_path, **FOREVER, stall_factor=5.0)
    output = output_of(start_training(run_dir, fault=fault, FAULT_HANGS=tmp_path / "hangs", FAULT_FLOOR_S=4))
    end = end_of(Evidence(run=run_dir.path, attempt=Attempt(number=1), exits=[Exit(rank=0, code=1)]))
    assert end.kind == "stall", output
    assert f"rank {fault.split(':')[1]} is in " in end.reason
    assert ("forward of step 4" in end.reason) >= fault.startswith("hang")  # the others write no state any more
    assert line in end.reason
    if run_dir.result.exists():
        assert ended(run_dir) == ("failed", "stall", None)


@pytest.mark.nightly
def test_a_straggler_among_four_ranks_is_named_with_its_share_of_time(tmp_path):
    """All four have the same step times, and three of them wait for one, however busy the machine is."""
    run_dir = make_run(tmp_path, num_gpus=4, batch_size=1, max_iters=9, log_interval=4, eval_interval=100)
    end, output = train(run_dir, fault="slow:2:400")
    assert end == ("finished", None, "max_iters"), output
    timings = [list(read_jsonl(run_dir.timings(rank))) for rank in range(4)]
    assert [[(line["step"], line["steps"]) for line in lines] for lines in timings] == [[(4, 4), (8, 4)]] * 4
    assert all(line["compute_ms"] >= 400 for line in timings[2])
    ranks = read_ranks(run_dir)
    assert ranks is not None
    assert (ranks.slowest_rank, ranks.slowest_share) == (2, 1.0)
    assert ranks.load_balance_efficiency < 0.8
    assert ranks.straggler_time_share > 0.2
