"""Tracker processes of runs: started, restarted and killed without affecting a run."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from contextlib import contextmanager

import psutil
import pytest

import kmatrix.cli.trackers as cli_track
import kmatrix.track.processes as track
from kmatrix.errors import LaunchError
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.runs import Status
from kmatrix.records.tracking import SyncState, SyncStatus, is_syncing, read_track, sync_status, write_track
from kmatrix.runner.archive import archive_result
from kmatrix.runner.loop import drive
from kmatrix.status.state import JobPhase, RunState
from kmatrix.status.status_file import write_state
from kmatrix.track.processes import MOST_RESTARTS, TrackerProcesses, start
from running import END_S, MAX_ITERS, PYTHON, ROOT, engine, plan_of, wait_for_start
from waiting import wait_until

pytest.importorskip("tensorboard", reason="make setup-trackers installs it")
pytestmark = pytest.mark.process


@pytest.fixture
def trackers():
    """The tracker processes of a matrix; all are killed after the test."""
    started = TrackerProcesses(PYTHON, ROOT)
    yield started
    started.kill()


@pytest.fixture
def plan(matrix):
    """Make the directory of a run with trackers and return its plan."""

    def make(name, behave="finish", trackers=("tensorboard",), limit_s=240, **known):
        train = {"batch_size": 12, "max_iters": MAX_ITERS}
        tracking = {"trackers": list(trackers), "project": "gpt2-1a2b3", "limit_s": limit_s}
        record = {"run_id": f"id-{name}", "name": name, "matrix": matrix.name, "train": train, "tracking": tracking}
        write_json(matrix.run(name).run_json, record)
        return plan_of(matrix, name, behave, **known)

    return make


@contextmanager
def hold_lock(plan):
    """Hold the lock of a run's trackers like a hanging process of an earlier attempt, so that the next one waits."""
    with plan.dir.track_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def steps_of(matrix, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(matrix.tensorboard / name), size_guidance={"scalars": 0})
    reader.Reload()
    return [event.step for event in reader.Scalars("train/loss")] if "train/loss" in reader.Tags()["scalars"] else []


