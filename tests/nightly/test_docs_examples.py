"""Follow examples of the pages literally, in a clone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import DOCS, fenced_blocks
from story import load_json

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


def test_a_custom_optimizer_and_a_custom_model_take_three_edits_each(clone, tmp_path):
    """Follows docs/optimizers.md and docs/developing.md literally, up to a matrix over both."""
    root, edit = clone.root, insert_before
    signsgd, relu2 = (example(root / "docs" / page) for page in ("optimizers.md", "developing.md"))
    edit(root / "gpt2/optim/builders.py", "BUILDERS: dict[str, Builder] = {", f"{signsgd}\n\n")
    edit(root / "gpt2/optim/builders.py", '    "sgd": sgd,', '    "signsgd": signsgd,\n')
    (root / "gpt2/model/relu2.py").write_text(relu2, encoding="utf-8")
    registry = root / "gpt2/model/registry.py"
    edit(registry, "from gpt2.model.nanochat", "from gpt2.model.relu2 import ReluSquaredGPT\n")
    edit(registry, '"gpt2": GPT', '"relu2": ReluSquaredGPT, ')
    kconfig = root / "gpt2/Kconfig"
    edit(
        kconfig,
        "config GPT2_OPTIMIZER_ADAM\n",
        'config GPT2_OPTIMIZER_SIGNSGD\n\tbool "signsgd: the sign of the gradient"\n\n',
    )
    edit(kconfig, "config GPT2_ARCH_GPT2\n", 'config GPT2_ARCH_RELU2\n\tbool "relu2: GPT-2 with squared ReLUs"\n\n')
    arguments = (
        "OPTIMIZER=signsgd",
        "ARCH=gpt2,relu2",
        "LEARNING_RATE=1e-3",
        "NUM_GPUS=1",
        "MAX_ITERS=30",
        "EVAL_SAMPLES=20",
    )
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    completed = clone.make("test-matrix", *arguments, f"RESULTS_DIR={tmp_path}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    results = {
        load_json(path.parent / "run.json")["train"]["arch"]: load_json(path)
        for path in tmp_path.glob("*/*/result.json")
    }
    assert set(results) == {"gpt2", "relu2"}
    assert results["gpt2"]["final_val_loss"] != results["relu2"]["final_val_loss"]
    assert all(result["initial_val_loss"] - result["final_val_loss"] > 0.5 for result in results.values())


def example(page: Path) -> str:
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return code


def insert_before(path: Path, mark: str, text: str) -> None:
    """Insert a text before a mark in a file, as a reader of the page does."""
    content = path.read_text(encoding="utf-8")
    position = content.index(mark)
    path.write_text(content[:position] + text + content[position:], encoding="utf-8")
