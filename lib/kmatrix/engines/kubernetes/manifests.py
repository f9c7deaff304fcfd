"""Shares of a matrix -> the objects of the Kubernetes API that run them, as the texts and numbers of their JSON.

Several nodes: a Job per share, whose pods are the nodes, on hosts of their own. One node: one Job for all shares of the
submission, an index each. https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kmatrix.engines.kubernetes.settings import Settings
from kmatrix.records.jobs.files import Shape, SubmissionFile
from kmatrix.records.jobs.forms import DNS_LABEL
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir

Object = dict[str, Any]  # one object, as the JSON of the API has it

CONTAINER = "kmatrix"
APPLICATION = {"app.kubernetes.io/name": "kmatrix"}
SUBMISSION_LABEL, JOB_LABEL = "kmatrix/submission", "kmatrix/job"
SHARES_NOTE, MATRIX_NOTE = "kmatrix/shares", "kmatrix/matrix"  # annotations
# https://kueue.sigs.k8s.io/docs/tasks/run/topology_aware_scheduling/
TOPOLOGY_NOTE = "kueue.x-k8s.io/podset-preferred-topology"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"  # https://kueue.sigs.k8s.io/docs/tasks/run/jobs/
# Variables of the pods.
JOB, HEAD, NODES, KILL, HOST = "KMATRIX_JOB", "KMATRIX_HEAD", "KMATRIX_NODES", "KMATRIX_KILL_S", "KMATRIX_HOST"
SHARES, FOLDER = "KMATRIX_SHARES", "KMATRIX_FOLDER"  # number of shares, and folder, of the submission
TASK = "KMATRIX_TASK"  # only for several nodes: otherwise the pod's index is the task
INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes
# Exit codes of the runner that another pod would only repeat: runs failed, refused, a bug of ours, and runs stopped by
# a decision of the runner, such as a spent budget (docs/formats.md).
FINAL_CODES = (1, 2, 70, 130)
MOST_TASKS = 10_000  # indexes of a Job: Kubernetes allows 100,000
LONGEST_BASE = 40  # characters: a pod's host name <job>-<task>-<index> has 63 at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What one Job runs."""

    settings: Settings
    base: str  # name of the submission
    name: str  # of the Job
    shape: Shape
    task: int | None  # the share of a Job over several nodes; None: all shares of the submission, an index each
    pods: int
    shares: int  # of the submission
    matrix: Path
    folder: Path  # of the submission
    command: tuple[str, ...]


def manifests(
    settings: Settings, matrix: Path, number: int, submission: SubmissionFile, *, python: str = "python"
) -> list[Object]:
    """Return the objects of a submission, in the order of their creation.

    matrix: its absolute path, below the mount of the claim.  number: of the submission.  python: in the image.
    """
    base, nodes = base_name(submission.label), submission.shape.nodes
    last = max((share.task for share in submission.shares), default=0)
    all_shares = _Work(
        settings=settings,
        base=base,
        name=base,
        shape=submission.shape,
        task=None,
        pods=last + 1,
        shares=len(submission.shares),
        matrix=matrix,
        folder=JobsDir(MatrixDir(matrix)).submission(number).path,
        command=(python, "-m", "kmatrix.runner.share", str(matrix), str(number)),
    )
    if nodes == 1:
        return [_job(all_shares)]
    each = [
        replace(all_shares, name=job_name(base, share.task), task=share.task, pods=nodes) for share in submission.shares
    ]
    return [_service(settings, base), *map(_job, each)]


def base_name(label: str) -> str:
    """Return the name of a submission's objects: its label, made legal and short enough; unique as the label is."""
    name = re.sub(r"[^a-z0-9-]+", "-", label.lower()).strip("-")
    if name == label and DNS_LABEL.fullmatch(name) and len(name) <= LONGEST_BASE and not name[0].isdigit():
        return name
    digest = hashlib.sha256(label.encode()).hexdigest()[:8]
    return f"km-{name[: LONGEST_BASE - 12].strip('-')}-{digest}"


def job_name(base: str, task: int) -> str:
    """Return the name of the Job of one share over several nodes."""
    return f"{base}-{task}"


def job_objects(objects: Sequence[Object]) -> list[Object]:
    """Return the Jobs among objects."""
    return [one for one in objects if one["kind"] == "Job"]


