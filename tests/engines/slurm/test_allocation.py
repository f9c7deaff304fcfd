"""The job of Slurm that a runner is in, with recorded answers of scontrol."""

from __future__ import annotations

import subprocess
import time

import pytest

from kmatrix.engines.slurm.allocation import SlurmJob, job_hosts, this_job
from kmatrix.engines.slurm.capacity import seconds_of
from kmatrix.errors import ConfigError, LaunchError

CONFIG = "Configuration data as of now\nKillWait                = 30 sec\nMaxArraySize            = 1001\n"
JOB = (
    "JobId=12 ArrayJobId=12 JobName=x JobState={state} Reason=None Restarts={restarts} RunTime={ran} TimeLimit={limit} "
    "StartTime=2026-11-23T05:00:00 EndTime=2026-11-23T07:00:00 PreemptTime={preempted} NodeList=n[1-2]\n"
)


class Answers:
    """scontrol with these answers; None: it does not answer."""

    def __init__(self, job: str | None = "", config: str | None = CONFIG, requeue: str | None = "") -> None:
        self.job, self.config, self.requeue = job, config, requeue
        self.nodes = "n1 allocated\nn2 allocated\n"
        self.asked: list[str] = []

    def __call__(self, words, **options) -> subprocess.CompletedProcess[str]:
        self.asked.append(" ".join(words))
        text = " ".join(words)
        if "hostnames" in words:
            return subprocess.CompletedProcess(words, 0, "n1\nn2\n", "")
        if words[0] == "sinfo":
            return subprocess.CompletedProcess(words, 0, self.nodes, "")
        answer = self.config if "config" in words else self.requeue if "requeue" in words else self.job
        if answer is None:
            raise subprocess.TimeoutExpired(text, options["timeout"])
        failed = "requeue" in words and answer != ""
        return subprocess.CompletedProcess(words, int(failed), "" if failed else answer, answer)


def about(state="RUNNING", ran="00:10:00", limit="02:00:00", preempted="None", restarts=0) -> str:
    return JOB.format(state=state, ran=ran, limit=limit, preempted=preempted, restarts=restarts)


def job_with(**known) -> SlurmJob:
    found = SlurmJob("12_3", "15", ("n1", "n2"), run=Answers(**known))
    found.begin()
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("02:00:00", 7200.0),
        ("1-02:03:04", 93784.0),
        ("05:00", 300.0),
        ("UNLIMITED", None),
        ("", None),
        ("1-00:00:00.5", 86400.0),
    ],
)
def test_durations_of_slurm_are_read(text, found):
    assert seconds_of(text) == found


def test_the_limit_and_the_grace_are_those_of_the_cluster():
    job = job_with(job=about())
    assert job.kill_s == 30.0
    assert job.left_s() == pytest.approx(6600.0, abs=5)


@pytest.mark.parametrize(
    ("state", "nodes", "over"),
    [
        ("FAILED", "n1 idle\nn2 mixed\n", True),
        ("CANCELLED", "n1 idle\nn2 drained\n", True),
        ("FAILED", "n1 idle-\nn2 mixed$\n", True),
        ("FAILED", "n1 idle~\nn2 idle\n", False),
        ("PENDING", "n1 idle\nn2 idle\n", True),  # requeued by itself: it finds a newer submission when it starts
        ("COMPLETING", "n1 idle\nn2 completing\n", False),
        ("RUNNING", "n1 idle\nn2 idle\n", False),
        ("SUSPENDED", "n1 idle\nn2 idle\n", False),
        ("NODE_FAIL", "n1 idle\nn2 idle\n", False),
        ("FAILED", "n1 idle\nn2 idle*\n", False),
        ("FAILED", "n1 idle\nn2 down*\n", False),
        ("FAILED", "n1 idle\n", False),
        (None, "n1 idle\nn2 idle\n", False),
    ],
)
def test_another_job_is_over_if_slurm_says_so_and_reaches_its_nodes(state, nodes, over):
    job = job_with(job=None if state is None else about(state=state))
    job.run.nodes = nodes
    assert job.is_over("11", ("n1", "n2")) is over


@pytest.mark.parametrize(
    ("known", "cancelled"),
    [
        ({"state": "COMPLETING"}, True),
        ({"state": "CANCELLED", "limit": "UNLIMITED"}, True),
        ({"state": "RUNNING"}, False),
        ({"state": "COMPLETING", "preempted": "2026-11-23T05:10:00"}, False),
        ({"state": "COMPLETING", "ran": "02:00:01"}, False),  # at its limit
        ({"state": "COMPLETING", "restarts": 1}, False),  # queued again by Slurm itself
    ],
)
def test_slurm_tells_whether_a_job_is_being_cancelled(known, cancelled):
    assert job_with(job=about(**known)).is_cancelled() is cancelled


def test_without_an_answer_no_job_is_cancelled():
    assert not job_with(job=None).is_cancelled()


