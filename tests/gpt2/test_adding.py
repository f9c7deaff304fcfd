"""The patches of the documentation add an optimizer and a part of a model, which train, resume and are reported."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from clones import background, clone, pristine  # noqa: F401  (fixtures)
from factories import train_config
from gpt2.model.registry import build_model
from held_training import HeldTraining
from kmatrix.errors import ConfigError
from pages import DOCS
from story import kill, load_json, matrices, only, processes_of
from waiting import wait_until

MOST_LINES = 40
RUN = ("OPTIMIZER=signsgd", "LEARNING_RATE=1e-3", "NUM_GPUS=1", "MAX_ITERS=12", "EVAL_SAMPLES=8")
SAVED = ("CHECKPOINT_INTERVAL=5", "REUSE=n", "GPU_MONITOR=n")


@pytest.mark.process
def test_an_optimizer_and_a_part_of_a_model_are_a_small_patch_each_and_train_resume_and_are_reported(
    clone,  # noqa: F811
    background,  # noqa: F811
    tmp_path,
):
    for page in ("optimizers.md", "developing.md"):
        apply(patch_of(DOCS / page), clone.root)
    clone.check("defconfig-gpt2-cpu-quick")
    arguments = (*RUN, *SAVED)
    clone.check("test-matrix", *arguments, "MLP_GATE=n,y", f"RESULTS_DIR={tmp_path / 'whole'}")
    matrix = only(matrices(tmp_path / "whole"))
    runs = {
        load_json(path.parent / "run.json")["train"]["mlp_gate"]: path.parent for path in matrix.glob("*/result.json")
    }
    plain, gated = (load_json(runs[gate] / "result.json") for gate in (False, True))
    assert plain["final_val_loss"] != gated["final_val_loss"]
    assert all(result["initial_val_loss"] - result["final_val_loss"] > 0.5 for result in (plain, gated))
    weights = final_weights(runs[True])
    assert gated["params"] == sum(tensor.numel() for tensor in weights.values())  # as planned
    assert re.search(r"1 signsgd, mlpgate y .* leader", clone.check("summary", f"TARGET={matrix}"))
    page = (matrix / "report.html").read_text(encoding="utf-8")
    assert re.search(r'"name":"signsgd, mlpgate y","colour":\d', page)

    held = HeldTraining(tmp_path / "held", "step == 8")
    runner = background("test-matrix", *arguments, "MLP_GATE=y", f"RESULTS_DIR={tmp_path / 'cut'}", **held.environment)
    wait_until(lambda: held.holds() or runner.poll() is not None, "the run is behind a checkpoint")
    matrix = only(matrices(tmp_path / "cut"))
    found = processes_of(matrix)
    kill([*found["runner"], *found["program"]])
    wait_until(lambda: not processes_of(matrix)["rank"], "its trainer has ended with it")
    runner.wait()
    clone.check("continue", f"TARGET={matrix}")
    resumed = final_weights(only(matrix.glob("*/result.json")).parent)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="mamba") as raised:
        build_model(train_config(arch="mamba"))
    assert "gpt2" in raised.value.why


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run / "checkpoints/step_00000012.pt", weights_only=True)["model"]
    return found


def patch_of(page: Path) -> str:
    (text,) = re.findall(r"<!-- patch -->\n```diff\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return text


def apply(patch: str, root: Path) -> None:
    """Apply a patch, as a reader of the page does."""
    added = [line for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(added) <= MOST_LINES
    subprocess.run(["git", "apply"], cwd=root, input=patch, text=True, check=True)
