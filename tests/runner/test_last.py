"""The job after all others: it submits what is due, or reports, and starts nothing that somebody has cancelled."""

from __future__ import annotations

import shutil

import pytest

from callable_slurm import FakeSlurm
from kmatrix.clock import clock
from kmatrix.engines.slurm import Slurm
from kmatrix.engines.slurm_nodes import SlurmSettings
from kmatrix.records import attempts, control
from kmatrix.runner import last
from records_factory import FakeRun, make_matrix

DONE, NEXT = FakeRun(optimizer="adamw"), FakeRun(optimizer="muon")


@pytest.fixture
def matrix(tmp_path):
    return make_matrix(tmp_path, [DONE], planned=[NEXT], engine="slurm").path


@pytest.fixture
def reports(monkeypatch):
    found = []
    monkeypatch.setattr(last, "conclude", found.append)
    return found


@pytest.fixture
def slurm(monkeypatch):
    fake = FakeSlurm()
    monkeypatch.setattr(last, "scheduler_of", lambda plan: Slurm(SlurmSettings(), run=fake))
    return fake


def test_it_submits_what_is_due_or_reports(matrix, reports, slurm):
    folder = str(matrix / "jobs/0009")

    assert last.main([folder]) == 0
    assert (list(slurm.live()), reports) == (["11", "12"], [])
    assert (matrix / "jobs/0001/runs").read_text() == f"{NEXT.name}\n"

    for job in slurm.jobs.values():  # before it had begun
        job.state = "CANCELLED"
    assert last.main([folder]) == 0
    assert (list(slurm.live()), reports) == ([], [matrix])


def test_a_run_that_trains_is_not_submitted_again_after_the_folder_of_its_job_was_removed(matrix, reports, slurm):
    folder = str(matrix / "jobs/0009")
    last.main([folder])
    (matrix / NEXT.name / "attempts").mkdir(parents=True)
    attempts.write(matrix / NEXT.name, attempts.Attempt(number=1, host="n7"))
    shutil.rmtree(matrix / "jobs")

    assert last.main([folder]) == 0
    assert list(slurm.live()) == ["11", "12"]


@pytest.mark.parametrize(("later", "expected"), [(False, 1), (True, 0)])
def test_a_pod_waits_for_the_files_of_runs_and_leaves_the_report_to_a_later_one(
    matrix, reports, monkeypatch, later, expected
):
    for number, runs in (("0001", NEXT.name), ("0002", "")):
        (matrix / "jobs" / number).mkdir(parents=True)
        (matrix / "jobs" / number / "runs").write_text(runs)

    def wait(_):
        assert reports == []
        if later:
            (matrix / "jobs/0003").mkdir()
            (matrix / "jobs/0003/runs").touch()
        else:
            control.stop(matrix)

    monkeypatch.setattr(clock, "sleep", wait)
    monkeypatch.setattr(last.signal, "signal", lambda *_: None)
    assert last.main(["--wait", str(matrix / "jobs/0002")]) == 0
    assert len(reports) == expected
