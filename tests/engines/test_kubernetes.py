"""Kubernetes: manifests that users read and every API server takes, answers of kubectl, and what a patch may change."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from callable_kubectl import FakeKubectl
from kmatrix.engines import jobs
from kmatrix.engines.kubernetes import Kubernetes, read_settings
from kmatrix.engines.ports import Batch, Phase, Shape, UnreachableError, label_of
from kmatrix.errors import ConfigError, LaunchError
from skips import require_program

SYMBOLS = {"K8S_IMAGE": "registry.example.org/kmatrix:1.0", "K8S_CLAIM": "results", "K8S_MOUNT": "/mnt/results"}
FOLDER = Path("/mnt/results/test_matrix/jobs/0003")
ONE = Batch(folder=FOLDER, label="km-0a1b2c3d", shape=Shape(gpus=1, cpus=8, memory_mib=65536), runs=("a", "b", "c"))
TWO = replace(ONE, folder=Path("/mnt/results/a $(B)/jobs/0004"), shape=Shape(nodes=2, gpus=8, cpus=96), runs=("w",))
LAST = replace(ONE, shape=Shape(), runs=(), is_last=True)
EVERYTHING = {
    **{"K8S_NAMESPACE": "ml", "K8S_MEMORY": "512Gi", "K8S_GPU_RESOURCE": "amd.com/gpu", "K8S_USER": "1000:100"},
    **{"K8S_GRACE": "600", "K8S_SECRET_NAME": "tracker-keys"},
}
MANIFESTS = {
    "array": (ONE, {"PARALLEL_JOBS": "2"}),
    "two_nodes": (TWO, EVERYTHING),
    "last": (LAST, {"K8S_QUEUE": "team-a", "K8S_USER": "0"}),
}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: 2 cpu."}


def kube(fake=None, **symbols):
    return Kubernetes(read_settings({**SYMBOLS, **symbols}), run=fake or FakeKubectl())


def of(kind, **known):
    return {"containerStatuses": [{"name": "kmatrix", "state": {kind: known}}]}


LOOPS = [{"name": "init", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
PULL = of("waiting", reason="ErrImagePull", message="no\n  image")
DONE, ERROR = of("terminated", exitCode=0), of("terminated", reason="Error", exitCode=3)
OOM = of("terminated", reason="OOMKilled", exitCode=137)
INIT = {**of("waiting", reason="PodInitializing"), "initContainerStatuses": LOOPS}
SIDECAR = {"containerStatuses": [{"name": "exporter", "state": {"terminated": {"exitCode": 1}}}]}


def submitted(folder, shapes, **symbols):
    """Submit runs; return the matrix, the scheduler, kubectl, and the name of the newest Job."""
    fake, matrix = FakeKubectl(), folder / "m"
    matrix.mkdir()
    cluster = kube(fake, K8S_MOUNT=str(folder), **symbols)
    assert jobs.submit(matrix, cluster, shapes, lambda _: None) == len(shapes)
    return matrix, cluster, fake, list(fake.items)[-1]


def job_is(kind, reason, status="True"):
    return {"conditions": [{"type": kind, "status": status, "reason": reason}]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_what_a_user_would_write(golden, name):
    batch, symbols = MANIFESTS[name]
    golden(f"job_{name}.yaml", kube(**symbols).script(batch)[1])


@pytest.mark.parametrize("version", ["1.29", "1.31", "1.33"])
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_published_schemas_allow_it(name, version):
    batch, symbols = MANIFESTS[name]
    kubernetes_validate.validate(yaml.safe_load(kube(**symbols).script(batch)[1]), version, strict=True)


def test_a_python_that_could_not_begin_is_tried_again_and_a_failed_run_is_not():
    rules = yaml.safe_load(kube().script(ONE)[1])["spec"]["podFailurePolicy"]["rules"]
    assert {0, 1, 137, 143}.isdisjoint(rules[1]["onExitCodes"]["values"])


@pytest.mark.parametrize(
    ("symbols", "batch", "what"),
    [
        ({}, replace(ONE, folder=Path("/home/u/m/jobs/0001")), "/home/u/m/jobs/0001 is not below K8S_MOUNT="),
        ({}, replace(ONE, folder=Path("/mnt/results/a\nb/jobs/1")), "'/mnt/results/a"),
        ({"K8S_IMAGE": ""}, ONE, "ENGINE=kubernetes needs K8S_IMAGE"),
    ],
)
def test_what_pods_could_not_run_is_refused_before_anything_is_made(symbols, batch, what):
    with pytest.raises((ConfigError, LaunchError), match=f"^{what}.*(?s:.*)hint: "):
        kube(**symbols).script(batch)


def test_no_call_and_no_manifest_has_the_value_of_a_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", key := "0123456789abcdef0123456789abcdef01234567")
    fake = FakeKubectl()
    assert not list(kube(fake, **EVERYTHING).check([ONE.shape, TWO.shape]))
    text = kube(fake, **EVERYTHING).script(TWO)[1]
    assert 'secretRef: {name: "tracker-keys"}' in text
    assert key not in str(fake.calls) + text


@pytest.mark.parametrize(
    ("stderr", "answers"),
    [
        ('Warning: old\nError from server (Forbidden): jobs.batch is forbidden: exceeded quota: "q"', True),
        ("error: context was not found for specified context: x", True),
        ('The Job "x" is invalid: \n* spec.template: Invalid value', True),
        ("The connection to the server x:6443 was refused - did you specify the right host or port?", False),
        ("Unable to connect to the server: net/http: TLS handshake timeout", False),
        ('E1128 13:06 x.go] y\nerror: error validating "-": failed to download openapi: dial tcp: lookup x', False),
        ("Error from server (InternalError): etcdserver: leader changed", False),
        ("Please enter Username: error: EOF", False),
    ],
)
def test_a_refusal_has_the_words_of_the_server_and_silence_says_nothing(stderr, answers):
    cluster = kube(FakeKubectl(stderr=stderr))
    with pytest.raises(LaunchError) as raised:
        cluster.submit(ONE)
    assert isinstance(raised.value, UnreachableError) is not answers
    assert stderr.splitlines()[-1] in raised.value.why
    for call in (lambda: cluster.poll("km"), lambda: cluster.cancel(["km-1"])):  # a refusal says nothing about jobs
        with pytest.raises(UnreachableError, match="does not answer"):
            call()
    if answers:
        assert [error.what for error in cluster.check([ONE.shape])] == ["Kubernetes refuses the Job"]


@pytest.mark.parametrize(
    ("job", "phase", "status", "seen"),
    [
        ({}, "", {}, "waits NoPod: no pod yet: kubectl describe job JOB"),
        ({}, "Pending", {"conditions": [UNSCHEDULABLE]}, "waits Pending: Unschedulable: 0/2 nodes: 2 cpu."),
        ({}, "Pending", PULL, "waits Pending: ErrImagePull: no image"),
        ({}, "Pending", INIT, "waits Pending: CrashLoopBackOff"),
        ({}, "Running", {}, "runs Running: "),
        ({}, "Running", SIDECAR, "runs Running: "),
        ({}, "Unknown", {"reason": "NodeLost"}, "runs Unknown: NodeLost"),
        ({}, "Failed", {"reason": "Evicted", "message": "disk"}, "waits Failed: Evicted: disk"),
        ({}, "Failed", OOM, "waits Failed: OOMKilled (exit code 137): LOGS"),
        ({}, "Succeeded", DONE, "waits Succeeded: "),
        ({"completedIndexes": "0-2,5"}, "Succeeded", DONE, "ended Complete: "),
        ({"failedIndexes": "0"}, "Failed", ERROR, "ended Failed: Error (exit code 3): LOGS"),
        (job_is("Failed", "DeadlineExceeded"), "", {}, "ended Failed: DeadlineExceeded"),
        (job_is("FailureTarget", "X"), "Running", {}, "runs FailureTarget: X"),
        (job_is("Failed", "X", "False"), "Running", {}, "runs Running: "),
    ],
)
def test_a_state_and_its_reason_are_those_of_kubernetes(tmp_path, job, phase, status, seen):
    matrix, cluster, fake, name = submitted(tmp_path, {"a": Shape()})
    fake.items[name]["status"] = job
    if phase:
        fake.pod(name, 0, phase, **status)
    found = jobs.look(matrix, cluster)["a"]
    seen = seen.replace("LOGS", f"kubectl logs --namespace=ml {name}-0-x").replace("JOB", name)
    assert f"{found.phase} {found.state}: {found.reason}" == seen


def test_what_killed_the_pod_before_is_told_as_long_as_the_new_one_has_nothing_to_say(tmp_path):
    matrix, cluster, fake, name = submitted(tmp_path, {"a": Shape()})
    fake.pod(name, 0, "Failed", **OOM)
    fake.pod(name, 0, "Running")
    fake.items = dict(reversed(fake.items.items()))
    assert jobs.look(matrix, cluster)["a"].reason.startswith("the pod before: OOMKilled (exit code 137)")


def test_a_job_that_was_deleted_lives_as_long_as_its_pods(tmp_path):
    matrix, cluster, fake, name = submitted(tmp_path, {"a": Shape(), "b": Shape()})
    fake.pod(name, 1)
    fake.items[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert {run: job.phase for run, job in jobs.look(matrix, cluster).items()} == {"a": Phase.ENDED, "b": Phase.RUNS}
    del fake.items[name]
    assert {run: job.state for run, job in jobs.look(matrix, cluster).items()} == {"b": "Deleted"}


def test_runs_of_one_node_share_a_job_and_the_nodes_of_a_run_have_one(tmp_path):
    matrix, cluster, fake, _ = submitted(tmp_path, {"a": Shape(), "b": Shape(), "w": Shape(nodes=2, gpus=8)})
    label = label_of(matrix)
    assert list(fake.items) == [f"{label}-0001", f"{label}-0002"]
    fake.pod(f"{label}-0001", 1, "Pending", conditions=[UNSCHEDULABLE])
    fake.pod(f"{label}-0001", 0)
    fake.pod(f"{label}-0002", 1)
    found = jobs.look(matrix, cluster)
    assert {run: (job.id, job.phase, job.nodes) for run, job in found.items()} == {
        "a": (f"{label}-0002/0", Phase.WAITS, ""),
        "b": (f"{label}-0002/1", Phase.RUNS, "node-1"),
        "w": (f"{label}-0001", Phase.RUNS, "node-0"),
    }
    assert found["w"].reason == "pod 1: Unschedulable: 0/2 nodes: 2 cpu."
    assert jobs.cancel(matrix, cluster) == 3
    assert not fake.items


def test_a_suspended_job_waits_for_its_queue(tmp_path):
    matrix, cluster, *_ = submitted(tmp_path, {"a": Shape()}, K8S_QUEUE="team-a")
    assert jobs.look(matrix, cluster)["a"].reason == "waits for the queue team-a"


@pytest.mark.parametrize("silent", ["before", "after"])
def test_a_lost_answer_creates_nothing_twice(tmp_path, silent):
    matrix, cluster, fake, name = submitted(tmp_path, {"a": Shape()})
    batch = replace(ONE, folder=matrix / "jobs" / "0001", label=label_of(matrix))
    fake.silent = silent
    with pytest.raises(UnreachableError):
        cluster.submit(batch)
    fake.silent = ""
    assert [cluster.submit(batch)] == list(fake.items) == [name]


PATCH = """\
metadata: {annotations: {team: vision}, labels: {cost-center: a}}
spec:
  template:
    spec:
      containers:
        - name: kmatrix
          resources: {requests: {cpu: "12"}}
          securityContext: {capabilities: {add: [IPC_LOCK]}}
          volumeMounts: [{name: scratch, mountPath: /scratch}]
        - {name: exporter, image: "exporter:1"}
      volumes: [{name: scratch, hostPath: {path: /mnt/nvme}}, {name: shm, emptyDir: {sizeLimit: 32Gi}}]
