"""A rank that hangs ends with its stacks; each rank records where it is and why it failed; rank 0 names the cause."""

from __future__ import annotations

import errno
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from factories import environment
from gpt2 import watchdog
from gpt2.log import RunLog
from gpt2.stopping import NotFiniteError
from gpt2.watchdog import FIRST_S, FLOOR_S, Watchdog, kind_of
from kmatrix.engines.failures import first_failure
from kmatrix.errors import DataError
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from recordings import read_jsonl


def watchdog_of(tmp_path, rank=0):
    return Watchdog(RunLog(RunDir(tmp_path), "id", 1, main=rank == 0), rank)


def state_of(tmp_path, rank=0):
    return read_json(RunDir(tmp_path).rank(rank) / "state.json")


@pytest.fixture
def exits(monkeypatch):
    """The exit codes of ranks, in order: none of them ends this process."""
    codes = []
    monkeypatch.setattr(watchdog.dist, "exit_now", codes.append)
    return codes


def test_the_limit_of_each_kind_of_work_is_a_multiple_of_its_usual_time_with_a_floor(tmp_path, monkeypatch):
    now, limits = [100.0], []
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda limit, **_: limits.append(limit))
    dog = watchdog_of(tmp_path)
    dog.work("step", 0)
    assert limits == []  # not before `begin`
    dog._factor = 10
    for took, limit in (([40.0], 400.0), ([1800.0, 0.01, 0.01], FLOOR_S), ([1800.0, 50.0, 50.0, 900.0], 500.0)):
        dog.took["step"].clear()
        dog.took["step"].extend(took)
        dog.progress()
        assert limits.pop() == limit
    dog.took.clear()
    for kind, at in (("step", 100.1), ("step", 100.5), ("step", 101.2), ("evaluation", 101.3), ("step", 101.4)):
        now[0] = at
        dog.work(kind, 1)
    assert limits == [FLOOR_S, FLOOR_S, FIRST_S, FLOOR_S]  # for each kind, and at most once per second


def test_each_rank_records_where_it_is_and_a_loop_that_ends_leaves_no_stacks(tmp_path):
    dog = watchdog_of(tmp_path, rank=1)
    assert state_of(tmp_path, 1)["work"] == "set-up"
    dog.work("step", 7)
    dog.at("forward")
    dog._write_state()
    dog.end()
    state = state_of(tmp_path, 1)
    assert (state["rank"], state["step"], state["work"], state["place"]) == (1, 7, "step", "forward")
    assert not (RunDir(tmp_path).rank(1) / "stacks_1.txt").exists()


HANGING = """
import re, sys, time
from pathlib import Path
from gpt2 import watchdog
from gpt2.log import RunLog
from kmatrix.records.paths import RunDir

watchdog.FIRST_S, watchdog.EVERY_S = 0.5, 0.1
dog = watchdog.Watchdog(RunLog(RunDir(Path(sys.argv[1])), "id", 1, main=False), 1)
dog.begin(10)
dog.work("step", 3)
dog.at("forward")

def asleep():
    time.sleep(60)

def spinning():
    re.match("(a*)*b", "a" * 40)  # one call into C code, which holds the GIL

globals()[sys.argv[2]]()
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["asleep", "spinning"])
def test_a_rank_that_hangs_ends_by_itself_with_its_stacks_also_if_it_holds_the_gil(tmp_path, how):
    command = [sys.executable, "-c", HANGING, str(tmp_path), how]
    process = subprocess.run(command, check=False, env=environment(), timeout=60)
    assert process.returncode == 1
    _, kind, reason = first_failure(RunDir(tmp_path), 1)
    assert kind == "stall"
    assert "no progress for 0:00:00.500000: rank 1 is in" in reason
    assert ("in asleep)" in reason) == (how == "asleep")  # re.match has a frame of its own
    assert f"in {how}\n" in (RunDir(tmp_path).rank(1) / "stacks_1.txt").read_text()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("Connection closed by peer"), "error"),
        (ValueError("a text about being out of memory"), "error"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (DataError("a shard is short"), "data"),
        (NotFiniteError("loss is nan at step 7"), "nan"),
    ],
)
def test_each_kind_of_failure_is_recognized_by_its_error(error, kind):
    assert kind_of(error) == kind


def test_each_rank_says_why_it_failed_and_rank_0_ends_the_result(tmp_path, exits):
    watchdog_of(tmp_path, 1).fail(ValueError("no data"))
    watchdog_of(tmp_path).fail(RuntimeError("Connection closed by peer"))
    result = read_json(RunDir(tmp_path).result)
    assert (result["status"], result["kind"], result["reason"]) == (
        "failed",
        "error",
        "RuntimeError: Connection closed by peer",
    )
    assert first_failure(RunDir(tmp_path), 1)[1:] == ("error", "rank 1: ValueError: no data")
    assert [event["event"] for event in read_jsonl(RunDir(tmp_path).events)] == ["failed"]
    assert exits == [1, 1]


def test_a_rank_exits_although_its_reason_cannot_be_written(tmp_path, exits, monkeypatch):
    monkeypatch.setattr(RunLog, "end", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        watchdog_of(tmp_path).fail(ValueError("no data"))
    assert exits == [1]


def test_a_run_that_was_moved_does_not_begin_again_at_its_old_path(tmp_path):
    (tmp_path / "run").mkdir()
    dog = watchdog_of(tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    dog._write_state()
    dog.record("error", "cannot write metrics.jsonl")
    assert list(tmp_path.iterdir()) == [moved]
