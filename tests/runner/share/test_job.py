"""Starts of a job over a share of a matrix, with the fake trainer and without a scheduler."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

import fake_srun
from fake_allocation import FakeAllocation
from kmatrix.engines import node_watch
from kmatrix.engines.allocation import StopCause
from kmatrix.engines.spread import Srun
from kmatrix.errors import LaunchError
from kmatrix.records.decode import as_json
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs.claim import Claim
from kmatrix.records.jobs.files import (
    EngineFile,
    JobLine,
    ShareEnd,
    ShareOwner,
    SubmissionFile,
    append_job_line,
    read_node,
    read_share_end,
    read_share_owner,
    write_engine,
)
from kmatrix.records.jobs.paths import JobsDir, NodeDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.states import change_requests
from kmatrix.runner.loop import Outcome
from kmatrix.runner.share import job as share_job
from kmatrix.runner.share import rivals
from kmatrix.runner.share.__main__ import main
from kmatrix.runner.share.job import open_job
from kmatrix.runner.share.restarts import idle_starts
from running import PYTHON, ROOT, processes_naming
from share_job import start, state_of
from waiting import wait_until

LIMIT = StopCause(kind="time limit", reason="the time limit of job 12 is near", again=True)
CANCELLED = StopCause(kind="signal", reason="job 12 was cancelled")


@pytest.fixture
def signal_when_training(monkeypatch):
    """Raise a signal in the loop of the runner, whose handler is installed then, as soon as a run trains."""

    def arm(share, number, name="a"):
        left = [number]

        class Log(share_job.ProgressLog):
            def __call__(self, progress):
                super().__call__(progress)
                if left and (share.run(name).path / "env.json").exists():
                    signal.raise_signal(left.pop())

        monkeypatch.setattr(share_job, "ProgressLog", Log)

    return arm


@pytest.mark.process
def test_a_job_trains_its_share_alone_with_files_of_its_own(share, matrix, capsys):
    mine = share("a", others=("b",))
    job, allocation = start(mine)
    assert job.run() == 0
    assert state_of(mine).status == "finished"
    assert not matrix.run("b").status.exists()
    assert not matrix.status.exists()
    assert not matrix.journal.exists()
    assert {"owner.json", "status.json", "journal.jsonl", "end.json"} < {path.name for path in mine.folder.iterdir()}
    end = read_share_end(mine)
    assert (end.job, end.counts, end.requeued, end.kind) == ("12", {"finished": 1}, False, None)
    assert read_share_owner(mine).nodes == allocation.hosts
    said = capsys.readouterr().out.splitlines()
    assert "job 12 of Slurm, first start" in said[0]
    assert any("a: finished" in line for line in said)
    assert not allocation.requeued


@pytest.mark.process
def test_runs_of_one_share_train_at_the_same_time_if_they_fit(share, monkeypatch):
    monkeypatch.setattr(share_job, "usable_cores", lambda: 2)
    mine = share("a", "b")
    assert start(mine)[0].run() == 0
    assert read_share_end(mine).counts == {"finished": 2}


@pytest.mark.process
def test_the_notice_before_the_time_limit_saves_and_requeues(share, capsys, signal_when_training):
    mine, allocation = share("a"), FakeAllocation(why=LIMIT)
    job, _ = start(mine, "hang", allocation)
    signal_when_training(mine, signal.SIGUSR1)
    assert job.run() == 0
    attempt = state_of(mine).last
    assert (attempt.status, attempt.kind, attempt.reason) == ("stopped", "time limit", LIMIT.reason)
    end = read_share_end(mine)
    assert (end.kind, end.reason, end.requeued) == ("time limit", LIMIT.reason, True)
    assert (allocation.requeued, allocation.asked) == (1, [True])
    assert "SIGUSR1: the time limit of job 12 is near" in capsys.readouterr().out

    # The next start goes on from there.
    job, allocation = start(mine, allocation=FakeAllocation(restart=1))
    assert job.run() == 0
    state = state_of(mine)
    assert (state.status, [attempt.resume for attempt in state.attempts]) == ("finished", ["none", "auto"])
    assert read_share_owner(mine).idle == 1  # the fake trainer has no index of checkpoints


@pytest.mark.process
def test_a_cancelled_job_is_stopped_and_not_requeued(share, signal_when_training):
    mine, allocation = share("a"), FakeAllocation(why=CANCELLED)
    job, _ = start(mine, "hang", allocation)
    signal_when_training(mine, signal.SIGTERM)
    assert job.run() == 130
    assert (state_of(mine).last.kind, state_of(mine).reason) == ("signal", "job 12 was cancelled")
    assert (allocation.requeued, allocation.asked, read_share_end(mine).requeued) == (0, [False], False)


@pytest.mark.process
def test_the_first_runner_of_a_job_retries_failed_runs_whatever_the_number_of_its_start(share):
    """A node may have failed before the program began: Slurm counts that start, too."""
    mine = share("a")
    assert start(mine, "fail")[0].run() == 1
    again = share("a", number=2)
    job, _ = start(again, allocation=FakeAllocation(job="13", restart=1), arguments={"RETRY_FAILED": "1"})
    assert job.run() == 0
    assert state_of(again).status == "finished"


@pytest.mark.process
def test_a_further_runner_of_a_job_does_not_retry_the_runs_that_have_failed_since(share):
    mine = share("a")
    asked = {"RETRY_FAILED": "1"}
    assert start(mine, "fail", arguments=asked)[0].run() == 1
    assert start(mine, allocation=FakeAllocation(restart=1), arguments=asked)[0].run() == 1
    assert state_of(mine).status == "failed"


@pytest.mark.process
def test_a_restart_beyond_the_limit_is_not_asked_for(share, signal_when_training):
    mine, allocation = share("a"), FakeAllocation(why=LIMIT, restart=3, most_restarts=3)
    job, _ = start(mine, "hang", allocation)
    signal_when_training(mine, signal.SIGUSR1)
    job.run()
    assert (allocation.requeued, read_share_end(mine).requeued) == (0, False)


@pytest.mark.process
@pytest.mark.parametrize("full", [True, False])
def test_a_job_whose_disk_is_full_is_not_requeued(share, monkeypatch, full):
    mine, allocation = share("a"), FakeAllocation(why=LIMIT)
    job, _ = start(mine, allocation=allocation)

    def stop(*_, **__) -> Outcome:
        job.signals.names.append("SIGUSR1")
        return Outcome(counts={}, exit_code=1, disk_full=full)

    monkeypatch.setattr(share_job, "drive", stop)
    assert job.run() == (1 if full else 0)
    assert (allocation.requeued, read_share_end(mine).requeued) == (int(not full), not full)


@pytest.mark.process
def test_a_failed_run_ends_the_job_with_status_1_and_is_not_requeued(share):
    mine = share("a")
    job, allocation = start(mine, "fail")
    assert job.run() == 1
    assert (allocation.requeued, read_share_end(mine).counts) == (0, {"failed": 1})


def test_a_later_start_of_the_job_keeps_the_share(share, capsys):
    mine = share("a")
    mine.folder.mkdir()
    write_json(mine.owner, as_json(ShareOwner(job="12", restart=2)))
    assert start(mine, allocation=FakeAllocation(restart=1))[0].run() == 0
    assert "start 3 of this job has the share" in capsys.readouterr().out
    assert not mine.run("a").status.exists()


def note(share, event, job=None):
    append_job_line(JobsDir(MatrixDir(share.path)), JobLine(event=event, submission=1, time=1.0, job=job))


@pytest.mark.parametrize(("event", "job"), [("cancelled", None), ("cancelled", "12"), ("cancelling", "12")])
def test_a_job_that_was_cancelled_or_given_up_trains_nothing(share, capsys, event, job):
    mine = share("a")
    note(mine, event, job)
    assert start(mine)[0].run() == 0
    assert "nothing to do: the job was cancelled; `continue` submits its runs again" in capsys.readouterr().out
    assert not mine.owner.exists()


@pytest.mark.process
def test_a_script_that_is_submitted_again_after_a_stop_trains(share):
    mine = share("a")
    note(mine, "cancelled", "11")
    assert start(mine)[0].run() == 0
    assert state_of(mine).status == "finished"


@pytest.mark.process
@pytest.mark.parametrize("told_by", ["log", "scheduler"])
def test_a_job_that_is_cancelled_while_it_saves_is_not_queued_again(
    share, told_by, capsys, monkeypatch, signal_when_training
):
    mine, allocation = share("a"), FakeAllocation(job="12_0", why=LIMIT)
    job, _ = start(mine, "hang", allocation)
    signal_when_training(mine, signal.SIGUSR1)

    def cause(_, *, noticed):
        assert noticed
        if told_by == "log":
            note(mine, "cancelling", "12")
        allocation.cancelled = told_by == "scheduler"
        return LIMIT

    monkeypatch.setattr(FakeAllocation, "cause", cause)
    assert job.run() == 130
    assert (allocation.requeued, read_share_end(mine).requeued) == (0, False)
    assert "the job was cancelled meanwhile: it is not queued again" in capsys.readouterr().out


@contextmanager
def claimed_by_another(share):
    """Return a context in which the runner of another job rewrites the claim of a share."""
    share.folder.mkdir()
    claim = Claim(share, ShareOwner(job="11", host="n7"))
    claim.begin()
    try:
        yield
    finally:
        claim.end()


@pytest.mark.process
def test_a_live_claim_of_another_job_keeps_the_share(share, monkeypatch, capsys):
    monkeypatch.setattr("kmatrix.records.jobs.claim.PULSE_S", 0.05)
    mine = share("a")
    with claimed_by_another(mine):
        assert start(mine)[0].run() == 0
    assert "nothing to do: job 11 on n7 runs the share" in capsys.readouterr().out


@pytest.mark.process
def test_a_dead_claim_of_another_job_is_waited_out(share, monkeypatch):
    monkeypatch.setattr(rivals, "FRESH_S", 0.3)
    mine = share("a")
    mine.folder.mkdir()
    write_json(mine.owner, as_json(ShareOwner(job="11", counter=5)))
    assert start(mine)[0].run() == 0
    assert state_of(mine).status == "finished"
    assert read_share_owner(mine).job == "12"


@pytest.mark.process
def test_a_job_that_is_over_but_whose_runner_lives_keeps_the_share(share, monkeypatch, capsys):
    """The daemon of its batch script was killed: Slurm takes the job for ended."""
    monkeypatch.setattr("kmatrix.records.jobs.claim.PULSE_S", 0.01)
    mine = share("a")

    def sleep(_: float) -> None:
        """Wait until the other runner has rewritten its claim, for which it needs some time of the processor."""
        before = read_share_owner(mine).counter
        wait_until(lambda: read_share_owner(mine).counter > before)

    monkeypatch.setattr(rivals, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with claimed_by_another(mine):
        assert start(mine, allocation=FakeAllocation(over=("11",)))[0].run() == 0
    assert "nothing to do: job 11 on n7 runs the share" in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.parametrize(("number", "job", "restart"), [(1, "12", 1), (2, "13", 0)])
def test_an_attempt_whose_runner_was_killed_says_where_that_was(share, number, job, restart):
    mine = share("a")
    mine.folder.mkdir()
    write_json(mine.owner, as_json(ShareOwner(job="12", host="n7", nodes=("n7", "n8"))))
    write_json(mine.run("a").status, {"status": "running", "attempts": [{"attempt": 1, "status": "running"}]})
    again = mine if number == 1 else share("a", number=number)
    assert start(again, allocation=FakeAllocation(job=job, restart=restart, over=("12",)))[0].run() == 0
    first, second = state_of(mine).attempts
    assert (first.status, first.kind) == ("stopped", "lost")
    assert first.reason == "start 1 of job 12 on n7 and n8 was killed, or a node of it failed"
    assert second.status == "finished"


@pytest.mark.process
def test_runs_of_a_newer_submission_are_left_to_it(share, capsys):
    mine = share("a", "b")
    newer = share("b", number=2)
    assert start(mine)[0].run() == 0
    assert state_of(mine).status == "finished"
    assert not mine.run("b").status.exists()
    newest = share("a", "b", number=3)
    assert start(newer)[0].run() == 0
    assert "submission 3 has its runs now" in capsys.readouterr().out
    assert not newest.run("b").status.exists()


@pytest.mark.process
def test_a_newer_job_leaves_runs_that_an_older_one_trains(share, monkeypatch, capsys):
    monkeypatch.setattr("kmatrix.records.jobs.claim.PULSE_S", 0.05)
    older = share("a")
    older.folder.mkdir()
    claim = Claim(older, ShareOwner(job="11", host="n7"))
    claim.begin()
    mine = share("a", number=2)
    try:
        assert start(mine)[0].run() == 0
    finally:
        claim.end()
    assert "nothing to do: job 11 on n7 runs the share" in capsys.readouterr().out
    write_json(older.end, as_json(ShareEnd(job="11")))
    assert start(mine)[0].run() == 0
    assert state_of(mine).status == "finished"


@pytest.mark.process
def test_an_older_job_leaves_its_runs_if_a_newer_submission_appears_while_it_begins(share, monkeypatch, capsys):
    mine = share("a")
    begin = Claim.begin

    def begin_late(claim):
        begin(claim)
        share("a", number=2)

    monkeypatch.setattr(Claim, "begin", begin_late)
    assert start(mine)[0].run() == 0
    assert "submission 2 has its runs now" in capsys.readouterr().out
    assert not mine.run("a").status.exists()
    assert read_share_end(mine).job == "12"  # the newer job need not wait


@pytest.mark.process
def test_two_restarts_without_a_later_checkpoint_fail_the_runs(share, capsys):
    mine = share("a")
    mine.folder.mkdir()
    write_json(mine.owner, as_json(ShareOwner(job="12", restart=4, steps={"a": 0}, idle=1)))
    job, allocation = start(mine, allocation=FakeAllocation(restart=5))
    assert job.run() == 1
    state = state_of(mine)
    assert (state.status, state.last.kind) == ("failed", "no progress")
    assert "2 restarts of job 12 in a row saved no later step" in state.reason
    assert "failed a" in capsys.readouterr().out
    assert not allocation.requeued


@pytest.mark.parametrize(
    ("before", "restart", "steps", "idle"),
    [
        (None, 0, {"a": 0}, 0),
        (ShareOwner(job="11", restart=0, idle=1), 1, {"a": 0}, 0),  # another job
        (ShareOwner(job="12", restart=0, steps={"a": 5}), 1, {"a": 5}, 1),
        (ShareOwner(job="12", restart=0, steps={"a": 5}, idle=1), 1, {"a": 6}, 0),
        (ShareOwner(job="12", restart=0, steps={"a": 5, "b": 1}, idle=1), 1, {"a": 5, "b": 2}, 0),
        (ShareOwner(job="12", restart=1, steps={"a": 5}, idle=1, lost_starts=1), 2, {"a": 5}, 1),
        (ShareOwner(job="12", restart=1, steps={"a": 5}, idle=1), 1, {"a": 5}, 0),  # the same start
    ],
)
def test_starts_without_a_later_checkpoint_are_counted(before, restart, steps, idle):
    assert idle_starts(before, "12", restart, steps) == idle


@pytest.mark.process
def test_a_lost_host_that_is_in_the_job_again_sends_it_back_a_few_times(share, capsys):
    mine = share("a")
    mine.folder.mkdir()
    write_json(mine.end, as_json(ShareEnd(job="12", requeued=True, lost=("n2",), kind="node lost")))
    for restart in range(1, 7):
        job, allocation = start(mine, allocation=FakeAllocation(restart=restart, hosts=("n1", "n2"), lost=("n2",)))
        assert job.run() == 0
        end = read_share_end(mine)
        assert (end.kind, end.lost) == ("node lost", ("n2",))
        assert (allocation.requeued, end.requeued) == ((1, True) if restart <= 5 else (0, False))
    assert "n2 still does not answer" in capsys.readouterr().out
    assert not mine.run("a").status.exists()
    # It answers again: the run trains, and those starts do not count as idle.
    write_json(mine.end, as_json(ShareEnd(job="12", restart=6, requeued=True, lost=("n2",))))
    job, _ = start(mine, allocation=FakeAllocation(restart=7, hosts=("n1", "n2")))
    assert job.run() == 0
    assert (state_of(mine).status, read_share_owner(mine).idle) == ("finished", 0)


@pytest.mark.process
def test_a_lost_host_requeues_the_job_and_is_named(share, monkeypatch, tmp_path, matrix):
    monkeypatch.setattr(node_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(node_watch, "PEERS_S", 0.1)
    folder = fake_srun.install(tmp_path / "bin", monkeypatch).parent
    (folder / "dead").write_text("n2")
    mine = share("a", num_gpus=2, num_nodes=2)
    hosts = (*FakeAllocation().hosts, "n2")
    job, allocation = start(mine, "hang", FakeAllocation(hosts=hosts, starts=Srun(PYTHON, "12", hosts)))

    def lose() -> None:
        run = mine.run("a")
        wait_until(lambda: (run.path / "env.json").exists() and read_node(NodeDir(run, 1)) is not None)
        os.killpg(read_node(NodeDir(run, 1)).pid, signal.SIGKILL)
        os.kill(read_json(run.path / "env.json")["pid"], signal.SIGKILL)

    thread = threading.Thread(target=lose)
    thread.start()
    assert job.run() == 0
    thread.join()
    end = read_share_end(mine)
    assert (end.kind, end.reason, end.lost, end.requeued) == ("node lost", "n2 stopped answering", ("n2",), True)
    assert (state_of(mine).last.kind, allocation.requeued) == ("node lost", 1)
    wait_until(lambda: not processes_naming(matrix))


@pytest.mark.process
@pytest.mark.parametrize("replaces_nodes", [True, False])
def test_preemptions_of_other_nodes_never_end_a_job_whose_nodes_are_replaced(share, replaces_nodes):
    job, allocation = start(share("a"), "preempted9", FakeAllocation(replaces_nodes=replaces_nodes))
    job.run()

    end = read_share_end(job.share)
    assert (end.requeued, allocation.requeued) == (replaces_nodes, int(replaces_nodes))
    assert end.kind == ("preempted" if replaces_nodes else None)
    # The next attempt waits for the node that replaces the lost one: the runner does not start it by itself.
    assert (len(state_of(job.share).attempts) == 1) == replaces_nodes


@pytest.mark.process
def test_a_request_of_the_user_is_followed_inside_a_job(share, matrix):
    mine = share("a")
    job, allocation = start(mine, "hang")

    def hold() -> None:
        wait_until((mine.run("a").path / "env.json").exists)
        change_requests(matrix, ["a"], hold=True)

    thread = threading.Thread(target=hold)
    thread.start()
    job.run()
    thread.join()
    assert state_of(mine).reason.startswith("held by user")
    assert not allocation.requeued


def test_a_share_without_runs_is_refused(share):
    with pytest.raises(LaunchError, match="has no task 3"):
        open_job(replace(share("a"), task=3, names=()), SubmissionFile(), FakeAllocation())


def test_the_program_needs_a_matrix_of_a_cluster(matrix, capsys):
    assert main([str(matrix.path), "1"]) == 2
    assert "engine.json is missing" in capsys.readouterr().out


def test_the_program_runs_in_a_job_only(share, matrix, capsys, monkeypatch):
    share("a")
    write_engine(matrix, EngineFile(engine="slurm", id="x", path=str(matrix.path)))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main([str(matrix.path), "1"]) == 2
    assert "this is not a job of Slurm" in capsys.readouterr().out


LOSING = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/lib", {root!r} + "/tests/support"]
from pathlib import Path
from kmatrix.records.jobs.files import SubmissionFile
from kmatrix.runner.share.folder import RunningShare
import kmatrix.records.jobs.claim as claim
claim.PULSE_S = 0.05
from share_job import start
job, _ = start(RunningShare(Path(sys.argv[1]), 1, 0, names=("a",)), "stubborn")
sys.exit(job.run())
"""