"""


@pytest.mark.process
def test_kubectl_itself_merges_a_patch_without_a_cluster(tmp_path, monkeypatch):
    require_program("kubectl")
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    (tmp_path / "p.yaml").write_text(PATCH, encoding="utf-8")
    text = kube(subprocess.run, K8S_PATCH=str(tmp_path / "p.yaml"), K8S_CONTEXT="x").script(ONE)[1]
    job = yaml.safe_load(text)
    kubernetes_validate.validate(job, "1.33", strict=True)
    pod = job["spec"]["template"]["spec"]
    ours = next(one for one in pod["containers"] if one["name"] == "kmatrix")
    assert ours["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {one["name"] for one in pod["volumes"]} == {"results", "shm", "scratch"}
    assert ours["resources"]["requests"] == {"cpu": "12"}


@pytest.mark.process
@pytest.mark.parametrize(
    ("patch", "what"),
    [
        ("metadata: {name: x}", "changes the name of the Job"),
        ("metadata: {labels: {kmatrix: x}}", "changes labels"),
        ("spec: {completions: 9}", "changes completions"),
        ("spec: {template: {spec: {terminationGracePeriodSeconds: 5}}}", "changes the grace period"),
        ("spec: {template: {spec: {containers: [{name: kmatrix, command: [sh]}]}}}", "changes the command"),
        ("spec: {template: 3}", "changes"),
        ("spec: [", "cannot be applied"),
        ("metadata: {annotations: {a: hf_abcdefghijklmnopqrstuvwxyzABCDEFGH}}", "contains a key"),
    ],
)
def test_a_patch_that_would_lose_the_job_or_tell_a_key_is_refused(tmp_path, patch, what):
    require_program("kubectl")
    (tmp_path / "p.yaml").write_text(patch, encoding="utf-8")
    with pytest.raises(LaunchError, match=f"^K8S_PATCH=.*p.yaml {what}"):
        kube(subprocess.run, K8S_PATCH=str(tmp_path / "p.yaml")).script(ONE)
