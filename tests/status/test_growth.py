"""Commands on a matrix of a cluster look at each run a fixed number of times, however many runs and arrays it has."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from cluster_factory import ScriptedScheduler
from kmatrix.cli.status import lines, plain
from kmatrix.engines.polling import refresh
from kmatrix.own_file import list_names_first
from kmatrix.records.jobs.files import Shape, ShareEntry, SubmissionFile, read_engine
from kmatrix.runner.submit import hand_over, occupied_runs, resolve_doubts, submitting
from kmatrix.status.view.overview import Overview
from large_matrix import make_queued_matrix

pytestmark = pytest.mark.process

SMALL, TASKS = 6, 2  # runs of the smallest matrix; tasks of an array, so that there are more arrays, too
EVENTS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove")
_counted: Counter[str] = Counter()
_state = {"counts": False, "hooked": False}


def _count(event, _arguments):
    if _state["counts"] and event in EVENTS:
        _counted[event] += 1


@pytest.fixture
def operations(monkeypatch):
    """Return a function that counts the operations on files in a call. It lists names first, as on a cluster."""
    monkeypatch.setattr("kmatrix.own_file._storage", {"lists names first": False})
    list_names_first()
    if not _state["hooked"]:
        sys.addaudithook(_count)  # there is no way to remove it
        _state["hooked"] = True

    def count(call):
        _counted.clear()
        _state["counts"] = True
        try:
            call()
        finally:
            _state["counts"] = False
        return _counted.total()

    return count


def first_view(matrix, slurm):
    plain(Overview(matrix, ask=lambda: refresh(matrix, scheduler=slurm, now=True)).poll())


def estimate(matrix, slurm):
    lines(Overview(matrix, ask=lambda: refresh(matrix, scheduler=slurm, now=True)).poll(), 0.0)


def busy(matrix, slurm):
    with submitting(matrix) as submitter:
        resolve_doubts(submitter, read_engine(matrix), slurm)
        occupied_runs(matrix, read_engine(matrix), slurm, [run.name for run in matrix.runs()])


def submission(matrix, slurm):
    names = [run.name for run in matrix.runs()]
    entries = [ShareEntry(task=task, runs=(name,)) for task, name in enumerate(names)]
    arrays = [
        SubmissionFile(shape=Shape(), shares=tuple(entries[first : first + TASKS]))
        for first in range(0, len(entries), TASKS)
    ]
    with submitting(matrix) as submitter:
        hand_over(submitter, read_engine(matrix), slurm, arrays)


@pytest.mark.parametrize("command", [first_view, estimate, busy, submission])
def test_twice_as_many_runs_need_twice_as_many_operations_on_files(command, operations, tmp_path):
    costs, questions = [], []
    for count in (SMALL, 2 * SMALL, 4 * SMALL):
        matrix, slurm = make_queued_matrix(tmp_path / str(count), count, running=0, tasks=TASKS), ScriptedScheduler()
        costs.append(operations(lambda: command(matrix, slurm)))  # noqa: B023  (called at once)
        questions.append(slurm.questions)
    # A fixed part, and the same for each further run: a part that grows with the square would make the second larger.
    assert costs[2] - costs[1] <= 2.1 * (costs[1] - costs[0])
    assert costs[1] - costs[0] <= 12 * SMALL
    arrays = 4 * SMALL // TASKS
    assert questions[2] <= (arrays if command is submission else 2)
