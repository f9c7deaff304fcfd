"""The last job of a round submits the seeds that the verdict wants next, and nothing else."""

from __future__ import annotations

import os
from functools import partial

import pytest

from fake_scheduler import FakeScheduler
from kmatrix.packing import Limits
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs.claim import FRESH_S
from kmatrix.records.jobs.files import (
    REPORT,
    SchedulerPhase,
    newest_shares,
    read_engine,
    read_submission,
    submitted_jobs,
    write_engine,
)
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.states import change_requests
from kmatrix.runner.cluster import new_engine
from kmatrix.runner.loop import drive
from kmatrix.runner.resume import reopen
from kmatrix.runner.share import next_seeds, report
from kmatrix.runner.share.folder import RunningShare
from kmatrix.runner.share.next_seeds import submit_next_seeds
from kmatrix.runner.submit import cancel_jobs, resolve_doubts, submit_plans, submitting
from scripted import FAIL, ScriptedEngine, adaptive_matrix, name_of

pytestmark = pytest.mark.process

CLEAR = {"adamw": [3.30, 3.31, 3.29, 3.30, 3.31], "muon": [3.20, 3.2101, 3.1902, 3.2003, 3.2101]}
# It fits into 0.01 nats/token with all five seeds, and not with four.
TIE = {"adamw": [3.285, 3.271, 3.28, 3.279, 3.265], "muon": [3.287, 3.272, 3.29, 3.28, 3.264]}
EQUAL = {"min_difference": 0.01}


class Cluster:
    """A matrix with adaptive seeds whose first seeds are submitted, and a scheduler without nodes."""

    def __init__(self, matrix, slurm):
        self.matrix, self.slurm = matrix, slurm

    def submit(self, **more):
        """Submit what a command does."""
        engine = read_engine(self.matrix)
        plan = reopen(self.matrix, None)
        with submitting(self.matrix) as submitter:
            known = {"is_busy": False, "seeds": True, "arguments": {}, "site": {}} | more
            submit_plans(submitter, engine, self.slurm, plan.plans, **known)

    def submissions(self):
        """Return number -> the runs of a submission, None for a report."""
        found = {folder.number: read_submission(folder) for folder in JobsDir(self.matrix).submissions()}
        runs = {number: [run for share in one.shares for run in share.runs] for number, one in found.items()}
        return {number: None if found[number].kind == REPORT else runs[number] for number in sorted(found)}

    def train(self, script):
        """Let the jobs of the newest runs end with these losses."""
        newest = max(number for number, runs in self.submissions().items() if runs is not None)
        names = set(self.submissions()[newest])
        plan = reopen(self.matrix, (), unasked=True)
        drive(self.matrix, [one for one in plan.plans if one.name in names], ScriptedEngine(script), poll_s=0.0)
        self.end_jobs()

    def end_jobs(self):
        """End all jobs of runs: the last job starts now."""
        kinds = self.submissions()
        for number, job in submitted_jobs(JobsDir(self.matrix)).items():
            if kinds[number] is not None:
                self.slurm.change(job, SchedulerPhase.ENDED)

    def next(self):
        """Run the last job up to the report; return what it returns."""
        number = max(number for number, runs in self.submissions().items() if runs is None)
        folder = JobsDir(self.matrix).submission(number)
        return submit_next_seeds(self.matrix, folder, read_submission(folder))


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeScheduler(tmp_path / "slurm.json")

    def found(engine, settings):
        fake.settings = dict(settings)
        return fake

    monkeypatch.setattr(next_seeds, "find_scheduler", found)
    monkeypatch.setattr(next_seeds, "resolve_doubts", partial(resolve_doubts, doubt_s=0.0))
    return fake


@pytest.fixture
def made(tmp_path, slurm, monkeypatch):
    """Return a function that makes a cluster with submitted first seeds."""

    def make(**rules):
        matrix = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
        matrix.path.mkdir()
        adaptive_matrix(matrix, ["adamw", "muon"], 5, **rules)
        write_engine(matrix, new_engine("slurm", matrix.path, {}))
        cluster = Cluster(matrix, slurm)
        cluster.submit()
        return cluster

    return make


