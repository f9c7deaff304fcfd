"""INIT_FROM: runs start from the weights of a checkpoint, or of an imported model, and know which these were."""

from __future__ import annotations

import os
import shutil

import pytest

from story import complete_lines, load_json, matrices, only

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

SMALL = (
    *(
        "DEVICE=cpu",
        "NUM_GPUS=1",
        "MODEL=custom",
        "N_LAYER=1",
        "N_HEAD=2",
        "N_EMBD=16",
        "BLOCK_SIZE=32",
        "BATCH_SIZE=4",
    ),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=16", "CPU_THREADS=1", "MAX_ITERS=4", "EVAL_INTERVAL=2", "LOG_INTERVAL=1"),
    *("OPTIMIZER=adamw", "REUSE=n"),
)


def losses(run):
    return [line["val/loss"] for line in complete_lines(run / "metrics.jsonl") if "val/loss" in line]


def test_runs_start_from_a_checkpoint_and_their_ids_from_its_hash(clone, tmp_path):
    results = tmp_path / "results"

    def make(*arguments, status=0):
        completed = clone.make(*arguments, f"RESULTS_DIR={results}")  # other tests use this clone, too
        assert completed.returncode == status, completed.stdout + completed.stderr
        return completed.stdout + completed.stderr

    # A run whose weights others start from; a copy of its checkpoint has the same weights.
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    make("train", *SMALL)
    before = only(matrices(results))
    first = only(before.glob("gpt2_*"))
    checkpoint = (first / "checkpoints" / "final.pt").resolve()
    copy = tmp_path / "copy.pt"
    shutil.copy(checkpoint, copy)
    name = os.path.relpath(copy, clone.root)  # paths are relative to the checkout

    # What does not exist or does not fit is refused before anything is made, with the difference.
    assert "INIT_FROM=nothing.pt is not a checkpoint" in make("train", *SMALL, "INIT_FROM=nothing.pt", status=2)
    other = make("test-matrix-dry-run", *SMALL, "N_EMBD=32", f"INIT_FROM={name}", status=2)
    assert "n_embd is 16 there and 32 here" in other
    assert matrices(results) == [before]

    # An axis: random weights, and the same weights under two names, which are one run.
    axis = f"MATRIX_GPT2_INIT_FROM=none {name} {checkpoint}"
    dry = make("test-matrix-dry-run", *SMALL, axis)
    assert "1 duplicate" in dry
    make("test-matrix", *SMALL, axis, "MAX_ITERS=4", "CHECKPOINT_INTERVAL=2", "LR=1e-4")
    matrix = only(set(matrices(results)) - {before})
    runs = {load_json(run / "run.json")["train"]["init_from"]: run for run in matrix.glob("gpt2_*")}
    random, started = runs.pop(""), runs.pop(str(copy))
    assert losses(random)[0] == losses(first)[0]
    assert losses(started)[0] == pytest.approx(losses(first)[-1], abs=1e-6)
    train = load_json(started / "run.json")["train"]
    assert len(train["init_sha256"]) == 64
