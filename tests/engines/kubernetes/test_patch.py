"""K8S_PATCH: a strategic merge patch, as kubectl merges it, with errors that name file and line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kmatrix.engines.kubernetes.patch import patched
from kmatrix.engines.kubernetes.scheduler import as_yaml
from kmatrix.errors import ConfigError
from kubernetes_factory import ONE_NODE, TWO_NODES, made
from skips import require_program

PATCH = """\
kind: Job
spec:
  template:
    metadata:
      annotations: {team: vision}
    spec:
      priorityClassName: high
      nodeSelector: null
      containers:
        - name: kmatrix
          env:
            - {name: NCCL_DEBUG, value: INFO}
          securityContext:
            capabilities: {add: [IPC_LOCK]}
          volumeMounts:
            - {mountPath: /scratch, name: scratch}
        - name: exporter
          image: registry.example.org/exporter:1
      volumes:
        - name: scratch
          hostPath: {path: /mnt/nvme}
        - name: shm
          emptyDir: {sizeLimit: 32Gi}
"""


def file(folder: Path, text: str) -> Path:
    path = folder / "patch.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_maps_are_merged_and_lists_by_their_keys(tmp_path):
    (job,) = patched(made(ONE_NODE, K8S_NODE_SELECTOR="a=b"), file(tmp_path, PATCH))

    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["template"]["metadata"]["annotations"] == {"team": "vision"}
    assert pod["priorityClassName"] == "high"
    assert "nodeSelector" not in pod
    assert [one["name"] for one in pod["containers"]] == ["kmatrix", "exporter"]
    assert pod["containers"][0]["env"][-1] == {"name": "NCCL_DEBUG", "value": "INFO"}
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert [one["mountPath"] for one in pod["containers"][0]["volumeMounts"]] == [
        "/mnt/results",
        "/dev/shm",
        "/scratch",
    ]
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


@pytest.mark.process
def test_kubectl_merges_the_same(tmp_path):
    require_program("kubectl")
    (job,) = made(ONE_NODE, K8S_NODE_SELECTOR="a=b")
    manifest = tmp_path / "job.yaml"
    manifest.write_text(as_yaml([job]), encoding="utf-8")

    options = ["--local", "--type=strategic", "--patch-file", str(file(tmp_path, PATCH)), "-o", "json"]
    done = subprocess.run(
        ["kubectl", "patch", "-f", str(manifest), *options], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr

    def by_name(value):
        """Return a value without the order of lists with names: kubectl puts new elements first."""
        if isinstance(value, dict):
            return {key: by_name(one) for key, one in value.items()}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return sorted(map(by_name, value), key=lambda one: json.dumps(one, sort_keys=True))
        return value

    assert by_name(json.loads(done.stdout)) == by_name(patched([job], file(tmp_path, PATCH))[0])


def test_elements_and_maps_can_be_deleted_and_replaced(tmp_path):
    text = """\
kind: Job
spec:
  template:
    spec:
      securityContext: {$patch: replace, fsGroup: 7}
      volumes:
        - {name: shm, $patch: delete}
      affinity: null
---
kind: Service
metadata: {annotations: {a: b}}
"""
    service, job, _ = patched(made(TWO_NODES), file(tmp_path, text))

    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"fsGroup": 7}
    assert [one["name"] for one in pod["volumes"]] == ["results"]
    assert "affinity" not in pod
    assert service["metadata"]["annotations"] == {"a": "b"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind: Job\nspec: [", "patch.yaml:2: not YAML"),
        ("kind: Node\n", "patch.yaml:1: kind is 'Node'"),
        ("kind: Job\nspec: {selector: {matchLabels: {a: b}}}\n", "patch.yaml:1: selector cannot be changed"),
        ("kind: Job\nspec: {manualSelector: true}\n", "patch.yaml:1: selector cannot be changed"),
        ("- 1\n", "patch.yaml: document 1 is not a mapping"),
        ("kind: Job\nspec:\n  a: 1\n  a: 2\n", "patch.yaml:4: a is there twice"),
        ("kind: Job\nspec:\n  1: 2\n", "patch.yaml:3: 1 is not a text"),
        ("kind: Job\nmetadata:\n  name: other\n", "patch.yaml:1: metadata.name cannot be changed"),
        ("kind: Job\nspec: {completions: 7}\n", "patch.yaml:1: completions cannot be changed"),
        (
            "kind: Job\nspec:\n  template:\n    spec:\n      terminationGracePeriodSeconds: 5\n",
            "patch.yaml:1: terminationGracePeriodSeconds (use K8S_GRACE) cannot be changed",
        ),
        (
            "kind: Job\nspec:\n  template:\n    spec:\n      containers:\n        - image: x\n",
            "patch.yaml:6: an element of containers has no name",
        ),
        ("kind: Job\nspec:\n  template: []\n", "patch.yaml:3: template is a list here"),
        ("kind: Job\nspec:\n  $retainKeys: [a]\n", "patch.yaml:3: $retainKeys is not supported"),
        (
            "kind: Job\nspec:\n  template:\n    spec:\n      containers:\n        - name: kmatrix\n          env:\n"
            "            - {name: HF_TOKEN, value: abc}\n",
            "patch.yaml:8: HF_TOKEN has its value here",
        ),
        ("kind: Job\nx: hf_abcdefghijklmnopqrstuvwxyzABCDEFGH\n", "patch.yaml contains a key"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, text, problem):
    with pytest.raises(ConfigError) as raised:
        patched(made(ONE_NODE), file(tmp_path, text))
    assert raised.value.what.removeprefix(f"{tmp_path}/").startswith(problem)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        patched(made(ONE_NODE), tmp_path / "none.yaml")


def test_a_service_that_finds_no_pod_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"spec\.selector cannot be changed"):
        patched(made(TWO_NODES), file(tmp_path, "kind: Service\nspec: {selector: {a: b}}\n"))
