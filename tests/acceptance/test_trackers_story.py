"""Three trackers store the content of metrics.jsonl, also of a run that was killed, read by their own readers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from slow_training import SlowTraining
from story import complete_lines, kill, load_json, matrices, only, processes_of
from tracker_readers import TrackerContent, expected_times, expected_values, read_tensorboard, read_trackio, read_wandb
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

TRACKERS = ("wandb", "trackio", "tensorboard")
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=1", "N_HEAD=2", "N_EMBD=16", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=2", "EVAL_SAMPLES=8", "LOG_INTERVAL=1", "REUSE=n", "SEED=1", "NUM_GPUS=1", "CPU_THREADS=1"),
    "TRACKER_LIMIT=600",  # seconds: trackers that work are never late
)
KILL_AT, STEPS = 250, 500


@pytest.fixture(autouse=True)
def wandb_offline(monkeypatch):
    """Unset the tester's own W&B key and mode."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture
def configured_clone(clone, tmp_path):
    """A configured clone and a results folder."""
    completed = clone.make("defconfig-gpt2-cpu-quick")
    assert completed.returncode == 0, completed.stderr
    return clone, tmp_path / "results"


def content_of(python: str, run: Path) -> dict[str, TrackerContent]:
    """Return the content of a run in each of the three trackers."""
    results, project = run.parent.parent, load_json(run / "run.json")["tracking"]["project"]
    return {
        "wandb": read_wandb(python, run),
        "trackio": read_trackio(python, results, project, run.name),
        "tensorboard": read_tensorboard(run.parent / "tb" / run.name),
    }


def single_precision(values: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Return the numbers in single precision, as TensorBoard stores them."""
    return {step: {key: pytest.approx(value, rel=1e-6) for key, value in row.items()} for step, row in values.items()}


def without_devices(values: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Remove device metrics, which are added to the metrics of a step."""
    return {step: {k: v for k, v in row.items() if not k.startswith("gpu")} for step, row in values.items()}


# Every step with its values, of two parallel runs


def test_two_parallel_runs_have_the_same_metrics_in_three_trackers_as_in_their_files(configured_clone):
    clone, results = configured_clone
    completed = clone.make(
        *("test-matrix", *TINY, "MAX_ITERS=60", "EVAL_INTERVAL=20", "OPTIMIZER=adamw,muon", "PARALLEL_JOBS=2"),
        *("TRACKER=wandb,trackio,tensorboard", f"RESULTS_DIR={results}"),
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-2000:]
    matrix = only(matrices(results))
    runs = [matrix / run["name"] for run in load_json(matrix / "matrix.json")["runs"]]
    spans = [(load_json(run / "status.json")["started"], load_json(run / "status.json")["ended"]) for run in runs]
    assert max(start for start, _ in spans) < min(end for _, end in spans)  # they overlapped
    for run in runs:
        _check_run(clone.python, run)
    assert "pending" not in completed.stdout
    assert "pending" not in clone.make("status", f"RESULTS_DIR={results}").stdout


def _check_run(python: str, run: Path) -> None:
    expected, stamps, contents = expected_values(run), expected_times(run), content_of(python, run)
    assert sorted(expected) == list(range(61))
    for name, content in contents.items():
        assert content.steps == sorted(expected), f"{name} of {run.name}"
        assert without_devices(content.values) == single_precision(expected), f"{name} of {run.name}"
        assert load_json(run / "track.json")["trackers"][name]["state"] == "done"
        if content.times:
            assert {s: stamps[s] for s in content.times} == pytest.approx(dict(content.times), abs=1e-3)
    _check_wandb(run, contents["wandb"].about)
    _check_trackio(run, contents["trackio"].about)
    _check_tensorboard(run, contents["tensorboard"].about)


def _optimizer(run: Path) -> str:
    return str(load_json(run / "run.json")["axes"]["optimizer"])


def _check_wandb(run: Path, metadata: dict) -> None:
    run_record = metadata["run"]
    assert (run_record["display_name"], run_record["run_group"], run_record["job_type"]) == (
        run.name,
        run.parent.name,
        "train",
    )
    assert run_record["project"] == load_json(run / "run.json")["tracking"]["project"]
    assert f"optimizer={_optimizer(run)}" in run_record["tags"]
    assert run_record["config"]["update"]["GPT2_MAX_ITERS"] == 60
    assert run_record["config"]["update"]["run_id"] == load_json(run / "run.json")["run_id"]
    assert metadata["exit"].get("exit_code", 0) == 0


def _check_trackio(run: Path, metadata: dict) -> None:
    config = metadata["run"]["config"]
    assert config["GPT2_MAX_ITERS"] == "60"
    assert config["run_id"] == load_json(run / "run.json")["run_id"]
    assert config["_Group"] == run.parent.name
    assert f"optimizer={_optimizer(run)}" in config["tags"]
    assert config["status"] == "finished"
    stamps = expected_times(run)
    for step, text in metadata["stamps"].items():
        assert datetime.fromisoformat(text).timestamp() == pytest.approx(stamps[step], abs=1e-3)


def _check_tensorboard(run: Path, metadata: dict) -> None:
    (text,) = metadata["config"]
    assert "| GPT2_MAX_ITERS | 60 |" in text
    assert f"| group | {run.parent.name} |" in text
    assert f"optimizer={_optimizer(run)}" in text
    assert metadata["status"] == ["finished"]


# SIGKILL of the trainer in the middle, then continue


def newest_step(run: Path) -> int:
    return max((line["step"] for line in complete_lines(run / "metrics.jsonl")), default=-1)


def test_each_tracker_stores_each_step_of_a_killed_and_resumed_run_once(configured_clone, background, tmp_path):
    clone, results = configured_clone
    slow = SlowTraining(tmp_path / "slow", f"inf if step > {KILL_AT + 1} else 0")
    arguments = ("train", *TINY, f"MAX_ITERS={STEPS}", "EVAL_INTERVAL=100", "CHECKPOINT_INTERVAL=100", "TRACKER=all")
    runner = background(*arguments, f"RESULTS_DIR={results}", **slow.environment)

    def has_started():
        """a run has started"""
        return next(results.glob("test_matrix_results_*/*/metrics.jsonl"), None)

    run = wait_until(has_started).parent
    wait_until(lambda: newest_step(run) >= KILL_AT)
    # The rank first: without its trainer it would be asked to stop, and the run would be tried again.
    kill(processes_of(run)["rank"] + processes_of(run)["trainer"])
    assert runner.wait(600) != 0
    assert KILL_AT <= newest_step(run) <= KILL_AT + 1  # a step is logged during the next one
    completed = clone.make("continue", f"TARGET={run.parent}")
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-2000:]
    assert any(line.get("resumed") for line in complete_lines(run / "metrics.jsonl"))
    logged: dict[int, set[float]] = {}
    for line in complete_lines(run / "metrics.jsonl"):
        if "train/loss" in line:
            logged.setdefault(line["step"], set()).add(line["train/loss"])
    before = content_of(clone.python, run)
    for name, content in before.items():
        assert content.steps == list(range(STEPS + 1)), name
        for step in range(STEPS):
            assert any(content.values[step]["train/loss"] == pytest.approx(loss, rel=1e-6) for loss in logged[step]), (
                name
            )
    synced = clone.make("track-sync", f"TARGET={run.parent}", "TRACKER=all")
    assert synced.returncode == 0, synced.stdout + synced.stderr
    assert synced.stdout.count(f"has all {STEPS + 1} steps (0 new)") == len(TRACKERS)
    for name, content in content_of(clone.python, run).items():
        assert content.rows == before[name].rows, name
