"""Prune through make: excluded combinations, a reached target, and masks that survive a resume."""

from __future__ import annotations

import json
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from slow_training import SlowTraining
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

SMALL = ("DEVICE=cpu", "NUM_GPUS=1", "MODEL=tiny", "BLOCK_SIZE=64", "EVAL_SAMPLES=10", "BATCH_SIZE=4", "LOG_INTERVAL=1")
RAMP = ("TARGET_SPARSITY=0.7", "PRUNING_FREQUENCY=5", "PRUNING_WARMUP=0.25", "PRUNING_RAMP_END=0.7")
EVERY_OTHER = ("PRUNING_FREQUENCY=2", "PRUNING_WARMUP=0")
QUIET = ("SAVE_BEST=n", "EVAL_INTERVAL=100", "AUTO_GENERATE_GRAPHS=n", "GPU_MONITOR=n")
COUNT_ZEROS = """
import sys, torch
sys.path.insert(0, {root!r})
value = torch.load({path!r}, weights_only=True)
pruned = [w for name, w in value["model"].items() if name.startswith("h.") and w.ndim == 2]
rest = [w for name, w in value["model"].items() if not name.startswith("h.") and w.ndim == 2]
print(sum(int((w == 0).sum()) for w in pruned), sum(w.numel() for w in pruned), sum(int((w == 0).sum()) for w in rest))
"""


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def newest(folder: Path) -> Path:
    return max(folder.glob("test_matrix_results_*"))


def count_zeros(clone, checkpoint: Path) -> tuple[int, int, int]:
    """Return zeros and weights of the block matrices, and zeros elsewhere, using torch only."""
    completed = clone.run(clone.python, "-c", COUNT_ZEROS.format(root=str(clone.root), path=str(checkpoint)))
    assert completed.returncode == 0, completed.stderr
    zeros, total, elsewhere = map(int, completed.stdout.split())
    return zeros, total, elsewhere


def test_invalid_combinations_are_excluded_with_a_reason_and_refused_as_single_runs(clone):
    """The dry run prints a reason for each excluded cell, and valid cells remain."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    arguments = (
        "OPTIMIZER=adamwspam,adamwprune,muon,schedulefree",
        "PRUNING=none,magnitude,movement,state",
        "NUM_GPUS=1",
    )
    dry = clone.make("test-matrix-dry-run", *arguments)
    assert dry.returncode == 0, dry.stdout + dry.stderr
    runs = [line.split()[2] for line in dry.stdout.splitlines() if line.startswith("run ")]
    assert sorted(runs) == sorted(
        f"gpt2_{pair}_1cpu"
        for pair in (
            "adamwspam_pruningnone",
            "adamwspam_pruningmagnitude",
            "adamwspam_pruningmovement",
            "adamwprune_pruningnone",
            "adamwprune_pruningstate",
            "muon_pruningnone",
            "schedulefree_pruningnone",
        )
    )
    excluded = "\n".join(line for line in dry.stdout.splitlines() if line.startswith("excluded "))
    for reason in (
        "adamwprune prunes by its own moments",
        "uses the moments of adamwprune",
        "compute the update of a matrix as a whole",
        "evaluated at an average",
    ):
        assert reason in excluded
    single = clone.make("test-matrix-dry-run", "OPTIMIZER=adamwprune", "PRUNING=magnitude", "NUM_GPUS=1")
    assert single.returncode == 2
    assert "adamwprune prunes by its own moments" in single.stdout + single.stderr


def test_the_matrix_of_the_original_project_is_one_command(clone):
    """SPAM with magnitude and movement pruning, and adamwprune on SPAM: three runs on four GPUs."""
    completed = clone.make("defconfig-gpt2-finewebedu-a10gx4-prune")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    dry = clone.make("test-matrix-dry-run")
    assert dry.returncode == 0, dry.stdout + dry.stderr
    assert [line.split()[2] for line in dry.stdout.splitlines() if line.startswith("run ")] == [
        "gpt2_adamwspam_pruningmagnitude_4gpu",
        "gpt2_adamwspam_pruningmovement_4gpu",
        "gpt2_adamwprune_4gpu",
    ]
    assert "\nexcluded " not in dry.stdout


def test_adamwprune_without_pruning_is_its_own_baseline(clone, tmp_path):
    """Two configurations with clear names, of which the first trains exactly as its base and prunes nothing."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    steps = ("MAX_ITERS=12", "WARMUP_FRACTION=", "WARMUP_STEPS=2", "LEARNING_RATE=1e-3", *SMALL, *QUIET)
    pair = (
        *EVERY_OTHER,
        "OPTIMIZER=adamwprune",
        "PRUNING=none,state",
        "ADAMWPRUNE_BASE=adamwadv",
        f"RESULTS_DIR={tmp_path}/pair",
    )
    completed = clone.make("test-matrix", *steps, *pair)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    runs = {
        path.parent.name: load(path.parent / "result.json") for path in newest(tmp_path / "pair").glob("*/run.json")
    }
    assert {name: result["sparsity"] for name, result in runs.items()} == {
        "gpt2_adamwprune_pruningnone_1cpu": None,
        "gpt2_adamwprune_pruningstate_1cpu": pytest.approx(0.5, abs=1e-5),
    }

    base = clone.make("test-matrix", *steps, "OPTIMIZER=adamwadv", f"RESULTS_DIR={tmp_path}/base")
    assert base.returncode == 0, base.stdout + base.stderr
    (other,) = [load(path.parent / "result.json") for path in newest(tmp_path / "base").glob("*/run.json")]
    assert runs["gpt2_adamwprune_pruningnone_1cpu"]["final_val_loss"] == other["final_val_loss"]


