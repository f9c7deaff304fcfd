"""Pods of a run over several nodes: who waits for whom, who has a lost attempt, and why a pod is ended."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from cluster_factory import make_engine, make_submission
from kmatrix.engines.kubernetes import allocation as pods
from kmatrix.engines.kubernetes import follow as following
from kmatrix.engines.kubernetes.allocation import PodJob, Pods, this_job
from kmatrix.engines.kubernetes.follow import Follower
from kmatrix.engines.kubernetes.gather import Gathering
from kmatrix.engines.kubernetes.orders import AGAIN, Orders, Ready, read_orders, read_ready, write_orders, write_ready
from kmatrix.errors import LaunchError
from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import (
    CANCELLED,
    CANCELLING,
    SUBMITTED,
    JobLine,
    NodeEnd,
    NodeFile,
    ShareEnd,
    ShareOwner,
    append_job_line,
)
from kmatrix.records.jobs.paths import JobsDir, NodeDir, ShareDir
from kmatrix.records.paths import RunDir
from kmatrix.status.state import PREEMPTED, RunPlan
from records_factory import FakeRun, make_matrix

JOB = "km-1-0"
WIDE = FakeRun(status="stopped", stop_at=40)


@pytest.fixture
def matrix(tmp_path):
    made = make_matrix(tmp_path, [WIDE], took=None)
    make_engine(made)
    make_submission(made, [[WIDE.name]], job=JOB)
    return made


@pytest.fixture
def share(matrix) -> ShareDir:
    return JobsDir(matrix).submission(1).share(0)


@pytest.fixture
def run(matrix) -> RunDir:
    return RunDir(matrix.run(WIDE.name).path)


@pytest.fixture
def lines() -> list[str]:
    return []


class Clock:
    """A clock that moves when somebody sleeps, and does at each sleep what a test has planned."""

    def __init__(self, *steps) -> None:
        self.now, self.steps = 0.0, list(steps)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.steps, "it waits longer than the test has planned"
        self.steps.pop(0)()


def gathering(share, run, lines, clock, nodes=3) -> Gathering:
    return Gathering(share, run, JOB, nodes, lines.append, now=clock, sleep=clock.sleep)


def ready(run, index, counter, job=JOB):
    return lambda: write_ready(run, index, Ready(job=job, pod="a", counter=counter))


def orders(**values) -> Orders:
    return Orders(job=JOB, address="head", port=1, nodes=2, ranks=2, **values)


def node_file(run, attempt, *, node=1, counter=1) -> None:
    folder = NodeDir(run, node)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder.node_json, as_json(NodeFile(node=node, host=f"{JOB}-{node}", attempt=attempt, counter=counter)))


def node_end(run, attempt, *, node=1) -> None:
    write_json(NodeDir(run, node).end, as_json(NodeEnd(node=node, attempt=attempt, exit_code=1)))


def test_pod_0_waits_until_each_other_pod_is_ready(share, run, lines):
    ready(run, 1, 7)()  # of a pod that may be gone
    clock = Clock(ready(run, 2, 1), lambda: None, ready(run, 1, 8))

    assert gathering(share, run, lines, clock).wait() is None

    assert lines == ["waits for pods 1 and 2 of 3", "waits for pod 1 of 3"]
    assert clock.steps == []


def test_the_note_of_another_job_is_none(share, run, lines):
    clock = Clock(ready(run, 1, 1, job="km-2-0"), ready(run, 1, 1))

    assert gathering(share, run, lines, clock, nodes=2).wait() is None
    assert clock.steps == []


@pytest.mark.process
def test_a_pod_0_that_is_ended_while_it_waits_is_replaced(share, run, lines):
    former = signal.getsignal(signal.SIGTERM)
    waiting = gathering(share, run, lines, Clock(lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: None))
    try:
        waiting.listen()
        assert waiting.wait() == AGAIN
    finally:
        for number in following.STOP:
            signal.signal(number, former if number == signal.SIGTERM else signal.default_int_handler)


def test_pod_0_does_not_wait_for_a_run_that_a_later_submission_has(matrix, share, run, lines):
    make_submission(matrix, [[WIDE.name]], number=2, job="km-2-0")

    assert gathering(share, run, lines, Clock()).wait() is None


def test_pod_0_does_not_wait_for_a_run_that_has_finished(tmp_path, lines):
    done = FakeRun()
    matrix = make_matrix(tmp_path, [done], took=None)
    make_submission(matrix, [[done.name]], job=JOB)

    share, run = JobsDir(matrix).submission(1).share(0), RunDir(matrix.run(done.name).path)

    assert gathering(share, run, lines, Clock()).wait() is None


def test_a_new_pod_0_ends_the_attempt_of_the_former_one(share, run, lines):
    NodeDir(run, 1).path.mkdir(parents=True)
    write_orders(run, orders(attempt=2))

    gathering(share, run, lines, Clock(ready(run, 1, 1)), nodes=2).wait()

    assert read_orders(run).over


def test_a_waiting_pod_announces_itself_again_and_again(share, run, lines, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(following.time, "monotonic", lambda: now[0])
    follower = Follower(share, run, JOB, 1, lines.append)

    follower._announce()
    first = read_ready(run, 1)
    follower._announce()
    assert read_ready(run, 1) == first
    now[0] += 60
    follower._announce()

    assert read_ready(run, 1) == Ready(job=JOB, pod=first.pod, counter=first.counter + 1)


def test_a_replacement_does_not_join_the_attempt_of_the_pod_that_it_replaces(share, run, lines):
    node_file(run, 2)
    follower = Follower(share, run, JOB, 1, lines.append)

    assert not follower._is_new(orders(attempt=2))
    assert follower._is_new(orders(restart=1, attempt=3))


def test_a_pod_obeys_no_orders_twice_and_none_that_are_over_or_of_another_job(share, run, lines):
    follower = Follower(share, run, JOB, 1, lines.append, _handled=(0, 2))
    node_file(run, 2)

    assert not follower._is_new(orders(attempt=2))
    assert not follower._is_new(orders(attempt=3, over=True))
    assert not follower._is_new(Orders(job="km-2-0", attempt=3))
    assert follower._is_new(orders(restart=1, attempt=2))
    node_end(run, 3, node=1)
    (NodeDir(run, 0).path).mkdir(parents=True)
    node_end(run, 3, node=0)
    assert not follower._is_new(orders(attempt=3))


def test_a_pod_obeys_no_orders_of_an_earlier_pod_0(share, run, lines):
    follower = Follower(share, run, JOB, 1, lines.append)
    share.folder.mkdir(parents=True, exist_ok=True)
    write_json(share.owner, as_json(ShareOwner(job=JOB, restart=1)))
    assert not follower._is_new(orders(attempt=2))
    assert follower._is_new(orders(restart=1, attempt=2))


@pytest.mark.parametrize(
    ("end", "is_over"),
    [
        (ShareEnd(job=JOB, status="finished"), True),
        (ShareEnd(job=JOB, status="stopped", requeued=True), False),
        (ShareEnd(job="km-2-0", status="finished"), False),
    ],
)
def test_a_pod_leaves_when_the_share_has_ended(share, run, lines, end, is_over):
    share.folder.mkdir(parents=True, exist_ok=True)
    write_json(share.owner, as_json(ShareOwner(job=JOB)))
    write_json(share.end, as_json(end))
    follower = Follower(share, run, JOB, 1, lines.append, _shares_at=time.monotonic() + 60)

    assert bool(follower._over()) is is_over


def test_storage_that_does_not_answer_now_ends_no_pod(share, run, lines, monkeypatch):
    def stale(_) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(share.path))

    monkeypatch.setattr(following, "newest_shares", stale)

    assert not Follower(share, run, JOB, 1, lines.append)._over()


def plan(run) -> RunPlan:
    return RunPlan(name=run.name, run_id="", dir=run, ranks=3, nodes=3, cuda=False, attempt=2)


def test_a_pod_whose_files_stand_still_is_lost_and_its_replacement_does_not_hide_that(run, monkeypatch):
    monkeypatch.setattr(pods, "SILENT_S", 0.05)
    monkeypatch.setattr(pods, "LOOK_S", 0.01)
    node_file(run, 2, node=1)
    ready(run, 1, 1)()
    node_file(run, 2, node=2)
    node_end(run, 2, node=2)
    looks = iter(range(2, 1000))
    monkeypatch.setattr(pods.time, "sleep", lambda _: ready(run, 1, next(looks))())

    assert Pods(Path("python"), JOB, 0, f"{JOB}-0.km-1").lost(plan(run)) == [f"{JOB}-1"]


def test_a_pod_that_never_came_is_lost_and_one_that_waits_is_not(run, monkeypatch):
    monkeypatch.setattr(pods, "SILENT_S", 0.05)
    monkeypatch.setattr(pods, "LOOK_S", 0.01)
    node_file(run, 1, node=1)  # of an earlier attempt
    looks = iter(range(2, 1000))
    monkeypatch.setattr(pods.time, "sleep", lambda _: ready(run, 1, next(looks))())

    assert Pods(Path("python"), JOB, 0, f"{JOB}-0.km-1").lost(plan(run)) == [f"{JOB}-2"]


def test_a_pod_0_ends_the_attempt_that_it_has_ordered_and_no_later_one(run):
    NodeDir(run, 1).path.mkdir(parents=True)
    former = Pods(Path("python"), JOB, 0, f"{JOB}-0.km-1")
    write_orders(run, orders(restart=1, attempt=2))
    former.kill(plan(run))
    assert not read_orders(run).over
    write_orders(run, orders(restart=0, attempt=2))
    former.kill(plan(run))
    assert read_orders(run).over


def environment(matrix, **values: str) -> dict[str, str]:
    folder = JobsDir(matrix).submission(1).path
    head = {"KMATRIX_HEAD": "km-1-0-0.km-1", "KMATRIX_NODES": "2", "KMATRIX_TASK": "0", "JOB_COMPLETION_INDEX": "1"}
    return {"KMATRIX_JOB": "km-1", "KMATRIX_FOLDER": str(folder), "KMATRIX_KILL_S": "90", **head, **values}


def test_a_pod_knows_its_place_in_the_job_from_its_variables(matrix, share):
    found = this_job(environment(matrix), {"STAGE_DIR": "/scratch"})

    assert (found.index, found.restart, found.kill_s, found.stage_dir) == (1, 0, 90.0, "/scratch")
    assert found.hosts == ("km-1-0-0", "km-1-0-1")
    assert found.replaces_nodes
    share.folder.mkdir(parents=True, exist_ok=True)
    write_json(share.owner, as_json(ShareOwner(job="km-1", restart=4)))
    assert this_job(environment(matrix), {}).restart == 5


def test_an_index_of_a_job_of_several_shares_is_a_job_by_itself(matrix):
    found = this_job(environment(matrix, KMATRIX_SHARES="3", KMATRIX_HEAD="", KMATRIX_TASK=""), {})

    assert (found.job, found.index) == ("km-1_1", 0)


def test_outside_of_a_pod_there_is_no_job():
    with pytest.raises(LaunchError, match="not a pod of kmatrix"):
        this_job({}, {})


def pod(matrix, head="km-1-0-0.km-1") -> PodJob:
    return PodJob(job=JOB, restart=0, hosts=("a",), folder=JobsDir(matrix).submission(1), index=0, head=head)


def note(matrix, event) -> None:
    append_job_line(JobsDir(matrix), JobLine(event=event, submission=1, time=1.0, job="km-1"))


@pytest.mark.parametrize("event", [CANCELLING, CANCELLED])
def test_a_pod_whose_user_has_cancelled_the_job_was_asked_to_stop(matrix, event):
    note(matrix, event)
    cause = pod(matrix).cause(noticed=False)

    assert (cause.kind, cause.reason, cause.again) == ("signal", f"asked to stop: job {JOB} was cancelled", False)


def test_any_other_pod_that_is_ended_was_preempted_and_starts_again(matrix):
    note(matrix, CANCELLING)
    note(matrix, SUBMITTED)  # the job could not be cancelled
    cause = pod(matrix).cause(noticed=False)

    assert (cause.kind, cause.again) == (PREEMPTED, True)


class LeftError(Exception):
    """The process would have ended, or become another program."""


@pytest.fixture
def left(monkeypatch) -> list[object]:
    found: list[object] = []

    def leave(*arguments) -> None:
        found.extend(arguments)
        raise LeftError

    monkeypatch.setattr(pods.os, "_exit", leave)
    monkeypatch.setattr(pods.os, "execv", leave)
    return found


def test_pod_0_keeps_its_place_if_another_pod_is_lost(matrix, left):
    with pytest.raises(LeftError):
        pod(matrix).requeue()

    assert left[0] != AGAIN
    assert left[0] == left[1][0]  # the same program, with its arguments


def test_a_pod_that_is_ended_is_replaced_by_kubernetes(matrix, left):
    job = pod(matrix)
    job.cause(noticed=False)
    with pytest.raises(LeftError):
        job.requeue()

    assert left == [AGAIN]
