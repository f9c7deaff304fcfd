"""Submissions and settings for tests of manifests."""

from __future__ import annotations

from pathlib import Path

from kmatrix.engines.kubernetes.manifests import manifests
from kmatrix.engines.kubernetes.settings import read_settings
from kmatrix.records.jobs.files import Shape, ShareEntry, SubmissionFile

MATRIX = Path("/mnt/results/test_matrix_results_20260101_120000")
SETTINGS = {
    "K8S_IMAGE": "registry.example.org/kmatrix:1.0",
    "K8S_CLAIM": "results",
    "K8S_MOUNT": "/mnt/results",
    "K8S_NAMESPACE": "ml",
    "K8S_TTL": "7d",
    "K8S_SHM": "8Gi",
}
EVERYTHING = {
    **SETTINGS,
    "K8S_SECRET_NAME": "tracker-keys",
    "K8S_NODE_SELECTOR": "nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB",
    "K8S_TOLERATIONS": "spot=true:NoSchedule maintenance",
    "K8S_MEMORY": "64Gi",
    "K8S_CPUS": "12",
    "K8S_USER": "1000:100",
    "K8S_CODE": "/mnt/results/code",
    "K8S_SUBPATH": "team/",
    "K8S_QUEUE": "gpus",
    "PARALLEL_JOBS": "2",
}
ONE_NODE = SubmissionFile(
    label="km-4f1a2b-0001",
    shape=Shape(cpus_per_node=4),
    shares=tuple(ShareEntry(task=task, runs=(f"run{task}",)) for task in range(3)),
)
TWO_NODES = SubmissionFile(
    label="km-4f1a2b-0002",
    shape=Shape(nodes=2, gpus_per_node=4, ranks_per_node=4, cpus_per_node=16, memory_mib=131072),
    shares=(ShareEntry(task=0, runs=("wide",)), ShareEntry(task=1, runs=("wider",))),
)


def made(submission: SubmissionFile, **settings: str) -> list[dict]:
    """Return the objects of a submission. settings: besides the required ones."""
    return manifests(read_settings({**SETTINGS, **settings}), MATRIX, 1, submission)