@pytest.mark.process
def test_a_start_that_lost_its_share_leaves_at_once_and_writes_nothing(share, matrix):
    mine = share("a")
    code = LOSING.format(root=str(ROOT))
    words = [str(PYTHON), "-c", code, str(matrix.path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until((mine.run("a").path / "env.json").exists)
    wait_until(lambda: state_of(mine).status == "running")

    def take() -> bool:  # as the later start does with each pulse, should the earlier one write once more
        write_json(mine.owner, as_json(ShareOwner(job="12", restart=7)))
        return process.poll() is not None

    wait_until(take)
    output, _ = process.communicate()
    assert process.returncode == 0
    assert "leaves at once" in output
    assert (read_share_owner(mine).restart, state_of(mine).status) == (7, "running")
    assert not mine.end.exists()
    wait_until(lambda: not processes_naming(matrix))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_a_job_on_storage_that_takes_no_claim_ends_with_the_reason(share, monkeypatch, capsys, number):
    def refuse(path, *args, **options):
        raise OSError(number, os.strerror(number), str(path))

    made = share("a")
    write_engine(MatrixDir(made.path), EngineFile(engine="slurm", id="k7", path=str(made.path.resolve())))
    monkeypatch.setattr("kmatrix.runner.share.__main__.find_allocation", lambda *_: FakeAllocation())
    monkeypatch.setattr(FakeAllocation, "follow", lambda *_: None, raising=False)
    monkeypatch.setattr("kmatrix.records.jobs.claim.write_json", refuse)
    monkeypatch.setattr("kmatrix.runner.share.job.Signals.listen", lambda _: None)
    assert main([str(made.path), "1"]) == 2
    line = capsys.readouterr().out.splitlines()[-1]
    assert "error: " in line
    assert line.endswith(f"{os.strerror(number)}: {made.owner}")
