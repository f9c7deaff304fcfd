"""The job after all others."""

from __future__ import annotations

import pytest

from cluster_factory import write_submission
from kmatrix.records.decode import as_json
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs import claim
from kmatrix.records.jobs.files import (
    EngineFile,
    JobView,
    PollFile,
    SchedulerPhase,
    ShareEnd,
    ShareOwner,
    SubmissionFile,
    write_engine,
    write_poll,
)
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.runner.share import report
from kmatrix.runner.share.__main__ import main
from share_job import start


@pytest.fixture
def matrix_of_jobs(share, matrix, tmp_path, monkeypatch):
    """Return a function that runs the report job of a matrix whose only run has finished."""
    mark = tmp_path / "finished"

    def run(*, newer=False) -> int:
        mine = share("a")
        command = f"sh -c 'echo $KMATRIX_STATUS > {mark}'"
        record = read_json(mine.run("a").run_json)
        write_json(mine.run("a").run_json, record | {"symbols": {"ON_FINISH": command}})
        write_json(matrix.matrix_json, {"name": matrix.name, "created": 1.0, "runs": [{"name": "a"}]})
        assert start(mine)[0].run() == 0
        write_engine(matrix, EngineFile(engine="slurm", id="x", path=str(matrix.path)))
        last = JobsDir(matrix).submission(2)
        last.path.mkdir()
        write_submission(last, SubmissionFile(kind="report"))
        if newer:
            share("a", number=3)
        return main([str(matrix.path), "2"])

    run.mark = mark
    return run


@pytest.mark.process
def test_the_last_job_writes_the_status_and_the_report_and_runs_the_command(matrix_of_jobs, matrix):
    assert matrix_of_jobs() == 0
    status = read_json(matrix.status)
    assert (status["status"], status["counts"]) == ("finished", {"finished": 1})
    (attempt,) = read_json(matrix.run("a").status)["attempts"]
    assert status["started"] == attempt["started"] < status["ended"]
    assert matrix.summary.exists()
    assert matrix_of_jobs.mark.read_text() == "finished\n"


@pytest.mark.process
def test_a_newer_submission_has_a_report_of_its_own(matrix_of_jobs, matrix, capsys):
    assert matrix_of_jobs(newer=True) == 0
    assert not matrix.summary.exists()
    assert not matrix_of_jobs.mark.exists()
    assert "submission 3 is newer" in capsys.readouterr().out


@pytest.mark.process
def test_a_report_that_cannot_be_written_fails_the_job_after_the_command(matrix_of_jobs, monkeypatch):
    def refuse(_: object) -> None:
        raise report.KmatrixError("the disk is full")

    monkeypatch.setattr("kmatrix.report.write.write_summary", refuse)
    assert matrix_of_jobs() == 1
    assert matrix_of_jobs.mark.exists()


@pytest.fixture
def waiting(share, matrix, monkeypatch):
    """Return the first of two shares without an end, and a function that waits for both as the report job does."""
    first, second = share("a"), share("b", number=2)
    last = JobsDir(matrix).submission(3)
    last.path.mkdir()
    write_submission(last, SubmissionFile(kind="report", after=(1, 2)))
    looks = []

    def look(_: float) -> None:
        looks.append(1)
        if len(looks) > 3:
            raise TimeoutError

    monkeypatch.setattr(report.time, "sleep", look)
    for one in (first, second):
        write_json(one.owner, as_json(ShareOwner(job=one.id)))
        write_json(one.end, as_json(ShareEnd(job=one.id, status="stopped", requeued=True)))

    def wait() -> bool:
        looks.clear()
        try:
            report.wait_for_others(matrix, last, SubmissionFile(kind="report", after=(1, 2)))
        except TimeoutError:
            return False
        return True

    return first, wait


def poll(matrix, *phases):
    views = {f"{number}.0": JobView(job=f"{number}.0", phase=phase) for number, phase in enumerate(phases, 1)}
    write_poll(JobsDir(matrix), PollFile(jobs=views))


def test_a_report_waits_for_jobs_that_start_again_until_the_scheduler_knows_them_no_more(waiting, matrix):
    _, wait = waiting
    assert not wait()
    poll(matrix, SchedulerPhase.UNKNOWN, SchedulerPhase.PENDING)
    assert not wait()
    poll(matrix, SchedulerPhase.UNKNOWN, SchedulerPhase.ENDED)
    assert wait()


def test_a_report_waits_while_a_runner_rewrites_its_claim_whatever_the_scheduler_answers(waiting, matrix, monkeypatch):
    first, wait = waiting
    poll(matrix, SchedulerPhase.ENDED, SchedulerPhase.ENDED)
    first.end.unlink()
    assert not wait()
    monkeypatch.setattr(claim, "FRESH_S", -1.0)  # its pod was killed
    assert wait()


def test_a_report_leaves_if_a_later_one_follows(waiting, share):
    _, wait = waiting
    share("c", number=4)
    assert wait()


def test_a_report_does_not_wait_for_a_share_whose_runs_have_a_newer_one(waiting, matrix, monkeypatch):
    _, wait = waiting
    poll(matrix, SchedulerPhase.RUNNING, SchedulerPhase.ENDED)
    assert not wait()
    second = JobsDir(matrix).submission(2).share(0)
    monkeypatch.setattr(report, "newest_shares", lambda _: {"a": second, "b": second})
    assert wait()
