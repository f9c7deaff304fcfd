"""Prune with AdamWPrune: the target is reached, and a run that is stopped in the ramp keeps its masks."""

from __future__ import annotations

import os
import signal
from itertools import pairwise

import pytest
import torch

from checkpoints import final_of
from held_training import HeldTraining
from kmatrix.records.runs import merged_metrics
from story import complete_lines, load_json, matrices, only
from waiting import wait_until

pytestmark = pytest.mark.story

ARGUMENTS = (
    *("DEVICE=cpu", "NUM_GPUS=1", "MODEL=tiny", "BLOCK_SIZE=64", "EVAL_SAMPLES=10", "BATCH_SIZE=4", "LOG_INTERVAL=1"),
    *("TARGET_SPARSITY=0.7", "PRUNING_FREQUENCY=2", "PRUNING_WARMUP=0.25", "PRUNING_RAMP_END=0.7"),
    *("OPTIMIZER=adamwprune", "ADAMWPRUNE_BASE=adamwspam", "SPAM_INTERVAL=15", "SPAM_WARMUP_STEPS=8", "MAX_ITERS=40"),
    *("GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "REUSE=n"),
)


def zeros_of(run) -> tuple[int, int, int]:
    """Return zeros and weights of the block matrices, and zeros elsewhere, using torch only."""
    model = torch.load(final_of(run), weights_only=True)["model"]
    matrices_of = {name: w for name, w in model.items() if w.ndim == 2}
    pruned = [w for name, w in matrices_of.items() if name.startswith("h.")]
    rest = [w for name, w in matrices_of.items() if not name.startswith("h.")]
    return (
        sum(int((w == 0).sum()) for w in pruned),
        sum(w.numel() for w in pruned),
        sum(int((w == 0).sum()) for w in rest),
    )


def test_adamwprune_reaches_its_target_and_a_resume_in_the_ramp_changes_nothing(clone, background, tmp_path):
    clone.check("defconfig-gpt2-cpu-quick")
    clone.check("test-matrix", *ARGUMENTS, f"RESULTS_DIR={tmp_path / 'whole'}")
    matrix = only(matrices(tmp_path / "whole"))
    run = only(matrix.glob("gpt2_*"))
    zeros, total, elsewhere = zeros_of(run)
    assert (zeros, elsewhere) == (round(0.7 * total), 0)
    assert load_json(run / "result.json")["sparsity"] == zeros / total
    sparsities = [line["sparsity"] for line in complete_lines(run / "metrics.jsonl") if "sparsity" in line]
    assert all(before <= after for before, after in pairwise(sparsities))
    assert (sparsities[0], sparsities[-1]) == (0.0, zeros / total)
    assert " 70.0% " in (matrix / "summary_report.txt").read_text()

    held = HeldTraining(tmp_path / "held", "step == 18")  # the ramp is from step 10 to 28
    runner = background("test-matrix", *ARGUMENTS, f"RESULTS_DIR={tmp_path / 'stopped'}", **held.environment)
    wait_until(lambda: held.holds() or runner.poll() is not None, "the run is in the ramp")
    assert runner.poll() is None
    os.killpg(runner.pid, signal.SIGINT)
    assert runner.wait() == 130
    stopped = only((tmp_path / "stopped").glob("*/gpt2_*"))
    middle = load_json(stopped / "result.json")
    assert middle["status"] == "stopped"
    assert 0 < middle["sparsity"] < 0.7
    clone.check("continue", f"TARGET={stopped.parent}")
    assert load_json(stopped / "result.json")["attempt"] == 2
    assert zeros_of(stopped) == (zeros, total, elsewhere)
    uninterrupted, resumed = (merged_metrics(path / "metrics.jsonl") for path in (run, stopped))
    for key in ("train/loss", "val/loss", "sparsity"):
        assert [at.values.get(key) for at in resumed] == [at.values.get(key) for at in uninterrupted], key
