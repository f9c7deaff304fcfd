"""Reproduce a run: equal bit for bit, and what has changed is named."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from story import load_json, matrices, only

pytestmark = pytest.mark.story

TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "EVAL_INTERVAL=5", "LOG_INTERVAL=1", "AUTO_GENERATE_GRAPHS=n"),
    *("OPTIMIZER=adamw", "NUM_GPUS=2", "DROPOUT=0.1", "MAX_ITERS=12"),
)


def verdict(printed: str) -> str:
    """Return the verdict at the end of the output of `make reproduce`."""
    return printed[printed.rindex(" and its repetition ") :]


def test_an_unchanged_run_reproduces_bit_for_bit_and_changes_are_named(clone, tmp_path):
    """Two ranks with dropout. Then change a logged loss and the seed; the trainer of the checkout is not used."""
    here = f"RESULTS_DIR={tmp_path}"
    clone.check("defconfig-gpt2-cpu-quick")
    clone.check("train", *TINY, here)
    matrix = only(matrices(tmp_path))
    first = only(matrix.glob("gpt2_*"))
    provenance = load_json(first / "run.json")["provenance"]
    assert provenance["git_commit"] == clone.run("git", "rev-parse", "HEAD").stdout.strip()

    said = verdict(clone.check("reproduce", f"RUN={first}", here))
    numbers = re.search(r"equal bit for bit: (\d+) values in 13 steps", said)[1]
    assert int(numbers) > 4 * 12
    assert "equal bit for bit: the final weights, SHA-256" in said
    second = only(path for path in tmp_path.glob("*/gpt2_*") if path != first)
    assert load_json(second / "result.json")["run_id"] == load_json(first / "result.json")["run_id"]

    tampered = shutil.copytree(matrix, tmp_path / "tampered") / first.name
    lines = [json.loads(line) for line in (tampered / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"train/loss": 5.25} if line["step"] == 7 and "train/loss" in line else line for line in lines]
    (tampered / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = clone.root / "gpt2" / "train.py"
    source.write_text(source.read_text() + "\nraise SystemExit(9)\n")  # the matrix has its own copy
    completed = clone.kmatrix("reproduce", f"RUN={tampered}", here)
    said = verdict(completed.stdout)
    assert f"not equal: 1 of {numbers} values in 13 steps differ" in said
    assert "first at step 7: train/loss 5.25 -> " in said
    assert "equal bit for bit: the final weights" in said
    config = tampered / ".config"
    config.write_text(config.read_text().replace("CONFIG_GPT2_SEED=1337", "CONFIG_GPT2_SEED=7"))
    completed = clone.kmatrix("reproduce", f"RUN={tampered}", here)
    assert completed.returncode == 1, completed.stdout + completed.stderr
    said = verdict(completed.stdout)
    assert "the configuration differs in seed 1337 -> 7" in said
    assert "first at step 0: " in said

    comparison = clone.check("compare", f"BASE={matrix}", f"NEW={matrices(tmp_path)[-1]}")
    assert "GPT2_SEED 1337 -> 7" in comparison
    assert "(one seed, not significant)" in comparison
