"""Train, resume, sample and export nanochat's models through make, from a fresh clone."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2.data.shards import find, open_shard
from gpt2.inference.restore import restore
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

ARCHITECTURES = ("gpt2", "nanochat", "nanochat2025")
SMALL = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=128", "NUM_GPUS=1", "BATCH_SIZE=8", "EVAL_SAMPLES=40"),
    *("WARMUP_STEPS=10", "EVAL_INTERVAL=40"),
)


def load_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def matrix(session_clone, tmp_path_factory):
    """All architectures on the standard library, as bytes and as BPE tokens."""
    folder = tmp_path_factory.mktemp("nanochat")
    session_clone.config.unlink(missing_ok=True)
    assert session_clone.make("defconfig").returncode == 0
    axes = (
        "LEARNING_RATE=2e-3",
        "ARCH=" + ",".join(ARCHITECTURES),
        "TOKENIZER=byte,bpe",
        "BPE_VOCAB_SIZE=320",
        "MAX_ITERS=60",
    )
    completed = session_clone.make("test-matrix", *SMALL, *axes, f"RESULTS_DIR={folder}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (found,) = folder.glob("test_matrix_results_*")
    return found


def test_all_architectures_learn_and_are_ranked_by_bits_per_byte(matrix):
    runs = [path.parent for path in matrix.glob("*/result.json")]
    results = {run.name: load_json(run / "result.json") for run in runs}
    trained = {fields_of(run, "arch", "tokenizer") for run in runs}

    assert trained == {(arch, tokenizer) for arch in ARCHITECTURES for tokenizer in ("byte", "bpe")}
    for name, result in results.items():
        assert result["initial_val_loss"] - result["final_val_loss"] > 1.0, name
    assert "Ranking by mean bits per byte" in (matrix / "summary_report.txt").read_text()


def run_of(matrix: Path, arch: str) -> Path:
    """Return the run of an architecture on bytes."""
    runs = [path.parent for path in matrix.glob("*/run.json")]
    return next(run for run in runs if fields_of(run, "arch", "tokenizer") == (arch, "byte"))


def fields_of(run: Path, *names: str) -> tuple:
    train = load_json(run / "run.json")["train"]
    return tuple(train[name] for name in names)


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
def test_a_sampled_text_equals_the_full_forward_pass(clone, matrix, arch):
    run = run_of(matrix, arch)
    completed = clone.make("sample", f"CHECKPOINT={run}", "PROMPT=def ", "TOKENS=200", "TEMPERATURE=0")
    assert completed.returncode == 0, completed.stderr
    found = restore(run / "checkpoints" / "final.pt", "cpu")
    tokens = [int(token) for token in found.tokenizer.encode("def ")]
    wanted = []
    with torch.no_grad():  # the text outgrows neither the context here, nor the cache's first capacity
        for _ in range(100):
            wanted.append(int(found.model(torch.tensor([tokens + wanted]))[0][0, -1].argmax()))

    assert completed.stdout.startswith("def " + found.tokenizer.decode(wanted))


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
def test_a_killed_run_continues_with_the_same_losses(clone, background, tmp_path, arch):
    arguments = (*SMALL, f"ARCH={arch}", "OPTIMIZER=muon-nanochat", "LEARNING_RATE=0.5", "MAX_ITERS=60")
    arguments = (*arguments, "CHECKPOINT_INTERVAL=10", "LOG_INTERVAL=1")
    clone.config.unlink(missing_ok=True)
    assert clone.make("defconfig").returncode == 0
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert clone.make("test-matrix", *arguments, f"RESULTS_DIR={whole}").returncode == 0
    runner = background("test-matrix", *arguments, f"RESULTS_DIR={cut}")

    def trained() -> bool:
        assert runner.poll() is None, (tmp_path / "output_0.txt").read_text()
        return any(load_json(path)["checkpoints"] for path in cut.glob("*/*/checkpoints/index.json"))

    wait_until(trained, "a checkpoint was written")
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    (interrupted,) = cut.glob("test_matrix_results_*")
    completed = clone.make("continue", f"TARGET={interrupted}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    losses = [losses_of(next(folder.glob("*/*/metrics.jsonl"))) for folder in (whole, cut)]

    assert losses[0] == losses[1]
    assert len(losses[0]) == 60


def losses_of(metrics: Path) -> dict[int, float]:
    """Return the training losses by step; of a step that was trained twice, the later."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def test_the_export_of_2025_gives_transformers_the_same_logits(clone, matrix, tmp_path):
    transformers = pytest.importorskip("transformers")
    run = run_of(matrix, "nanochat2025")
    folder = tmp_path / "exported"
    assert clone.make("export", f"CHECKPOINT={run}", f"OUTPUT={folder}").returncode == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = restore(run / "checkpoints" / "final.pt", "cpu").model
    (path,) = find(Path(load_json(run / "run.json")["train"]["data_path"]), "val")
    window = torch.tensor(np.asarray(open_shard(path)[:128], dtype=np.int64))[None]
    with torch.no_grad():
        assert torch.allclose(theirs(window).logits, ours(window)[0], rtol=0, atol=1e-4)


def test_the_export_of_2026_is_refused_with_the_parts_that_have_no_layout(clone, matrix, tmp_path):
    run = run_of(matrix, "nanochat")
    completed = clone.make("export", f"CHECKPOINT={run}", f"OUTPUT={tmp_path / 'exported'}")

    assert completed.returncode == 2
    assert "value_embeddings is True" in completed.stderr
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("DROPOUT=0.1",), "has no dropout"),
        (("N_KV_HEAD=3",), "N_KV_HEAD=3 does not divide the 4 attention heads"),
        (("WINDOW_PATTERN=SSX",), "WINDOW_PATTERN=SSX: expected a letter L or S per layer"),
        (("BIAS=y",), "no biases"),
        (("MODEL=custom", "N_EMBD=16", "N_HEAD=2", "N_LAYER=2"), "needs a width of at least 24"),
    ],
)
def test_a_part_that_nanochat_does_not_have_is_refused(clone, arguments, message):
    clone.config.unlink(missing_ok=True)
    assert clone.make("defconfig").returncode == 0
    completed = clone.make("plan", *SMALL, "ARCH=nanochat", *arguments)

    assert completed.returncode == 2
    assert message in re.sub(r"\s+", " ", completed.stdout + completed.stderr)
    assert "Traceback" not in completed.stderr
