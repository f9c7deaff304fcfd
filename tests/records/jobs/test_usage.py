"""Allocated hours: accounting where it knows all, else the files of the jobs; one start is never counted twice."""

from __future__ import annotations

import os
import time

import pytest

from cluster_factory import claim, make_empty, make_engine, make_submission
from kmatrix.errors import damaged_files
from kmatrix.records.jobs import usage
from kmatrix.records.jobs.files import ShareOwner
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.jobs.usage import (
    ShareUsage,
    begin_again,
    keep_usage,
    own_usage,
    process_seconds,
    read_usage,
    record_killed_start,
    record_start,
    usage_of,
)

HOUR = 3600.0


@pytest.fixture
def matrix(tmp_path):
    found = make_empty(tmp_path)
    make_engine(found)
    return found


def noted(share, restart=0, seconds=HOUR, job="12"):
    record_start(share, ShareOwner(job=job, restart=restart), seconds)


def test_every_start_of_every_job_counts_with_all_of_its_nodes_and_gpus(matrix):
    wide, other = make_submission(matrix, [["a"], ["b"]], nodes=2, gpus_per_node=4, cpus_per_node=16)
    noted(wide)
    noted(wide, restart=1)
    noted(other, seconds=HOUR / 2)

    used = usage_of(matrix)

    assert (used.jobs, used.starts, used.counted) == (2, 3, 0)
    assert (used.node_hours, used.gpu_hours, used.cpu_hours) == (5.0, 20.0, 80.0)


def test_a_start_that_goes_on_or_was_killed_counts_until_its_last_sign_of_life(matrix):
    (share,) = make_submission(matrix, [["a"]])
    noted(share)
    claim(share, restart=1, seconds=HOUR / 4)

    assert own_usage(share, 1).starts == 2
    assert usage_of(matrix).node_hours == 1.25


def test_the_next_start_notes_the_one_that_was_killed_once(matrix):
    (share,) = make_submission(matrix, [["a"]])
    killed = ShareOwner(job="12", seconds=100.0)
    for _ in range(2):
        record_killed_start(share, killed, "12", 1)
    record_killed_start(share, None, "12", 1)
    record_killed_start(share, ShareOwner(job="12", restart=1, seconds=5.0), "12", 1)  # itself

    assert len(share.starts.read_text().splitlines()) == 1
    assert own_usage(share, 1).node_s == 100.0


def test_a_start_with_two_lines_counts_once_with_the_longer_one(matrix):
    (share,) = make_submission(matrix, [["a"]])
    noted(share, seconds=90.0)
    noted(share, seconds=100.0)
    claim(share, seconds=95.0)

    assert own_usage(share, 1) == ShareUsage(starts=1, node_s=100.0)


def test_accounting_wins_where_it_knows_every_start_and_counts_what_runners_do_not_see(matrix):
    shares = make_submission(matrix, [["a"], ["b"], ["c"]], gpus_per_node=2)
    for share in shares:
        noted(share)
    told = {
        "1.0": ShareUsage(
            starts=2, node_s=2 * HOUR, cpu_s=8 * HOUR, gpu_s=16 * HOUR
        ),  # whole nodes, and a failed start
        "1.1": ShareUsage(starts=1, node_s=HOUR / 2),  # an older answer
        "1.2": ShareUsage(starts=1, node_s=HOUR - 21),  # its start ended with a requeue; accounting without GPUs
    }
    keep_usage(JobsDir(matrix), told)

    used = usage_of(matrix)

    assert (used.counted, used.jobs, used.starts) == (2, 3, 4)
    assert used.gpu_hours == pytest.approx(16 + 2 + 2, abs=0.02)


def test_accounting_that_does_not_know_a_start_is_not_used_whatever_it_has_counted(matrix):
    (share,) = make_submission(matrix, [["a"]])
    noted(share)
    noted(share, restart=1)
    keep_usage(JobsDir(matrix), {"1.0": ShareUsage(starts=1, node_s=9 * HOUR)})

    used = usage_of(matrix)

    assert (used.counted, used.starts, used.node_hours) == (0, 2, 2.0)


def test_an_answer_is_kept_when_accounting_forgets_and_replaced_when_it_knows_more(matrix):
    jobs = JobsDir(matrix)
    make_submission(matrix, [["a"], ["b"]])
    keep_usage(jobs, {"1.0": ShareUsage(starts=1, node_s=10.0), "1.1": ShareUsage(starts=1, node_s=10.0)})
    keep_usage(jobs, {"1.0": ShareUsage(starts=2, node_s=25.0)})
    keep_usage(jobs, {"1.0": ShareUsage(starts=1, node_s=1.0)})

    assert {share: used.node_s for share, used in read_usage(jobs).shares.items()} == {"1.0": 25.0, "1.1": 10.0}


def test_without_a_start_there_is_nothing_to_report(matrix):
    assert usage_of(matrix) is None
    make_submission(matrix, [["a"]])
    keep_usage(JobsDir(matrix), {})
    assert usage_of(matrix) is None
    assert not JobsDir(matrix).usage.exists()


def test_the_job_of_the_report_is_not_counted_and_packed_runs_are_marked(matrix):
    (packed,) = make_submission(matrix, [["a", "b"]])
    (report,) = make_submission(matrix, [[]], number=2, job="13", kind="report")
    noted(packed)
    noted(report, job="13")

    used = usage_of(matrix)

    assert (used.jobs, used.is_packed) == (1, True)


@pytest.mark.parametrize("text", ["{", '{"job": "12", "seconds": -5}\n', '{"job": "--x", "seconds": 5}\n', "\0\n"])
def test_damaged_files_count_as_nothing(matrix, text):
    (share,) = make_submission(matrix, [["a"]])
    noted(share)
    with share.starts.open("a") as file:
        file.write(text)
    JobsDir(matrix).usage.write_text(text)

    assert usage_of(matrix).node_hours == 1.0
    damaged_files()


def test_the_time_of_a_job_begins_with_its_process(monkeypatch):
    begun = time.clock_gettime(time.CLOCK_BOOTTIME) - 90
    monkeypatch.setattr(usage, "start_of", lambda _: int(begun * os.sysconf("SC_CLK_TCK")))
    assert 90 <= process_seconds() < 300
    monkeypatch.setattr(usage, "start_of", lambda _: None)
    assert process_seconds() < 60


def test_a_start_in_the_place_of_an_earlier_one_counts_from_its_own_begin(monkeypatch):
    monkeypatch.setenv(usage.BEFORE, "")
    begun = time.clock_gettime(time.CLOCK_BOOTTIME) - 90
    monkeypatch.setattr(usage, "start_of", lambda _: int(begun * os.sysconf("SC_CLK_TCK")))
    begin_again()
    assert process_seconds() < 60
    begin_again()  # a third one
    assert process_seconds() < 60
