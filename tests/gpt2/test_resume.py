"""k and then n - k steps equal n steps bit for bit: every optimizer, one rank and two, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from factories import ROOT, environment
from gpt2.checkpoint.files import load_checkpoint
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics
from resume_ranks import STEPS, cases
from waiting import wait_until

PROGRAM = "tests/support/resume_ranks.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
CASES = {case.name: case for case in cases()}
QUICK = ("sgd", "adamw", "muon", "adamwspam", "adamwprune-adamw", "movement", "border", "start", "noisy")
MEASURED = ("train/loss", "grad/norm", "train/lr", "val/loss", "tokens")
LONGEST = 500  # seconds for all cases of one kind


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains some cases, uninterrupted and in parts, and returns their directory.

    All worker processes of pytest share the trained runs.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def train(ranks, names):
        folder = base / f"resume-{ranks}-{names[0]}"
        try:
            folder.mkdir()
        except FileExistsError:
            wait_until((folder / "done").exists, "another process trains them", LONGEST)
            return folder
        command = [sys.executable, *(TORCHRUN if ranks == 2 else []), PROGRAM, str(folder), *names]
        completed = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LONGEST, check=False
        )
        (folder / "done").write_text(completed.stdout[-3000:] + completed.stderr[-5000:])
        return folder

    return train


def both(folder, name):
    return RunDir(folder / name / "straight"), RunDir(folder / name / "parts")


def equal(one, other):
    """Return whether two nested values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def end_as_if_never_stopped(folder, name):
    """Check that a run in two parts ended like the uninterrupted one."""
    assert (folder / name).exists(), (folder / "done").read_text()
    ends = [load_checkpoint(run.checkpoints / "final.pt") for run in both(folder, name)]
    assert ends[0]["step"] == ends[1]["step"] == STEPS
    for part in ("model", "optimizer", "rng", "pruner"):
        assert equal(*(end.get(part, end["carried"].get(part)) for end in ends)), part
    metrics = [merged_metrics(run.metrics) for run in both(folder, name)]
    lines = [[{key: line.values.get(key) for key in MEASURED} for line in run] for run in metrics]
    assert lines[0] == lines[1]
    (resume,) = (event for event in read_jsonl(both(folder, name)[1].events) if event["event"] == "resume")
    assert CASES[name].stop <= resume["step"] <= CASES[name].stop + 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", QUICK)
def test_a_run_in_two_parts_equals_an_uninterrupted_run_bit_for_bit(trained, ranks, name):
    end_as_if_never_stopped(trained(ranks, QUICK), name)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_every_other_optimizer_resumes_bit_for_bit_too(trained, ranks, name):
    end_as_if_never_stopped(trained(ranks, [name for name in CASES if name not in QUICK]), name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_result_of_the_second_attempt_covers_the_whole_run(trained, ranks):
    straight, parts = both(trained(ranks, QUICK), "adamw")
    whole, result = read_json(straight.result), read_json(parts.result)
    for key in ("initial_val_loss", "final_val_loss", "best_val_loss", "best_val_step", "final_train_loss", "step"):
        assert result[key] == whole[key], key
    assert (result["attempt"], result["ended_by"]) == (2, "max_iters")
    assert result["seconds"] > result["attempt_seconds"] > 0
    metrics = [read_json(run.training_metrics) for run in (straight, parts)]
    for key in ("iterations", "train_losses", "val_losses", "val_steps", "learning_rates"):
        assert metrics[0][key] == metrics[1][key], key
