"""Three trackers store the content of metrics.jsonl, read by their own readers, also after kills."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from story import kill, load_json, only, processes_of
from tracker_readers import TrackerContent, expected_times, expected_values, read_tensorboard, read_trackio, read_wandb
from waiting import wait_until

pytestmark = pytest.mark.story

TRACKERS = ("wandb", "trackio", "tensorboard")
PLANTED_KEYS = {"HF_TOKEN": "hf_" + "Pl4nted" * 5, "TRACKIO_WRITE_TOKEN": "planted-write-token-4711"}
PATIENT = "TRACKER_LIMIT=600"  # seconds: trackers that work are never late


def content_of(python: str, run: Path) -> dict[str, TrackerContent]:
    """Return the content of a run in each of the three trackers."""
    results, project = run.parent.parent, load_json(run / "run.json")["tracking"]["project"]
    return {
        "wandb": read_wandb(python, run),
        "trackio": read_trackio(python, results, project, run.name),
        "tensorboard": read_tensorboard(run.parent / "tb" / run.name),
    }


def check_contents(python: str, run: Path) -> dict[str, TrackerContent]:
    expected, stamps, contents = expected_values(run), expected_times(run), content_of(python, run)
    assert sorted(expected) == list(range(11))
    for name, content in contents.items():
        assert content.steps == sorted(expected), name
        found = {
            step: {k: v for k, v in row.items() if not k.startswith("gpu")} for step, row in content.values.items()
        }
        # TensorBoard stores single precision.
        close = {step: {k: pytest.approx(v, rel=1e-6) for k, v in row.items()} for step, row in expected.items()}
        assert found == close, name
        tracked = load_json(run / "track.json")["trackers"]
        assert (name, "done") in {(one["tracker"], one["state"]) for one in tracked}
        if content.times:
            assert {step: stamps[step] for step in content.times} == pytest.approx(dict(content.times), abs=1e-3)
    return contents


def seen_keys() -> set[str]:
    """Return the planted keys that are in the command line of a process."""
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines += process.cmdline()
    return {key for key in PLANTED_KEYS.values() if any(key in line for line in lines)}


def test_each_tracker_has_each_step_once_although_processes_are_killed(story, tmp_path):
    """The sidecar is killed and started again; then the trainer is killed and its run continued."""
    story.script({"adamw": [3.3]})
    story.hold()
    words = story.words("OPTIMIZER=adamw", "TRACKER=all", "WANDB_OFFLINE=y", PATIENT)
    runner = story.start("test-matrix", *words, **PLANTED_KEYS)
    story.wait_for_start(1)
    matrix = story.newest()
    (run,) = matrix.runs()

    def sidecar(other_than: int = 0) -> psutil.Process | None:
        return next((one for one in processes_of(matrix.path)["tracker"] if one.pid != other_than), None)

    def has_sent() -> bool:
        return run.track.exists() and all(one["points"] for one in load_json(run.track)["trackers"])

    wait_until(has_sent, "each tracker has some steps")
    first = wait_until(sidecar, "the sidecar")
    assert seen_keys() == set()
    first.kill()
    wait_until(lambda: sidecar(first.pid), "another sidecar")
    assert kill(processes_of(matrix.path)["rank"]) == 1
    assert runner.wait() != 0
    story.let_go()
    story.make("continue", f"TARGET={matrix.path}", **PLANTED_KEYS)
    assert load_json(run.result)["attempt"] == 2
    wait_until(lambda: not sidecar(), "what was pending is sent")

    python = story.clone.python
    before = check_contents(python, run.path)
    synced = story.make("track-sync", f"TARGET={matrix.path}", "TRACKER=all")
    assert synced.count("has all 11 steps (0 new)") == len(TRACKERS)
    for name, content in content_of(python, run.path).items():
        assert content.rows == before[name].rows, name
    about = before["wandb"].about["run"]
    assert (about["display_name"], about["run_group"], about["job_type"]) == (run.name, matrix.name, "train")
    assert before["trackio"].about["run"]["config"]["_Group"] == matrix.name
    assert "pending" not in story.make("status", f"TARGET={matrix.path}")
    files = [path for path in (*tmp_path.glob("results/**/*"), *story.clone.root.glob(".config*")) if path.is_file()]
    assert not [path for path in files for key in PLANTED_KEYS.values() if key.encode() in path.read_bytes()]


def test_the_command_line_chooses_trackers_and_pages_say_what_is_missing(story):
    story.clone.check("defconfig-gpt2-cpu-quick", "TRACKER=trackio,wandb", "TRACKER_PROJECT=mine")
    before = story.clone.config.read_bytes()
    story.script({"adamw": [3.3]})
    words = story.words("OPTIMIZER=adamw", "REUSE=n")
    assert "trackers: " not in story.make("test-matrix", *words, "TRACKER=none")
    with_tensorboard = story.make("test-matrix", *words, "TRACKER=tensorboard", PATIENT)
    assert "trackers: TensorBoard; project mine" in with_tensorboard
    first, second = (only(path.glob("gpt2_*")) for path in sorted(story.results.glob("test_matrix_results_*")))
    assert load_json(first / "run.json")["tracking"]["trackers"] == []
    assert load_json(first / "run.json")["run_id"] == load_json(second / "run.json")["run_id"]
    assert not (first / "track.json").exists()
    wait_until(lambda: not processes_of(second)["tracker"], "what was pending is sent")
    assert list((second.parent / "tb").rglob("events.out.tfevents.*"))
    assert story.clone.config.read_bytes() == before
    assert "no Trackio project in" in story.clone.refused("trackio-view", f"RESULTS_DIR={story.results}")
    refused = story.clone.refused("test-matrix", *words, "HF_TOKEN=correct-horse")
    assert "correct-horse" not in refused
