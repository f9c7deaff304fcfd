"""Reproduce a run and record everything that may have changed its result."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from story import load_json, matrices, only

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "EVAL_INTERVAL=5", "LOG_INTERVAL=1", "AUTO_GENERATE_GRAPHS=n"),
)


def verdict(completed: subprocess.CompletedProcess[str]) -> str:
    """Return the verdict at the end of the output of `make reproduce`."""
    return completed.stdout[completed.stdout.rindex(" and its repetition ") :]


def change_lines(path, change) -> None:
    """Change each line of a log."""
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_unchanged_run_reproduces_bit_for_bit_and_a_changed_one_does_not(clone, tmp_path):
    """Two ranks with dropout. Then change a loss, the seed, and the code of the trainer."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    arguments = (*TINY, "OPTIMIZER=adamw", "NUM_GPUS=2", "DROPOUT=0.1", "MAX_ITERS=12", f"RESULTS_DIR={tmp_path}")
    completed = clone.make("train", *arguments, OMP_PROC_BIND="false", KMATRIX_SECRET_TOKEN="planted-0123456789")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    matrix = only(matrices(tmp_path))
    first = only(matrix.glob("gpt2_*"))

    provenance, used = load_json(first / "run.json")["provenance"], load_json(first / "run_used.json")
    assert provenance["git_commit"] == clone.run("git", "rev-parse", "HEAD").stdout.strip()
    assert provenance["environment"]["OMP_PROC_BIND"] == "false"
    assert used["software"]["torch"] == provenance["versions"]["torch"]
    assert used["gpus"] == []
    assert not any(b"planted-0123456789" in path.read_bytes() for path in matrix.rglob("*") if path.is_file())

    completed = clone.make("reproduce", f"RUN={first}", f"RESULTS_DIR={tmp_path}", OMP_PROC_BIND="false")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    numbers = re.search(r"equal bit for bit: (\d+) values in 13 steps", verdict(completed))[1]
    assert int(numbers) > 4 * 12
    assert "equal bit for bit: the final weights, SHA-256" in verdict(completed)
    assert "the results must be equal" in verdict(completed)
    second = only(path for path in tmp_path.glob("*/gpt2_*") if path != first)
    first_result, second_result = load_json(first / "result.json"), load_json(second / "result.json")
    assert (second_result["run_id"], second_result["final_val_loss"]) == (
        first_result["run_id"],
        first_result["final_val_loss"],
    )

    tampered = shutil.copytree(matrix, tmp_path / "tampered") / first.name
    change_lines(
        tampered / "metrics.jsonl",
        lambda line: line | {"train/loss": 5.25} if line["step"] == 7 and "train/loss" in line else line,
    )
    config = tampered / ".config"
    config.write_text(config.read_text().replace("CONFIG_GPT2_SEED=1337", "CONFIG_GPT2_SEED=7"))
    completed = clone.kmatrix("reproduce", f"RUN={tampered}", f"RESULTS_DIR={tmp_path}", OMP_PROC_BIND="false")
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert "the configuration differs in seed 1337 -> 7" in verdict(completed)
    assert "first at step 0: " in verdict(completed)
    assert "final weights, most " in verdict(completed)

    third = matrices(tmp_path)[-1]  # the run with seed 7, next to the one with seed 1337
    comparison = clone.make("compare", f"BASE={matrix}", f"NEW={third}")
    assert comparison.returncode == 0, comparison.stderr
    assert "GPT2_SEED 1337 -> 7" in comparison.stdout
    assert "not significant (one seed)" in comparison.stdout
    assert "better" not in comparison.stdout
    comparison = clone.kmatrix("compare", f"BASE={first}", f"NEW={second}", "JSON=1")
    measures = only(json.loads(comparison.stdout)["configurations"])["measures"]
    assert (measures["final loss"]["difference"], measures["final loss"]["word"]) == (0.0, "not distinguishable")
    assert measures["speed"]["base"] > 0

    config.write_text((first / ".config").read_text())
    source = clone.root / "gpt2" / "train.py"
    was = source.read_text()
    try:
        source.write_text(was + "\n# not as it was\n")
        completed = clone.kmatrix("reproduce", f"RUN={tampered}", f"RESULTS_DIR={tmp_path}", OMP_PROC_BIND="false")
    finally:
        source.write_text(was)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert (
        f"check out the old code: git worktree add ../kmatrix-then {provenance['git_commit'][:10]}" in completed.stdout
    )
    assert f"not equal: 1 of {numbers} values in 13 steps differ" in verdict(completed)
    assert "first at step 7: train/loss 5.25 -> " in verdict(completed)
    assert "equal bit for bit: the final weights" in verdict(completed)
    assert "the results may differ: the code of the trainer changed: gpt2/train.py" in verdict(completed)
    patch = matrices(tmp_path)[-1] / "code.patch"
    assert "+# not as it was" in patch.read_text()
