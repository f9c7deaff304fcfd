"""make track-sync: pending steps are uploaded at any later time, any number of times."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

from factories import list_runs
from kmatrix.records.files import read_json, write_json
from kmatrix.records.tracking import SyncState, SyncStatus, read_track, write_track
from kmatrix.text import shown
from programs import ROOT
from programs import run as program
from track_factory import expected_values, make_run_dir, write_end, write_recording, write_training

pytest.importorskip("tensorboard", reason="make setup-trackers installs it")
pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path):
    """A finished run of which nothing was sent."""
    run = make_run_dir(tmp_path)
    list_runs(run.path.parent)
    write_training(run, range(30))
    write_recording(run, range(30))
    write_end(run)
    return run


def sync(run, *arguments):
    return program("track-sync", f"RESULTS_DIR={run.path.parent.parent}", *arguments)


def values_in_tensorboard(run):
    """Return step -> values, read by TensorBoard's own reader, and check that each value was sent once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run.path.parent / "tb" / run.name), size_guidance={"scalars": 0})
    reader.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in (tag for tag in reader.Tags()["scalars"] if not tag.startswith("gpu")):
        events = reader.Scalars(tag)
        assert len({event.step for event in events}) == len(events)
        for event in events:
            found.setdefault(event.step, {})[tag] = pytest.approx(event.value)
    return found


def test_pending_steps_are_sent_and_a_second_sync_sends_nothing(run):
    result = sync(run)
    assert (result.status, result.err) == (0, "")
    folder = run.path.parent / "tb" / run.name
    assert result.out == f"{run.name}: tensorboard has all 30 steps (30 new), {folder}\n"
    assert values_in_tensorboard(run) == expected_values(run)
    second = sync(run)
    assert (second.status, second.out.splitlines()[-1].split(": ")[1]) == (0, "no pending steps in 1 run")
    for_tensorboard = sync(run, "TRACKER=tensorboard")
    assert (for_tensorboard.status, "30 steps (0 new)" in for_tensorboard.out) == (0, True)
    assert values_in_tensorboard(run) == expected_values(run)


def test_a_matrix_without_trackers_is_sent_to_the_trackers_of_the_command_line(run):
    value = {"run_id": "0123456789ab", "name": run.name, "matrix": run.path.parent.name, "symbols": {}, "train": {}}
    write_json(run.run_json, {**value, "tracking": {}})
    refused = sync(run)
    assert refused.status == 2
    assert "ran without trackers" in refused.err
    assert sync(run, "TRACKER=tensorboard").status == 0
    assert values_in_tensorboard(run) == expected_values(run)


def test_a_tracker_that_refuses_is_reported_and_the_others_receive_the_run(run):
    (run.path.parent / "tb").write_text("in the way")
    result = sync(run)
    assert result.status == 1
    assert result.out.startswith(f"{run.name}: tensorboard: 30 of 30 steps pending: ")
    assert "tb" in result.out
    assert read_track(run)[0].state is SyncState.FAILED
    (run.path.parent / "tb").unlink()
    assert sync(run).status == 0


def test_a_run_with_a_live_tracker_process_is_skipped(run):
    with run.track_lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = sync(run)
    assert (result.status, result.out) == (1, f"{run.name}: a tracker process is already uploading it\n")


def test_the_summary_and_the_status_report_pending_steps_and_the_sync_command(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # else long commands are wrapped
    late = SyncStatus(
        tracker="wandb", state=SyncState.BEHIND, points=10, waiting=20, error="no answer", link="https://w/r/1"
    )
    write_track(run, [late, SyncStatus(tracker="tensorboard", state=SyncState.DONE, points=30, link="tb")])
    results = f"RESULTS_DIR={run.path.parent.parent}"
    for command in ("status", "summary"):
        out = program(command, results).out
        assert f"pending for wandb: 20 of 30 steps of {run.name} (no answer)" in out
        assert f"upload them with make track-sync TARGET={shown(run.path.parent)}" in out
        assert "https://w/r/1" in out
    assert '"link": "https://w/r/1"' in program("status", results, "JSON=1").out


def test_a_full_disk_under_log_and_track_json_does_not_prevent_sending(run):
    run.track.mkdir()  # a directory cannot be replaced by a file
    command = [sys.executable, "-m", "kmatrix.track", str(run.path), "--trackers", "wandb_that_is_none"]
    with open("/dev/full", "w") as full:  # noqa: PTH123 (no folder of ours)
        assert subprocess.run(command, stdout=full, stderr=full, env=environment(), check=False).returncode == 2
        command[-1] = "tensorboard"
        assert subprocess.run(command, stdout=full, stderr=full, env=environment(), check=False).returncode == 0
    assert values_in_tensorboard(run) == expected_values(run)


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT / "lib")}


def test_invalid_arguments_are_refused_before_anything_is_sent(run):
    both = "TRACKER=tensorboard,trackio"
    for arguments, message in (
        (("TRACKER=comet",), "unknown tracker comet"),
        (("RUN=*muon*",), "matches no run"),
        (("TRACKER=tensorboard", "PROJECT=mine"), "error: TRACKER=tensorboard does not take PROJECT"),
        *(((both, f"PROJECT={name}"), f"invalid PROJECT={name}") for name in ("../../evil", "A", "registry-x", "a_b")),
    ):
        result = sync(run, *arguments)
        assert (result.status, message in result.err.splitlines()[0]) == (2, True), result.err
    assert not run.track.exists()


@pytest.mark.parametrize("field", ["tracking", "run_id"])
def test_a_foreign_run_file_does_not_lead_out_of_a_trackers_directory(run, field):
    record = read_json(run.run_json)
    evil = {"tracking": {"trackers": ["trackio"], "project": "../../evil"}, "run_id": "../../evil"}
    write_json(run.run_json, {**record, "tracking": {"trackers": ["trackio"]}, field: evil[field]})
    result = sync(run)
    assert result.status == 2
    assert "'../../evil'" in result.err
    assert [path.name for path in run.path.parent.parent.parent.rglob("*evil*")] == []
