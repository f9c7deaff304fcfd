"""Follow examples of the pages literally, in a clone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from held_training import HeldTraining
from pages import DOCS, fenced_blocks
from story import load_json, matrices, only, processes_of
from waiting import wait_until

pytestmark = pytest.mark.nightly


def test_the_python_example_of_the_page_plans_runs_and_reads_a_matrix(clone):
    lines = fenced_blocks(DOCS / "from-python.md", "python")[0]
    completed = clone.run(clone.python, "-c", lines, PYTHONPATH=f"{clone.root / 'lib'}")
    assert completed.returncode == 0, completed.stderr[-3000:]
    *progress, adamw, muon = completed.stdout.splitlines()
    assert adamw.split()[:2] == ["gpt2_adamw_1cpu", "finished"]
    assert muon.split()[:2] == ["gpt2_muon_1cpu", "finished"]
    assert all(float(number) > 0 for line in (adamw, muon) for number in line.split()[2:])
    assert any(line.startswith("gpt2_muon_1cpu running") for line in progress)
    (matrix,) = (clone.root / "results").glob("test_matrix_results_*")
    assert (matrix / "gpt2_adamw_1cpu" / "result.json").is_file()


def test_an_optimizer_and_a_part_of_a_model_are_three_small_edits_each_that_train_resume_and_are_reported(
    clone, background, tmp_path
):
    """Follows docs/optimizers.md and docs/developing.md literally, up to a matrix over both."""
    root = clone.root
    signsgd, relu2 = (example(root / "docs" / page) for page in ("optimizers.md", "developing.md"))
    optimizer = [
        ("gpt2/optim/builders.py", "BUILDERS: dict[str, Builder] = {", f"{signsgd}\n\n"),
        ("gpt2/optim/builders.py", '    "sgd": sgd,', '    "signsgd": signsgd,\n'),
        ("gpt2/Kconfig", "config GPT2_OPTIMIZER_ADAM\n", 'config GPT2_OPTIMIZER_SIGNSGD\n\tbool "signsgd: signs"\n\n'),
    ]
    part = [
        ("gpt2/model/relu2.py", "", relu2),
        ("gpt2/model/registry.py", "from gpt2.model.nanochat", "from gpt2.model.relu2 import ReluSquaredGPT\n"),
        ("gpt2/model/registry.py", '"gpt2": GPT', '"relu2": ReluSquaredGPT, '),
        ("gpt2/Kconfig", "config GPT2_ARCH_GPT2\n", 'config GPT2_ARCH_RELU2\n\tbool "relu2: squared ReLUs"\n\n'),
    ]
    for patch in (optimizer, part):
        assert sum(len(text.splitlines()) for _, _, text in patch) <= 40
        for name, mark, text in patch:
            insert_before(root / name, mark, text)
    clone.check("defconfig-gpt2-cpu-quick")
    arguments = ["OPTIMIZER=signsgd", "LEARNING_RATE=1e-3", "NUM_GPUS=1", "MAX_ITERS=30", "EVAL_SAMPLES=20"]
    arguments += ["CHECKPOINT_INTERVAL=10", "REUSE=n"]
    clone.check("test-matrix", *arguments, "ARCH=gpt2,relu2", f"RESULTS_DIR={tmp_path / 'whole'}")
    whole = results(tmp_path / "whole")
    assert set(whole) == {"gpt2", "relu2"}
    assert whole["gpt2"]["final_val_loss"] != whole["relu2"]["final_val_loss"]
    assert all(result["initial_val_loss"] - result["final_val_loss"] > 0.5 for result in whole.values())
    assert "signsgd" in clone.check("summary", f"TARGET={only(matrices(tmp_path / 'whole'))}")

    held = HeldTraining(tmp_path / "held", "step == 13")
    arguments += ["ARCH=relu2", f"RESULTS_DIR={tmp_path / 'cut'}"]
    runner = background("test-matrix", *arguments, **held.environment)
    wait_until(lambda: held.holds() or runner.poll() is not None, "the run is behind a checkpoint")
    runner.kill()
    runner.wait()
    matrix = only(matrices(tmp_path / "cut"))
    wait_until(lambda: not processes_of(matrix)["rank"], "its trainer has ended with it")
    clone.check("continue", f"TARGET={matrix}")
    assert results(tmp_path / "cut")["relu2"]["final_val_loss"] == whole["relu2"]["final_val_loss"]


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a matrix by architecture."""
    found = folder.glob("*/*/result.json")
    return {load_json(path.parent / "run.json")["train"]["arch"]: load_json(path) for path in found}


def example(page: Path) -> str:
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return code


def insert_before(path: Path, mark: str, text: str) -> None:
    """Insert a text before a mark in a file, as a reader of the page does."""
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    position = content.index(mark)
    path.write_text(content[:position] + text + content[position:], encoding="utf-8")
