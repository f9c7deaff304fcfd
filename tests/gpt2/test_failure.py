"""Detect a stalled run and name the slowest rank. Real processes with short timeouts."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2.failure as watchdog
from factories import environment
from gpt2.failure import FIRST_S, RankPosition, Watchdog, describe_ranks, innermost, spent_before
from gpt2.log import RunLog
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.paths import RunDir
from waiting import wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def rank_watchdog(tmp_path):
    """The watchdog of rank 0 of 1, and the messages of its reports."""
    reports = []
    rank_watchdog = Watchdog(log_of(tmp_path), rank=0, size=1, stalled=reports.append)
    rank_watchdog.spent = lambda: 12.5
    yield rank_watchdog, reports
    rank_watchdog.end()


def log_of(tmp_path):
    return RunLog(RunDir(tmp_path), "id", 1, main=True)


def status_of_rank(rank, step, phase, **fields):
    return RankPosition(rank=rank, step=step, kind=fields.pop("kind", "step"), place=phase, **fields)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            [status_of_rank(0, 4, "backward"), status_of_rank(1, 4, "forward", line="model.py:9 in forward")],
            "rank 1 is late, in forward of step 4 (model.py:9 in forward); rank 0 is in backward of step 4",
        ),
        (
            [
                status_of_rank(0, 5, "numbers"),
                status_of_rank(1, 5, "data"),
                status_of_rank(2, 5, "numbers"),
                status_of_rank(3, 6, "forward"),
            ],
            "rank 1 is late, in data of step 5; ranks 0, 2 are in numbers of step 5; rank 3 is in forward of step 6",
        ),
        (
            [status_of_rank(0, 4, "backward", stuck="its process is stopped"), status_of_rank(1, 4, "forward")],
            "rank 0 is late, last seen in backward of step 4 (its process is stopped); rank 1 is in forward of step 4",
        ),
        ([status_of_rank(0, 4, "backward"), status_of_rank(1, 4, "backward")], "ranks 0, 1 are in backward of step 4"),
        ([status_of_rank(0, 4, "", kind="evaluation")], "rank 0 is in evaluation of step 4"),
    ],
)
def test_the_rank_with_the_least_progress_is_named_as_late(ranks, expected):
    assert describe_ranks(ranks) == expected


def test_the_innermost_line_is_that_of_the_main_thread():
    stacks = (
        'Thread 0x7f01 (most recent call first):\n  File "/x/watchdog.py", line 5 in _watch\n\n'
        'Current thread 0x7f00 (most recent call first):\n  File "/x/model.py", line 70 in forward\n'
        '  File "/x/train.py", line 9 in train\n'
    )
    assert innermost(stacks) == "model.py:70 in forward"
    assert innermost("") == ""


def test_the_limit_is_a_multiple_of_the_usual_time_with_a_floor(rank_watchdog):
    rank_watchdog, _ = rank_watchdog
    assert rank_watchdog.limit_s() is None
    rank_watchdog.begin(factor=10, floor_s=0.5)
    assert rank_watchdog.limit_s() == FIRST_S
    rank_watchdog._took["step"] = watchdog.deque([40.0])
    rank_watchdog._kind = "step"
    assert rank_watchdog.limit_s() == 400
    rank_watchdog._took["step"].extend([0.01] * 9)
    assert rank_watchdog.limit_s() == 0.5
    rank_watchdog._took["step"].extend([0.2] * 20)
    assert rank_watchdog.limit_s() == pytest.approx(2.0)


@pytest.mark.nightly
def test_each_kind_of_work_has_its_own_usual_time(rank_watchdog):
    rank_watchdog, _ = rank_watchdog
    rank_watchdog.begin(factor=10, floor_s=0.0)
    for step in range(50):  # a busy machine makes some of them long, but not the median
        rank_watchdog.work("step", step)
    rank_watchdog.work("evaluation", 3)
    assert rank_watchdog.limit_s() == FIRST_S
    rank_watchdog.work("step", 3)
    assert rank_watchdog.limit_s() < 1


def test_the_position_of_the_rank_is_recorded(rank_watchdog, tmp_path, monkeypatch):
    rank_watchdog, reports = rank_watchdog
    rank_watchdog.work("step", 7)
    rank_watchdog.at("forward")
    wait_until(
        lambda: RunDir(tmp_path).rank_state(0).exists() and read_json(RunDir(tmp_path).rank_state(0))["step"] == 7
    )
    state = read_json(RunDir(tmp_path).rank_state(0))
    assert (state["work"], state["place"], state["pid"], state["spent_s"]) == ("step", "forward", os.getpid(), 12.5)
    assert reports == []


@pytest.mark.nightly
def test_a_stalled_step_is_reported_with_its_stack(rank_watchdog, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "WAIT_S", 0.1)
    rank_watchdog, reports = rank_watchdog
    for step in range(4):
        rank_watchdog.work("step", step)
    rank_watchdog.begin(factor=10, floor_s=0.1)
    wait_until(lambda: reports)
    assert "rank 0 is in step of step 3" in reports[0]
    assert re.search(r"\(\w+\.py:\d+ in \w+\)", reports[0])
    assert "until" in RunDir(tmp_path).rank_stacks(0).read_text()


@pytest.mark.nightly
def test_a_progressing_run_is_not_reported_and_writes_no_stacks(ticks, tmp_path):
    reports = []
    rank_watchdog = Watchdog(log_of(tmp_path), rank=0, size=1, stalled=reports.append)
    rank_watchdog.begin(factor=1000, floor_s=30)
    step = 0
    while len(ticks) < 20:
        rank_watchdog.work("step", step)
        step += 1
    rank_watchdog.end()
    assert reports == []
    assert not RunDir(tmp_path).rank_stacks(0).exists()


@pytest.fixture
def ticks(monkeypatch):
    """Return the ages of a fast watchdog's ticks."""
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    for name in ("WAIT_S", "TURN_S"):
        monkeypatch.setattr(watchdog, name, 0.0)
    ages, write = [], Watchdog._write_state
    monkeypatch.setattr(Watchdog, "_write_state", lambda self, age: ages.append(age) or write(self, age))
    return ages