def test_without_an_answer_both_are_unknown():
    job = job_with(job=None, config=None)
    assert (job.kill_s, job.left_s()) == (None, None)


@pytest.mark.parametrize(
    ("noticed", "answer", "kind", "again"),
    [
        (True, about(ran="01:58:30"), "time limit", True),
        (True, about(), "preempted", True),  # the limit is far away
        (True, about(limit="UNLIMITED"), "time limit", True),  # unknown: never without a reason
        (False, about(preempted="2026-11-23T05:10:00"), "preempted", True),
        (True, about(ran="01:58:30", preempted="2026-11-23T05:10:00"), "preempted", True),
        (False, about(state="PREEMPTED"), "preempted", True),
        (False, about(state="COMPLETING", ran="02:00:10"), "time limit", True),
        (False, about(state="COMPLETING"), "signal", False),
        (False, about(state="CANCELLED"), "signal", False),
        (False, about(), "signal", False),
        (False, None, "signal", False),
    ],
)
def test_the_cause_of_a_stop_is_found(noticed, answer, kind, again):
    cause = job_with(job=answer).cause(noticed=noticed)
    assert (cause.kind, cause.again) == (kind, again)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (about(state="COMPLETING"), "job 12_3 was cancelled"),
        (about(), "asked to stop"),
        (None, "job 12_3 was signalled, and Slurm does not answer why"),
    ],
)
def test_the_reason_of_a_stop_tells_what_is_known(answer, reason):
    assert job_with(job=answer).cause(noticed=False).reason == reason


def test_a_notice_near_the_known_limit_is_the_limit_without_an_answer():
    job = job_with(job=about(ran="01:58:30"))
    job.run.job = None
    assert job.cause(noticed=True).kind == "time limit"
    job._ends = time.monotonic() + 5000
    assert job.cause(noticed=True).kind == "preempted"


def test_a_node_that_slurm_lost_is_named_and_its_requeue_is_noticed():
    job = job_with(job=about())
    left = job.left_s()
    job.run.job = about(state="COMPLETING", ran="00:00:00", restarts=1)
    cause = job.cause(noticed=False)
    assert (cause.kind, cause.reason, cause.again) == ("signal", "job 12_3 was requeued", True)
    assert job.left_s() == pytest.approx(left, abs=5)  # of this start, not of the next one
    job.run.nodes = "n1 completing\nn1 completing\nn2 down*\n"
    cause = job.cause(noticed=False)
    assert (cause.kind, cause.reason, cause.again) == ("node lost", "Slurm has lost n2", True)
    assert cause.lost == ("n2",)
    job.run.requeue = "Job is pending execution for job 12"
    assert job.requeue() == ""


def test_a_task_of_an_array_is_requeued_alone():
    job = job_with(job=about())
    assert job.requeue() == ""
    assert job.run.asked[-1] == "scontrol requeue 12_3"
    job.run.requeue = "slurm_requeue error: Unable to contact slurm controller"
    assert "Unable to contact" in job.requeue()
    job.run.requeue = None
    assert "timed out" in job.requeue()


def test_this_job_is_read_from_its_environment(monkeypatch):
    monkeypatch.setattr("kmatrix.engines.slurm.allocation.job_hosts", lambda listed: ("n1", "n2"))
    monkeypatch.setattr(SlurmJob, "begin", lambda _: None)
    environment = {"SLURM_JOB_ID": "15", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "2"}
    alone = this_job(environment, {})
    assert (alone.job, alone.number, alone.restart, alone.most_restarts) == ("15", "15", 2, None)
    environment |= {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    settings = {"SLURM_RESTARTS": "0", "SLURM_NOTICE": "300", "STAGE_DIR": "/local"}
    task = this_job(environment, settings)
    assert (task.job, task.number, task.most_restarts) == ("12_3", "15", 0)
    assert (task.notice_s, task.stage_dir) == (300.0, "/local")


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "1"}, {"SLURM_JOB_NODELIST": "n1"}])
def test_outside_of_a_job_there_is_none(environment):
    with pytest.raises(LaunchError, match="not a job of Slurm"):
        this_job(environment, {})


def test_hosts_that_cannot_be_read_are_an_error():
    assert job_hosts("n[1-2]", Answers()) == ("n1", "n2")
    with pytest.raises(LaunchError, match="cannot read SLURM_JOB_NODELIST"):
        job_hosts("n[1-2]", lambda words, **_: subprocess.CompletedProcess(words, 1, "", "no"))
    with pytest.raises(LaunchError, match="cannot read"):
        job_hosts("n[", lambda words, **_: (_ for _ in ()).throw(OSError("none")))


@pytest.mark.parametrize("setting", ["SLURM_RESTARTS", "SLURM_NOTICE"])
def test_a_damaged_setting_ends_the_job_with_its_name(setting):
    environment = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1"}
    with pytest.raises(ConfigError, match=f"{setting}=nan"):
        this_job(environment, {setting: "nan"})
