"""The runner writes the curves of each run that has ended, and no error of that concerns a run."""

import errno
import signal

import pytest

from kmatrix.curves.file import read_curves_file
from kmatrix.records.files import read_jsonl
from kmatrix.runner.loop import drive
from running import END_S, engine, status_of, wait_for_start


@pytest.mark.process
def test_each_run_that_ended_has_its_curves_also_if_it_failed(matrix, plan):
    plans = [plan("a"), plan("b", "fail")]
    drive(matrix, plans, engine(), poll_s=0.02)
    for run in plans:
        curves = read_curves_file(run.dir)
        assert curves.metrics_bytes == (run.dir.metrics.stat().st_size if run.dir.metrics.exists() else 0)
        assert curves.attempt == status_of(run)["attempt"]
    assert read_curves_file(plans[0].dir).train.step


@pytest.mark.process
def test_a_run_that_is_retried_has_the_curves_of_its_last_attempt(matrix, plan):
    run = plan("a", "nccl1")
    drive(matrix, [run], engine(), poll_s=0.02)
    assert status_of(run)["attempt"] == 2
    assert read_curves_file(run.dir).attempt == 2


@pytest.mark.nightly
def test_a_run_that_was_stopped_has_its_curves(matrix, plan, start_runner):
    run = plan("a", "until asked")
    process = start_runner("a=until asked")
    wait_for_start(run)
    process.send_signal(signal.SIGINT)
    assert process.wait(END_S) == 130
    assert read_curves_file(run.dir).attempt == 1


@pytest.mark.process
@pytest.mark.parametrize(("number", "logged"), [(errno.EACCES, ["a", "b"]), (errno.ENOSPC, [])])
def test_curves_that_cannot_be_written_are_logged_unless_the_disk_is_full(matrix, plan, monkeypatch, number, logged):
    def refuse(path, *_, **__):
        raise OSError(number, "no", str(path))

    monkeypatch.setattr("kmatrix.curves.make.write_bytes", refuse)
    outcome = drive(matrix, [plan("a"), plan("b")], engine(), poll_s=0.02)
    assert (outcome.exit_code, outcome.counts) == (0, {"finished": 2})
    events = read_jsonl(matrix.journal)
    assert [line["run"] for line in events if line["event"] == "curves not written"] == logged
    assert not list(matrix.path.glob("*/curves.json"))


@pytest.mark.process
def test_a_run_with_a_large_log_leaves_its_curves_to_the_report(matrix, plan, monkeypatch):
    monkeypatch.setattr("kmatrix.curves.queue.MOST_BYTES", 10)
    run = plan("a")
    drive(matrix, [run], engine(), poll_s=0.02)
    assert run.dir.metrics.stat().st_size > 10
    assert not run.dir.curves.exists()