def seeds(*numbers):
    return [name_of(one, number) for number in numbers for one in ("adamw", "muon")]


def test_rounds_follow_until_the_verdict_needs_no_more_seeds(made, capsys):
    cluster = made(**EQUAL)
    for _ in range(3):
        cluster.train(TIE)
        assert cluster.next()
    assert cluster.submissions() == {1: seeds(1, 2, 3), 2: None, 3: seeds(4), 4: None, 5: seeds(5), 6: None}
    assert "looked after 5 seeds: adamw and muon equivalent" in capsys.readouterr().out
    report.write_status(cluster.matrix)
    assert read_json(cluster.matrix.status)["status"] == "finished"


def test_a_clear_difference_leaves_the_reserve_and_the_matrix_is_finished(made):
    cluster = made()
    cluster.train(CLEAR)
    assert cluster.next()
    assert cluster.submissions() == {1: seeds(1, 2, 3), 2: None}
    report.write_status(cluster.matrix)
    status = read_json(cluster.matrix.status)
    assert (status["status"], status["counts"]) == ("finished", {"finished": 6, "planned": 4})


def test_a_second_start_submits_nothing_twice(made):
    cluster = made(**EQUAL)
    cluster.train(TIE)
    folder = JobsDir(cluster.matrix).submission(2)
    for _ in range(2):
        assert submit_next_seeds(cluster.matrix, folder, read_submission(folder))
    assert cluster.submissions() == {1: seeds(1, 2, 3), 2: None, 3: seeds(4), 4: None}


@pytest.mark.parametrize("kept", [2, 3])
def test_a_start_that_was_killed_is_completed_by_the_next_one(made, slurm, kept):
    cluster = made(**EQUAL)
    cluster.train(TIE)

    def kill():
        if len(slurm.state) == kept:
            raise KeyboardInterrupt

    slurm.before_submit = kill
    with pytest.raises(KeyboardInterrupt):
        cluster.next()
    slurm.before_submit = lambda: None
    folder = JobsDir(cluster.matrix).submission(2)
    assert submit_next_seeds(cluster.matrix, folder, read_submission(folder))
    live = [runs for number, runs in cluster.submissions().items() if number in submitted_jobs(JobsDir(cluster.matrix))]
    assert live == [seeds(1, 2, 3), None, seeds(4), None]
    assert len(slurm.state) == 4


def test_runs_that_were_cancelled_wait_for_the_user(made, capsys):
    cluster = made(**EQUAL)
    cluster.end_jobs()  # by scancel, before any run began
    assert cluster.next()
    assert len(cluster.submissions()) == 2
    assert f"the verdict waits for {name_of('adamw', 1)}" in capsys.readouterr().out
    report.write_status(cluster.matrix)
    assert read_json(cluster.matrix.status)["status"] == "stopped"


def test_a_stopped_matrix_gets_no_further_seeds_until_it_is_continued(made, slurm, capsys):
    cluster = made(**EQUAL)
    cluster.train(TIE)
    with submitting(cluster.matrix) as submitter:
        cancel_jobs(submitter, slurm, {"1.0": submitted_jobs(JobsDir(cluster.matrix))[1]}, why="make stop")
    assert cluster.next()
    assert len(cluster.submissions()) == 2
    assert "no further seeds are submitted: the matrix was stopped" in capsys.readouterr().out
    cluster.submit()  # make continue
    assert cluster.submissions()[3] == seeds(4)
    cluster.train(TIE)
    assert cluster.next()
    assert cluster.submissions()[5] == seeds(5)


def test_a_spent_budget_ends_the_rounds(made, capsys):
    cluster = made(**EQUAL)
    cluster.train(TIE)
    for run in cluster.matrix.runs():  # each attempt took a second
        record = read_json(run.run_json)
        write_json(run.run_json, record | {"symbols": {"BUDGET_DOLLARS": "1", "MACHINE_HOUR_PRICE": "9000"}})
        record = read_json(run.run_json)
        write_json(run.run_json, record | {"train": record["train"] | {"machine_hour_price": 9000.0}})
    assert cluster.next()
    assert len(cluster.submissions()) == 2
    assert "the budget of the matrix is spent" in capsys.readouterr().out


