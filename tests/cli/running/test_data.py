"""The job that prepares data is followed until its end, and its errors name what to do."""

from __future__ import annotations

import pytest

from kmatrix.cli.running import data
from kmatrix.engines.base import UnreachableError
from kmatrix.engines.slurm.script import Task
from kmatrix.engines.slurm.task import TaskView
from kmatrix.errors import LaunchError


@pytest.fixture
def task(tmp_path, monkeypatch):
    for name in ("READ_S", "ASK_S", "FIRST_S"):
        monkeypatch.setattr(data, name, 0.001)
    return Task(folder=tmp_path, name="x", title="x", label="x", commands=(), cpus=1, seconds=None)


def answers(monkeypatch, *views):
    """Let Slurm answer with these one after the other; a function is called, the last one is repeated."""
    left = list(views)

    def view(_):
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) else found

    monkeypatch.setattr(data, "view_task", view)


def ended(task, code, log):
    def end():
        task.log.write_text(log)
        task.end.write_text(f"{code}\n")
        return TaskView(job="7", message="ended")

    return end


def test_the_output_and_the_states_of_a_job_are_printed(task, monkeypatch, capsys):
    waits = TaskView(job="7", is_live=True, message="waits for free nodes (Resources)")
    answers(monkeypatch, waits, waits, UnreachableError("x", why="no controller"), ended(task, 0, "écrit\n"))

    assert data._follow(task, "7", {"ENGINE": "local"}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["job 7: waits for free nodes (Resources)", "job 7: Slurm does not answer: no controller"]
    assert lines[-1] == "écrit"


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        ("error: Temporary failure in name resolution\n", "prepare-data ENGINE=local"),
        ("error: the text column is missing\n", "prepare-data ENGINE=slurm"),
    ],
)
def test_a_failed_job_is_an_error_with_the_command_that_helps(task, monkeypatch, log, hint):
    answers(monkeypatch, ended(task, 2, log))

    with pytest.raises(LaunchError, match="job 7 has ended with status 2") as caught:
        data._follow(task, "7", {"ENGINE": "local"})
    assert hint in caught.value.hint
    assert str(task.log) in caught.value.why


def test_a_job_that_was_cancelled_does_not_wait_for_ever(task, monkeypatch):
    monkeypatch.setattr(data, "MISSING_S", 0.01)
    answers(monkeypatch, TaskView(job="7", message="was cancelled"))

    with pytest.raises(LaunchError, match="job 7 has ended without a result: was cancelled"):
        data._follow(task, "7", {"ENGINE": "local"})
