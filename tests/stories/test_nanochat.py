"""Train nanochat's model of 2026 with its optimizer, kill the run and continue it, and sample from it."""

from __future__ import annotations

import pytest
import torch

from checkpoints import final_of
from gpt2.inference.restore import restore
from held_training import HeldTraining
from story import complete_lines, kill, load_json, matrices, only, processes_below
from waiting import wait_until

pytestmark = pytest.mark.story

STEPS, INTERVAL = 30, 10
SMALL = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=128", "NUM_GPUS=1", "BATCH_SIZE=8", "EVAL_SAMPLES=40"),
    *("WARMUP_STEPS=10", "EVAL_INTERVAL=10", "LOG_INTERVAL=1", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n"),
    *("ARCH=nanochat", "OPTIMIZER=muon-nanochat", "LEARNING_RATE=0.5", "TOKENIZER=byte"),
    *(f"MAX_ITERS={STEPS}", f"CHECKPOINT_INTERVAL={INTERVAL}"),
)


def losses_of(run):
    """Return the training losses by step; of a step that was trained twice, the later."""
    return {line["step"]: line["train/loss"] for line in complete_lines(run / "metrics.jsonl") if "train/loss" in line}


def test_a_killed_run_continues_with_the_same_losses_and_its_text_is_that_of_the_full_forward_pass(
    clone, background, tmp_path
):
    clone.check("defconfig")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    clone.check("test-matrix", *SMALL, f"RESULTS_DIR={whole}")
    held = HeldTraining(tmp_path / "held", f"step == {INTERVAL + 3}")
    runner = background("test-matrix", *SMALL, f"RESULTS_DIR={cut}", **held.environment)
    wait_until(lambda: held.holds() or runner.poll() is not None, "the run is behind a checkpoint")
    assert runner.poll() is None
    matrix = only(matrices(cut))
    kill(processes_below(matrix))
    runner.wait()
    wait_until(lambda: not processes_below(matrix), "everything has ended")
    clone.check("continue", f"TARGET={matrix}")
    runs = [only(folder.glob("*/gpt2_*")) for folder in (whole, cut)]
    assert losses_of(runs[0]) == losses_of(runs[1])
    assert sorted(losses_of(runs[0])) == list(range(STEPS))
    result = load_json(runs[0] / "result.json")
    assert result["initial_val_loss"] - result["final_val_loss"] > 1.0

    options = ("--prompt=def ", "--tokens=60", "--temperature=0")
    program = (clone.python, "-m", "gpt2.inference.generate", str(final_of(runs[0])), *options)
    text = clone.run(*program, PYTHONPATH=f"{clone.root}/lib:{clone.root}").stdout
    found = restore(final_of(runs[0]), "cpu")
    tokens, wanted = [int(token) for token in found.tokenizer.encode("def ")], []
    with torch.no_grad():
        for _ in range(60):
            wanted.append(int(found.model(torch.tensor([tokens + wanted]))[0][0, -1].argmax()))
    assert text.startswith("def " + found.tokenizer.decode(wanted))
    refused = clone.refused("export", f"CHECKPOINT={runs[0]}", f"OUTPUT={tmp_path / 'exported'}")
    assert "value_embeddings is True" in refused
