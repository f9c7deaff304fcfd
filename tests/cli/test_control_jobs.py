"""`make stop`, `logs`, `hold` and commands that refuse, on a matrix whose jobs a cluster runs."""

from __future__ import annotations

import os
import shutil

import pytest

from cluster_factory import ScriptedScheduler, claim, make_engine, make_submission
from kmatrix.cli.commands import Arguments
from kmatrix.cli.control import stop as stopping
from kmatrix.cli.control.logs import logs
from kmatrix.cli.control.requests import hold, release
from kmatrix.cli.control.stop import stop
from kmatrix.cli.status import plain
from kmatrix.cli.targets import look, refuse_if_running
from kmatrix.engines.base import UnreachableError
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import (
    CANCELLED,
    CANCELLING,
    REPORT,
    SUBMITTED,
    is_cancelled,
    job_lines,
    read_engine,
    submitted_jobs,
)
from kmatrix.records.jobs.paths import JobsDir, NodeDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.states import read_requests
from kmatrix.runner.submit import resolve_doubts, submitting
from kmatrix.status.activity import Activity
from kmatrix.status.view.overview import Overview
from records_factory import FakeRun, make_matrix

FIRST = FakeRun(status="stopped", stop_at=40)
SECOND = FakeRun(optimizer="muon", status="planned")


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    """Return a matrix with two jobs, of which one runs and one waits, and a third that writes the report."""
    monkeypatch.setenv("HOME", str(tmp_path))
    made = make_matrix(tmp_path, [FIRST, SECOND], took=None)
    make_engine(made)
    make_submission(made, [[FIRST.name], [SECOND.name]])
    make_submission(made, [[]], number=2, job="13", kind=REPORT)
    return made


@pytest.fixture
def scheduler(monkeypatch):
    found = ScriptedScheduler(phases={"12_0": "running", "12_1": "pending", "13": "pending"})
    for place in ("kmatrix.engines.polling.find_scheduler", "kmatrix.cli.control.stop.find_scheduler"):
        monkeypatch.setattr(place, lambda engine, settings: found)
    return found


def arguments(target, matrix, **values):
    return Arguments(target, {"TARGET": str(matrix.path), **values})


@pytest.mark.process
def test_stop_cancels_the_jobs_that_train_and_leaves_the_report(matrix, scheduler, capsys):
    assert stop(arguments("stop", matrix)) == 0
    assert scheduler.cancelled == [("12_0", "12_1")]
    assert [line.submission for line in job_lines(JobsDir(matrix)) if line.event == CANCELLED] == [1]
    text = capsys.readouterr().out
    assert "cancelled 2 jobs" in text
    assert f"{FIRST.name}: stopped" in text
    assert "continue TARGET=" in text


@pytest.mark.process
def test_stop_of_a_matrix_without_an_attempt_cancels_the_report_too(tmp_path, monkeypatch, scheduler):
    monkeypatch.setenv("HOME", str(tmp_path))
    waiting = make_matrix(tmp_path / "waiting", [SECOND], took=None)
    make_engine(waiting)
    make_submission(waiting, [[SECOND.name]])
    make_submission(waiting, [[]], number=2, job="13", kind=REPORT)
    scheduler.phases["12"] = "pending"

    assert stop(arguments("stop", waiting)) == 0
    assert scheduler.cancelled == [("12", "13")]


def events(matrix):
    return [line.event for line in job_lines(JobsDir(matrix)) if line.submission == 1]


@pytest.mark.process
def test_stop_is_noted_before_a_job_ends_so_that_its_runner_knows_who_ended_it(matrix, scheduler, monkeypatch):
    seen = []
    cancel = ScriptedScheduler.cancel
    monkeypatch.setattr(ScriptedScheduler, "cancel", lambda *a, **k: (seen.extend(events(matrix)), cancel(*a, **k)))
    stop(arguments("stop", matrix))

    assert seen[-1] == CANCELLING
    assert events(matrix) == [*seen, CANCELLED]


@pytest.mark.process
def test_the_log_names_the_job_that_was_cancelled(matrix, scheduler):
    stop(arguments("stop", matrix))
    last = [line for line in job_lines(JobsDir(matrix)) if line.submission == 1][-1]
    assert (last.event, last.job) == (CANCELLED, "12")  # of the array


@pytest.mark.process
def test_the_next_submitter_notes_that_a_stop_was_killed_before_it_cancelled(matrix, scheduler, monkeypatch):
    def die(*_, **__):
        raise SystemExit

    monkeypatch.setattr(ScriptedScheduler, "cancel", die)
    with pytest.raises(SystemExit):
        stop(arguments("stop", matrix))
    assert is_cancelled(JobsDir(matrix), 1, "12_0")

    with submitting(matrix) as submitter:
        resolve_doubts(submitter, read_engine(matrix), scheduler, doubt_s=0.0)
    assert not is_cancelled(JobsDir(matrix), 1, "12_0")
    assert submitted_jobs(JobsDir(matrix))[1] == "12"