def tracker_processes_of(plan):
    """Return the tracker processes of a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command_line = process.info["cmdline"] or []
        if "kmatrix.track" in command_line and str(plan.dir.path) in command_line:
            found.append(process)
    return found


@pytest.mark.nightly
def test_the_end_of_a_matrix_waits_for_its_trackers(matrix, plan, trackers):
    plans = [plan("gpt2_adamw_1cpu"), plan("gpt2_muon_1cpu"), plan("gpt2_sgd_1cpu", trackers=())]
    outcome = drive(matrix, plans, engine(trackers=trackers), poll_s=0.02)
    assert outcome.exit_code == 0
    wait_until(lambda: not trackers.syncing())
    for run in plans[:2]:
        (sent,) = read_track(run.dir)
        assert (sent.state, sent.points) == (SyncState.DONE, MAX_ITERS)
        assert steps_of(matrix, run.name) == list(range(MAX_ITERS))
    assert not plans[2].dir.track_log.exists()


def test_trackers_of_the_command_line_replace_those_of_the_matrix(matrix, plan):
    without, instead = (
        TrackerProcesses(PYTHON, ROOT, chosen=()),
        TrackerProcesses(PYTHON, ROOT, chosen=("tensorboard",), project="own"),
    )

    without.begin(plan("a"), os.getpid())
    instead.begin(run := plan("b", trackers=()), os.getpid())
    try:
        assert without.syncing() == {}
        assert instead.syncing() == {"b": ("tensorboard",)}
        (command_line,) = [process.info["cmdline"] for process in tracker_processes_of(run)]
        assert command_line[command_line.index("--trackers") + 1] == "tensorboard"
        assert command_line[command_line.index("--project") + 1] == "gpt2-1a2b3"  # the trackers of run.json come first
    finally:
        instead.kill()


def test_a_tracker_left_out_of_an_attempt_has_pending_steps(plan):
    run = plan("a")
    for step in range(10):
        append_jsonl(run.dir.metrics, {"step": step, "time": 1.0, "train/loss": 1.0})
    write_track(run.dir, [SyncStatus(tracker="tensorboard", state=SyncState.DONE, points=6, sent_step=5)])

    TrackerProcesses(PYTHON, ROOT, chosen=()).begin(run, os.getpid())

    (sent,) = sync_status(run.dir)
    assert (sent.state, sent.points, sent.waiting) == (SyncState.BEHIND, 6, 4)
    assert sent.error == "not selected when the run was continued"


@pytest.mark.nightly
def test_trackers_do_not_delay_the_end_of_a_run(matrix, plan, trackers):
    run = plan("gpt2_adamw_1cpu")
    with hold_lock(run):
        assert drive(matrix, [run], engine(trackers=trackers), poll_s=0.02).exit_code == 0
        assert trackers.syncing() == {run.name: ("tensorboard",)}
    wait_until(lambda: not trackers.syncing())
    assert steps_of(matrix, run.name) == list(range(MAX_ITERS))


def test_a_killed_tracker_process_is_restarted_and_sends_each_step_once(matrix, plan, trackers):
    run = plan("gpt2_adamw_1cpu", "hang")
    local = engine(trackers=trackers)
    local.submit([run])
    wait_until(lambda: local.poll() and any(sent.points for sent in read_track(run.dir)) and is_syncing(run.dir))
    (feeder,) = tracker_processes_of(run)
    run.dir.track.unlink()
    feeder.kill()
    wait_until(lambda: local.poll() and any(sent.points for sent in read_track(run.dir)))
    local.cancel()
    wait_until(lambda: local.poll()[run.name].phase is JobPhase.ENDED)
    write_state(run.dir, RunState(status=Status.STOPPED))
    wait_until(lambda: not trackers.syncing())
    sent = steps_of(matrix, run.name)
    assert sent == list(range(len(run.dir.metrics.read_text().splitlines())))


def test_a_tracker_process_that_keeps_dying_is_not_restarted(matrix, plan, trackers):
    run = plan("gpt2_adamw_1cpu")
    trackers.begin(run, os.getpid())
    for _ in range(MOST_RESTARTS + 1):
        wait_until(lambda: tracker_processes_of(run))
        tracker_processes_of(run)[0].kill()
        wait_until(
            lambda: not tracker_processes_of(run)
        )  # a process that was not waited for has no command line any more
        trackers.poll()
    assert trackers.syncing() == {}


def test_killing_a_run_kills_its_tracker_process(matrix, plan, trackers):
    run = plan("gpt2_adamw_1cpu", "hang")
    local = engine(trackers=trackers)
    local.submit([run])
    wait_until(lambda: local.poll() and is_syncing(run.dir))
    local.cancel(now=True)
    assert trackers.syncing() == {}
    assert not is_syncing(run.dir)


@pytest.mark.nightly
def test_after_the_runner_is_killed_pending_steps_are_still_sent(matrix, plan, start_runner):
    run = plan("gpt2_adamw_1cpu", "hang")
    process = start_runner(f"{run.name}=hang")
    guard = wait_for_start(run)
    wait_until(lambda: len(run.dir.metrics.read_text().splitlines()) > 5)
    begun = start(PYTHON, ROOT, run.dir, "--parent", str(guard), "--limit", str(END_S))  # as the runner does
    wait_until(lambda: is_syncing(run.dir))
    os.kill(process.pid, signal.SIGKILL)
    assert begun.wait(END_S) == 0
    (sent,) = read_track(run.dir)
    assert (sent.state, sent.waiting) == (SyncState.DONE, 0)
    assert steps_of(matrix, run.name) == list(range(sent.points))


def test_a_result_that_is_still_being_sent_is_not_archived(matrix, plan, trackers):
    run = plan("gpt2_adamw_1cpu")
    assert drive(matrix, [run], engine(), poll_s=0.02).exit_code == 0
    trackers.begin(run, os.getpid())
    wait_until(lambda: is_syncing(run.dir))
    with pytest.raises(LaunchError, match="still sends to its trackers"):
        archive_result(run.dir)
    trackers.kill()
    assert archive_result(run.dir) == run.dir.archive / "1"


def test_the_end_of_a_matrix_shows_which_trackers_it_waits_for_and_ctrl_c_skips_them(plan, trackers, monkeypatch):
    run, shown = plan("gpt2_adamw_1cpu"), []

    def show(line, text):
        shown.append(text)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli_track._Line, "show", show)
    with hold_lock(run):
        trackers.begin(run, os.getpid())
        trackers.end(run.dir)
        cli_track.wait_for_sync(trackers)
    assert re.fullmatch(r"uploading to tensorboard: \d+ s, Ctrl\+C leaves the rest to make track-sync", shown.pop())
    assert (shown, trackers.syncing(), tracker_processes_of(run)) == ([], {}, [])


def test_a_tracker_process_that_exceeds_the_time_limit_is_killed(plan, trackers, monkeypatch):
    monkeypatch.setattr(track, "MARGIN_S", 0.1)
    run = plan("gpt2_adamw_1cpu", limit_s=0.1)
    trackers.begin(run, os.getpid())
    wait_until(lambda: is_syncing(run.dir))
    # A suspended process cannot exit by itself.
    tracker_processes_of(run)[0].suspend()
    trackers.end(run.dir)
    wait_until(lambda: not trackers.syncing())
    assert tracker_processes_of(run) == []


def test_a_tracker_process_has_no_gpu_one_thread_and_lower_priority(plan, trackers):
    run = plan("gpt2_adamw_1cpu")
    trackers.begin(run, os.getpid())
    wait_until(lambda: is_syncing(run.dir))
    (feeder,) = tracker_processes_of(run)
    environ = feeder.environ()
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["OMP_NUM_THREADS"]) == ("", "1")
    assert feeder.nice() == min(19, os.nice(0) + 10)
