"""Jobs and pods, as the API lists them -> the state of each share, and why it waits or ended, as a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kmatrix.engines.kubernetes.manifests import (
    CONTAINER,
    JOB_LABEL,
    QUEUE_LABEL,
    SUBMISSION_LABEL,
    Object,
)
from kmatrix.records.jobs.files import JobView, SchedulerPhase
from kmatrix.text import printable

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
LIVE, WAITS, ENDED = "Running", "Pending", ("Succeeded", "Failed")  # phases of a pod
STARTED = (LIVE, "Unknown")
PHASES = {LIVE: "", "Unknown": "its node does not answer"}  # what a phase alone says
LONGEST = 300  # characters of a message: an unschedulable pod's names every reason of every node
# Reasons of waiting containers that need no explanation: https://pkg.go.dev/k8s.io/kubernetes/pkg/kubelet/images
CREATING = "the container is created"
STARTING = {"ContainerCreating": CREATING, "PodInitializing": "init containers run"}
IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
# https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "its node does not answer, or is being emptied",
    "EvictionByEvictionAPI": "evicted: its node is being emptied",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "ended by its node: it shuts down, or has too little memory or disk",
}
LEAVES = "; another pod follows when this one is gone, after its node is back, or was removed from the cluster"
JOB_ENDS = {
    "DeadlineExceeded": "its deadline is over",
    "BackoffLimitExceeded": "its pods were killed too often (K8S_RESTARTS)",
    "FailedIndexes": "some of its shares failed",
    "PodFailurePolicy": "the runner ended before all of its runs were finished",
}


@dataclass(frozen=True, slots=True)
class PodView:
    """What matters of a pod. The pods of a large matrix are read page by page, and only this is kept."""

    name: str
    job: str  # name of its Job
    index: int
    created: str  # ISO time; they sort as texts
    phase: str
    node: str
    reason: str  # a sentence, "" while it trains
    leaving: bool  # it is being deleted
    before: str = ""  # how the pod before it ended, if that was killed


def pod_view(pod: Mapping[str, Any]) -> PodView | None:
    """Return what matters of a pod, None if it is not one of a Job of ours."""
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    labels = meta.get("labels") or {}
    index = str(labels.get(INDEX_LABEL) or (meta.get("annotations") or {}).get(INDEX_LABEL) or "")
    if JOB_LABEL not in labels or not index.isdecimal():
        return None
    return PodView(
        name=str(meta.get("name") or ""),
        job=labels[JOB_LABEL],
        index=int(index),
        created=str(meta.get("creationTimestamp") or ""),
        phase=str(status.get("phase") or WAITS),
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        reason=waiting_reason(pod),
        leaving=bool(meta.get("deletionTimestamp")),
    )


def _seconds(text: object) -> float | None:
    """Return a time of the API in Unix seconds, None if there is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def waiting_reason(pod: Mapping[str, Any]) -> str:
    """Return why a pod waits or has ended, as a sentence; "" while it runs."""
    return _cut(_pod_reason(pod))


def newest(pods: Iterable[PodView]) -> dict[tuple[str, int], PodView]:
    """Return job and index -> its newest pod, with the end of the one before, if that was killed.

    Killed pods are listed until the Job is deleted, evicted ones only until they are gone.
    """
    found: dict[tuple[str, int], PodView] = {}
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.phase not in ENDED)):
        known = found.get((pod.job, pod.index))
        before = (known.reason or known.before) if known is not None and known.phase == "Failed" else ""
        found[pod.job, pod.index] = replace(pod, before=before) if before else pod
    return found