@pytest.mark.process
def test_jobs_that_could_not_be_cancelled_stay_submitted(matrix, scheduler, monkeypatch):
    def refuse(*_, **__):
        raise UnreachableError("Slurm does not answer")

    monkeypatch.setattr(ScriptedScheduler, "cancel", refuse)
    with pytest.raises(UnreachableError) as raised:
        stop(arguments("stop", matrix))

    assert "make hold TARGET=" in raised.value.hint
    assert "RUN='*'" in raised.value.hint
    assert events(matrix)[-2:] == [CANCELLING, SUBMITTED]
    assert submitted_jobs(JobsDir(matrix))[1] == "12"


@pytest.mark.process
def test_stop_of_a_matrix_whose_jobs_do_not_end_is_left_to_the_user(matrix, scheduler, capsys, monkeypatch):
    monkeypatch.setattr(stopping, "JOBS_S", 0.0)
    monkeypatch.setattr(ScriptedScheduler, "cancel", lambda *_, **__: None)
    assert stop(arguments("stop", matrix)) == 0
    assert "1 job running, 1 job waiting" in capsys.readouterr().out


def test_jobs_of_somebody_else_are_not_cancelled(matrix, scheduler, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: matrix.path.stat().st_uid + 1)
    with pytest.raises(LaunchError, match="belongs to another user"):
        stop(arguments("stop", matrix))
    assert scheduler.cancelled == []


def test_without_a_job_there_is_nothing_to_stop(matrix, scheduler):
    scheduler.phases = {}
    with pytest.raises(LaunchError, match=r"no job of .* runs or waits"):
        stop(arguments("stop", matrix))


def test_commands_that_change_files_refuse_while_jobs_may_write(matrix, scheduler):
    with pytest.raises(LaunchError, match="is being run by Slurm: 1 job running, 1 job waiting"):
        refuse_if_running(matrix)
    scheduler.phases = {}
    JobsDir(matrix).poll.unlink()
    refuse_if_running(matrix)
    JobsDir(matrix).poll.unlink()
    scheduler.why_not = "timed out"
    with pytest.raises(LaunchError, match="may be running: Slurm does not answer"):
        refuse_if_running(matrix)


def test_a_request_for_a_run_whose_job_waits_is_followed_when_it_starts(matrix, scheduler, capsys):
    assert hold(arguments("hold", matrix, RUN=SECOND.name)) == 0
    assert "held; its job still waits, and ends as soon as it starts" in capsys.readouterr().out
    assert SECOND.name in read_requests(matrix)
    (line,) = [one for one in plain(Overview(matrix).poll()) if one.startswith(f"{SECOND.name} queued")]
    assert "; held by user, " in line
    assert line.endswith(": its job ends as soon as it starts")
    assert release(arguments("release", matrix, RUN=SECOND.name)) == 0
    assert "released; its job still waits, and runs it" in capsys.readouterr().out


def test_a_request_for_a_run_without_a_job_is_in_its_status_at_once(matrix, scheduler, capsys):
    scheduler.phases = {}
    assert hold(arguments("hold", matrix, RUN=SECOND.name)) == 0
    assert capsys.readouterr().out == f"{SECOND.name}: held\n"


def test_the_log_of_a_job_that_died_before_it_trained_has_the_reason(matrix, scheduler, capsys):
    scheduler.phases = {}
    share = JobsDir(matrix).submission(1).share(1)
    share.log.write_text("setup.sh: line 3: module: command not found\n")
    assert logs(arguments("logs", matrix)) == 0
    text = capsys.readouterr().out
    assert text == "==> job 12_1 (share 1.1)\nsetup.sh: line 3: module: command not found\n"


def test_logs_without_any_say_that_the_jobs_wait(matrix, scheduler):
    scheduler.reasons = {"12_1": "waits for free nodes (Resources)"}
    with pytest.raises(LaunchError, match="has a log yet") as raised:
        logs(arguments("logs", matrix, RUN=SECOND.name))
    assert raised.value.why == "its jobs wait: waits for free nodes (Resources)"


def test_logs_without_any_say_why_a_job_has_ended(matrix, scheduler):
    scheduler.phases["12_1"] = "ended"
    scheduler.reasons = {"12_1": "exit code 127: kubectl logs pod-1"}
    with pytest.raises(LaunchError, match="has a log yet") as raised:
        logs(arguments("logs", matrix, RUN=SECOND.name))
    assert raised.value.why == "a job has ended: exit code 127: kubectl logs pod-1"


def test_a_job_that_has_started_and_printed_nothing_is_named(matrix, scheduler, monkeypatch, capsys):
    """Set-up and imports take a minute on a busy node: a silent terminal looks like a hang."""

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("kmatrix.cli.control.logs.time.sleep", interrupt)
    scheduler.phases["12_1"] = "running"
    claim(JobsDir(matrix).submission(1).share(1), "12_1")
    assert logs(arguments("logs", matrix, RUN=SECOND.name)) == 0
    assert capsys.readouterr().out == "==> job 12_1 (share 1.1) has started, and printed nothing yet\n"


