"""A full disk is reported as such wherever it occurs, with the space to free and the command to type."""

from __future__ import annotations

import errno
import re
from collections import namedtuple
from pathlib import Path

import pytest

import kmatrix.status.disk_space as room
from checkpoints import add_checkpoint
from gpt2.log import RunLog
from gpt2.watchdog import Watchdog, kind_of
from kmatrix.cli.running.start import print_next_steps
from kmatrix.errors import LaunchError, RecordError, is_full
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.runs import Status
from kmatrix.runner.loop import Outcome, drive
from kmatrix.runner.resume import reopen
from kmatrix.status import classify
from kmatrix.status.state import DISK
from kmatrix.status.status_file import writing
from running import classify_end, engine, status_of

Usage = namedtuple("Usage", "total used free")
FULL_DISK = OSError(errno.ENOSPC, "No space left on device", "/results/x")


def chained_error(cause):
    try:
        try:
            raise cause
        except OSError as error:
            raise RuntimeError("[enforce fail at inline_container.cc]") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (FULL_DISK, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (RecordError("damaged"), False),
        (chained_error(FULL_DISK), True),
        (chained_error(OSError(errno.EIO, "Input/output error")), False),
    ],
)
def test_a_full_disk_error_is_recognized_by_errno_or_by_its_cause(error, full):
    assert is_full(error) is full
    assert (kind_of(error) == "disk") is full


def test_a_failed_run_writes_its_result_even_on_a_full_disk(plan, monkeypatch):
    run = plan("a")
    log = RunLog(run.dir, run.run_id, 1, main=True)

    def raise_disk_full(*_):
        raise FULL_DISK

    monkeypatch.setattr("kmatrix.records.files.append_jsonl", raise_disk_full)
    Watchdog(log, 0).record("disk", "no room for a checkpoint")
    assert (read_json(run.dir.result)["kind"], read_json(run.dir.result)["status"]) == ("disk", "failed")


def test_an_attempt_that_died_on_a_full_disk_failed_with_kind_disk(plan, monkeypatch):
    run = plan("a")
    run.dir.output_log.write_text("RuntimeError: cannot write\n")
    monkeypatch.setattr(classify, "is_full", lambda path: path == run.dir.path)
    found = classify_end(run, exit_code=1)
    assert (found.status, found.kind) == (Status.FAILED, DISK)
    assert found.reason.startswith("the disk is full: ")
    assert "RuntimeError: cannot write" in found.reason


@pytest.mark.process
def test_on_a_full_disk_no_run_is_started_and_all_continue_later(matrix, plan):
    plans = [plan("a", "quick"), plan("b", "disk"), plan("c", "quick")]
    outcome = drive(matrix, plans, engine(), poll_s=0.02)
    assert (outcome.counts, outcome.exit_code, outcome.disk_full) == (
        {"planned": 1, "finished": 1, "failed": 1},
        1,
        True,
    )
    assert (status_of(plans[1])["kind"], status_of(plans[1])["reason"]) == ("disk", "no room for a checkpoint")
    held_back = [line["held_back"] for line in read_jsonl(matrix.journal) if line["event"] == "disk full"]
    assert held_back == [["c"]]
    assert [run.name for run in continued_plans(matrix)] == ["b", "c"]


def continued_plans(folder):
    for run in folder.runs():
        record = read_json(run.run_json)
        fields = {"num_gpus": 1, "device": "cpu", "cpu_threads": 1, "data_path": "/data"}
        write_json(run.run_json, record | {"train": record["train"] | fields})
    return reopen(folder, ()).plans


def test_the_error_names_the_disk_the_space_to_free_and_the_command_to_type(matrix, plan, monkeypatch):
    run = plan("a")
    write_json(matrix.matrix_json, {"runs": [{"name": "a"}]})
    add_checkpoint(run.dir.checkpoints, 4, bytes(6 * 2**20))
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: Usage(24 * 2**20, 24 * 2**20, 1000))
    with pytest.raises(LaunchError) as raised, writing(run.dir.status):
        raise FULL_DISK
    assert raised.value.what == f"cannot write {run.dir.status}"
    assert raised.value.why.startswith("No space left on device: /")
    assert raised.value.why.endswith(" of 25.2 MB free")
    assert raised.value.hint == (
        f"free at least 10.5 MB, then run `make continue TARGET={matrix.path}`; finished runs are kept"
    )
    assert room.is_full(matrix.path)


def test_the_end_of_a_matrix_names_the_disk_of_the_checkpoints_too(matrix, plan, capsys):
    plan("a")
    other = Path("/dev/shm")
    if not other.is_mount():
        pytest.skip("no second disk")
    write_json(matrix.matrix_json, {"runs": [{"name": "a"}], "checkpoints": str(other / "kmatrix-checkpoints")})
    ended = Outcome(exit_code=1, counts={Status.FAILED: 1}, disk_full=True)
    print_next_steps(matrix, ended)
    assert re.search(
        r"The disk is full: \S+ has .* free; /dev/shm has .* free\nContinue: free at", capsys.readouterr().out
    )
    matrix.matrix_json.write_text("{")
    print_next_steps(matrix, ended)
    assert "The disk is full: " in capsys.readouterr().out
