"""An API server that refuses, puts off, answers half or not at all: what each means, and that nothing is made twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fake_kubernetes import NAMESPACE, FakeKubernetes, Fault
from kmatrix.engines.base import UnreachableError
from kmatrix.engines.kubernetes.scheduler import KubernetesScheduler
from kmatrix.engines.schedulers import find_scheduler
from kmatrix.errors import LaunchError
from kmatrix.records.jobs.files import KUBERNETES, Shape, ShareEntry, SubmissionFile
from kmatrix.records.jobs.paths import SubmissionDir
from waiting import wait_until

LABEL = "km-4f1a2b-0001"
CONFLICT = Fault(
    code=409,
    reason="Conflict",
    message='Operation cannot be fulfilled on resourcequotas "team": the object has been modified',
)

pytestmark = pytest.mark.nightly  # the same


@pytest.fixture
def cluster(monkeypatch) -> Iterator[FakeKubernetes]:
    monkeypatch.setattr("kmatrix.engines.kubernetes.api.WAITS_S", (0.0, 0.0))
    with FakeKubernetes() as found:
        monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig))
        yield found


@pytest.fixture
def folder(tmp_path) -> SubmissionDir:
    found = SubmissionDir(tmp_path / "test_matrix_results_1" / "jobs" / "0001")
    found.path.mkdir(parents=True)
    return found


@pytest.fixture
def jobs(cluster, tmp_path) -> KubernetesScheduler:
    texts = {"K8S_IMAGE": "registry.test/kmatrix:1", "K8S_CLAIM": "results", "K8S_MOUNT": str(tmp_path)}
    found = find_scheduler(KUBERNETES, texts)
    assert isinstance(found, KubernetesScheduler)
    return found


def two_runs() -> SubmissionFile:
    """Return a submission of two runs over two nodes: a Service and two Jobs."""
    shares = tuple(ShareEntry(task=task, runs=(f"run{task}",)) for task in range(2))
    return SubmissionFile(label=LABEL, shape=Shape(nodes=2), shares=shares)


def first(times: int, method: str, part: str, fault: Fault) -> Callable[[str, str], Fault | None]:
    """Return what fails the first requests of a method whose path has a part."""
    left = [fault] * times

    def find(asked: str, path: str) -> Fault | None:
        return left.pop() if left and asked == method and part in path else None

    return find


def names(cluster: FakeKubernetes) -> list[str]:
    return [f"{one['kind']} {one['metadata']['name']}" for one in cluster.created]


ALL = [f"Service {LABEL}", f"Job {LABEL}-0", f"Job {LABEL}-1"]


@pytest.mark.parametrize("part", ["services", "jobs"])
@pytest.mark.parametrize("fault", [CONFLICT, Fault(code=429, headers={"Retry-After": "0"})])
def test_a_request_that_is_put_off_is_repeated(cluster, jobs, folder, part, fault):
    cluster.fault = first(2, "POST", part, fault)

    assert jobs.submit(folder, two_runs()) == LABEL
    assert names(cluster) == ALL


def test_a_service_that_a_quota_never_takes_does_not_count_as_created(cluster, jobs, folder):
    cluster.fault = first(9, "POST", "services", CONFLICT)

    with pytest.raises(UnreachableError, match="the object has been modified"):
        jobs.submit(folder, two_runs())
    assert not cluster.created


def test_a_server_that_asks_to_wait_for_hours_is_not_waited_for(cluster, jobs, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("kmatrix.engines.kubernetes.api.time.sleep", slept.append)
    cluster.fault = first(9, "GET", "jobs", Fault(code=429, message="slow down", headers={"Retry-After": "7200"}))

    with pytest.raises(UnreachableError, match="status 429: slow down"):
        jobs.find([LABEL])
    assert [seconds for seconds in slept if seconds] == [10.0, 10.0]  # 0: of the fake server


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault(cut=True), "Connection broken"),
        (Fault(lost=True), "closed connection"),
        (Fault(body="<html>log in</html>"), "not JSON"),
        (Fault(body='["a", "list"]'), "not JSON"),
        (Fault(code=500, message="etcdserver: leader changed"), "leader changed"),
    ],
)
@pytest.mark.parametrize("ask", ["find", "poll"])
def test_an_answer_that_is_none_leaves_everything_unknown(cluster, jobs, fault, why, ask):
    cluster.fault = first(9, "GET", "jobs", fault)

    with pytest.raises(UnreachableError, match="Kubernetes does not answer") as raised:
        jobs.find([LABEL]) if ask == "find" else jobs.poll({"1.0": LABEL})
    assert why in raised.value.why


def test_a_list_whose_next_page_is_gone_leaves_everything_unknown(cluster, jobs, folder, monkeypatch):
    monkeypatch.setattr("kmatrix.engines.kubernetes.api.PAGE", 1)
    jobs.submit(folder, two_runs())
    cluster.fault = first(9, "GET", "continue=", Fault(code=410, reason="Expired", message="the parameter is too old"))

    with pytest.raises(UnreachableError, match="the parameter is too old"):
        jobs.poll({"1.0": f"{LABEL}_0", "1.1": f"{LABEL}_1"})


@pytest.mark.parametrize("fault", [Fault(cut=True), Fault(lost=True, done=True), Fault(body="<html>", done=True)])
def test_a_job_whose_creation_had_no_whole_answer_is_in_doubt_and_not_made_twice(cluster, jobs, folder, fault):
    cluster.fault = first(1, "POST", f"namespaces/{NAMESPACE}/jobs", fault)

    with pytest.raises(UnreachableError):
        jobs.submit(folder, two_runs())
    jobs.submit(folder, two_runs())
    assert names(cluster) == ALL
    assert jobs.find([LABEL]) == {LABEL: LABEL}


def test_a_submission_that_is_refused_in_the_middle_leaves_nothing(cluster, jobs, folder):
    quota = 'jobs.batch "x" is forbidden: exceeded quota: team, requested: count/jobs.batch=1, used: 9, limited: 9'

    def second_job(method: str, path: str) -> Fault | None:
        is_second = method == "POST" and "/jobs" in path and any(one["kind"] == "Job" for one in cluster.created)
        return Fault(code=403, reason="Forbidden", message=quota) if is_second else None

    cluster.fault = second_job
    with pytest.raises(LaunchError, match="Kubernetes refuses Job") as raised:
        jobs.submit(folder, two_runs())

    assert raised.value.why == quota
    assert raised.value.hint == "`kubectl describe quota` shows what is left"
    kinds = ("jobs", "services", "pods")
    wait_until(lambda: not [key for key in cluster.objects if key[0] in kinds], "nothing is left")


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        (401, "Unauthorized", "log in to the cluster again; `kubectl auth whoami` tries it"),
        (403, 'User "me" cannot list resource "jobs"', "see docs/kubernetes.md, Permissions"),
        (403, "maximum memory usage per Pod is 1Gi, but limit is 2Gi", ""),
    ],
)
def test_a_refusal_has_the_words_of_the_server_and_the_next_step(cluster, jobs, code, message, hint):
    cluster.fault = first(9, "GET", "jobs", Fault(code=code, message=message))

    with pytest.raises(LaunchError) as raised:
        jobs.find([LABEL])
    assert (raised.value.what, raised.value.why, raised.value.hint) == ("Kubernetes refuses Jobs", message, hint)
    assert not isinstance(raised.value, UnreachableError)


def test_a_slow_answer_ends_after_the_time_limit(cluster, jobs, monkeypatch):
    limits = {"_preload_content": False, "_request_timeout": (1.0, 0.2)}
    monkeypatch.setattr("kmatrix.engines.kubernetes.api.RAW", limits)
    cluster.fault = lambda method, path: Fault(delay_s=2.0)

    with pytest.raises(UnreachableError, match="timed out"):
        jobs.find([LABEL])
    assert len(cluster.requests) == 2