def test_the_log_of_another_node_is_printed(matrix, scheduler, capsys):
    scheduler.phases = {}
    node = NodeDir(matrix.run(FIRST.name), 3)
    node.path.mkdir(parents=True)
    node.output_log.write_text("rank 6 of n4\n")
    write_json(node.node_json, {"node": 3, "host": "n4"})
    first = matrix.run(SECOND.name).output_log
    first.write_text("all ranks of a run on one node\n")
    assert logs(arguments("logs", matrix, NODE="3")) == 0
    assert capsys.readouterr().out == f"==> {FIRST.name}, node 3 on n4\nrank 6 of n4\n"
    with pytest.raises(LaunchError, match="has a log of node 1") as raised:
        logs(arguments("logs", matrix, NODE="1", RUN=SECOND.name))
    assert raised.value.why == f"{SECOND.name} is on one node"
    with pytest.raises(LaunchError, match="has a log of node 4"):
        logs(arguments("logs", matrix, NODE="4"))
    with pytest.raises(ConfigError, match="NODE=x"):
        logs(arguments("logs", matrix, NODE="x"))


TRACE = "Traceback (most recent call last):\n  File run.py, line 1032\n    main()\n\n  File api.py, line 86\n"
LAUNCHER = f"{TRACE}torch.distributed.elastic.multiprocessing.api.SignalException: Process 575 got signal: 15\n"
OWN = f"{TRACE}ValueError: not a number\n"


def test_the_reason_of_an_end_is_last_and_not_hidden_by_tracebacks_of_torchrun(matrix, scheduler, capsys):
    scheduler.phases = {}
    run = matrix.run(FIRST.name)
    run.output_log.write_text(f"{OWN}checkpoint: step 5\n{LAUNCHER}srun: error: n1: task 0: Exited\n{TRACE}")
    attempt = {"attempt": 1, "status": "stopped", "reason": "job 12 was cancelled", "ended": 2.0}
    write_json(run.status, {"status": "stopped", "reason": attempt["reason"], "attempt": 1, "attempts": [attempt]})
    assert logs(arguments("logs", matrix, RUN=FIRST.name)) == 0
    assert capsys.readouterr().out == (
        f"==> {FIRST.name}\n{OWN}checkpoint: step 5\nsrun: error: n1: task 0: Exited\n{TRACE}"
        f"==> {FIRST.name} stopped: job 12 was cancelled\n"
    )


def test_a_running_claim_without_an_answer_is_followed_by_the_runner(matrix, scheduler, capsys):
    scheduler.why_not = "timed out"
    claim(JobsDir(matrix).submission(1).share(0), "12_0")
    assert hold(arguments("hold", matrix, RUN=FIRST.name)) == 0
    assert "held, the runner follows within a second" in capsys.readouterr().out


def test_stop_of_a_copy_never_touches_the_jobs_of_the_original(matrix, scheduler, tmp_path):
    claim(JobsDir(matrix).submission(1).share(0), "12_0", host="n1")
    copy = MatrixDir(tmp_path / "copy")
    shutil.copytree(matrix.path, copy.path)  # now: as new as the claims of the original
    with pytest.raises(LaunchError, match="no job of copy runs or waits") as caught:
        stop(arguments("stop", copy))
    assert "the jobs are those of the original" in caught.value.why
    assert str(matrix.path) in caught.value.hint
    assert scheduler.cancelled == []
    assert events(matrix) == ["intent", "submitted"]


def test_stop_of_a_matrix_that_was_moved_ends_the_jobs_with_its_label_alone(matrix, scheduler, tmp_path, capsys):
    claim(JobsDir(matrix).submission(1).share(0), "12_0", host="n1")
    scheduler.labels = {"kmatrix-k7-1": "12"}
    moved = MatrixDir(matrix.path.rename(tmp_path / "moved"))
    assert stop(arguments("stop", moved)) == 0
    assert scheduler.cancelled == [("12_0", "12_1")]
    assert "was moved from" in capsys.readouterr().out
    # The claims of the jobs that were killed are new, and say nothing any more.
    assert look(moved).activity is Activity.NONE
    with pytest.raises(LaunchError, match="no job of moved runs or waits"):
        stop(arguments("stop", moved))


@pytest.mark.process
def test_a_job_without_the_label_of_the_matrix_is_neither_cancelled_nor_shown(matrix, scheduler, capsys):
    """Its number is in jobs.jsonl, which others may have changed, and Slurm uses its numbers again."""
    scheduler.comments = {"12_0": "somebody else's", "12_1": "kmatrix-k7-1"}
    assert look(matrix).counts() == {Activity.QUEUED: 1, Activity.NONE: 1}
    assert stop(arguments("stop", matrix)) == 0
    assert scheduler.cancelled == [("12_1",)]


def test_stop_says_that_it_cannot_know_the_jobs_of_a_damaged_submission(matrix, scheduler):
    JobsDir(matrix).submission(1).submission_json.write_bytes(b"\0" * 100)
    claim(JobsDir(matrix).submission(1).share(0), "12_0", host="n1")
    with pytest.raises(LaunchError, match=r"submission.json is damaged") as caught:
        stop(arguments("stop", matrix))
    assert caught.value.why == "which runs job 12 trains is unknown"
    assert scheduler.cancelled == []
