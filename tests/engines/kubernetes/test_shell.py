"""The shell in a pod: it starts when the pod runs, and the pod is deleted in any case."""

from __future__ import annotations

import pytest

from fake_kubernetes import NAMESPACE, VERSIONS, FakeKubernetes, check_object
from kmatrix.engines.kubernetes.api import Api
from kmatrix.engines.kubernetes.settings import read_settings
from kmatrix.engines.kubernetes.shell import run_shell, shell_pod
from kmatrix.errors import LaunchError
from kubernetes_factory import EVERYTHING, SETTINGS

KUBECTL = """#!/bin/sh
echo "$@" >"$0.called"
exit 7
"""


def test_the_pod_is_valid_for_each_version():
    for version in VERSIONS:
        check_object(shell_pod(read_settings(EVERYTHING), "kmatrix-shell-1"), version, lambda _: True)


def test_the_pod_is_taken_where_only_restricted_pods_are():
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted."""
    spec = shell_pod(read_settings(SETTINGS), "kmatrix-shell-1")["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_shell_has_a_terminal_and_the_pod_is_deleted(tmp_path, monkeypatch):
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with FakeKubernetes() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        monkeypatch.setattr(Api, "read", lambda self, kind, name: {"status": {"phase": "Running"}})

        patch = tmp_path / "patch.yaml"
        patch.write_text("kind: Pod\nspec: {imagePullSecrets: [{name: registry}]}\n", encoding="utf-8")
        settings = read_settings({**SETTINGS, "K8S_PATCH": str(patch)})
        status = run_shell(settings, Api(), say=lambda _: None)

        assert cluster.created[0]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        (pod,) = [one["metadata"]["name"] for one in cluster.created]
        assert status == 7
        assert (tmp_path / "kubectl.called").read_text() == f"--namespace {NAMESPACE} exec -it {pod} -- bash\n"
        assert next(one for one in cluster.requests if one.startswith("DELETE")).split("?")[0].endswith(f"/pods/{pod}")


def test_a_machine_without_kubectl_creates_no_pod(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(LaunchError, match="kubectl not found"):
        run_shell(read_settings(SETTINGS), Api())
