"""On a real Slurm: jobs are found by their comment, killed at once, task by task, and the report comes after them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from cluster_factory import write_submission
from kmatrix.engines.slurm import commands
from kmatrix.engines.slurm.scheduler import SlurmScheduler
from kmatrix.engines.slurm.script import JobPlace
from kmatrix.records.jobs.files import (
    REPORT,
    EngineFile,
    SchedulerPhase,
    Shape,
    ShareEntry,
    SubmissionFile,
    job_label,
)
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from slurm_stage import SlurmStage

pytestmark = pytest.mark.nightly
# Instead of Python: a runner that does not end when it is asked to, unless it is that of a report (submission 3).
STUBBORN = """#!/bin/sh
case "$*" in *" 3"*) exit 0;; esac
trap '' TERM USR1
echo started
while :; do sleep 1; done
"""
ENGINE = EngineFile(engine="slurm", id="abc", path="/x")


@pytest.fixture(scope="module")
def stage() -> Iterator[SlurmStage]:
    # What is not killed at once would last longer than any wait below.
    with SlurmStage(nodes=2, gpus=0, requeue_delay=5, kill_wait=600) as running:
        yield running


@pytest.fixture
def jobs(stage, monkeypatch):
    """Return the jobs of a matrix with three submissions; programs of Slurm run on the login node."""

    def run(words, **options):
        return stage.login(words, env=options["env"], check=False)

    monkeypatch.setattr(commands, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    runner = stage.shared / "run ner"
    runner.write_text(STUBBORN)
    runner.chmod(0o755)
    scheduler = SlurmScheduler({}, JobPlace(root=stage.shared, python=runner))
    found = JobsDir(MatrixDir(stage.shared / "a matrix"))
    for number, tasks in ((1, 3), (2, 1), (3, 1)):
        folder, shares = found.submission(number), tuple(ShareEntry(task=task, runs=("x",)) for task in range(tasks))
        submission = SubmissionFile(
            label=job_label("abc", number),
            kind=REPORT if number == 3 else "runs",
            shape=Shape(seconds=120),
            shares=shares,
            after=(1, 2) if number == 3 else (),
        )
        for task in range(tasks):
            folder.share(task).folder.mkdir(parents=True)
        write_submission(folder, submission)
        for name, text in scheduler.render(folder, submission).items():
            (folder.path / name).write_text(text)
    return found, scheduler


def test_jobs_are_found_killed_task_by_task_and_the_report_comes_after_them(stage, jobs):
    found, scheduler = jobs
    array = scheduler.submit(found.submission(1), SubmissionFile())
    single = scheduler.submit(found.submission(2), SubmissionFile())
    report = scheduler.submit(found.submission(3), SubmissionFile(kind=REPORT), [array, single])

    known = scheduler.find([job_label("abc", number) for number in (1, 2, 3)])
    assert known[job_label("abc", 1)] == array
    assert (known[job_label("abc", 2)], known[job_label("abc", 3)]) == (single, report)
    ids = {"1.0": f"{array}_0", "1.1": f"{array}_1", "1.2": f"{array}_2", "2.0": single, "3.0": report}

    def phases():
        return {share: view.phase for share, view in scheduler.poll(ids).items()}

    runs = dict.fromkeys(("1.0", "1.1", "1.2", "2.0"), SchedulerPhase.RUNNING)
    stage.wait(lambda: phases() == {**runs, "3.0": SchedulerPhase.PENDING}, "all runs train, the report waits")
    assert "(Dependency)" in scheduler.poll(ids)["3.0"].reason

    logs = [found.submission(number).share(task).log for number, task in ((1, 0), (1, 1), (1, 2), (2, 0))]
    stage.wait(lambda: all(log.exists() and log.read_text() == "started\n" for log in logs), "they ignore SIGTERM")

    scheduler.cancel([ids["1.1"]], now=True)
    stage.wait(lambda: phases()["1.1"] is SchedulerPhase.ENDED, "the end of one task")
    assert [phases()[share] for share in ("1.0", "1.2", "2.0")] == [SchedulerPhase.RUNNING] * 3

    scheduler.cancel([ids["1.0"], ids["1.2"], single], now=True)
    stage.wait(lambda: set(phases().values()) == {SchedulerPhase.ENDED}, "the end of all, and of the report")
    assert scheduler.poll(ids)["3.0"].state == "COMPLETED"
    assert scheduler.find([job_label("abc", 1)]) == {job_label("abc", 1): array}
