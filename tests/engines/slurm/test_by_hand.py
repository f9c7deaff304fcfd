"""Scripts submitted by hand: the first job submits the others, and the report comes after all jobs."""

from __future__ import annotations

import pytest

from kmatrix.engines.slurm import commands
from kmatrix.engines.slurm.by_hand import is_first_start, submit_others, submit_report_later
from kmatrix.records.jobs.files import REPORT, EngineFile, SubmissionFile, job_label, write_submission
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from slurm_answers import answer

ENGINE = EngineFile(engine="slurm", id="abc", path="/x")


@pytest.fixture
def jobs(tmp_path):
    """Return a matrix with two submissions of runs and the report, and their scripts in the folder `d`."""
    found = JobsDir(MatrixDir(tmp_path / "matrix"))
    (tmp_path / "d").mkdir()
    for number in (1, 2, 3):
        folder, label = found.submission(number), job_label("abc", number)
        folder.path.mkdir(parents=True)
        report = number == 3
        write_submission(
            folder, SubmissionFile(label=label, kind=REPORT if report else "runs", after=(1, 2) if report else ())
        )
        (tmp_path / "d" / f"{number}.sbatch").write_text(f"#!/bin/bash\n#SBATCH --comment={label}\ntrue\n")
    return found


@pytest.fixture
def slurm(monkeypatch):
    answers = answer(monkeypatch)
    answers.say("squeue", "7|RUNNING|None|n1|N/A|kmatrix-abc-1\n5|COMPLETED|None|n1|N/A|kmatrix-abc-2\n")
    return answers


def submitted(slurm):
    return [call[2:] for call in slurm.calls if call[0] == "sbatch"]


def test_the_first_job_submits_the_other_scripts_and_the_report_after_all(jobs, slurm, tmp_path):
    said = []

    submit_others(jobs, ENGINE, ["d/3.sbatch", "d/2.sbatch"], {"SLURM_SUBMIT_DIR": str(tmp_path)}, said.append)

    folder = tmp_path / "d"
    assert submitted(slurm) == [(str(folder / "2.sbatch"),), ("--dependency=afterany:7", str(folder / "3.sbatch"))]
    assert said == ["submitted 2.sbatch: job 33", "submitted 3.sbatch: job 33, after all others"]


def test_a_script_whose_job_waits_or_runs_is_not_submitted_again(jobs, slurm, tmp_path):
    said = []

    submit_others(jobs, ENGINE, [str(tmp_path / "d/1.sbatch")], {}, said.append)

    assert (submitted(slurm), said) == ([], ["1.sbatch has a job: 7"])


@pytest.mark.parametrize("text", ["#!/bin/bash\nrm -rf x\n", "#!/bin/bash\n#SBATCH --comment=kmatrix-other-2\n", None])
def test_other_words_are_not_submitted(jobs, slurm, tmp_path, text):
    said, path = [], tmp_path / "other"
    if text:
        path.write_text(text)

    submit_others(jobs, ENGINE, [str(path)], {}, said.append)

    assert (submitted(slurm), said) == ([], [f"not submitted: {path} is not a script of this matrix"])


def test_a_refused_script_is_reported_and_the_next_one_submitted(jobs, slurm, tmp_path):
    said, folder = [], tmp_path / "d"
    slurm.say("sbatch --parsable " + str(folder / "2.sbatch"), err="sbatch: error: invalid account\n", status=1)

    submit_others(jobs, ENGINE, [str(folder / "2.sbatch"), str(folder / "3.sbatch")], {}, said.append)

    two = folder / "2.sbatch"
    assert said[0] == f"cannot submit {two}: invalid account; submit it on a login node: sbatch {two}"
    assert said[1].startswith("submitted 3.sbatch")


def test_a_report_that_starts_too_early_is_submitted_again_after_the_jobs(jobs, slurm, tmp_path):
    said, script = [], tmp_path / "d/3.sbatch"

    assert submit_report_later(jobs.submission(3), script, ENGINE, said.append)
    assert submitted(slurm) == [("--dependency=afterany:7", str(script))]
    slurm.say("squeue", "")
    assert not submit_report_later(jobs.submission(3), script, ENGINE, said.append)


def test_without_an_answer_the_report_is_written_at_once(jobs, slurm):
    said = []
    slurm.stop_controller()

    assert not submit_report_later(jobs.submission(3), None, ENGINE, said.append)
    assert "cannot ask Slurm for the other jobs" in said[0]


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"SLURM_RESTART_COUNT": "0"}, True),
        ({"SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0"}, True),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0"}, False),
    ],
)
def test_only_the_first_start_of_the_first_task_submits_others(environment, first):
    assert is_first_start(environment) is first


def test_a_job_that_a_job_submits_does_not_get_its_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert commands.environment()["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "CUDA_VISIBLE_DEVICES" not in commands.environment()
