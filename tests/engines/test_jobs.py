"""Submission: no run has two live jobs, whatever is lost between sbatch and its answer; what was cancelled stays so."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from callable_slurm import FakeSlurm
from kmatrix.engines import jobs
from kmatrix.engines.ports import Phase, Shape, UnreachableError
from kmatrix.engines.slurm import Slurm
from kmatrix.engines.slurm_nodes import SlurmSettings
from kmatrix.errors import LaunchError
from kmatrix.records import files

SILENT, STEPS = st.sampled_from(["", "", "before", "after"]), st.sampled_from([*range(9), *[99] * 9])
ONE, WIDE, LAST = Shape(gpus=1, cpus=4, seconds=7200), Shape(nodes=2, gpus=2, cpus=4), Shape(seconds=300)


@pytest.fixture
def slurm():
    return Slurm(SlurmSettings(), run=FakeSlurm())


def test_the_widest_and_longest_first_one_array_per_shape_and_a_last_job(tmp_path, slurm):
    said = []
    wanted = {"a": ONE, "l": Shape(gpus=1, cpus=4, seconds=9000), "b": ONE, "w": WIDE}
    assert jobs.submit(tmp_path, slurm, wanted, said.append, last=LAST) == 4
    assert said == [
        "job 11: 1 run on 2 nodes with 2 GPUs",
        "job 12: 1 run on 1 node with 1 GPU, at most 2h30m",
        "job 13: 2 runs, each on 1 node with 1 GPU, at most 2h00m",
        "job 14: the report, after all others",
    ]
    assert "--dependency=afterany:11:12:13" in slurm.run.calls[-1]
    assert (tmp_path / "jobs/0003/runs").read_text() == "a\nb\n"


def test_one_last_job_waits_for_all_others_and_may_submit_the_next_one(tmp_path, slurm):
    jobs.submit(tmp_path, slurm, {"a": ONE}, print, last=LAST)
    jobs.submit(tmp_path, slurm, {"a": ONE}, print, last=LAST)
    assert list(slurm.run.live()) == ["11", "12"]
    jobs.submit(tmp_path, slurm, {"a": ONE, "b": ONE}, print, last=LAST)
    assert list(slurm.run.live()) == ["11", "13", "14"]
    assert any("--dependency=afterany:11:13" in words for words in slurm.run.calls)
    slurm.run.jobs["11"].state, slurm.run.jobs["14"].state = "COMPLETED", "RUNNING"
    jobs.submit(tmp_path, slurm, {"b": ONE, "c": ONE}, print, last=LAST)
    assert list(slurm.run.live()) == ["13", "14", "15", "16"]


def test_cancel_leaves_the_report_and_a_copy_has_no_jobs(tmp_path, slurm):
    matrix, copy = tmp_path / "a", tmp_path / "b"
    matrix.mkdir()
    jobs.submit(matrix, slurm, {"r": ONE, "s": ONE, "w": WIDE}, print, last=LAST)
    shutil.copytree(matrix, copy)

    assert (jobs.look(copy, slurm), jobs.cancel(copy, slurm)) == ({}, 0)
    assert jobs.cancel(matrix, slurm) == 3
    assert [job.state for job in slurm.run.jobs.values()] == ["CANCELLED"] * 3 + ["PENDING"]


@pytest.mark.parametrize(("silent", "kind", "nodes"), [("before", UnreachableError, 1), ("", LaunchError, 4)])
def test_without_an_answer_or_for_what_never_starts_nothing_is_made(tmp_path, slurm, silent, kind, nodes):
    slurm.run.silent = silent
    with pytest.raises(kind):
        jobs.submit(tmp_path, slurm, {"a": ONE, "w": Shape(nodes=nodes)}, print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("runs", "most", "calls"), [(10_000, 1001, 10), (10_000, 5001, 10), (200, 11, 20)])
def test_ten_thousand_runs_are_ten_submissions(tmp_path, slurm, runs, most, calls):
    slurm.run.config = f"MaxArraySize            = {most}\n"
    jobs.submit(tmp_path, slurm, {f"r{index}": ONE for index in range(runs)}, print)
    assert sum(words[0] == "sbatch" for words in slurm.run.calls) == calls
    assert len(jobs.look(tmp_path, slurm)) == runs


def test_small_runs_share_nodes(tmp_path, slurm):
    node = Shape(gpus=4, cpus=16)
    wanted = {name: Shape(gpus=1, cpus=4, seconds=600) for name in "abcde"}
    wanted |= {"two": Shape(gpus=2, cpus=8, seconds=3600), "four": Shape(gpus=4, cpus=16), "cpu": Shape(cpus=8)}

    slurm.run.sinfo = ""  # users may not see the nodes
    assert jobs.submit(tmp_path, slurm, wanted, print, node=node) == 8

    lines = {path.parent.name: path.read_text() for path in tmp_path.glob("jobs/*/runs")}
    assert lines == {"0001": "four\n", "0002": "two a b\n", "0003": "c d e\n", "0004": "cpu\n"}
    assert jobs.look(tmp_path, slurm)["b"].id == "12"
    assert jobs.submit(tmp_path, slurm, {"b": ONE}, print, node=node) == 0


class Submission(RuleBasedStateMachine):
    """continue, the last job, scancel, lost answers, killed submitters, ends and ageing, in any order."""

    @initialize(packs=st.booleans())
    def begin(self, packs):
        self.kept = tempfile.TemporaryDirectory()
        self.folder = Path(self.kept.name)
        self.fake = FakeSlurm()
        self.slurm = Slurm(SlurmSettings(), run=self.fake)
        self.node = Shape(gpus=2, cpus=8) if packs else None
        self.trained, self.cancelled = set(), set()  # runs with an attempt; runs whose job a person has cancelled

    def submit(self, names, silent, steps):
        done = count()

        def before(what, path):
            if next(done) == steps:
                raise KeyboardInterrupt
            self.fake.silent = silent if what == "submit" else ""

        files.before = before
        with suppress(UnreachableError, KeyboardInterrupt):
            jobs.submit(self.folder, self.slurm, dict.fromkeys(sorted(names), ONE), print, last=LAST, node=self.node)
        files.before, self.fake.silent = lambda what, path: None, ""

    @rule(names=st.sets(st.sampled_from("abcd"), min_size=1), silent=SILENT, steps=STEPS)
    def go_on(self, names, silent, steps):
        self.cancelled -= names
        self.submit(names, silent, steps)

    @rule(silent=SILENT, steps=STEPS)
    def last_job(self, silent, steps):
        known = jobs.known_runs(self.folder)
        due = {run for run in "abcde" if (run in self.trained if run in known else True)}
        self.submit(due - (self.cancelled & self.trained), silent, steps)  # an attempt knows that it was asked to stop

    @rule(data=st.data(), state=st.sampled_from(["RUNNING", "COMPLETED", "NODE_FAIL", "PENDING"]))
    def a_job_moves(self, data, state):
        if live := list(self.fake.live()):
            job = data.draw(st.sampled_from(live))
            self.fake.jobs[job].state = state
            self.trained |= set(self.runs_of(job)) if state == "RUNNING" else set()

    @rule(data=st.data())
    def a_person_cancels(self, data):
        if live := list(self.fake.live()):
            job = data.draw(st.sampled_from(live))
            self.fake.jobs[job].state = "CANCELLED"
            self.cancelled |= set(self.runs_of(job))

    @rule()
    def slurm_forgets(self):
        self.fake.jobs = self.fake.live()

    @rule()
    def stop(self):
        self.cancelled |= {run for job in self.fake.live() for run in self.runs_of(job)}
        jobs.cancel(self.folder, self.slurm)
        assert not [job for job in self.fake.live() if self.runs_of(job)]

    def teardown(self):
        self.kept.cleanup()

    def runs_of(self, job):
        lines = (self.folder / "jobs" / self.fake.jobs[job].name.rpartition("-")[2] / "runs").read_text().splitlines()
        return lines[int(job.partition("_")[2] or 0)].split() if lines else []

    @invariant()
    def no_run_has_two_live_jobs_and_what_a_person_cancelled_has_none(self):
        live = [run for job in self.fake.live() for run in self.runs_of(job)]
        assert len(live) == len(set(live))
        assert self.cancelled.isdisjoint(live)
        seen = jobs.look(self.folder, self.slurm)
        assert all(seen[run].phase is not Phase.ENDED for run in live)


TestSubmission = Submission.TestCase
TestSubmission.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
