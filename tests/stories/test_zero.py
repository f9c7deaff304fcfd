"""Shard optimizer states over two ranks: the same numbers, half of the states, also after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import final_of
from held_training import HeldTraining
from kmatrix.records.runs import merged_metrics
from story import load_json, matrices, only, processes_of
from waiting import wait_until

pytestmark = pytest.mark.story

STEPS, HALF = 8, 4
ARGUMENTS = (
    *("DEVICE=cpu", "NUM_GPUS=2", "MODEL=tiny", "BLOCK_SIZE=64", "BATCH_SIZE=2", "GLOBAL_BATCH=8", "CPU_THREADS=1"),
    *(f"MAX_ITERS={STEPS}", f"CHECKPOINT_INTERVAL={HALF}", "LOG_INTERVAL=1", "EVAL_SAMPLES=8", "GPU_MONITOR=n"),
    *("OPTIMIZER=muon", "AUTO_GENERATE_GRAPHS=n", "REUSE=n"),
)


def losses(run: Path) -> list[float]:
    lines = merged_metrics(run / "metrics.jsonl")
    return [line.values["train/loss"] for line in lines if "train/loss" in line.values]


def differing_parts(one: Path, two: Path) -> list[str]:
    """Return which of weights and optimizer states differ in a bit at the end of two runs, using torch only."""
    ends = [torch.load(final_of(run), weights_only=True) for run in (one, two)]
    return [part for part in ("model", "optimizer") if not equal(ends[0][part], ends[1][part])]


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_sharded_states_give_the_same_bits_and_a_killed_run_continues(clone, background, tmp_path):
    clone.check("defconfig-gpt2-cpu-quick")
    clone.check("test-matrix", *ARGUMENTS, "ZERO_STAGE=0,1", f"RESULTS_DIR={tmp_path / 'both'}")
    runs = {load_json(path)["train"]["zero_stage"]: path.parent for path in (tmp_path / "both").glob("*/*/run.json")}
    plain, sharded = runs[0], runs[1]
    assert losses(sharded) == losses(plain)
    assert len(losses(plain)) == STEPS
    assert differing_parts(plain, sharded) == []
    whole, parts = (load_json(run / "result.json")["optimizer_state_mib"] for run in (plain, sharded))
    assert 0.45 <= parts / whole <= 0.55  # whole tensors

    held = HeldTraining(tmp_path / "held", f"step == {HALF + 2}")
    words = (*ARGUMENTS, "ZERO_STAGE=1", f"RESULTS_DIR={tmp_path / 'killed'}")
    runner = background("test-matrix", *words, **held.environment)
    wait_until(lambda: held.holds() or runner.poll() is not None, "the run is behind a checkpoint")
    assert runner.poll() is None
    killed = only((tmp_path / "killed").glob("*/gpt2_*"))
    for rank in processes_of(killed)["rank"]:
        rank.kill()
    assert runner.wait() != 0
    clone.check("continue", f"TARGET={only(matrices(tmp_path / 'killed'))}")
    assert load_json(killed / "result.json")["attempt"] == 2
    assert losses(killed) == losses(sharded)
    assert differing_parts(killed, sharded) == []
