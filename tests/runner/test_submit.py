"""Submitting: after a kill at any point, the next command gives each run exactly one job."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster_factory import age
from fake_scheduler import FakeScheduler
from kmatrix.engines.base import UnreachableError
from kmatrix.engines.polling import refresh
from kmatrix.errors import LaunchError
from kmatrix.records.decode import as_json, replaced
from kmatrix.records.files import write_json
from kmatrix.records.jobs.claim import FRESH_S
from kmatrix.records.jobs.files import (
    CANCELLED,
    INTENT,
    KUBERNETES,
    SUBMITTED,
    SchedulerPhase,
    Shape,
    ShareEnd,
    ShareEntry,
    ShareOwner,
    SubmissionFile,
    SubmitterFile,
    job_label,
    job_lines,
    newest_shares,
    read_engine,
    read_submission,
    submitted_jobs,
    write_engine,
)
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.lock import try_lock
from kmatrix.records.paths import MatrixDir
from kmatrix.runner import submit
from kmatrix.runner.cluster import new_engine
from kmatrix.runner.submit import hand_over, occupied_runs, resolve_doubts, submitting
from kmatrix.status.activity import MatrixActivity
from waiting import wait_until

pytestmark = pytest.mark.process

RUNS = ("a", "b", "c")
WIDE = SubmissionFile(shape=Shape(nodes=2), shares=(ShareEntry(task=0, runs=("a",)),))
ARRAY = SubmissionFile(shares=(ShareEntry(task=0, runs=("b",)), ShareEntry(task=1, runs=("c",))))
REPORT = SubmissionFile(kind="report", shares=(ShareEntry(task=0),))


class KilledError(BaseException):
    """Stands for kill -9: nothing but `finally` runs after it."""


def new_matrix(path):
    path.mkdir()
    made = MatrixDir(path)
    write_engine(made, new_engine("slurm", path, {"SLURM_PARTITION": "batch"}))
    return made


@pytest.fixture
def matrix(tmp_path):
    return new_matrix(tmp_path / "m")


@pytest.fixture
def slurm(tmp_path):
    return FakeScheduler(tmp_path / "slurm.json")


def run_command(matrix, slurm, submissions=(WIDE, ARRAY), *, report=None, doubt_s=0.0):
    """Do what `make continue` does: resolve doubts, leave out runs that have jobs, submit the others."""
    engine = read_engine(matrix)
    with submitting(matrix, wait_s=0.2) as submitter:
        resolve_doubts(submitter, engine, slurm, doubt_s=doubt_s)
        busy = occupied_runs(matrix, engine, slurm, RUNS)
        open_ones = []
        for one in submissions:
            shares = [entry for entry in one.shares if not set(entry.runs) & busy.keys()]
            shares = [replaced(entry, task=number) for number, entry in enumerate(shares)]
            open_ones += [replaced(one, shares=tuple(shares))] if shares else []
        return hand_over(submitter, engine, slurm, open_ones, report=report)


def jobs_of_runs(matrix, slurm):
    """Return run -> number of live jobs that have it, from the labels that the scheduler knows."""
    found = Counter()
    for about in slurm.state.values():
        if about["phase"] in (SchedulerPhase.PENDING, SchedulerPhase.RUNNING):
            submission = read_submission(JobsDir(matrix).submission(int(about["label"].rpartition("-")[2])))
            found.update(run for entry in submission.shares for run in entry.runs)
    return found


def events(matrix):
    return [(line.event, line.submission) for line in job_lines(JobsDir(matrix))]


def test_each_shape_is_one_submission_with_a_folder_a_script_and_two_lines(matrix, slurm):
    assert run_command(matrix, slurm) == {1: "100", 2: "101"}
    assert events(matrix) == [(INTENT, 1), (SUBMITTED, 1), (INTENT, 2), (SUBMITTED, 2)]
    second = JobsDir(matrix).submission(2)
    assert second.sbatch.is_file()
    assert sorted(path.name for path in second.path.iterdir()) == ["0", "1", "job.sbatch", "submission.json"]
    assert read_submission(second).label == slurm.state["101"]["label"]
    assert {run: share.id for run, share in newest_shares(matrix).items()} == {"a": "1.0", "b": "2.0", "c": "2.1"}


def test_the_report_waits_for_the_jobs_of_all_runs(matrix, slurm):
    run_command(matrix, slurm, (WIDE,), report=REPORT)
    assert slurm.state["101"]["after"] == "100"
    slurm.change("100", SchedulerPhase.ENDED)
    run_command(matrix, slurm, (WIDE, ARRAY), report=REPORT)
    assert slurm.state[submitted_jobs(JobsDir(matrix))[5]]["after"] == "100 102 103"


def test_without_open_runs_nothing_is_submitted(matrix, slurm):
    run_command(matrix, slurm)
    assert run_command(matrix, slurm) == {}
    assert len(slurm.state) == 2


STEPS = (
    ("scheduler.render", 0),
    ("submit.write_json", 0),
    ("Path.rename", 0),
    ("submit._submit", 0),
    ("submit._note", 0),
    ("submit._note", 1),
    ("scheduler.submit", 0),
    ("scheduler.submit", 1),
    ("submit._note", 2),
    ("scheduler.receive", 1),
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", STEPS, ids=str)
def test_after_a_kill_at_any_step_each_run_has_exactly_one_job(matrix, slurm, monkeypatch, point, when):
    step, count = point
    owner, _, name = step.rpartition(".")
    target = {"scheduler": slurm, "submit": submit, "Path": Path}[owner]
    real, calls = getattr(target, name), [0]

    def killed(*words, **named):
        calls[0] += 1
        if calls[0] == count + 1 and when == "before":
            raise KilledError
        found = real(*words, **named)
        if calls[0] == count + 1:
            raise KilledError
        return found

    with monkeypatch.context() as patch:
        patch.setattr(target, name, killed)
        patch.setattr(submit.Submitter, "end", lambda self: self._over.set())  # its file stays, as after a kill
        with pytest.raises(KilledError):
            run_command(matrix, slurm)
    for _ in range(2):
        run_command(matrix, slurm)
        assert jobs_of_runs(matrix, slurm) == dict.fromkeys(RUNS, 1)


def killed_after(operations, action):
    """Do something in another process, which kills itself at its file operation of this number. Return whether."""
    pid = os.fork()
    if not pid:
        left = [operations]

        def count(event, _):
            if event in ("open", "os.rename", "os.mkdir", "subprocess.Popen"):
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(count)
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.nightly
def test_kill_9_at_any_file_operation_leaves_no_run_with_two_jobs(tmp_path):
    operations, killed = 0, True
    while killed:
        matrix, slurm = new_matrix(tmp_path / str(operations)), FakeScheduler(tmp_path / f"{operations}.json")
        killed = killed_after(operations, lambda matrix=matrix, slurm=slurm: run_command(matrix, slurm))
        assert max(jobs_of_runs(matrix, slurm).values(), default=0) <= 1
        run_command(matrix, slurm)
        assert jobs_of_runs(matrix, slurm) == dict.fromkeys(RUNS, 1)
        operations += 2
    assert operations > 20


def test_a_submitter_killed_while_it_takes_the_right_to_submit_keeps_nobody_waiting(matrix, slurm, monkeypatch):
    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "hardlink_to", killed)
        with pytest.raises(KilledError):
            run_command(matrix, slurm)
    assert not JobsDir(matrix).submitter.exists()  # complete, or not there
    run_command(matrix, slurm)
    assert jobs_of_runs(matrix, slurm) == dict.fromkeys(RUNS, 1)


def test_an_sbatch_that_outlives_its_command_is_waited_for(matrix, slurm, tmp_path):
    slurm.client_gate = tmp_path / "answer"
    pid = os.fork()
    if not pid:
        run_command(matrix, slurm)
        os._exit(1)
    wait_until((tmp_path / "answer.waits").exists, "sbatch of the first submission")
    assert events(matrix) == [(INTENT, 1)]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(LaunchError, match="are being submitted by"):
        run_command(matrix, slurm)
    slurm.client_gate.touch()
    wait_until(lambda: slurm.state, "the job of the first command")
    wait_until(lambda: not is_locked(matrix), "sbatch ends")
    slurm.client_gate = None
    run_command(matrix, slurm)
    assert jobs_of_runs(matrix, slurm) == dict.fromkeys(RUNS, 1)


def is_locked(matrix):
    lock = try_lock(JobsDir(matrix).lock)
    if lock is not None:
        os.close(lock)
    return lock is None


def test_a_lost_answer_makes_no_second_job(matrix, slurm):
    slurm.loses_answer = True
    with pytest.raises(UnreachableError):
        run_command(matrix, slurm)
    assert events(matrix) == [(INTENT, 1)]
    run_command(matrix, slurm)
    assert jobs_of_runs(matrix, slurm) == dict.fromkeys(RUNS, 1)
    assert events(matrix)[1] == (SUBMITTED, 1)


def test_a_refused_submission_is_given_up_and_those_before_it_stay(matrix, slurm):
    slurm.before_submit = lambda: setattr(slurm, "refuses", "invalid account" if slurm.state else "")
    with pytest.raises(LaunchError, match="invalid account"):
        run_command(matrix, slurm)
    assert events(matrix) == [(INTENT, 1), (SUBMITTED, 1), (INTENT, 2), (CANCELLED, 2)]
    slurm.refuses, slurm.before_submit = "", lambda: None
    assert list(run_command(matrix, slurm)) == [3]
    assert jobs_of_runs(matrix, slurm) == dict.fromkeys(RUNS, 1)


def test_without_an_answer_nothing_changes(matrix, slurm):
    run_command(matrix, slurm)
    before = events(matrix)
    slurm.is_down = True
    with pytest.raises(UnreachableError):
        run_command(matrix, slurm)
    assert events(matrix) == before


def claimed(matrix, share_id, job, **end):
    """Write the claim of a runner, and the end of its job."""
    submission, _, task = share_id.partition(".")
    share = JobsDir(matrix).submission(int(submission)).share(int(task))
    share.folder.mkdir(parents=True, exist_ok=True)
    write_json(share.owner, as_json(ShareOwner(job=job)))
    if end:
        write_json(share.end, as_json(ShareEnd(job=job, **end)))


def test_a_job_that_has_aged_out_counts_by_its_claim(matrix, slurm):
    run_command(matrix, slurm, (ARRAY,))
    slurm.change("100", SchedulerPhase.UNKNOWN)
    claimed(matrix, "1.0", "100_0")
    claimed(matrix, "1.1", "100_1", status="stopped")
    assert list(occupied_runs(matrix, read_engine(matrix), slurm, RUNS)) == ["b"]
    age(JobsDir(matrix).submission(1).share(0).owner, FRESH_S + 1)  # the claim was not rewritten for long
    assert not occupied_runs(matrix, read_engine(matrix), slurm, RUNS)


def test_a_requeued_job_that_slurm_has_forgotten_is_not_over_while_its_claim_is_fresh(matrix, slurm):
    run_command(matrix, slurm, (WIDE,))
    slurm.change("100", SchedulerPhase.UNKNOWN)
    claimed(matrix, "1.0", "100", status="stopped", requeued=True)
    assert list(occupied_runs(matrix, read_engine(matrix), slurm, RUNS)) == ["a"]


def test_a_job_that_was_deleted_does_not_start_again_although_its_runner_expected_it(matrix, slurm):
    write_engine(matrix, replaced(read_engine(matrix), engine=KUBERNETES))
    run_command(matrix, slurm, (ARRAY,))
    slurm.change("100", SchedulerPhase.UNKNOWN)
    claimed(matrix, "1.0", "100_0")  # its pod is still saving
    claimed(matrix, "1.1", "100_1", status="stopped", requeued=True)
    assert list(occupied_runs(matrix, read_engine(matrix), slurm, RUNS)) == ["b"]


def prepared(matrix, slurm, submission=WIDE):
    """Write a submission that the user submits by hand."""
    with submitting(matrix) as submitter:
        return submit.prepare(submitter, read_engine(matrix), slurm, submission)[0]


def test_a_share_whose_noted_job_has_ended_is_busy_while_another_job_of_its_script_trains(matrix, slurm):
    run_command(matrix, slurm, (WIDE,))
    other = slurm.receive(job_label("f" * 12, 1))
    slurm.change("100", SchedulerPhase.ENDED)
    claimed(matrix, "1.0", other)
    assert occupied_runs(matrix, read_engine(matrix), slurm, RUNS)["a"].job == other
    slurm.change(other, SchedulerPhase.ENDED)
    assert not occupied_runs(matrix, read_engine(matrix), slurm, RUNS)


def test_a_script_that_was_submitted_by_hand_occupies_its_runs_before_any_command_has_noted_its_job(matrix, slurm):
    job = slurm.receive(read_submission(prepared(matrix, slurm)).label)
    view = occupied_runs(matrix, read_engine(matrix), slurm, RUNS)["a"]
    assert (view.job, view.phase) == (job, SchedulerPhase.PENDING)


def test_the_scheduler_is_asked_for_all_runs_at_once_and_status_comes_to_the_same_result(matrix, slurm):
    run_command(matrix, slurm)
    slurm.asked = 0
    assert set(occupied_runs(matrix, read_engine(matrix), slurm, ("a", "b"))) == {"a", "b"}
    assert slurm.asked == 1
    activity = MatrixActivity(matrix, refresh(matrix, scheduler=slurm))
    assert [activity.of(run).activity for run in RUNS] == ["queued"] * 3


def test_a_script_without_a_job_does_not_keep_its_runs(matrix, slurm):
    prepared(matrix, slurm)
    assert list(run_command(matrix, slurm)) == [2, 3]
    assert (CANCELLED, 1) not in events(matrix)


def test_another_host_that_submits_now_is_waited_for_and_one_that_is_gone_is_not(matrix, slurm, monkeypatch):
    jobs = JobsDir(matrix)
    jobs.path.mkdir()
    write_json(jobs.submitter, as_json(SubmitterFile(host="elsewhere", pid=7, token="x")))
    with pytest.raises(LaunchError, match="submitted by process 7 on elsewhere"):
        run_command(matrix, slurm)
    monkeypatch.setattr(submit, "FRESH_S", -1.0)
    assert run_command(matrix, slurm)
    assert not jobs.submitter.exists()


def test_a_submitter_that_was_suspended_submits_nothing_while_another_one_does(matrix, slurm):
    jobs = JobsDir(matrix)
    with submitting(matrix) as submitter:
        write_json(jobs.submitter, as_json(SubmitterFile(host="elsewhere", pid=7, token="x")))
        with pytest.raises(LaunchError, match="another process submits"):
            hand_over(submitter, new_engine("slurm", matrix.path, {}), slurm, (WIDE,))
    assert not slurm.state
    assert jobs.submitter.exists()  # it is the other one's


@pytest.mark.parametrize("damage", [b"", b"{", b'{"shares": 3}', b"{}", None])
def test_no_run_is_submitted_while_it_is_unknown_which_runs_a_job_has(matrix, slurm, damage):
    """A job trains the runs of that submission: a second one would train them again."""
    run_command(matrix, slurm)
    path = JobsDir(matrix).submission(2).submission_json
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(LaunchError, match=r"0002/submission.json is (damaged|missing)") as caught:
        run_command(matrix, slurm)
    assert caught.value.why == "which runs job 101 trains is unknown"
    assert len(slurm.state) == 2


def test_no_run_is_submitted_with_the_jobs_of_another_matrix_in_place_of_its_own(matrix, slurm):
    run_command(matrix, slurm)
    write_engine(matrix, replaced(read_engine(matrix), id="another"))
    with pytest.raises(LaunchError, match=r"0001/submission.json is of another matrix\n"):
        run_command(matrix, slurm)
    assert len(slurm.state) == 2


@pytest.mark.parametrize(("folder", "jobs"), [("jobs", "100, 101"), ("jobs/0001", "100"), ("jobs/0002", "101")])
def test_no_run_is_submitted_again_after_the_folder_of_its_job_was_removed(matrix, slurm, folder, jobs):
    run_command(matrix, slurm)
    shutil.rmtree(matrix.path / folder)
    with pytest.raises(LaunchError, match=f"jobs has no folder for {jobs}\n"):
        run_command(matrix, slurm)
    assert len(slurm.state) == 2
