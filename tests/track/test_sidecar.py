"""A tracker receives each value once, however it fails and whenever its process is killed, without affecting others."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kmatrix.cli.trackers import _pending
from kmatrix.errors import LaunchError
from kmatrix.locks import is_held
from kmatrix.records.tracking import SyncState, pending_messages, read_track, sync_status
from kmatrix.track import sidecar
from kmatrix.track.sidecar import feed
from track_factory import (
    START_TIME,
    MemoryTracker,
    append_metrics,
    append_resume,
    expected_values,
    loss,
    make_run_dir,
    write_end,
    write_nodes,
    write_recording,
    write_training,
)
from waiting import wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path):
    return make_run_dir(tmp_path, trackers=("memory",))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Use short pauses, and restore the signal handlers of pytest."""
    for name, value in (
        ("READ_S", 0.01),
        ("PAUSE_S", 0.01),
        ("POLL_S", 0.01),
        ("WRITE_S", 0.02),
        ("END_S", 0.0),
    ):
        monkeypatch.setattr(sidecar, name, value)
    # `feed` installs handlers in this process, which is pytest.
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def send(run, *trackers, limit_s=60.0, **options):
    """Feed these trackers; return the exit status and the state of each in track.json."""
    stores = {f"memory{number}" if number else "memory": tracker for number, tracker in enumerate(trackers)}
    code = feed(run, tuple(stores), limit_s=limit_s, make=lambda name: lambda: stores[name], **options)
    return code, {sent.tracker: sent for sent in read_track(run)}


def test_a_tracker_gets_the_nodes_of_a_run_before_its_points(run):
    write_nodes(run, ("n1", "n2"))
    write_training(run, range(3))
    tracker = MemoryTracker()
    assert send(run, tracker)[0] == 0
    assert tracker.configs == [(0, {"nodes": "2", "hosts": "n1, n2"})]


@pytest.fixture
def during_feed():
    """Call `action` in a thread during the feed, then end the process that represents the run."""
    run_process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])

    def start(action):
        def work():
            try:
                action()
            finally:
                run_process.kill()
                run_process.wait()

        threading.Thread(target=work, daemon=True).start()
        return run_process.pid

    yield start
    run_process.kill()
    run_process.wait()


def test_a_finished_run_is_sent_completely_with_its_status(run):
    write_training(run, range(30))
    write_recording(run, range(30))
    write_end(run)
    store = MemoryTracker()
    code, sent = send(run, store)
    assert code == 0
    assert store.steps() == expected_values(run)
    assert [time for _, time, _ in store.rows] == [START_TIME + step for step in range(30)]
    assert len(store.gpus) == 30
    assert store.closed == ["finished"]
    assert (sent["memory"].state, sent["memory"].points, sent["memory"].waiting) == (SyncState.DONE, 30, 0)
    assert (sent["memory"].sent_step, sent["memory"].link) == (29, "memory://run")


def test_a_second_sync_sends_nothing(run):
    write_training(run, range(30))
    write_recording(run, range(30))
    write_end(run, "nan", at=START_TIME + 30)
    store = MemoryTracker()
    send(run, store)
    send(run, store)
    assert (len(store.rows), len(store.gpus), len(store.alerts)) == (30, 30, 1)
    assert store.sent_twice() == []


def test_a_running_run_is_sent_live_and_completed_after_its_process_exits(run, during_feed):
    store = MemoryTracker()

    def continue_run():
        write_training(run, range(20))
        wait_until(lambda: len(store.rows) == 20)
        write_training(run, range(20, 40))
        write_end(run)

    code, _ = send(run, store, parent=during_feed(continue_run))
    assert code == 0
    assert store.steps() == expected_values(run)
    assert store.closed == ["finished"]


def test_sigterm_means_that_the_attempt_has_ended(run, monkeypatch):
    store = MemoryTracker()
    write_training(run, range(20))
    write_end(run, "stopped")
    reached = sidecar._AttemptEnd.reached

    def once_sent(end):
        """Raise the signal in the feed's own loop, whose handler is installed then."""
        if store.rows:
            signal.raise_signal(signal.SIGTERM)
        return reached(end)

    monkeypatch.setattr(sidecar._AttemptEnd, "reached", once_sent)
    code, _ = send(run, store, parent=os.getpid())
    assert (code, len(store.rows), store.closed) == (0, 20, ["stopped"])


def test_steps_sent_by_a_killed_process_are_not_sent_again_and_none_is_missing(run):
    write_training(run, range(10))
    store = MemoryTracker()
    store.rows = [(step, START_TIME + step, {"train/loss": loss(step)}) for step in range(7)]  # all else was lost
    write_training(run, range(10, 30))
    write_end(run)
    send(run, store)
    assert store.steps() == expected_values(run)
    assert store.sent_twice() == []


def test_a_step_started_by_one_attempt_and_completed_by_the_next_is_complete(run):
    write_training(run, range(20))
    append_metrics(run, 20, val__loss=4.0)
    write_end(run, "stopped")
    store = MemoryTracker()
    send(run, store)
    assert store.steps()[20] == {"attempt": 1, "val/loss": 4.0}
    append_resume(run, 20)
    append_metrics(run, 20, attempt=2, train__loss=5.8)
    write_training(run, range(21, 30), attempt=2)
    write_end(run, attempt=2)
    send(run, store)
    assert store.steps()[20] == {"attempt": 1, "val/loss": 4.0, "train/loss": 5.8}
    assert store.sent_twice() == []


def test_a_step_that_is_stored_but_unreadable_is_not_sent_again(run):
    class Server(MemoryTracker):
        def steps(self):
            return {step: {} for step in range(20)}

    write_training(run, range(30))
    write_end(run)
    store = Server()
    send(run, store)
    assert [step for step, _, _ in store.rows] == list(range(20, 30))


