"""Accounting is asked for a report, and its answer is kept; without one, the reason is returned."""

from __future__ import annotations

import pytest

from cluster_factory import FakeScheduler, make_empty, make_engine, make_submission
from kmatrix.engines.accounting import refresh_usage
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.jobs.usage import ShareUsage, read_usage

USED = ShareUsage(starts=1, node_s=60.0, cpu_s=60.0, gpu_s=120.0)


@pytest.fixture
def matrix(tmp_path):
    return make_empty(tmp_path)


def test_the_answer_is_kept_for_the_report(matrix):
    make_engine(matrix)
    make_submission(matrix, [["a"], ["b"]])

    assert refresh_usage(matrix, scheduler=FakeScheduler(used={"1.1": USED})) == ""

    assert read_usage(JobsDir(matrix)).shares == {"1.1": USED}


def test_without_an_answer_the_older_one_stays(matrix):
    make_engine(matrix)
    make_submission(matrix, [["a"]])
    refresh_usage(matrix, scheduler=FakeScheduler(used={"1.0": USED}))

    why = refresh_usage(matrix, scheduler=FakeScheduler(why_not="Slurm accounting storage is disabled"))

    assert why == "Slurm accounting storage is disabled"
    assert read_usage(JobsDir(matrix)).shares == {"1.0": USED}


def test_a_matrix_of_this_machine_and_a_copy_ask_nobody(matrix):
    scheduler = FakeScheduler(used={"1.0": USED})
    assert refresh_usage(matrix, scheduler=scheduler) == ""
    make_engine(matrix, path="/elsewhere/test_matrix_results_20261120_052300")
    make_submission(matrix, [["a"]])
    assert refresh_usage(matrix, scheduler=scheduler) == ""

    assert scheduler.questions == 0
    assert not JobsDir(matrix).usage.exists()
