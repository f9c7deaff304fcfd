"""Jobs of a matrix on a fake API server: submitted once, equal to job.yaml, and their states as sentences."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from fake_kubernetes import NAMESPACE, FakeKubernetes, Node
from kmatrix.engines.base import UnreachableError
from kmatrix.engines.kubernetes.scheduler import KubernetesScheduler
from kmatrix.engines.schedulers import find_scheduler
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records.jobs.files import KUBERNETES, SchedulerPhase, Shape, ShareEntry, SubmissionFile
from kmatrix.records.jobs.paths import SubmissionDir
from skips import require_program
from waiting import wait_until

pytestmark = pytest.mark.nightly  # the official client over HTTP, and an imitation of the server

LABEL = "km-4f1a2b-0001"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(nodes=(Node("node-a", gpus=4), Node("node-b", gpus=4))) as cluster:
        yield cluster


@pytest.fixture
def cluster(server, monkeypatch) -> FakeKubernetes:
    """Return the fake cluster without objects of an earlier test."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    for key in [key for key in server.objects if key[0] in ("jobs", "pods", "services", "events")]:
        server.objects.pop(key, None)
    server.created.clear()
    server.refuse_pods, server.most_pods, server.down = "", None, False
    server.forbidden.clear()
    return server


@pytest.fixture
def folder(tmp_path) -> SubmissionDir:
    found = SubmissionDir(tmp_path / "test_matrix_results_1" / "jobs" / "0001")
    found.path.mkdir(parents=True)
    return found


def scheduler(tmp_path: Path, **settings: str) -> KubernetesScheduler:
    texts = {"K8S_IMAGE": "registry.test/kmatrix:1", "K8S_CLAIM": "results", "K8S_MOUNT": str(tmp_path)}
    found = find_scheduler(KUBERNETES, {**texts, **settings})
    assert isinstance(found, KubernetesScheduler)
    return found


def submission(shares: int = 3, **shape: int) -> SubmissionFile:
    entries = tuple(ShareEntry(task=task, runs=(f"run{task}",)) for task in range(shares))
    return SubmissionFile(label=LABEL, shape=Shape(**shape), shares=entries)


def job_objects(folder: SubmissionDir) -> list[Mapping]:
    return list(yaml.safe_load_all(folder.manifest.read_text(encoding="utf-8")))


@pytest.mark.parametrize("nodes", [1, 2])
def test_job_yaml_says_exactly_the_submitted_objects(cluster, folder, tmp_path, nodes):
    job = scheduler(tmp_path).submit(folder, submission(nodes=nodes, gpus_per_node=2))

    assert job == LABEL
    sent = [{**one, "apiVersion": one.get("apiVersion"), "kind": one.get("kind")} for one in cluster.created]
    assert sent == job_objects(folder)
    assert folder.manifest.read_text(encoding="utf-8") == next(
        iter(scheduler(tmp_path).render(folder, submission(nodes=nodes, gpus_per_node=2)).values())
    )


