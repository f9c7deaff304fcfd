"""Submit a matrix to a fake Kubernetes, look at it and stop it. Nightly tests run its pods."""

from __future__ import annotations

import json

import pytest

from fake_kubernetes import NAMESPACE, FakeKubernetes, Node

pytestmark = pytest.mark.story

IMAGE = "registry.test/kmatrix:1"
KEY = "0f3c5ab77e0d4c1e9a1b2c3d4e5f60718293a4b5"  # of the form of a W&B key


def test_a_matrix_is_submitted_once_shown_and_stopped(story, tmp_path):
    with FakeKubernetes(nodes=(Node("node-a"),), secrets={"keys": {"WANDB_API_KEY": KEY}}) as cluster:
        variables = {"KUBECONFIG": str(cluster.kubeconfig), "WANDB_API_KEY": KEY}
        where = ("K8S_CLAIM=results", f"K8S_MOUNT={tmp_path}", f"K8S_NAMESPACE={NAMESPACE}", "K8S_SECRET_NAME=keys")
        words = story.words("ENGINE=kubernetes", *where, "DEVICE=cpu", "REUSE=n", "K8S_CPUS=16")
        assert "K8S_IMAGE" in story.clone.refused("test-matrix", *words, **variables)
        story.make("test-matrix", *words, f"K8S_IMAGE={IMAGE}", **variables)
        matrix = story.newest()
        target, jobs = f"TARGET={matrix.path}", [job["metadata"]["name"] for job in cluster.jobs()]
        assert jobs
        story.make("continue", target, **variables)
        assert [job["metadata"]["name"] for job in cluster.jobs()] == jobs, "no run is submitted twice"
        assert "queued, 2 planned, jobs: 2 waiting" in story.make("status", target, **variables)
        story.make("stop", target, **variables)
        assert cluster.jobs() == []
        assert set(story.statuses(matrix).values()) == {"planned"}
        assert KEY not in json.dumps(cluster.created)
    files = [path for path in story.results.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