def share_view(
    job: str, object_: Object, task: int | None, pods: Mapping[tuple[str, int], PodView], failures: str
) -> JobView:
    """Return the view of one share.

    job: as the user knows it.  object_: its Job.  task: its index in a Job of several shares, None if it has the Job
    for itself.  failures: why pods of the Job cannot be created, "" if they can.
    """
    name, spec, status = object_["metadata"]["name"], object_["spec"], object_.get("status") or {}
    indexes = range(int(spec.get("completions") or 1)) if task is None else (task,)
    own = [pod for index in indexes if (pod := pods.get((name, index)))]
    nodes = tuple(pod.node for pod in own if pod.node)
    label = str((object_["metadata"].get("labels") or {}).get(SUBMISSION_LABEL) or "no label")
    before = next((pod.before for pod in own if pod.before), "")
    end, why = job_end(status) if job_end(status)[0] else ending(status)
    if task is not None and end != "Complete":
        if has_index(str(status.get("completedIndexes") or ""), task):
            end, why = "Complete", ""
        elif has_index(str(status.get("failedIndexes") or ""), task):
            end, why = "Failed", (own[0].reason if own else "") or why
    if not end and object_["metadata"].get("deletionTimestamp"):
        end, why = "Deleted", "its Job is being deleted"
    if end:  # its pods get the grace period
        is_live = end != "Complete" and any(pod.phase in STARTED for pod in own)
        phase, state = SchedulerPhase.RUNNING if is_live else SchedulerPhase.ENDED, end
    else:
        head = next((pod for pod in own if pod.index == indexes[0]), None)
        phase = SchedulerPhase.RUNNING if head and head.phase in STARTED else SchedulerPhase.PENDING
        state = "Suspended" if object_["spec"].get("suspend") else head.phase if head else "NoPod"
        why = _reason(object_, indexes, own, failures)
    return JobView(job=job, phase=phase, state=state, reason=_cut(why), nodes=nodes, label=label, before=_cut(before))


def gone_view(job: str, own: Iterable[PodView], *, has_ttl: bool) -> JobView:
    """Return the view of a share without a Job: its pods may end after the Job, or go on without it.

    has_ttl: Kubernetes itself deletes a Job some time after its end.
    """
    nodes = tuple(pod.node for pod in own if pod.phase not in ENDED)
    if nodes:
        return JobView(
            job=job, phase=SchedulerPhase.RUNNING, state="Deleted", reason="its Job was deleted", nodes=nodes
        )
    reason = "its Job was deleted" + (", or had ended and K8S_TTL is over" if has_ttl else "")
    return JobView(job=job, phase=SchedulerPhase.UNKNOWN, state="Deleted", reason=reason)


def _reason(object_: Object, indexes: Sequence[int], own: Sequence[PodView], failures: str) -> str:
    """Return why a share waits, "" if all of its pods train."""
    if object_["spec"].get("suspend"):
        queue = object_["metadata"].get("labels", {}).get(QUEUE_LABEL)
        return f"waits for Kueue to admit it in the queue {queue}" if queue else "the Job is suspended"
    several = len(indexes) > 1
    found = []
    for index in indexes:
        pod = next((pod for pod in own if pod.index == index), None)
        if pod is None:
            text = failures or "no pod yet: waits for its turn"
        elif pod.phase in ENDED:
            text = f"{pod.reason or 'its pod ended'}; a new pod follows" if pod.phase == "Failed" else ""
        elif pod.leaving:
            text = f"its pod on {pod.node or 'no node'} is being deleted" + (f": {pod.reason}" if pod.reason else "")
            text += LEAVES if pod.reason == DISRUPTIONS["DeletionByTaintManager"] else ""
        else:
            text = pod.reason
        if text:
            found.append(f"pod {index} of {len(indexes)}: {text}" if several else text)
    return _cut("; ".join(found))