def test_kubectl_reads_job_yaml_as_what_was_submitted(cluster, folder, tmp_path):
    require_program("kubectl")
    scheduler(tmp_path).submit(folder, submission(nodes=2))
    stored = cluster.created[:]
    for key in [key for key in cluster.objects if key[0] in ("jobs", "services", "pods")]:
        cluster.objects.pop(key, None)

    options = [
        "apply",
        f"--cache-dir={tmp_path}",
        "--dry-run=client",
        "--validate=false",
        "--namespace",
        NAMESPACE,
        "-o",
        "json",
    ]
    done = subprocess.run(
        ["kubectl", *options, "-f", str(folder.manifest)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["items"]
    for one in found:
        one["metadata"].get("annotations", {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
        one["metadata"].pop("namespace")
        if not one["metadata"].get("annotations"):
            one["metadata"].pop("annotations", None)
    assert found == stored


def test_a_submission_is_submitted_once(cluster, folder, tmp_path):
    first = scheduler(tmp_path).submit(folder, submission(nodes=2))
    again = scheduler(tmp_path).submit(folder, submission(nodes=2))

    assert first == again
    assert len(cluster.jobs()) == 3


def test_a_submitter_that_was_killed_between_two_jobs_creates_the_others(cluster, folder, tmp_path):
    of_two_nodes = submission(nodes=2)
    scheduler(tmp_path).submit(folder, of_two_nodes)
    cluster.objects.pop(("jobs", NAMESPACE, f"{LABEL}-2"))

    assert scheduler(tmp_path).find([LABEL]) == {}
    scheduler(tmp_path).submit(folder, of_two_nodes)
    assert scheduler(tmp_path).find([LABEL]) == {LABEL: LABEL}


def test_a_job_of_somebody_else_with_the_name_is_not_ours(cluster, folder, tmp_path):
    scheduler(tmp_path).submit(folder, submission())
    cluster.objects["jobs", NAMESPACE, LABEL]["metadata"]["labels"] = {}

    with pytest.raises(LaunchError, match="not of this matrix"):
        scheduler(tmp_path).submit(folder, submission())


def test_the_service_is_deleted_after_the_last_job_of_its_submission(cluster, folder, tmp_path):
    of_two_nodes = submission(2, nodes=2)
    jobs = scheduler(tmp_path)
    jobs.submit(folder, of_two_nodes)
    assert len(cluster.objects["services", NAMESPACE, LABEL]["metadata"]["ownerReferences"]) == 2

    jobs.cancel([f"{LABEL}_0"])
    wait_until(lambda: len(cluster.jobs()) == 1, "one Job is left")
    assert ("services", NAMESPACE, LABEL) in cluster.objects
    jobs.cancel([f"{LABEL}_1"])
    wait_until(lambda: not cluster.jobs(), "no Job is left")
    assert ("services", NAMESPACE, LABEL) not in cluster.objects


def set_pod(cluster: FakeKubernetes, index: int, status: Mapping, **metadata: str) -> None:
    """Set the status of the pod of an index."""

    def pod():
        found = [
            one
            for one in cluster.pods(live=False)
            if one["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == str(index)
        ]
        return found[-1] if found else None

    name = wait_until(pod, f"pod {index}")["metadata"]["name"]
    stored = cluster.objects["pods", NAMESPACE, name]
    stored["status"].update(status)
    stored["metadata"].update(metadata)
    stored["spec"]["nodeName"] = f"node-{index}"


def waiting(reason: str, message: str = "") -> dict:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"containerStatuses": [{"name": "kmatrix", "state": state}]}


def condition(kind: str, status: str, reason: str, message: str = "") -> dict:
    return {"conditions": [{"type": kind, "status": status, "reason": reason, "message": message}]}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (condition("PodScheduled", "False", "Unschedulable", "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
         "unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
        (waiting("ImagePullBackOff", "Back-off pulling image"),
         "the image registry.test/kmatrix:1 cannot be pulled: Back-off pulling image"),
        (waiting("ContainerCreating"), "the container is created"),
        (waiting("CreateContainerConfigError", 'secret "tokens" not found'),
         'create container config error: secret "tokens" not found'),
    ],
)  # fmt: skip
def test_a_pending_pod_says_why_it_waits(cluster, folder, tmp_path, status, reason):
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(1))
    set_pod(cluster, 0, status)

    view = jobs.poll({"1.0": LABEL})["1.0"]

    assert (view.phase, view.reason) == (SchedulerPhase.PENDING, reason)


def test_a_quota_is_the_reason_of_a_job_without_pods(cluster, folder, tmp_path):
    cluster.refuse_pods = "exceeded quota: gpus, requested: 4, used: 8, limited: 8"
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(1))

    def reason():
        view = jobs.poll({"1.0": LABEL})["1.0"]
        return view.reason if "quota" in view.reason else ""

    assert wait_until(reason, "the reason") == (
        f'no pod can be created: Error creating: pods "{LABEL}-0-x" is forbidden: {cluster.refuse_pods}'
    )


def test_a_quota_that_lets_some_pods_run_is_the_reason_of_the_others(cluster, folder, tmp_path):
    cluster.most_pods = 1
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(2))
    wait_until(lambda: [key for key in cluster.objects if key[0] == "events"], "the event")
    first, second = (jobs.poll({f"1.{task}": f"{LABEL}_{task}"})[f"1.{task}"] for task in range(2))

    assert first.reason == "waits for a node"
    assert second.reason.startswith("no pod can be created: ")
    assert second.reason.endswith("exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1")


def test_a_pod_that_waits_for_its_turn_has_no_old_quota_as_its_reason(cluster, folder, tmp_path):
    jobs = scheduler(tmp_path, PARALLEL_JOBS="1")
    jobs.submit(folder, submission(2))
    event = {"involvedObject": {"kind": "Job", "name": LABEL}, "reason": "FailedCreate", "message": "exceeded quota"}
    cluster.objects["events", NAMESPACE, "old"] = {"metadata": {"name": "old", "namespace": NAMESPACE}, **event}
    wait_until(cluster.pods, "the first pod")

    assert jobs.poll({"1.1": f"{LABEL}_1"})["1.1"].reason == "no pod yet: waits for its turn"


def test_a_volume_that_cannot_be_mounted_is_the_reason_of_a_container_that_is_not_created(cluster, folder, tmp_path):
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(1))
    set_pod(cluster, 0, waiting("ContainerCreating"))
    (pod,) = cluster.pods()
    for number, text in ((2, "mount.nfs: Connection timed out"), (1, "an older one")):
        about = {"kind": "Pod", "name": pod["metadata"]["name"]}
        event = {"involvedObject": about, "reason": "FailedMount", "message": text}
        at = {"lastTimestamp": f"2026-01-01T00:00:0{number}Z"}
        cluster.objects["events", NAMESPACE, text] = {"metadata": {"name": text}, **event, **at}

    view = jobs.poll({"1.0": LABEL})["1.0"]

    assert view.reason == "a volume cannot be mounted: mount.nfs: Connection timed out"