def test_adamwprune_reaches_its_target_and_a_resume_keeps_its_masks(clone, tmp_path):
    """A run that is stopped in the ramp and continued equals one without a stop."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    arguments = (
        "OPTIMIZER=adamwprune",
        "ADAMWPRUNE_BASE=adamwspam",
        "SPAM_INTERVAL=75",
        "SPAM_WARMUP_STEPS=40",
        "MAX_ITERS=150",
        *SMALL,
        *RAMP,
    )
    completed = clone.make("test-matrix", *arguments, "CHECKPOINT_INTERVAL=50", f"RESULTS_DIR={tmp_path}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    matrix = newest(tmp_path)
    (run,) = [path.parent for path in matrix.glob("*/run.json")]
    result = load(run / "result.json")

    middle, total, _ = count_zeros(clone, run / "checkpoints" / "step_00000050.pt")
    zeros, _, elsewhere = count_zeros(clone, run / "checkpoints" / "final.pt")
    assert 0 < middle < zeros == round(0.7 * total)
    assert elsewhere == 0
    assert result["sparsity"] == zeros / total
    sparsities = [line["sparsity"] for line in lines(run / "metrics.jsonl") if "sparsity" in line]
    assert all(before <= after for before, after in pairwise(sparsities))
    assert (sparsities[0], sparsities[-1]) == (0.0, zeros / total)
    assert load(run / "training_metrics.json")["sparsities"] == sparsities
    summary = (matrix / "summary_report.txt").read_text()
    assert " 70.0% " in summary
    assert "target_sparsity 0.7 (explicit)" in summary
    (row,) = json.loads((matrix / "all_results.json").read_text())
    assert (row["pruning"], row["target_sparsity"], row["sparsity"]) == ("state", 0.7, zeros / total)

    folder = stop_in_the_ramp(clone, tmp_path / "stopped", *arguments)
    continued = clone.make("continue", f"TARGET={folder.parent}")
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert load(folder / "result.json")["attempt"] == 2
    assert count_zeros(clone, folder / "checkpoints" / "final.pt")[0] == zeros
    uninterrupted, resumed = (load(path / "training_metrics.json") for path in (run, folder))
    for key in ("train_losses", "val_losses", "sparsities"):
        assert resumed[key] == uninterrupted[key], key


def stop_in_the_ramp(clone, results: Path, *arguments: str) -> Path:
    """Start the matrix, interrupt it once weights are pruned, and return the directory of its run."""
    results.mkdir()
    slow = SlowTraining(results.with_name("slow"), "inf if step >= 60 else 0")  # the ramp is from step 38 to 105
    process = subprocess.Popen(
        [clone.python, "-m", "kmatrix", "test-matrix", *arguments, f"RESULTS_DIR={results}"],
        cwd=clone.root,
        env=clone.environment | slow.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_until(lambda: has_pruned(results) or process.poll() is not None, "weights are pruned", 600)
        assert process.poll() is None, "the run ended before it could be stopped"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=600) == 130
        assert slow.has_begun()
    finally:
        process.kill()
    (run,) = [path.parent for path in newest(results).glob("*/run.json")]
    middle = load(run / "result.json")
    assert middle["status"] == "stopped"
    assert 0 < middle["sparsity"] < 0.7
    return run


def has_pruned(results: Path) -> bool:
    """Return whether a metrics line written so far reports pruned weights."""
    for path in results.glob("*/*/metrics.jsonl"):
        complete_text = path.read_text(encoding="utf-8").rpartition("\n")[0]
        return any(json.loads(line).get("sparsity", 0) > 0 for line in complete_text.splitlines())
    return False
