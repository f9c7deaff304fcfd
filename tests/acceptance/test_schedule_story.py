"""Runs that share one machine, and the estimate of their end, through make with the real trainer on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slow_training import SlowTraining
from story import complete_lines
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1200)]

TINY = (
    *("OPTIMIZER=adamw", "NUM_GPUS=1", "GLOBAL_BATCH=4", "DEVICE=cpu"),
    *("MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=4"),
    *("EVAL_SAMPLES=8", "EVAL_INTERVAL=100", "LOG_INTERVAL=1", "CPU_THREADS=1", "MACHINE_HOUR_PRICE=1.0", "REUSE=n"),
)


@pytest.fixture(autouse=True)
def configured(clone):
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def newest(folder: Path) -> Path:
    return max(folder.glob("test_matrix_results_*"))


def spans(matrix: Path) -> list[tuple[float, float]]:
    found = [load(path) for path in matrix.glob("*/status.json")]
    return sorted((attempt["started"], attempt["ended"]) for attempt in found)


def losses(matrix: Path) -> dict[str, float]:
    return {path.parent.name: load(path)["final_val_loss"] for path in matrix.glob("*/result.json")}


def test_runs_that_share_the_cores_give_the_same_numbers_as_runs_alone(clone, tmp_path):
    arguments = (*TINY, "MAX_ITERS=20", "SEED=1,2")
    sequential = clone.make("test-matrix", *arguments, f"RESULTS_DIR={tmp_path / 'alone'}")
    assert sequential.returncode == 0, sequential.stdout + sequential.stderr
    (first, second) = spans(newest(tmp_path / "alone"))
    assert first[1] <= second[0]  # runs do not overlap unless the user asks for it

    packed = clone.make(
        "test-matrix", *arguments, "PARALLEL_JOBS=2", "EXCLUSIVE=n", f"RESULTS_DIR={tmp_path / 'packed'}"
    )
    assert packed.returncode == 0, packed.stdout + packed.stderr
    (first, second) = spans(newest(tmp_path / "packed"))
    assert second[0] < first[1]
    assert losses(newest(tmp_path / "packed")) == losses(newest(tmp_path / "alone"))
    assert "Shared machine" in (newest(tmp_path / "packed") / "summary_report.txt").read_text()
    assert "Shared machine" not in (newest(tmp_path / "alone") / "summary_report.txt").read_text()


def test_the_estimate_of_a_running_matrix_is_accurate(clone, tmp_path):
    results, slow = tmp_path / "results", SlowTraining(tmp_path / "slow")  # whose pace is that of any machine
    arguments = (*TINY, "MAX_ITERS=120", "SEED=1,2", "PARALLEL_JOBS=1", f"RESULTS_DIR={results}")
    completed = clone.make("test-matrix", *arguments, "DETACH=1", **slow.environment)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    matrix = newest(results)
    first = matrix / load(matrix / "matrix.json")["runs"][0]["name"]
    wait_until(lambda: any(line["step"] >= 60 for line in complete_lines(first / "metrics.jsonl")), "half of it")
    slow.hold()  # an estimate takes longer than the rest of the run
    value = json.loads(clone.kmatrix("estimate", f"TARGET={matrix}", "JSON=1").stdout)
    text = clone.make("estimate", f"TARGET={matrix}").stdout
    slow.unhold()
    running, planned = value["runs"]
    assert 60 <= running["step"] < 120
    assert (running["left_from"], planned["left_from"]) == ("its own steps", "runs like it here")
    assert planned["starts_s"] == pytest.approx(running["ends_s"])
    assert "end: 20" in text
    assert "cost: $" in text
    wait_until(lambda: load(matrix / "status.json")["status"] != "running", "the matrix ends", 600)
    matrix_status = load(matrix / "status.json")
    assert matrix_status["status"] == "finished"
    predicted, actual = value["ends"] - matrix_status["started"], matrix_status["ended"] - matrix_status["started"]
    assert predicted == pytest.approx(
        actual, rel=0.5
    )  # the machine is shared, so only roughly; tests/status/test_estimate.py checks the exact values
    assert "nothing is left to run" in clone.make("estimate", f"TARGET={matrix}").stdout


@pytest.mark.parametrize(
    ("argument", "message"), [("PARALLEL_JOBS=-1", "PARALLEL_JOBS"), ("EXCLUSIVE=maybe", "EXCLUSIVE")]
)
def test_an_invalid_argument_is_refused_before_any_run_starts(clone, tmp_path, argument, message):
    completed = clone.kmatrix("test-matrix", *TINY, argument, f"RESULTS_DIR={tmp_path}")
    assert completed.returncode == 2
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr
    assert not list(tmp_path.iterdir())