def _service(settings: Settings, base: str) -> Object:
    """Return the headless Service that gives the pods of a submission names in the DNS."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(settings, base, base),
        "spec": {
            "clusterIP": "None",
            # The first attempt resolves the head's name before all containers are ready.
            "publishNotReadyAddresses": True,
            "selector": {SUBMISSION_LABEL: base},
        },
    }


def _job(work: _Work) -> Object:
    """Return the Job of a share over several nodes, or of all shares of a submission."""
    settings, several = work.settings, work.task is not None
    ends = {"containerName": CONTAINER, "operator": "In", "values": list(FINAL_CODES)}
    rules = [
        # The first rule that fits counts: evictions and lost nodes are replaced without being counted ...
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # ... a final exit code is not, and any other end (a signal) is replaced K8S_RESTARTS times.
        {"action": "FailJob" if several else "FailIndex", "onExitCodes": ends},
    ]
    spec: Object = {
        "completionMode": "Indexed",
        "completions": work.pods,
        "parallelism": work.pods if several else min(work.pods, settings.parallel or work.pods),
        # Without maxFailedIndexes the other shares go on if one has failed.
        ("backoffLimit" if several else "backoffLimitPerIndex"): settings.restarts * work.shape.nodes,
        # A replacement only starts when the old pod is gone: two runners never have one share.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {
            "metadata": _pod_metadata(work),
            "spec": _pod(work),
        },
    }
    metadata = _metadata(settings, work.base, work.name)
    metadata["annotations"] = {MATRIX_NOTE: work.matrix.name, SHARES_NOTE: str(work.shares)}
    outer: Object = {} if settings.ttl_s is None else {"ttlSecondsAfterFinished": settings.ttl_s}
    if settings.queue:
        metadata["labels"][QUEUE_LABEL] = settings.queue
        outer["suspend"] = True  # Kueue admits it
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {**outer, **spec}}


def _pod_metadata(work: _Work) -> Object:
    settings = work.settings
    labels = {**APPLICATION, SUBMISSION_LABEL: work.base, JOB_LABEL: work.name}
    if work.task is None or not (settings.queue and settings.topology):
        return {"labels": labels}
    return {"labels": labels, "annotations": {TOPOLOGY_NOTE: settings.topology}}


def _affinity(work: _Work) -> Object:
    """Return the affinity of the pods of a run: on hosts of their own, which are close to each other."""
    own: Object = {"labelSelector": {"matchLabels": {JOB_LABEL: work.name}}}
    apart = {"topologyKey": "kubernetes.io/hostname", **own}
    found: Object = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    if work.settings.topology and not work.settings.queue:  # Kueue chooses the nodes itself
        close = {"topologyKey": work.settings.topology, **own}
        terms = [{"weight": 100, "podAffinityTerm": close}]
        found["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": terms}
    return found


def _pod(work: _Work) -> Object:
    settings, several = work.settings, work.task is not None
    tolerations: list[Any] = [dict(one) for one in settings.tolerations]
    if work.shape.gpus_per_node:  # clouds taint nodes with GPUs by the name of the resource
        tolerations.append({"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    security: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    security |= {} if settings.user == 0 else {"runAsNonRoot": True}
    security |= {} if settings.user is None else {"runAsUser": settings.user}
    security |= {} if settings.group is None else {"runAsGroup": settings.group}
    memory: Object = {"medium": "Memory"} | ({"sizeLimit": settings.shm} if settings.shm else {})
    return {
        **({"subdomain": work.base} if several else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security,
        **({"affinity": _affinity(work)} if several else {}),
        **({"nodeSelector": dict(settings.node_selector)} if settings.node_selector else {}),
        **({"tolerations": tolerations} if tolerations else {}),
        "containers": [_container(work)],
        "volumes": [
            {"name": "results", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": memory},  # of the container runtime: 64 MiB, too little for NCCL
        ],
    }


def _container(work: _Work) -> Object:
    settings, shape = work.settings, work.shape
    mount: Object = {"name": "results", "mountPath": settings.mount}
    mount |= {"subPath": settings.subpath} if settings.subpath else {}
    requests: Object = {"cpu": str(settings.cpus or shape.cpus_per_node)}
    limits: Object = {}
    if size := settings.memory or (f"{shape.memory_mib}Mi" if shape.memory_mib else ""):
        requests["memory"] = limits["memory"] = size
    if shape.gpus_per_node:
        limits[settings.gpu_resource] = str(shape.gpus_per_node)
    return {
        "name": CONTAINER,
        "image": settings.image,
        **({"workingDir": settings.code} if settings.code else {}),
        "command": [_literal(word) for word in work.command],
        "env": _environment(work),
        # By reference: no value of it is ever in a manifest. A name that does not exist is shown by `make status`.
        **({"envFrom": [{"secretRef": {"name": settings.secret}}]} if settings.secret else {}),
        "resources": {"requests": requests} | ({"limits": limits} if limits else {}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [mount, {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _environment(work: _Work) -> list[Object]:
    settings = work.settings
    values = {JOB: work.base, SHARES: str(work.shares), FOLDER: str(work.folder), KILL: str(settings.grace_s)}
    if work.task is not None:
        values |= {TASK: str(work.task), NODES: str(work.shape.nodes), HEAD: f"{work.name}-0.{work.base}"}
    if settings.code:
        values["PYTHONPATH"] = f"{settings.code}/lib:{settings.code}"
    if settings.user is not None:  # a user that the image does not know has neither a name nor a home
        values |= {"USER": CONTAINER, "HOME": "/tmp"}
    found: list[Object] = [{"name": key, "value": _literal(value)} for key, value in values.items()]
    return [*found, {"name": HOST, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]


def _literal(text: str) -> str:
    """Return a text of a command or a variable such that Kubernetes replaces no $(NAME) in it."""
    return text.replace("$", "$$")


def _metadata(settings: Settings, base: str, name: str) -> Object:
    place = {"namespace": settings.namespace} if settings.namespace else {}
    return {"name": name, **place, "labels": {**APPLICATION, SUBMISSION_LABEL: base}}