def _pod_reason(pod: Mapping[str, Any]) -> str:
    status = pod.get("status") or {}
    conditions = {one.get("type"): one for one in status.get("conditions") or ()}
    states = {one.get("name"): one.get("state") or {} for one in status.get("containerStatuses") or ()}
    ours = states.get(CONTAINER) or {}
    if disrupted := _true(conditions.get("DisruptionTarget")):
        reason = str(disrupted.get("reason") or "")
        return DISRUPTIONS.get(reason) or f"evicted: {disrupted.get('message') or reason}"
    if status.get("reason") == "Evicted":
        return f"evicted: {status.get('message') or 'no reason given'}"
    if ended := ours.get("terminated"):
        return _container_end(pod.get("metadata") or {}, ended)
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        return f"{_words(scheduled.get('reason') or 'not scheduled')}: {scheduled.get('message') or 'no reason given'}"
    for state in (*states.values(), *(s.get("state") or {} for s in status.get("initContainerStatuses") or ())):
        if waiting := state.get("waiting"):
            return _waiting(pod, waiting)
    return PHASES.get(str(status.get("phase")), "waits for a node")


def _container_end(meta: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    code, message = ended.get("exitCode"), str(ended.get("message") or "")
    if ended.get("reason") == "OOMKilled":
        return "out of memory: its node killed it above the memory limit (K8S_MEMORY)"
    if code == 137:
        return "killed (SIGKILL), by somebody or by its node"
    if code == 0:
        return ""
    # Its output is on its node, not on the claim.
    place = f" --namespace {meta['namespace']}" if meta.get("namespace") else ""
    return f"exit code {code}" + (f" ({message})" if message else "") + f": kubectl logs{place} {meta.get('name')}"


def _waiting(pod: Mapping[str, Any], waiting: Mapping[str, Any]) -> str:
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in STARTING:
        return STARTING[reason]
    if reason in IMAGE:
        containers = (pod.get("spec") or {}).get("containers") or [{}]
        return f"the image {containers[0].get('image')} cannot be pulled: {message or reason}"
    return f"{_words(reason)}: {message}" if message else _words(reason)


def job_end(status: Mapping[str, Any]) -> tuple[str, str]:
    """Return how a Job ended, Complete or Failed, and why; "" if it goes on."""
    for condition in status.get("conditions") or ():
        kind, reason = condition.get("type"), str(condition.get("reason") or "")
        if condition.get("status") == "True" and kind in ("Complete", "Completed", "Failed"):
            message = str(condition.get("message") or "")
            return ("Failed", JOB_ENDS.get(reason) or message or reason) if kind == "Failed" else ("Complete", "")
    return "", ""


def ending(status: Mapping[str, Any]) -> tuple[str, str]:
    """Return Failed, and why, for a Job that has failed and whose pods are being ended; "" for any other."""
    # Since 1.31: https://kubernetes.io/docs/concepts/workloads/controllers/job/#terminal-job-conditions
    return job_end({"conditions": [{**one, "type": "Failed"} for one in _of_kind(status, "FailureTarget")]})


def _of_kind(status: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [one for one in status.get("conditions") or () if one.get("type") == kind]


def has_index(text: str, index: int) -> bool:
    """Return whether a list of indexes such as 0-3,5 has one."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and int(first) <= index <= int(last if last.isdecimal() else first):
            return True
    return False


def open_indexes(job: Object) -> set[int]:
    """Return the indexes of a Job that have not ended."""
    status, spec = job.get("status") or {}, job["spec"]
    if job_end(status)[0] or ending(status)[0]:
        return set()
    ended = [str(status.get(name) or "") for name in ("completedIndexes", "failedIndexes")]
    return {index for index in range(int(spec.get("completions") or 1)) if not any(has_index(t, index) for t in ended)}


def lacks_pods(job: Object, living: int) -> bool:
    """Return whether a Job has fewer pods than it may have. living: the number of its pods that have not ended."""
    if job["spec"].get("suspend"):
        return False
    return living < min(int(job["spec"].get("parallelism") or 1), len(open_indexes(job)))


def _true(condition: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return condition if condition and condition.get("status") == "True" else None


def _words(name: str) -> str:
    """Return a reason of the API as words: CreateContainerConfigError -> create container config error."""
    text = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
    return text or "waits"


def _cut(text: str) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