def test_a_job_that_kueue_has_not_admitted_says_so(cluster, folder, tmp_path):
    jobs = scheduler(tmp_path, K8S_QUEUE="gpus")
    jobs.submit(folder, submission(1))

    view = jobs.poll({"1.0": LABEL})["1.0"]

    assert (view.phase, view.reason) == (SchedulerPhase.PENDING, "waits for Kueue to admit it in the queue gpus")


def test_each_index_of_a_job_is_a_share_with_its_own_state(cluster, folder, tmp_path):
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(4))
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    set_pod(cluster, 0, {"phase": "Succeeded"})
    set_pod(cluster, 1, {"phase": "Running"})
    set_pod(
        cluster,
        2,
        {"phase": "Failed", "containerStatuses": [{"name": "kmatrix", "state": {"terminated": {"exitCode": 1}}}]},
    )
    wait_until(lambda: cluster.jobs()[0]["status"].get("failedIndexes") == "2", "the failed index")
    set_pod(cluster, 3, {"phase": "Pending", "containerStatuses": [{"name": "kmatrix", "state": killed}]})

    views = jobs.poll({f"1.{task}": f"{LABEL}_{task}" for task in range(4)})

    assert [view.phase for view in views.values()] == ["ended", "running", "ended", "pending"]
    assert [view.state for view in views.values()] == ["Complete", "Running", "Failed", "Pending"]
    assert views["1.1"].nodes == ("node-1",)
    assert views["1.3"].reason.startswith("out of memory: its node killed it")


def test_a_run_over_several_nodes_names_the_pod_that_waits(cluster, folder, tmp_path):
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(1, nodes=2))
    set_pod(cluster, 0, {"phase": "Running"})
    set_pod(cluster, 1, condition("PodScheduled", "False", "Unschedulable", "0/2 nodes are available"))

    view = jobs.poll({"1.0": LABEL})["1.0"]

    assert view.phase is SchedulerPhase.RUNNING
    assert view.reason == "pod 1 of 2: unschedulable: 0/2 nodes are available"


def test_an_evicted_pod_says_who_evicted_it(cluster, folder, tmp_path):
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(1))
    set_pod(cluster, 0, {"phase": "Running", **condition("DisruptionTarget", "True", "PreemptionByScheduler")})

    assert jobs.poll({"1.0": LABEL})["1.0"].reason == "preempted by a pod of higher priority"


def test_a_job_that_was_deleted_is_unknown(cluster, folder, tmp_path):
    view = scheduler(tmp_path).poll({"1.0": LABEL})["1.0"]

    assert view.phase is SchedulerPhase.UNKNOWN


