"""How pods and Jobs end, as the API lists them: the state of each share, and why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kmatrix.engines.kubernetes.views import gone_view, lacks_pods, newest, pod_view, share_view
from kmatrix.records.jobs.files import JobView, SchedulerPhase

JOB = "km-4f1a2b-1"
OOM = {"exitCode": 137, "reason": "OOMKilled"}
KILLED = {"exitCode": 137, "reason": "Error"}
TAINT = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}


def pod(number: int, phase: str, *, index: int = 0, ended: dict | None = None, leaving: bool = False, **status) -> dict:
    """Return a pod. number: of its creation."""
    state = {"terminated": ended} if ended else {"running": {}}
    metadata = {"name": f"{JOB}-{index}-{number}", "creationTimestamp": f"2026-01-01T00:00:{number:02}Z"}
    metadata["labels"] = {"kmatrix/job": JOB, "batch.kubernetes.io/job-completion-index": str(index)}
    return {
        "metadata": {**metadata, **({"deletionTimestamp": "2026-01-01T00:01:00Z"} if leaving else {})},
        "spec": {"nodeName": "node-a"},
        "status": {"phase": phase, "containerStatuses": [{"name": "kmatrix", "state": state}], **status},
    }


def job(*conditions: dict, completions: int = 2, **status) -> dict:
    metadata = {"name": JOB, "labels": {"kmatrix/submission": JOB}}
    spec = {"completions": completions, "parallelism": completions}
    return {"kind": "Job", "metadata": metadata, "spec": spec, "status": {"conditions": list(conditions), **status}}


def condition(kind: str, reason: str) -> dict:
    return {"type": kind, "status": "True", "reason": reason}


def view(stored: dict, pods: Sequence[dict], task: int | None = 0, failures: str = "") -> JobView:
    known = newest(found for one in pods if (found := pod_view(one)))
    return share_view(JOB, stored, task, known, failures)


@pytest.mark.parametrize("order", [1, -1])
def test_a_share_knows_how_the_pod_before_was_killed(order):
    pods = [pod(1, "Failed", ended=KILLED), pod(2, "Failed", ended=OOM), pod(3, "Running")][::order]

    found = view(job(), pods)

    assert (found.phase, found.reason) == (SchedulerPhase.RUNNING, "")
    assert found.before == "out of memory: its node killed it above the memory limit (K8S_MEMORY)"


def test_a_share_that_failed_after_a_kill_tells_of_it():
    pods = [pod(1, "Failed", ended=OOM), pod(2, "Failed", ended={"exitCode": 1, "reason": "Error"})]

    found = view(job(condition("Failed", "FailedIndexes"), failedIndexes="0"), pods)

    assert (found.phase, found.reason) == (SchedulerPhase.ENDED, f"exit code 1: kubectl logs {JOB}-0-2")
    assert found.before.startswith("out of memory")


def test_a_pod_that_was_killed_by_hand_is_not_out_of_memory():
    found = view(job(), [pod(1, "Failed", ended=KILLED)])

    assert found.reason == "killed (SIGKILL), by somebody or by its node; a new pod follows"


def test_a_container_that_does_not_start_comes_with_its_message_and_its_output():
    ended = {"exitCode": 128, "reason": "StartError", "message": 'exec: "python": not found'}
    one = pod(1, "Failed", ended=ended)
    one["metadata"]["namespace"] = "ml"

    found = view(job(failedIndexes="0"), [one])

    assert found.reason == f'exit code 128 (exec: "python": not found): kubectl logs --namespace ml {JOB}-0-1'


def test_a_first_pod_has_none_before():
    assert not view(job(), [pod(1, "Running")]).before


@pytest.mark.parametrize("kind", ["FailureTarget", "Failed"])  # FailureTarget: since 1.31
def test_a_job_that_has_failed_runs_until_its_pods_have_saved(kind):
    over = job(condition(kind, "DeadlineExceeded"))

    found = view(over, [pod(1, "Running", leaving=True)])
    after = view(over, [pod(1, "Failed", ended={"exitCode": 143})])

    assert (found.phase, found.reason) == (SchedulerPhase.RUNNING, "its deadline is over")
    assert (after.phase, after.reason) == (SchedulerPhase.ENDED, "its deadline is over")


def test_an_index_that_has_completed_is_complete_in_a_job_that_fails():
    found = view(job(condition("Failed", "DeadlineExceeded"), completedIndexes="0"), [pod(1, "Running")])

    assert (found.phase, found.state, found.reason) == (SchedulerPhase.ENDED, "Complete", "")


def test_a_pod_on_a_lost_node_says_which_node_and_what_it_waits_for():
    found = view(job(), [pod(1, "Running", leaving=True, conditions=[TAINT])])

    assert found.phase is SchedulerPhase.RUNNING
    assert found.reason.startswith("its pod on node-a is being deleted: its node does not answer, or is being emptied")
    assert "was removed from the cluster" in found.reason


def test_a_pod_that_its_node_does_not_tell_of_may_run():
    found = view(job(), [pod(1, "Unknown")])

    assert (found.phase, found.reason) == (SchedulerPhase.RUNNING, "its node does not answer")


@pytest.mark.parametrize(
    ("stored", "living", "lacks"),
    [
        (job(), 1, True),
        (job(), 2, False),
        (job(completedIndexes="0"), 1, False),
        (job(condition("FailureTarget", "DeadlineExceeded")), 0, False),
        ({**job(), "spec": {"completions": 9, "parallelism": 3}}, 3, False),
        ({**job(), "spec": {"completions": 9, "parallelism": 3, "suspend": True}}, 0, False),
    ],
)
def test_a_job_lacks_pods_if_it_has_fewer_than_it_may_have(stored, living, lacks):
    assert lacks_pods(stored, living) is lacks


def test_a_share_without_its_job_runs_as_long_as_a_pod_may():
    alive = [found for one in [pod(1, "Running", leaving=True)] if (found := pod_view(one))]

    assert gone_view(JOB, alive, has_ttl=True).phase is SchedulerPhase.RUNNING
    assert gone_view(JOB, [], has_ttl=True).phase is SchedulerPhase.UNKNOWN


def test_only_a_time_limit_of_ended_jobs_may_have_deleted_one_that_nobody_has():
    assert gone_view(JOB, [], has_ttl=False).reason == "its Job was deleted"
    assert gone_view(JOB, [], has_ttl=True).reason == "its Job was deleted, or had ended and K8S_TTL is over"
