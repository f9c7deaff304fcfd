"""A task, a job that trains nothing, is submitted once, found again, and tells how it ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kmatrix.engines.slurm.script import JobPlace, Task, render_task
from kmatrix.engines.slurm.settings import read_settings
from kmatrix.engines.slurm.task import exit_status, submit_task, task_shape, view_task
from kmatrix.errors import LaunchError
from slurm_answers import answer

PLACE = JobPlace(root=Path("/shared/km"), python=Path("/shared/km/.venv/bin/python"))


@pytest.fixture
def task(tmp_path):
    return make_task(tmp_path / "a task")


def make_task(folder, *commands):
    words = commands or (("true",),)
    return Task(
        folder=folder,
        name="kmatrix-data",
        title="Prepare x",
        label="kmatrix-data-1",
        commands=words,
        cpus=4,
        seconds=60,
    )


@pytest.fixture
def slurm(monkeypatch):
    answers = answer(monkeypatch)
    answers.say("squeue", "")
    return answers


def test_a_task_is_submitted_with_its_settings(task, slurm):
    assert submit_task(task, read_settings({"SLURM_ACCOUNT": "lab", "SLURM_MEMORY": "8G"}), PLACE) == ("33", True)
    text = task.script.read_text()
    for line in ("--account=lab", "--mem=8192M", "--cpus-per-task=4", "--time=00:01:00", "--comment=kmatrix-data-1"):
        assert f"#SBATCH {line}\n" in text


def test_a_task_that_waits_or_runs_is_not_submitted_again(task, slurm):
    slurm.say("squeue", "4|COMPLETED|None|n1|N/A|kmatrix-data-1\n7|PENDING|Resources||N/A|kmatrix-data-1\n")

    assert submit_task(task, read_settings({}), PLACE) == ("7", False)
    assert not task.script.exists()


def test_files_of_an_earlier_job_do_not_end_a_new_one(task, slurm):
    task.folder.mkdir()
    task.end.write_text("2\n")

    submit_task(task, read_settings({}), PLACE)

    assert exit_status(task) is None


def test_a_refused_task_leaves_no_script(task, slurm):
    slurm.say("sbatch --test-only", err="sbatch: error: invalid account\n", status=1)

    with pytest.raises(LaunchError, match="invalid account"):
        submit_task(task, read_settings({}), PLACE)
    assert not task.script.exists()


@pytest.mark.parametrize(
    ("line", "live", "message"),
    [
        ("7|PENDING|Resources||N/A|kmatrix-data-1", True, "waits for free nodes (Resources)"),
        ("7|RUNNING|None|n1|1|kmatrix-data-1", True, "runs on n1"),
        ("7|TIMEOUT|TimeLimit|n1|1|kmatrix-data-1", False, "reached its time limit"),
        ("7|RUNNING|None|n1|1|kmatrix-data-2", False, ""),
    ],
)
def test_the_state_of_a_task(task, slurm, line, live, message):
    slurm.say("squeue", f"{line}\n")

    view = view_task(task)

    assert (view.is_live, view.message) == (live, message)


def test_commands_run_until_one_fails_and_the_status_is_written(tmp_path):
    folder, root = tmp_path / "it's a folder", tmp_path / "root"
    folder.mkdir()
    root.mkdir()
    words = [("touch", str(folder / "a $x")), ("sh", "-c", "exit 3"), ("touch", str(folder / "never"))]
    task = make_task(folder, *words)
    text = render_task(task, read_settings({}), JobPlace(root=root, python=Path("/bin/true")))

    done = subprocess.run(["bash"], input=text, text=True, check=False, env={})

    assert (done.returncode, exit_status(task)) == (3, 3)
    assert (folder / "a $x").exists()
    assert not (folder / "never").exists()


def test_a_task_fits_its_partition(slurm):
    assert task_shape(read_settings({})) == (16, 172800.0)
    assert task_shape(read_settings({"SLURM_PARTITION": "short", "SLURM_TIME": "1"})) == (16, 60)
    with pytest.raises(LaunchError, match="above the limit of the partition short"):
        task_shape(read_settings({"SLURM_PARTITION": "short", "SLURM_TIME": "5-0"}))
    with pytest.raises(LaunchError, match="no such partition"):
        task_shape(read_settings({"SLURM_PARTITION": "none"}))
