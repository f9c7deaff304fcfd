"""Train while the data are tokenized: kill the runner, change the text, and get the same run or one reason."""

from __future__ import annotations

import os
import random
import subprocess

import pytest

from kmatrix.records.attempts import read_all
from story import complete_lines, kill, only, processes_below
from waiting import wait_until

pytestmark = pytest.mark.story

SMALL = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=32", "BATCH_SIZE=4", "MAX_ITERS=200", "EVAL_SAMPLES=8"),
    *("EVAL_INTERVAL=100", "CHECKPOINT_INTERVAL=20", "AUTO_GENERATE_GRAPHS=n", "GPU_MONITOR=n", "LOG_INTERVAL=1"),
    *("WARMUP_STEPS=5", "CPU_THREADS=1", "DATASET=folder", "TOKENIZER=byte", "SHARD_TOKENS=4000", "VAL_PERCENT=20"),
    "DATA_STREAMING=y",
)
WORDS = ["rain", "sun", "tree", "river", "stone", "cloud", "light", "wind", "road", "sea"]


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    rng = random.Random(0)
    for number in range(300):
        (folder / f"{number:03}.txt").write_text(" ".join(rng.choices(WORDS, k=rng.randint(5, 60))) + f" {number}")
    return folder


def losses(run):
    """Return the training loss of each step; of repeated ones the last."""
    return {line["step"]: line["train/loss"] for line in complete_lines(run / "metrics.jsonl") if "train/loss" in line}


def run_of(folder):
    return only(path.parent for path in folder.glob("test_matrix_results_*/gpt2_*/run.json"))


def test_a_run_starts_with_the_first_shard_survives_a_kill_and_a_text_that_changes_ends_it(clone, notes, tmp_path):
    """The losses are those of prepared shards, to the last bit."""
    clone.check("defconfig")

    def words(name):
        return (*SMALL, f"DATA_PATH={notes}", f"DATA_DIR={tmp_path / name}", f"RESULTS_DIR={tmp_path / name}")

    at_once = [word for word in words("prepared") if word != "DATA_STREAMING=y"]
    clone.check("prepare-data", *at_once)
    clone.check("train", *words("prepared"))
    expected = losses(run_of(tmp_path / "prepared"))
    assert sorted(expected) == list(range(200))

    command = [clone.python, "-m", "kmatrix", "train", *words("streamed")]
    with subprocess.Popen(command, cwd=clone.root, env=clone.environment, stdout=subprocess.DEVNULL) as runner:
        wait_until(lambda: [*tmp_path.glob("streamed/test_matrix_results_*/gpt2_*/run.json")], "the run")
        run = run_of(tmp_path / "streamed")
        wait_until(lambda: len(losses(run)) > 30, "steps")
        kill(processes_below(run.parent))
        runner.kill()
    wait_until(lambda: not processes_below(run), "the end of the trainer and the preparation")
    folder = only((tmp_path / "streamed").glob("folder-byte-*"))
    assert len([*folder.glob("*_train_*.bin")]) > 1

    changed = notes / "007.txt"
    text, before = changed.read_text(), changed.stat().st_mtime_ns
    changed.write_text("other words")
    failed = clone.make("continue", f"TARGET={run.parent}")
    assert failed.returncode != 0
    assert "has changed while runs read it" in read_all(run)[-1].end.reason

    changed.write_text(text)
    os.utime(changed, ns=(before, before))
    continued = clone.make("continue", f"TARGET={run.parent}", "RETRY_FAILED=1")
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert losses(run) == expected
    assert not processes_below(run)