def enforce(rank_watchdog):
    """Set a limit of 50 ms for a step, and begin one."""
    for step in range(4):
        rank_watchdog.work("step", step)
    rank_watchdog.begin(factor=1, floor_s=0.05)


SLEEPING_RANK = """
import sys, time
from pathlib import Path
from gpt2.log import RunLog
from gpt2.failure import Watchdog
from kmatrix.records.paths import RunDir

def nap():
    rank_watchdog.at("forward")  # here, so that who reads it finds this rank in this function
    time.sleep(300)

log = RunLog(RunDir(Path(sys.argv[1])), "id", 1, main=False)
rank_watchdog = Watchdog(log, rank=1, size=2, stalled=lambda reason: None)
rank_watchdog.work("step", 3)
nap()
"""


@pytest.fixture
def sleeping_rank(tmp_path):
    """Rank 1 in another process, asleep in a forward pass."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPING_RANK, str(tmp_path)], env=environment())
    yield process
    process.kill()
    process.wait()


@pytest.mark.nightly
@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_can_dump_the_stack_of_another_even_if_that_is_stopped(tmp_path, sleeping_rank, monkeypatch, stopped):
    run_dir = RunDir(tmp_path)
    wait_until(lambda: run_dir.rank_state(1).exists() and read_json(run_dir.rank_state(1))["place"] == "forward")
    if stopped:
        os.kill(sleeping_rank.pid, signal.SIGSTOP)
        wait_until(lambda: ") T" in Path(f"/proc/{sleeping_rank.pid}/stat").read_text())
    monkeypatch.setattr(watchdog, "WAIT_S", 0.1)
    monkeypatch.setattr(watchdog, "TICK_S", 0.3)
    monkeypatch.setattr(watchdog, "ANSWER_S", 60.0)  # until it has written its stacks, however busy the machine is
    reports = []
    rank_watchdog = Watchdog(log_of(tmp_path), rank=0, size=2, stalled=reports.append)
    for step in range(4):
        rank_watchdog.work("step", step)
    rank_watchdog.at("backward")
    rank_watchdog.begin(factor=1, floor_s=0.5)
    wait_until(lambda: reports)
    rank_watchdog.end()
    assert f"rank 1 is late, {'last seen ' if stopped else ''}in forward of step 3" in reports[0]
    assert ("(its process is stopped)" in reports[0]) == stopped
    assert ("in nap" in reports[0]) != stopped, "a process that was stopped goes on before it writes its stacks"
    assert "nap" in run_dir.rank_stacks(1).read_text()


@pytest.mark.nightly
def test_a_dump_of_stacks_is_complete_with_the_outermost_frame_of_the_main_thread(sleeping_rank, tmp_path):
    """However long a rank pauses in the middle of its dump, a part of it is not taken for the whole."""
    run_dir = RunDir(tmp_path)
    wait_until(lambda: run_dir.rank_state(1).exists() and read_json(run_dir.rank_state(1))["place"] == "forward")
    sleeping_rank.send_signal(watchdog.STACKS_SIGNAL)
    wait_until(lambda: watchdog.has_all_stacks(run_dir.rank_stacks(1).read_text(), "<module>"))
    text = run_dir.rank_stacks(1).read_text()
    assert text.count("(most recent call first)") == 2  # the watchdog's thread, then the main thread
    assert [end for end in range(len(text) + 1) if watchdog.has_all_stacks(text[:end], "<module>")] == [len(text)]


def test_a_rank_records_its_position_before_the_first_tick_so_that_an_early_freeze_is_found(tmp_path, monkeypatch):
    # No tick happens during the test, so the state must have been written at the start.
    monkeypatch.setattr(watchdog, "TICK_S", 3600.0)
    run_dir = RunDir(tmp_path)
    write_json(run_dir.rank_state(0), {"attempt": 1, "spent_s": 33.5})
    rank_watchdog = Watchdog(RunLog(run_dir, "id", 2, main=True), rank=0, size=2, stalled=print)
    wait_until(lambda: read_json(run_dir.rank_state(0))["attempt"] == 2)
    rank_watchdog.end()
    state = read_json(run_dir.rank_state(0))
    assert (state["pid"], state["spent_s"]) == (os.getpid(), 33.5)


def test_a_run_that_was_moved_does_not_begin_again_at_its_old_path(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.001)
    run_dir = RunDir(tmp_path / "run")
    log = RunLog(run_dir, "id", 1, main=True)
    with Watchdog(log, rank=0, size=1, stalled=print) as rank_watchdog:
        wait_until(run_dir.rank_state(0).exists)
        moved = run_dir.path.rename(tmp_path / "moved")
        rank_watchdog._write_state(0.0)
        log.end("failed", "error", "cannot write metrics.jsonl")
    assert list(tmp_path.iterdir()) == [moved]


def test_the_time_spent_by_earlier_attempts_is_that_recorded_by_rank_0(tmp_path):
    run_dir = RunDir(tmp_path)
    assert spent_before(run_dir, 2) == 0.0
    write_json(run_dir.rank_state(0), {"attempt": 1, "spent_s": 33.5})
    assert spent_before(run_dir, 2) == 33.5
    assert spent_before(run_dir, 1) == 0.0


def test_the_stacks_of_an_earlier_attempt_are_kept(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.rank(0).mkdir(parents=True)
    run_dir.rank_stacks(0).write_text("it stood here")
    Watchdog(RunLog(run_dir, "id", 3, main=True), rank=0, size=1, stalled=print).end()
    assert run_dir.rank_stacks(0, 2).read_text() == "it stood here"
    assert not run_dir.rank_stacks(0).exists()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rank 0 first", "rank 1 first"])
def test_ranks_that_cannot_stop_end_a_stopped_run_whichever_gives_up_first(tmp_path, monkeypatch, order):
    exits = []
    monkeypatch.setattr(watchdog.dist, "exit_now", exits.append)
    for rank in order:
        watchdog.give_up(log_of(tmp_path), rank, "SIGTERM")
    result = read_json(RunDir(tmp_path).result)
    assert (result["status"], result["kind"]) == ("stopped", "signal")
    assert "stopped by SIGTERM at step 0, which did not end: no checkpoint" in result["reason"]
    assert [event["event"] for event in read_jsonl(RunDir(tmp_path).events)] == ["stop"]
    assert len(exits) == 2


def test_a_rank_that_loses_its_peer_during_a_stop_does_not_fail_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog.dist, "exit_now", lambda code: None)
    watchdog.give_up(log_of(tmp_path), 1, "SIGTERM")
    watchdog.record(log_of(tmp_path), 0, "error", "RuntimeError: connection closed by peer")
    result = read_json(RunDir(tmp_path).result)
    assert (result["status"], result["kind"]) == ("stopped", "signal")


def test_an_error_before_the_stop_is_the_reason_of_the_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog.dist, "exit_now", lambda code: None)
    watchdog.record(log_of(tmp_path), 1, "error", "ValueError: no data")
    watchdog.give_up(log_of(tmp_path), 0, "SIGTERM")
    result = read_json(RunDir(tmp_path).result)
    assert (result["status"], result["kind"]) == ("failed", "error")
    assert result["reason"] == "rank 1: ValueError: no data"


@pytest.mark.nightly
def test_a_step_that_ends_before_the_run_is_ended_was_slow_and_did_not_hang(rank_watchdog, tmp_path, monkeypatch):
    rank_watchdog, reports = rank_watchdog
    monkeypatch.setattr(watchdog, "WAIT_S", 0.0)
    began, states = rank_watchdog._began, rank_watchdog._states
    with monkeypatch.context() as during:
        during.setattr(rank_watchdog, "_states", lambda: rank_watchdog.work("step", 1) or states())
        rank_watchdog._end_run(began, 1.0, 0.5)
    rank_watchdog._end_run(began, 1.0, 0.5)  # of the same step: it has ended by now
    assert reports == []
    assert RunDir(tmp_path).rank_stacks(0).read_text() == ""
    rank_watchdog._end_run(rank_watchdog._began, 1.0, 0.5)
    assert len(reports) == 1
    assert RunDir(tmp_path).rank_stacks(0).read_text().count("most recent call first") >= 1


def test_a_rank_exits_although_its_reason_cannot_be_written(tmp_path, monkeypatch):
    exits = []
    monkeypatch.setattr(watchdog.dist, "exit_now", exits.append)

    def full(*_):
        assert watchdog._last.locked()  # no other thread ends this rank meanwhile
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(watchdog, "record", full)
    monkeypatch.setattr(RunLog, "event", full)
    with pytest.raises(OSError, match="No space"):
        watchdog.give_up(log_of(tmp_path), 0, "SIGTERM")
    with pytest.raises(OSError, match="No space"):
        watchdog.fail(log_of(tmp_path), 1, ValueError("no data"))
    watchdog.stalled(log_of(tmp_path), 0, "no progress")  # the small result may still have space
    assert read_json(RunDir(tmp_path).result)["kind"] == "stall"
    assert exits == [watchdog.dist.EXIT_STOPPED, watchdog.dist.EXIT_FAILED, watchdog.dist.EXIT_FAILED]


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        ("ValueError: no data", "error", "rank 1: ValueError: no data"),
        ("RuntimeError: Connection closed by peer", "stall", "no progress"),
    ],
)
def test_a_rank_that_waits_for_one_that_failed_by_itself_names_that_failure(tmp_path, monkeypatch, error, kind, reason):
    monkeypatch.setattr(watchdog.dist, "exit_now", lambda code: None)
    watchdog.record(log_of(tmp_path), 1, "error", error)
    watchdog.stalled(log_of(tmp_path), 0, "no progress")
    result = read_json(RunDir(tmp_path).result)
    assert (result["status"], result["kind"], result["reason"]) == ("failed", kind, reason)
    assert next(read_jsonl(RunDir(tmp_path).events))["event"] == "stall"