def test_all_jobs_are_asked_for_at_once_and_page_by_page(cluster, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("kmatrix.engines.kubernetes.api.PAGE", 2)
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(5))
    wait_until(lambda: len(cluster.pods()) == 5, "five pods")
    cluster.requests.clear()

    views = jobs.poll({f"1.{task}": f"{LABEL}_{task}" for task in range(5)})

    assert len(views) == 5
    assert len([one for one in cluster.requests if "/jobs?" in one]) == 1
    assert len([one for one in cluster.requests if "/pods?" in one]) == 3


def test_a_server_that_does_not_answer_is_unreachable(cluster, folder, tmp_path):
    jobs = scheduler(tmp_path)
    cluster.down = True

    with pytest.raises(UnreachableError, match="Kubernetes does not answer"):
        jobs.poll({"1.0": LABEL})


def test_the_capacity_is_that_of_the_largest_node(cluster, tmp_path):
    there = scheduler(tmp_path).capacity()

    assert there.partitions[0].nodes == 2
    assert there.partitions[0].gpus_per_node == 4
    assert there.partitions[0].node_memory_mib == 65536
    assert there.kill_s == 90


def test_a_user_who_may_not_list_nodes_has_an_unknown_capacity(cluster, tmp_path):
    cluster.forbidden.add("nodes")

    assert scheduler(tmp_path).capacity().partitions == ()


def test_nodes_that_are_added_on_demand_limit_nothing(cluster, tmp_path):
    too_large = submission(gpus_per_node=9)
    (refused,) = scheduler(tmp_path).check([too_large])

    assert "set K8S_AUTOSCALE=y if nodes are added on demand" in refused
    assert scheduler(tmp_path, K8S_AUTOSCALE="y").check([too_large]) == []
    assert scheduler(tmp_path, K8S_AUTOSCALE="y").capacity().partitions == ()


@pytest.mark.parametrize(
    ("shape", "settings", "problem"),
    [
        ({"gpus_per_node": 9}, {}, "9 GPUs per node: the cluster has 4 at most"),
        ({"nodes": 3}, {}, "3 nodes: the cluster has 2 at most"),
        ({}, {"K8S_CLAIM": "other"}, "no PersistentVolumeClaim other in the namespace ml"),
        ({}, {"K8S_CLAIM": "alone"}, "the claim alone has ReadWriteOnce: 3 pods on several nodes need ReadWriteMany"),
        ({}, {"K8S_MEMORY": "900Gi"}, "921600 MiB of memory per node: the cluster has 65536 at most"),
    ],
)
def test_jobs_that_can_never_start_are_refused_with_the_fix(cluster, tmp_path, shape, settings, problem):
    cluster.add_claim("alone", "ReadWriteOnce")

    found = scheduler(tmp_path, **settings).check([submission(**shape)])

    assert len(found) == 1
    assert found[0].startswith(problem)


def test_the_server_is_asked_about_jobs_that_fit_without_creating_them(cluster, tmp_path):
    assert scheduler(tmp_path).check([submission(nodes=2, gpus_per_node=4)]) == []
    assert not cluster.created


def test_a_job_that_the_server_refuses_is_named_with_its_reason(cluster, tmp_path):
    cluster.forbidden.add("jobs")

    (found,) = scheduler(tmp_path).check([submission()])

    assert found.startswith(f"Kubernetes refuses Job {LABEL}: jobs is forbidden")


def test_results_outside_the_claim_are_refused(cluster, folder, tmp_path):
    elsewhere = scheduler(tmp_path, K8S_MOUNT="/mnt/claim")

    assert "is not below K8S_MOUNT=/mnt/claim" in elsewhere.check_paths([tmp_path])[0]
    with pytest.raises(LaunchError, match="not below K8S_MOUNT"):
        elsewhere.render(folder, submission())


