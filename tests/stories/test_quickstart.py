"""Train from a fresh clone to a comparison, with the real make, torchrun and trainer on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from story import load_json, matrices, only

pytestmark = pytest.mark.story

GRAPHS = ("loss_vs_steps", "loss_vs_tokens", "loss_vs_time", "final_loss_by_run")


def check_picture(path: Path) -> None:
    with Image.open(path) as picture:
        assert picture.width >= 800
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10, f"{path.name} is blank"


def test_the_quickstart_compares_two_optimizers(clone):
    """Without a configuration, one command trains two optimizers on one and two ranks and compares them."""
    printed = clone.check("quickstart", "MAX_ITERS=40", "EVAL_SAMPLES=20")
    matrix = only(matrices(clone.root))
    runs = [load_json(path) for path in sorted(matrix.glob("*/result.json"))]
    planned = [load_json(path) for path in sorted(matrix.glob("*/run.json"))]
    assert sorted((run["axes"]["optimizer"], run["train"]["num_gpus"]) for run in planned) == [
        ("adamw", 1),
        ("adamw", 2),
        ("muon", 1),
        ("muon", 2),
    ]
    assert len({run["train"]["data_sha256"] for run in planned}) == 1
    for run in runs:
        assert (run["status"], run["step"]) == ("finished", 40)
        assert run["final_val_loss"] < run["initial_val_loss"]
    assert f"{matrix.name}: 4 finished" in printed
    assert "summary_report.txt" in printed
    assert (matrix / "report.html").stat().st_size > 10_000
    summary = (matrix / "summary_report.txt").read_text()
    assert "one seed per configuration is not evidence" in summary
    assert "ranks on the CPU" in summary
    assert "Balance: CV = " in summary
    for name in GRAPHS:
        check_picture(matrix / "graphs" / f"{name}.png")
    assert not clone.config.exists()

    # Reports are functions of the runs: deleted ones are made again.
    before, results = matrix / "results.json", load_json(matrix / "results.json")["runs"]
    for name in ("summary_report.txt", "results.json", "graphs/loss_vs_steps.png"):
        (matrix / name).unlink()
    clone.check("summary", "update-graphs", f"TARGET={matrix}")
    assert load_json(before)["runs"] == results
    check_picture(matrix / "graphs" / "loss_vs_steps.png")
