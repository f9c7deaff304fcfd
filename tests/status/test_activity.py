"""docs/status.md: who runs a matrix of a cluster follows from the scheduler, the claim and the end of each share."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest

from cluster_factory import age, answer, claim, end, make_empty, make_engine, make_submission, node, view
from kmatrix.errors import RecordError
from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.jobs.claim import FRESH_S
from kmatrix.records.jobs.files import NodeEnd, SchedulerPhase
from kmatrix.records.jobs.paths import JobsDir, NodeDir
from kmatrix.records.lock import held
from kmatrix.records.paths import MatrixDir
from kmatrix.status.activity import (
    QUIET_S,
    Activity,
    Handover,
    MatrixActivity,
    Trace,
    share_activity,
)
from pages import DOCS

COLUMNS = ["submission", "scheduler", "files", "activity"]
SUBMISSIONS = {
    "submitted": {Handover.YES},
    "handed over": {Handover.YES, Handover.INTENT},
    "copied": {Handover.COPIED},
    "elsewhere": {Handover.ELSEWHERE},
    "not submitted": {Handover.NO},
    "any": set(Handover),
}
PHASES = {"forgotten": SchedulerPhase.UNKNOWN, "not listed": None}
FILES = {"nothing": Trace.NOTHING, "claim": Trace.CLAIM, "end": Trace.OVER, "requeued": Trace.REQUEUED}


def rows():
    lines = (DOCS / "status.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return table[table.index(COLUMNS) + 2 :]


def applies(row, handover, scheduler, trace, *, answers, newer):
    """Return whether a row of the table is about this case."""
    submission, asked, files, _ = row
    if asked == "silent":
        fits = not answers
    elif asked == "silent, had ended":
        fits = not answers and scheduler is SchedulerPhase.ENDED
    elif asked == "silent, was listed":
        fits = not answers and scheduler is not None
    elif asked == "any":
        fits = True
    else:
        fits = answers and scheduler == (PHASES[asked] if asked in PHASES else SchedulerPhase(asked))
    is_file = files == "any" or (FILES[files.removeprefix("newer ")] is trace and (newer or "newer" not in files))
    return handover in SUBMISSIONS[submission] and fits and is_file


def test_the_first_row_of_the_table_that_applies_decides_in_every_case():
    table = rows()
    used = set()
    phases = [*SchedulerPhase, None]
    for handover, scheduler, trace, answers, newer in itertools.product(
        Handover, phases, Trace, (True, False), (True, False)
    ):
        if trace is Trace.NOTHING and newer:
            continue  # without a file, none is newer
        case = (handover, scheduler, trace)
        number = next(n for n, row in enumerate(table) if applies(row, *case, answers=answers, newer=newer))
        used.add(number)
        assert share_activity(*case, answers=answers, newer=newer) == table[number][3], (*case, answers, newer)
    assert used == set(range(len(table)))  # no row without a case


@pytest.fixture
def matrix(tmp_path):
    return make_empty(tmp_path, "a", "b", "c")


def test_on_this_machine_the_lock_of_the_matrix_decides(matrix):
    activity = MatrixActivity(matrix)
    assert activity.activity is Activity.NONE
    assert not activity.has_runner("a")
    with held(matrix):
        activity.refresh()
        assert activity.activity is Activity.RUNNING
        assert activity.has_runner("a")
        assert activity.scheduler == "" == activity.why_silent


def test_the_newest_submission_that_lists_a_run_decides(matrix):
    make_engine(matrix)
    make_submission(matrix, [["a"], ["b"]])
    make_submission(matrix, [["b"]], number=2, job="13")
    answer(matrix, {"1.0": view("12_0", "running"), "1.1": view("12_1", "running"), "2.0": view("13", "pending")})
    activity = MatrixActivity(matrix)
    assert [activity.of(run).activity for run in "abc"] == ["running", "queued", "none"]
    assert [activity.has_runner(run) for run in "abc"] == [True, False, False]
    assert activity.counts() == {Activity.RUNNING: 1, Activity.QUEUED: 1}


def test_a_claim_counts_without_an_answer_until_it_is_old(matrix):
    make_engine(matrix)
    first, second = make_submission(matrix, [["a"], ["b"]])
    claim(first, "12_0", host="n1", nodes=("n1", "n2"))
    claim(second, "12_1", age_s=FRESH_S + 10)
    answer(matrix, {}, why_not="Unable to contact slurm controller")
    activity = MatrixActivity(matrix)
    assert [activity.of(run).activity for run in "ab"] == ["running", "unknown"]
    assert activity.of("a").hosts == ("n1", "n2")
    assert activity.why_silent == "Unable to contact slurm controller"


def test_a_job_that_started_and_one_that_ended_after_the_answer(matrix):
    make_engine(matrix)
    first, second = make_submission(matrix, [["a"], ["b"]])
    answer(matrix, {"1.0": view("12_0", "pending"), "1.1": view("12_1", "running")}, age_s=8)
    activity = MatrixActivity(matrix)
    assert [activity.of(run).activity for run in "ab"] == ["queued", "running"]
    claim(first, "12_0")
    claim(second, "12_1", age_s=20)
    end(second, "12_1")
    activity.refresh()
    assert [activity.of(run).activity for run in "ab"] == ["running", "none"]


@pytest.mark.parametrize(
    ("engine", "listed", "age_s", "activity"),
    [
        ("slurm", True, 10.0, "queued"),
        ("slurm", False, 10.0, "queued"),
        ("slurm", True, FRESH_S + 10, "none"),
        ("slurm", False, FRESH_S + 10, "none"),
        ("kubernetes", True, 10.0, "none"),
    ],
)
def test_a_job_that_was_to_start_again_and_that_the_scheduler_does_not_know_is_gone(
    matrix, engine, listed, age_s, activity
):
    make_engine(matrix, engine=engine)
    (share,) = make_submission(matrix, [["a"]], events=("intent", "submitted") if listed else ())
    claim(share, age_s=age_s)
    end(share, age_s=age_s, requeued=True)
    answer(matrix, {"1.0": view("12", "unknown")} if listed else {})
    assert MatrixActivity(matrix).of("a").activity == activity


@pytest.mark.parametrize("phase", ["pending", "running", "ended", "unknown"])
def test_a_script_that_was_submitted_twice_runs_in_the_job_that_has_the_claim(matrix, phase):
    make_engine(matrix)
    (share,) = make_submission(matrix, [["a"]])
    claim(share, "13", age_s=10.0, host="n2")
    answer(matrix, {"1.0": view("12", phase, nodes=("n1",))})
    state = MatrixActivity(matrix).of("a")
    assert (state.activity, state.hosts) == ("running", ("n2",))
    age(share.owner, FRESH_S + 10)
    assert MatrixActivity(matrix).of("a").activity == {"pending": "queued", "running": "running"}.get(phase, "none")


def test_the_end_of_an_earlier_start_does_not_end_the_next_one(matrix):
    make_engine(matrix)
    (share,) = make_submission(matrix, [["a"]])
    end(share, "12", restart=0, kind="time limit", requeued=True)
    answer(matrix, {}, why_not="timed out")
    activity = MatrixActivity(matrix)
    assert activity.of("a").activity is Activity.QUEUED
    assert activity.of("a").end.kind == "time limit"
    claim(share, "12", restart=1, host="n1")
    activity.refresh()
    assert activity.of("a").activity is Activity.RUNNING
    assert activity.of("a").end is None


def test_a_damaged_engine_file_is_refused(matrix):
    make_engine(matrix)
    JobsDir(matrix).engine_json.write_text("{")
    with pytest.raises(RecordError, match=r"engine\.json is damaged"):
        MatrixActivity(matrix)


def test_hosts_without_a_sign_of_life_are_named(matrix):
    make_engine(matrix)
    (share,) = make_submission(matrix, [["a"]], nodes=3)
    claim(share, "12", host="n1", nodes=("n1", "n2", "n3"), age_s=QUIET_S + 5)
    run = matrix.run("a")
    node(NodeDir(run, 1), "n2", age_s=QUIET_S + 15)
    node(NodeDir(run, 2), "n3", age_s=5)
    answer(matrix, {"1.0": view("12", "running")})
    quiet = MatrixActivity(matrix).quiet_hosts(run, 1)
    assert quiet == {"n1": pytest.approx(QUIET_S + 5, abs=5), "n2": pytest.approx(QUIET_S + 15, abs=5)}
    assert MatrixActivity(matrix).quiet_hosts(run, 2).keys() == {"n1"}  # the files of the nodes are of attempt 1
    write_json(NodeDir(run, 1).end, as_json(NodeEnd(node=1, attempt=1)))  # it is quiet because it has ended
    assert MatrixActivity(matrix).quiet_hosts(run, 1).keys() == {"n1"}
    write_json(NodeDir(run, 1).end, as_json(NodeEnd(node=1, attempt=0)))
    assert MatrixActivity(matrix).quiet_hosts(run, 1).keys() == {"n1", "n2"}


def test_no_clock_of_this_host_is_compared_with_the_times_of_files(matrix, monkeypatch):
    make_engine(matrix)
    (share,) = make_submission(matrix, [["a"]])
    claim(share, "12")
    answer(matrix, {}, why_not="timed out")
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert MatrixActivity(matrix).of("a").activity is Activity.RUNNING


def test_on_a_cluster_no_missing_file_is_looked_for_by_its_name(matrix, monkeypatch):
    """A host that has looked for a missing file on network storage does not find it for up to a minute."""
    from kmatrix.own_file import read_file
    from kmatrix.records.states import read_run_status
    from kmatrix.status.status_file import recover_status

    monkeypatch.setattr("kmatrix.own_file._storage", {"lists names first": False})
    make_engine(matrix)
    make_submission(matrix, [["a"]])
    assert MatrixActivity(matrix).of("a").activity is not None
    looked_for, opened = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: looked_for.append(str(path)) or opened(path, *rest, **more)
    )
    run = matrix.run("a")
    write_json(run.run_json, {"name": "a"})
    looked_for.clear()
    assert read_run_status(run) is None
    assert recover_status(run, has_runner=True).status == "planned"
    missing = [path for path in looked_for if not Path(path).exists()]
    assert missing == []
    write_json(run.status, {"name": "a", "status": "running", "attempts": [{"attempt": 1, "status": "running"}]})
    assert recover_status(run, has_runner=True).status == "running"
    with pytest.raises(FileNotFoundError):
        read_file(run.result)


def test_a_copy_of_a_running_matrix_does_not_run_however_new_its_claims_look(matrix, tmp_path):
    make_engine(matrix)
    claim(make_submission(matrix, [["a"]])[0], host="n1")
    copy = MatrixDir(tmp_path / "copy")
    shutil.copytree(matrix.path, copy.path)
    activity = MatrixActivity(copy)
    assert activity.activity is Activity.NONE
    assert (activity.original, activity.is_copy) == (str(matrix.path.resolve()), True)
    assert not activity.why_silent, "nobody asks about a copy"
