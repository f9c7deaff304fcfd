"""Every GPU watched, as a user sees it: simulated GPUs beside a real training, the screen, the two scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

GRAPHS = (
    "gpu_memory_comparison",
    "per_gpu_memory_breakdown",
    "gpu_load_balance_analysis",
    "gpu_memory_timeline",
)
SHORT = ("OPTIMIZER=adamw", "NUM_GPUS=2", "MAX_ITERS=40", "EVAL_SAMPLES=20")


def only(found) -> Path:
    (path,) = found
    return path


def load(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def matrix(clone, tmp_path):
    """A short matrix of one run on two CPU ranks, recorded beside four simulated GPUs."""
    done = clone.make("quickstart", "SIMULATE=4", *SHORT, f"RESULTS_DIR={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    return only(tmp_path.glob("test_matrix_results_*"))


def test_simulated_gpus_are_recorded_drawn_and_marked(clone, matrix):
    summary = (matrix / "summary_report.txt").read_text()
    assert "(simulated)" in summary
    assert "J/token" in summary
    assert "Balance: CV = " in summary
    run = only(matrix.glob("gpt2_*"))
    recorded = load(run / "gpu_summary.json")
    assert recorded["simulated"] is True
    assert len(recorded["gpus"]) == 4
    assert all("(simulated)" in gpu["gpu_name"] for gpu in recorded["gpus"])
    both = load(run / f"gpu_stats_{run.name}.json"), load(run / f"gpu_stats_{run.name}_multi_gpu.json")
    assert {"timestamp", "gpu_index", "gpu_name", "utilization", "memory_used", "memory_total", "power"} <= both[0][
        0
    ].keys()
    assert both[1][0]["aggregate_stats"]["gpu_count"] == 4
    for name in GRAPHS:
        with Image.open(matrix / "graphs" / f"{name}.png") as picture:
            assert picture.width >= 800

    compared = clone.run(clone.python, "scripts/generate_gpu_memory_comparison.py", str(matrix))
    assert compared.returncode == 0, compared.stderr
    told = clone.run(clone.python, "scripts/generate_consolidated_gpu_summary.py", str(matrix))
    assert told.returncode == 0, told.stderr
    assert "ADAMW Training - Per-GPU Breakdown:" in told.stdout
    assert "GPU 3: " in told.stdout

    shown = clone.run(clone.python, "scripts/gputop.py", "--replay", str(run), "--once")
    assert shown.returncode == 0, shown.stderr
    assert "SIMULATED" in shown.stdout


def test_recording_is_switched_by_its_symbol_and_changes_no_id(clone, tmp_path):
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    ids = {}
    for choice in ("y", "n"):
        folder = tmp_path / choice
        done = clone.make("test-matrix", f"GPU_MONITOR={choice}", *SHORT, f"RESULTS_DIR={folder}")
        assert done.returncode == 0, done.stdout + done.stderr
        run = only(folder.glob("*/gpt2_*"))
        ids[choice] = (load(run / "result.json")["run_id"], load(run / "result.json")["final_val_loss"])
        assert bool(list(run.glob("gpu_*"))) == (choice == "y")
        assert ("Balance: CV = " in (run.parent / "summary_report.txt").read_text()) == (choice == "y")
    assert ids["y"] == ids["n"]


def test_without_a_gpu_the_screen_says_so_and_is_no_failure(clone):
    for words in (("--once",), ("--json",)):
        done = clone.run(clone.python, "scripts/gputop.py", *words)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stdout + done.stderr
    done = clone.run(
        clone.python,
        "-c",
        "import scripts.gputop; m=scripts.gputop.GPUMonitor(); m.initialize(); print(f'GPUs: {m.gpu_count}')",
    )
    assert done.stdout.strip() == "GPUs: 0", done.stderr