@pytest.mark.parametrize(
    ("entry", "is_key"),
    [
        ("{name: WANDB_API_KEY, value: 0123456789abcdef0123456789abcdef01234567}", True),
        ("{name: PROXY, value: 'http://me:passw0rd@proxy.example.org:3128'}", True),
        ("{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: tracker-keys, key: HF_TOKEN}}}", False),
        ("{name: NCCL_DEBUG, value: INFO}", False),
    ],
)
def test_a_key_in_a_patch_is_refused_before_anything_has_it(cluster, folder, tmp_path, entry, is_key):
    """The manifest is stored with the results."""
    patch = tmp_path / "patch.yaml"
    patch.write_text(f"kind: Job\nspec: {{template: {{spec: {{containers: [{{name: kmatrix, env: [{entry}]}}]}}}}}}\n")
    found = scheduler(tmp_path, K8S_PATCH=str(patch))
    if is_key:
        for call in (lambda: found.render(folder, submission()), lambda: found.check([submission()])):
            with pytest.raises(ConfigError, match=r"contains a key|has its value here") as caught:
                call()
            assert "passw0rd" not in str(caught.value)
        assert not cluster.created
    else:
        assert "NCCL_DEBUG" in entry or "secretKeyRef" in found.render(folder, submission())["job.yaml"]


def test_without_a_cluster_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))

    with pytest.raises(LaunchError, match="kubectl config get-contexts") as raised:
        scheduler(tmp_path).poll({"1.0": LABEL})
    assert "no cluster is configured" in str(raised.value)


def test_a_part_of_a_job_cannot_be_cancelled_unless_the_rest_has_ended(cluster, folder, tmp_path):
    kubernetes = scheduler(tmp_path)
    job = kubernetes.submit(folder, submission(shares=3))

    with pytest.raises(LaunchError, match=rf"{job}_0, {job}_2 have not ended") as refused:
        kubernetes.cancel([f"{job}_1"])

    assert "hold RUN=" in refused.value.hint
    assert len(cluster.jobs()) == 1
    cluster.end_indexes(job, done={0}, failed={2})
    wait_until(lambda: cluster.jobs()[0].get("status", {}).get("failedIndexes") == "2", "the ends are known")
    kubernetes.cancel([f"{job}_1"])
    wait_until(lambda: not cluster.jobs(), "the Job is gone")


@pytest.mark.parametrize("now", [False, True])
def test_jobs_that_are_killed_lose_their_pods_at_once(cluster, folder, tmp_path, now):
    kubernetes = scheduler(tmp_path)
    kubernetes.submit(folder, submission(shares=2, nodes=2))
    cluster.requests.clear()

    kubernetes.cancel([f"{LABEL}_0", f"{LABEL}_1"], now=now)

    killed = [one for one in cluster.requests if one.startswith("DELETE") and "/pods?" in one]
    assert len(killed) == (2 if now else 0)
    assert all("gracePeriodSeconds=0" in one for one in killed)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "clusters: 3", '{"current-context": "x"}', None])
def test_a_kubeconfig_that_is_none_is_named(tmp_path, monkeypatch, text):
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(LaunchError, match="no cluster is configured") as raised:
        scheduler(tmp_path).find(["a"])
    assert raised.value.why.startswith(f"{file}: ")


def test_no_connection_has_one_short_line(tmp_path, monkeypatch):
    with FakeKubernetes() as gone:
        config = gone.kubeconfig.read_text(encoding="utf-8")
    file = tmp_path / "config"
    file.write_text(config, encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(UnreachableError) as raised:
        scheduler(tmp_path).find(["a"])
    assert raised.value.why.startswith("http://127.0.0.1:")
    assert raised.value.why.endswith("Connection refused")
    assert "object at" not in raised.value.why
    assert len(raised.value.why) < 120


def test_a_job_that_is_deleted_runs_until_its_pods_have_ended(cluster, folder, tmp_path):
    jobs = scheduler(tmp_path)
    jobs.submit(folder, submission(1))
    set_pod(cluster, 0, {"phase": "Running"})
    key = ("jobs", NAMESPACE, LABEL)
    cluster.objects[key]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stored = jobs.poll({"1.0": LABEL})["1.0"]
    assert (stored.phase, stored.state) == (SchedulerPhase.RUNNING, "Deleted")
    cluster.objects.pop(key, None)  # as `kubectl delete`, which does not wait for the pods

    gone = jobs.poll({"1.0": LABEL})["1.0"]
    assert (gone.phase, gone.reason) == (SchedulerPhase.RUNNING, "its Job was deleted")