def test_a_refusal_names_the_command_and_can_be_repeated(made, slurm, capsys):
    cluster = made(**EQUAL)
    cluster.train(TIE)
    slurm.refuses = "access denied"
    assert not cluster.next()
    out = capsys.readouterr().out
    assert "error: cannot submit the next seeds from " in out
    assert f"on a login node: make continue TARGET={cluster.matrix.path}" in out
    slurm.refuses = ""
    folder = JobsDir(cluster.matrix).submission(2)
    assert submit_next_seeds(cluster.matrix, folder, read_submission(folder))  # it was given up: never submitted
    assert [runs for runs in cluster.submissions().values() if runs == seeds(4)] == [seeds(4)] * 2
    assert len(slurm.state) == 4


def test_a_scheduler_that_is_away_is_asked_again(made, slurm, monkeypatch):
    cluster = made(**EQUAL)
    cluster.train(TIE)
    slurm.is_down, waited = True, []

    def sleep(seconds):
        waited.append(seconds)
        slurm.is_down = len(waited) < 3

    monkeypatch.setattr(next_seeds.time, "sleep", sleep)
    assert cluster.next()
    assert waited == [next_seeds.AGAIN_S] * 3
    assert cluster.submissions()[3] == seeds(4)


def test_a_start_whose_node_failed_while_it_submitted_is_waited_out(made, monkeypatch):
    cluster = made(**EQUAL)
    cluster.train(TIE)
    submitter, waited = JobsDir(cluster.matrix).submitter, []
    write_json(submitter, {"host": "a_lost_node", "pid": 4711, "token": "of the start before", "counter": 3})

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            old = submitter.stat().st_mtime - FRESH_S
            os.utime(submitter, (old, old))

    monkeypatch.setattr(next_seeds.time, "sleep", sleep)
    assert cluster.next()
    assert waited == [next_seeds.AGAIN_S] * 3
    assert cluster.submissions() == {1: seeds(1, 2, 3), 2: None, 3: seeds(4), 4: None}
    assert not submitter.exists()


def test_arguments_and_settings_of_the_shell_go_to_all_rounds(made, slurm):
    cluster = made(**EQUAL)
    arguments = {"TRACKER": "none", "RESUME": "none", "RETRY_FAILED": "1"}
    cluster.end_jobs()
    cluster.submit(arguments=arguments, site={"SLURM_PARTITION": "gpu"})
    cluster.train(TIE)
    assert cluster.next()
    assert slurm.settings == {"SLURM_PARTITION": "gpu"}
    jobs = JobsDir(cluster.matrix)
    assert read_submission(jobs.submission(5)).arguments == {"TRACKER": "none"}
    assert read_submission(jobs.submission(6)).arguments == {"TRACKER": "none", "SLURM_PARTITION": "gpu"}


def test_a_held_seed_is_waited_for(made, capsys):
    cluster = made(**EQUAL)
    cluster.train(TIE)
    change_requests(cluster.matrix, seeds(4)[:1], hold=True)
    assert cluster.next()
    assert cluster.submissions()[3] == seeds(4)[1:]
    assert f"the verdict waits for {seeds(4)[0]}" in capsys.readouterr().out


def test_a_job_has_no_rounds_of_its_own_and_tries_a_failed_seed_once_more(made):
    cluster = made()
    names = (name_of("adamw", 1),)
    share = RunningShare(cluster.matrix.path, 1, 0, names=names)
    plan = reopen(share, (), limits=Limits(jobs=1))
    assert ([one.name for one in plan.plans], plan.rounds, plan.reserve) == ([*names], None, ())
    engine = ScriptedEngine({"adamw": [FAIL]}, twice=True)
    share.folder.mkdir(exist_ok=True)
    drive(share, plan.plans, engine, again=plan.again, poll_s=0.0)
    assert engine.started == [(names[0], 1), (names[0], 2)]
    assert set(newest_shares(cluster.matrix)) == set(seeds(1, 2, 3))