def test_a_resumed_run_sends_repeated_steps_once_and_reports_nothing_if_they_agree(run):
    write_training(run, range(26))
    write_end(run, "signal")
    store = MemoryTracker()
    send(run, store)
    append_resume(run, 20)
    write_training(run, range(20, 40), attempt=2)
    write_end(run, attempt=2)
    send(run, store)
    assert sorted(store.steps()) == list(range(40))
    assert store.sent_twice() == []
    assert store.alerts == []


def test_a_repeated_step_that_differs_is_reported_once(run):
    write_training(run, range(26))
    store = MemoryTracker()
    send(run, store)
    append_resume(run, 20)
    write_training(run, range(20, 40), attempt=2, off=0.01)
    write_end(run, attempt=2)
    send(run, store)
    send(run, store)
    ((title, text),) = store.alerts
    assert title == f"{run.name}: a repeated step differs"
    assert text == "step 20: train/loss was sent as 5.8000, and is 5.8100 after the resume"


def test_a_tracker_that_refuses_temporarily_is_retried_during_the_run(run, during_feed):
    store = MemoryTracker()
    store.refuse = [ConnectionError("no route"), TimeoutError("no answer"), ValueError()]
    write_training(run, range(20))
    write_end(run)
    code, sent = send(run, store, parent=during_feed(lambda: wait_until(lambda: len(store.rows) == 20)))
    assert (code, store.opened, sent["memory"].error) == (0, 4, "")
    assert store.steps() == expected_values(run)


def test_a_tracker_that_always_refuses_is_reported_and_does_not_block_the_others(run):
    dead, store = MemoryTracker(), MemoryTracker()
    dead.refuse = [ConnectionError("401: your key\nis wrong")] * 100
    write_training(run, range(20))
    write_end(run)
    code, sent = send(run, dead, store)
    assert code == 1
    assert (sent["memory"].state, sent["memory"].waiting) == (SyncState.FAILED, 20)
    assert sent["memory"].error == "ConnectionError: 401: your key is wrong"
    assert sent["memory1"].state is SyncState.DONE
    assert store.steps() == expected_values(run)


def test_a_hanging_tracker_is_abandoned_after_the_limit_and_synced_later(run, monkeypatch):
    hanging, store, lasts = MemoryTracker(), MemoryTracker(), threading.Event()
    hanging.hang = lasts.wait
    write_training(run, range(20))
    write_end(run)
    at = [0.0, 100.0]  # s: when the other tracker got everything; the clock of the feed, which stands still until then

    def clock() -> float:
        if not store.closed:
            at[0] = time.monotonic()
        return at[1] + time.monotonic() - at[0] if store.closed else at[1]

    monkeypatch.setattr(sidecar, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    code, sent = send(run, hanging, store, limit_s=0.3)
    monkeypatch.setattr(sidecar, "time", time)
    assert (code, sent["memory"].state, sent["memory"].waiting) == (1, SyncState.BEHIND, 20)
    assert sent["memory1"].state is SyncState.DONE
    hanging.hang = lambda: None
    code, sent = send(run, hanging)
    assert (code, sent["memory"].state) == (0, SyncState.DONE)
    assert hanging.steps() == expected_values(run)
    lasts.set()


def test_a_missing_package_is_not_waited_for(run, during_feed):
    store = MemoryTracker()
    store.refuse = [ImportError("No module named 'wandb'")] * 3
    write_training(run, range(20))
    lasts = threading.Event()
    code, sent = send(run, store, parent=during_feed(lasts.wait))  # during the run
    lasts.set()
    assert (code, store.opened) == (1, 1)
    assert (sent["memory"].state, sent["memory"].error) == (SyncState.FAILED, "ImportError: No module named 'wandb'")


def test_a_full_disk_under_track_json_does_not_prevent_sending(run, monkeypatch, capsys):
    def raise_disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sidecar, "write_track", raise_disk_full)
    write_training(run, range(20))
    write_end(run)
    store = MemoryTracker()
    code, sent = send(run, store)
    assert (code, sent) == (0, {})
    assert store.steps() == expected_values(run)
    assert "cannot write track.json: No space left on device" in capsys.readouterr().out


def test_a_run_has_one_tracker_process_at_a_time(run):
    write_training(run, range(3))
    with run.track_lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert is_held(run.track_lock)
        with pytest.raises(LaunchError, match="another process is uploading"):
            send(run, MemoryTracker(), limit_s=0.05)
    assert not is_held(run.track_lock)
    assert send(run, MemoryTracker())[0] == 0


def test_an_unknown_tracker_is_refused(run):
    with pytest.raises(LaunchError, match="unknown tracker 'comet'"):
        feed(run, ("comet",), limit_s=1)


def test_pending_steps_of_a_killed_process_are_counted_from_the_files_of_the_run(run):
    write_training(run, range(20))
    (sent,) = sync_status(run)
    assert (sent.state, sent.waiting, sent.points) == (SyncState.BEHIND, 20, 0)
    assert pending_messages([(run.name, sent)], Path("m")) == [
        f"pending for memory: 20 of 20 steps of {run.name} (the tracker process was killed)",
        "upload them with make track-sync TARGET=m",
    ]


def test_steps_of_an_attempt_that_ran_without_a_tracker_are_pending_for_track_sync(run):
    write_training(run, range(10))
    write_end(run)
    send(run, MemoryTracker())
    assert _pending(run) == ()
    write_training(run, range(10, 12), attempt=2)
    assert _pending(run) == ("memory",)


def test_a_fully_synced_run_is_not_reported(run):
    write_training(run, range(20))
    write_end(run)
    send(run, MemoryTracker())
    assert pending_messages([(run.name, sent) for sent in sync_status(run)], "m") == []
