"""A fake Kubernetes: an API server on loopback, a controller of Indexed Jobs, and pods that are processes.

    with FakeKubernetes(claim=folder) as cluster:
        environment["KUBECONFIG"] = str(cluster.kubeconfig)

The official client and kubectl talk to it. Objects are checked with the schemas of one version of Kubernetes, and for
what those miss. Jobs have the semantics of the documentation: indexes, replacement of pods when they are gone,
backoffLimit(PerIndex), podFailurePolicy, suspension, deletion with a grace period; pods go to nodes with room, respect
anti-affinity, and wait with the scheduler's message otherwise; a node may be lost, and come back as none. Deadlines and
TTL end and delete Jobs. Requests may fail, as `Fault` says. Without `claim`, no pod is ever started.
Not imitated: users and permissions, admission by Kueue, DNS (a hosts file).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import re
import signal
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate

from fake_pods import PodProcess, PodRoom

Object = dict[str, Any]
NAMESPACE = "ml"
OLD = ("1.29", "1.30")  # a Job has failed before its pods have ended
VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
PLURALS = {
    "pods": "Pod", "services": "Service", "persistentvolumeclaims": "PersistentVolumeClaim", "nodes": "Node",
    "events": "Event", "secrets": "Secret", "jobs": "Job",
}  # fmt: skip
GROUPS = {"batch/v1": ("jobs",)}
CORE = ("pods", "services", "persistentvolumeclaims", "nodes", "events", "secrets")
INDEX = "batch.kubernetes.io/job-completion-index"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
TICK_S = 0.05
BACKOFF_S = 0.3  # before a counted failure is replaced; 10 s and doubling in a real cluster


class InvalidError(Exception):
    """The API server refuses an object."""


class _FaultError(Exception):
    """A request fails as `Fault` says."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request."""

    code: int = 0  # status of the answer, 0: that of the request
    reason: str = ""  # of the Status object
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None  # instead of JSON, such as a page of a proxy
    delay_s: float = 0.0  # before the answer
    cut: bool = False  # the connection ends in the middle of the answer
    lost: bool = False  # the connection ends without an answer
    done: bool = False  # the request is executed nevertheless


@dataclass
class Node:
    """A node of the cluster."""

    name: str
    cpus: int = 16
    memory_mib: int = 65536
    gpus: int = 0


@dataclass
class _Pod:
    """What the kubelet knows of a pod."""

    process: PodProcess | None = None
    kill_at: float | None = None  # monotonic seconds
    oom: bool = False
    is_lost: bool = False  # with its node: the kubelet tells nothing


@dataclass
class _Job:
    """What the controller knows of a Job."""

    failures: dict[int, int] = field(default_factory=dict)  # index -> counted failures; -1: of the whole Job
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)  # pods whose end was handled
    not_before: dict[int, float] = field(default_factory=dict)  # index -> monotonic seconds
    begun: float = field(default_factory=time.monotonic)  # monotonic seconds
    ending: str | None = None  # reason of the condition that follows when all pods have ended; "": complete
    over_at: float | None = None  # monotonic seconds: it has that condition


class FakeKubernetes:
    """A cluster, as a context manager.

    claim: folder of the claim `results`; None starts no pods.  images: image -> checkout that it contains, and the
    folder of its interpreter.  nodes: of the cluster.  caches: seconds for which pods believe what they know about
    files.  secrets: name -> variables.  version: of the schemas.
    """

    def __init__(
        self,
        *,
        claim: Path | None = None,
        images: Mapping[str, tuple[Path, Path]] | None = None,
        nodes: tuple[Node, ...] = (Node("node-a"), Node("node-b")),
        caches: float = 0,
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        version: str = VERSIONS[-1],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.claim, self.images, self.nodes = claim, dict(images or {}), nodes
        self.secrets = {name: dict(values) for name, values in (secrets or {}).items()}
        self.variables = dict(variables or {})  # of every container, as if the image set them
        self.objects: dict[tuple[str, str, str], Object] = {}  # plural, namespace, name
        self.created: list[Object] = []  # as they were sent
        self.requests: list[str] = []  # method and path
        self.refuse_pods = ""  # why no pod may be created, such as a quota
        self.most_pods: int | None = None  # living pods that exist when more are refused; None: none
        self.forbidden: set[str] = set()  # plurals that this user may not list
        self.down = False  # the API server does not answer
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self._version, self._caches = version, caches
        self._lock = threading.RLock()
        self._pods: dict[str, _Pod] = {}
        self._jobs: dict[str, _Job] = {}
        self._numbers = itertools.count(1)
        self._over = threading.Event()
        self._room: PodRoom | None = None
        for node in nodes:
            self._store("nodes", "", _node_object(node))
        self.add_claim("results", "ReadWriteMany")

    def __enter__(self) -> FakeKubernetes:
        self._folder = tempfile.TemporaryDirectory(prefix="kmatrix-k8s-")
        if self.claim is not None:
            self._room = PodRoom(self.claim, caches=self._caches)
        handler = functools.partial(_Handler, self)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True, name="api server").start()
        self._controller = threading.Thread(target=self._control, daemon=True, name="controller")
        self._controller.start()
        self.kubeconfig = Path(self._folder.name, "config")
        self.kubeconfig.write_text(json.dumps(self._config()), encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._controller.join()
        self._server.shutdown()
        self._server.server_close()
        if self._room is not None:
            self._room.close()
        self._folder.cleanup()

    def add_claim(self, name: str, mode: str, *, phase: str = "Bound") -> None:
        """Add a PersistentVolumeClaim."""
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}}
        stored = {**claim, "spec": {"accessModes": [mode]}, "status": {"phase": phase}}
        self._store("persistentvolumeclaims", NAMESPACE, stored)

    def jobs(self) -> list[Object]:
        """Return the Jobs as stored."""
        return self._all("jobs")

    def pods(self, *, live: bool = True) -> list[Object]:
        """Return the pods, in the order of their creation. live: without ended ones."""
        found = self._all("pods")
        return [pod for pod in found if not live or pod["status"]["phase"] in ("Pending", "Running")]

    def process(self, pod: Object) -> PodProcess:
        """Return the process of a running pod."""
        process = self._pods[pod["metadata"]["name"]].process
        assert process is not None, f"{pod['metadata']['name']} was not started"
        return process

    def log(self, pod: Object) -> str:
        """Return the output of a pod so far."""
        known = self._pods.get(pod["metadata"]["name"])
        return known.process.log.read_text(encoding="utf-8", errors="replace") if known and known.process else ""

    def kill(self, pod: Object, *, oom: bool = False) -> None:
        """Kill a pod at once. oom: as the kernel does above the memory limit."""
        with self._lock:
            self._pods[pod["metadata"]["name"]].oom = oom
        self.process(pod).send(signal.SIGKILL)

    def evict(self, pod: Object) -> None:
        """Evict a pod, as `kubectl drain` does: SIGTERM, the grace period, and the condition of a disruption."""
        with self._lock:
            stored = self.objects["pods", NAMESPACE, pod["metadata"]["name"]]
            disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            stored["status"].setdefault("conditions", []).append(disrupted)
            self._terminate(stored)

    def lose(self, name: str) -> None:
        """Cut a node off: its pods die, nobody hears of it, and after a while they are to be deleted."""
        with self._lock:
            disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
            self.nodes = tuple(node for node in self.nodes if node.name != name)
            self.objects["nodes", "", name]["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
            for pod in self._on(name):
                self._pods[pod["metadata"]["name"]].is_lost = True
                pod["status"].setdefault("conditions", []).append(disrupted)
                pod["metadata"]["deletionTimestamp"] = _now()
                self.process(pod).send(signal.SIGKILL)

    def remove(self, name: str) -> None:
        """Remove a lost node from the cluster: its pods have failed, and are deleted."""
        with self._lock:
            del self.objects["nodes", "", name]
            for pod in self._on(name):
                pod["status"]["phase"] = "Failed"

    def _on(self, node: str) -> list[Object]:
        return [
            one
            for (kind, _, _), one in self.objects.items()
            if kind == "pods" and one["spec"].get("nodeName") == node and one["status"]["phase"] == "Running"
        ]

    def end_indexes(self, job: str, *, done: set[int], failed: set[int]) -> None:
        """End indexes of a Job without their pods."""
        with self._lock:
            uid = self.objects["jobs", NAMESPACE, job]["metadata"]["uid"]
            state = self._jobs.setdefault(uid, _Job())
            state.done |= done
            state.failed |= failed

    def report(self) -> str:
        """Return the pods with their states and the ends of their logs, for a test that failed."""
        with self._lock:
            parts = [json.dumps({"jobs": [job.get("status") for job in self.jobs()]})]
            for pod in self.pods(live=False):
                parts.append(f"--- {pod['metadata']['name']} {json.dumps(pod['status'])}\n{self.log(pod)[-3000:]}")
        return "\n".join(parts)

    # The API server

    def create(self, plural: str, namespace: str, value: Object, *, dry_run: bool) -> Object:
        """Check and store an object, and return it as stored. Raises InvalidError; FileExistsError if it is there."""
        check_object(value, self._version, lambda claim: ("persistentvolumeclaims", namespace, claim) in self.objects)
        with self._lock:
            name = value["metadata"]["name"]
            if (plural, namespace, name) in self.objects:
                raise FileExistsError(f'{plural} "{name}" already exists')
            stored = copy.deepcopy(value)
            if dry_run:
                return stored
            self.created.append(copy.deepcopy(value))
            if plural == "pods":
                stored["status"] = {"phase": "Pending"}
                self._pods[name] = _Pod()
            return self._store(plural, namespace, stored)

    def delete(self, plural: str, namespace: str, name: str, options: Mapping[str, Any]) -> Object:
        """Delete an object and what belongs to it. Raises KeyError if there is none."""
        with self._lock:
            found = self.objects[plural, namespace, name]
            if plural == "jobs":
                found["metadata"]["deletionTimestamp"] = _now()
                for pod in self._pods_of(name):
                    self._terminate(pod, options.get("gracePeriodSeconds"))
            elif plural == "pods":
                self._terminate(found, options.get("gracePeriodSeconds"))
            else:
                del self.objects[plural, namespace, name]
            return found

    def list(self, plural: str, namespace: str | None, query: Mapping[str, str]) -> Object:
        """Return a page of the objects that a label selector and simple field selectors choose."""
        with self._lock:
            found = [
                copy.deepcopy(one)
                for (kind, place, _), one in self.objects.items()
                if kind == plural and (namespace is None or place == namespace)
                and _selected(one["metadata"].get("labels") or {}, query.get("labelSelector", ""))
                and _fields_match(one, query.get("fieldSelector", ""))
            ]  # fmt: skip
        first, limit = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(found)
        more = {"continue": str(first + limit)} if first + limit < len(found) else {}
        kind = PLURALS[plural]
        version = found[0].get("apiVersion", "v1") if found else "v1"
        items = [{k: v for k, v in one.items() if k not in ("kind", "apiVersion")} for one in found]
        return {
            "kind": f"{kind}List",
            "apiVersion": version,
            "metadata": {"resourceVersion": "1", **more},
            "items": items[first : first + limit],
        }

    def _store(self, plural: str, namespace: str, value: Object) -> Object:
        number = next(self._numbers)
        place = {"namespace": namespace} if namespace else {}
        value["metadata"].update(place, uid=f"uid-{number}", resourceVersion=str(number), creationTimestamp=_now())
        self.objects[plural, namespace, value["metadata"]["name"]] = value
        return value

    def _all(self, plural: str) -> list[Object]:
        with self._lock:
            return [copy.deepcopy(one) for (kind, _, _), one in self.objects.items() if kind == plural]

    def _config(self) -> Object:
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        context = {"cluster": "fake", "user": "fake", "namespace": NAMESPACE}
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "fake", "preferences": {},
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "fake", "user": {"token": "none"}}],
            "contexts": [{"name": "fake", "context": context}],
        }  # fmt: skip

    # The controller of Jobs

    def _control(self) -> None:
        while not self._over.wait(TICK_S):
            with self._lock:
                for pod in [one for (kind, _, _), one in self.objects.items() if kind == "pods"]:
                    self._watch(pod)
                for (kind, namespace, name), job in list(self.objects.items()):
                    if kind == "jobs":
                        self._advance(namespace, name, job)
                if self._room is not None:
                    for pod in [one for (kind, _, _), one in self.objects.items() if kind == "pods"]:
                        self._schedule(pod)

    def _advance(self, namespace: str, name: str, job: Object) -> None:
        pods = self._pods_of(name)
        if job["metadata"].get("deletionTimestamp"):
            if not any(pod["status"]["phase"] in ("Pending", "Running") for pod in pods):
                for pod in pods:
                    self.objects.pop(("pods", namespace, pod["metadata"]["name"]), None)
                self._delete_owned(job)
                del self.objects["jobs", namespace, name]
            return
        state, spec = self._jobs.setdefault(job["metadata"]["uid"], _Job()), job["spec"]
        for pod in pods:
            if pod["status"]["phase"] in ("Succeeded", "Failed") and pod["metadata"]["name"] not in state.counted:
                state.counted.add(pod["metadata"]["name"])
                self._count(job, state, pod)
        live = [_index(pod) for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        status = job.setdefault("status", {"startTime": _now()})
        status.update(active=len(live), succeeded=len(state.done), failed=sum(state.failures.values()))
        status.update(completedIndexes=_ranges(state.done), failedIndexes=_ranges(state.failed))
        if not status["failedIndexes"]:
            del status["failedIndexes"]
        if self._ends(namespace, job, state, is_live=bool(live)) or spec.get("suspend"):
            return
        for index in range(spec["completions"]):
            wanted = index not in state.done | state.failed and index not in live
            if wanted and len(live) < spec["parallelism"] and time.monotonic() >= state.not_before.get(index, 0):
                if not self._create_pod(namespace, job, index):
                    return
                live.append(index)

    def _ends(self, namespace: str, job: Object, state: _Job, *, is_live: bool) -> bool:
        """End a Job whose time has come, or delete it some time after its end; return whether it makes no more pods."""
        spec = job["spec"]
        if _is_over(job):
            ttl, since = spec.get("ttlSecondsAfterFinished"), state.over_at
            if ttl is not None and since is not None and time.monotonic() - since >= ttl:
                self.delete("jobs", namespace, job["metadata"]["name"], {})
        elif state.ending is not None:
            if not is_live:
                self._add_end(job, state)
        elif "activeDeadlineSeconds" in spec and time.monotonic() - state.begun >= spec["activeDeadlineSeconds"]:
            self._finish(job, "DeadlineExceeded")
        elif len(state.done) + len(state.failed) == spec["completions"]:
            self._finish(job, "FailedIndexes" if state.failed else "")
        else:
            return False
        return True

    def _count(self, job: Object, state: _Job, pod: Object) -> None:
        """Apply the end of a pod: https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy."""
        index, spec = _index(pod), job["spec"]
        if pod["status"]["phase"] == "Succeeded":
            state.done.add(index)
            return
        action = next((rule["action"] for rule in _rules(spec) if _fits(rule, pod)), "Count")
        if action == "Ignore":
            return
        if action == "FailJob":
            self._finish(job, "PodFailurePolicy")
            return
        if action == "FailIndex":
            state.failed.add(index)
            return
        per_index = spec.get("backoffLimitPerIndex")
        key = -1 if per_index is None else index
        state.failures[key] = state.failures.get(key, 0) + 1
        state.not_before[index] = time.monotonic() + BACKOFF_S
        if per_index is not None and state.failures[key] > per_index:
            state.failed.add(index)
        elif per_index is None and state.failures[key] > spec.get("backoffLimit", 6):
            self._finish(job, "BackoffLimitExceeded")

    def _finish(self, job: Object, failure: str) -> None:
        """End a Job: its pods are to end, and it has ended when they have; before 1.31, at once.

        https://kubernetes.io/docs/concepts/workloads/controllers/job/#terminal-job-conditions
        """
        state = self._jobs[job["metadata"]["uid"]]
        if state.ending is None:
            state.ending = failure
            if self._version in OLD:
                self._add_end(job, state)
            else:
                _add_condition(job, "FailureTarget" if failure else "SuccessCriteriaMet", failure)
        for pod in self._pods_of(job["metadata"]["name"]):
            self._terminate(pod)

    def _add_end(self, job: Object, state: _Job) -> None:
        _add_condition(job, "Failed" if state.ending else "Complete", state.ending or "")
        state.over_at = time.monotonic()

    def _create_pod(self, namespace: str, job: Object, index: int) -> bool:
        name, refused = job["metadata"]["name"], self.refuse_pods
        if self.most_pods is not None and len(self.pods()) >= self.most_pods:
            refused = (
                f"exceeded quota: team, requested: pods=1, used: pods={self.most_pods}, limited: pods={self.most_pods}"
            )
        if refused:
            key = ("events", namespace, f"{name}.refused")
            about = {"kind": "Job", "name": name, "namespace": namespace}
            event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": key[2]}, "involvedObject": about}
            if key not in self.objects:
                message = f'Error creating: pods "{name}-{index}-x" is forbidden: {refused}'
                self._store(
                    "events", namespace, {**event, "reason": "FailedCreate", "type": "Warning", "message": message}
                )
            return False
        template = copy.deepcopy(job["spec"]["template"])
        labels = {**template["metadata"].get("labels", {}), INDEX: str(index), "job-name": name}
        labels["batch.kubernetes.io/job-name"] = name
        pod = {
            "apiVersion": "v1", "kind": "Pod", "spec": {**template["spec"], "hostname": f"{name}-{index}"},
            "metadata": {"name": f"{name}-{index}-{next(self._numbers):05x}", "labels": labels,
                         "annotations": {INDEX: str(index)}},
            "status": {"phase": "Pending"},
        }  # fmt: skip
        self._store("pods", namespace, pod)
        self._pods[pod["metadata"]["name"]] = _Pod()
        return True

    def _pods_of(self, job: str) -> list[Object]:
        return [
            one
            for (kind, _, _), one in self.objects.items()
            if kind == "pods" and one["metadata"].get("labels", {}).get("job-name") == job
        ]

    def _delete_owned(self, job: Object) -> None:
        """Collect what had this Job as its last owner."""
        uid = job["metadata"]["uid"]
        for key, one in list(self.objects.items()):
            owners = one["metadata"].get("ownerReferences") or []
            left = [owner for owner in owners if owner["uid"] != uid]
            if owners and not left:
                del self.objects[key]
            elif owners:
                one["metadata"]["ownerReferences"] = left

    # Scheduler and kubelet

    def _schedule(self, pod: Object) -> None:
        """Give a pod a node with room, and start it there; or say why it waits."""
        name, spec, status = pod["metadata"]["name"], pod["spec"], pod["status"]
        if status["phase"] != "Pending" or pod["metadata"].get("deletionTimestamp"):
            return
        container = spec["containers"][0]
        if "nodeName" not in spec:
            node, message = self._place(pod)
            if node is None:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                status["conditions"] = [condition]
                return
            spec["nodeName"] = node
            status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        reason = message = ""
        if container["image"] not in self.images:
            reason, message = "ImagePullBackOff", f'Back-off pulling image "{container["image"]}"'
        missing = [one for one in _secret_names(container) if one not in self.secrets]
        if missing:
            reason, message = "CreateContainerConfigError", f'secret "{missing[0]}" not found'
        if reason:
            waiting = {"waiting": {"reason": reason, "message": message}}
            status["containerStatuses"] = [_container_status(container, waiting)]
            return
        self._pods[name].process = self._start(pod)
        status["phase"] = "Running"
        status["containerStatuses"] = [_container_status(container, {"running": {"startedAt": _now()}})]

    def _place(self, pod: Object) -> tuple[str | None, str]:
        """Return a node for a pod, or the message of the scheduler."""
        claims = [one.get("persistentVolumeClaim", {}).get("claimName") for one in pod["spec"].get("volumes", [])]
        stored = [self.objects["persistentvolumeclaims", NAMESPACE, claim] for claim in claims if claim]
        if any(one["status"]["phase"] != "Bound" for one in stored):
            return None, f"0/{len(self.nodes)} nodes are available: pod has unbound immediate PersistentVolumeClaims."
        wanted, problems = _needs(pod), []
        for node in self.nodes:
            others = [
                one
                for (kind, _, _), one in self.objects.items()
                if kind == "pods" and one["spec"].get("nodeName") == node.name and one["status"]["phase"] == "Running"
            ]
            used = [sum(needs) for needs in zip(*map(_needs, others), strict=True)] or [0, 0, 0]
            free = [node.cpus - used[0], node.memory_mib - used[1], node.gpus - used[2]]
            names = ("cpu", "memory", "nvidia.com/gpu")
            short = [what for what, need, left in zip(names, wanted, free, strict=True) if need > left]
            if short:
                problems.append(f"Insufficient {short[0]}")
            elif any(_avoids(pod, other) for other in others):
                problems.append("node(s) didn't match pod anti-affinity rules")
            else:
                return node.name, ""
        counted = ", ".join(f"{problems.count(one)} {one}" for one in dict.fromkeys(problems))
        return None, f"0/{len(self.nodes)} nodes are available: {counted}."

    def _start(self, pod: Object) -> PodProcess:
        assert self._room is not None
        container, spec = pod["spec"]["containers"][0], pod["spec"]
        checkout, interpreters = self.images[container["image"]]
        environment = {
            "PATH": f"{interpreters}:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": f"{checkout / 'lib'}:{checkout}",
            "HOME": "/tmp",
            INDEX_VARIABLE: str(_index(pod)),
            **self.variables,
        }
        for entry in container.get("envFrom", []):
            environment |= self.secrets[entry["secretRef"]["name"]]
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            facts = {"spec.nodeName": spec["nodeName"], "metadata.name": pod["metadata"]["name"]}
            environment[entry["name"]] = expanded(entry["value"], environment) if "value" in entry else facts[source]
        host = spec["hostname"]
        mount = next(one for one in container["volumeMounts"] if one["name"] == "results")
        return self._room.start(
            host,
            [expanded(word, environment) for word in container["command"]],
            names=(host, f"{host}.{spec.get('subdomain', host)}"),
            mount=mount["mountPath"],
            environment=environment,
            folder=Path(container.get("workingDir") or checkout),
        )

    def _watch(self, pod: Object) -> None:
        known, status = self._pods.get(pod["metadata"]["name"], _Pod()), pod["status"]
        if known.process is None or status["phase"] != "Running" or known.is_lost:
            return
        if known.kill_at is not None and time.monotonic() > known.kill_at:
            known.process.send(signal.SIGKILL)
        code = known.process.exit_code()
        if code is None:
            return
        status["phase"] = "Failed" if code else "Succeeded"
        reason = "OOMKilled" if known.oom else "Error" if code else "Completed"
        ended = {"terminated": {"exitCode": code, "reason": reason}}
        status["containerStatuses"] = [_container_status(pod["spec"]["containers"][0], ended)]

    def _terminate(self, pod: Object, grace: int | None = None) -> None:
        name = pod["metadata"]["name"]
        if pod["status"]["phase"] not in ("Pending", "Running"):
            return
        pod["metadata"]["deletionTimestamp"] = _now()
        known = self._pods[name]
        if known.process is None:
            pod["status"]["phase"] = "Failed"
            return
        limit = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
        known.process.send(signal.SIGTERM if limit else signal.SIGKILL)
        known.kill_at = time.monotonic() + limit


INDEX_VARIABLE = "JOB_COMPLETION_INDEX"


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a text of a command or a variable as a container gets it: $(NAME) is replaced, and $$ is a $.

    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
    """
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda one: "$" if one[0] == "$$" else variables.get(one[1], one[0]), text)


def check_object(value: Object, version: str, has_claim: Callable[[str], bool]) -> None:
    """Raise InvalidError for what a real API server refuses: by its schemas, and by its rules that no schema has."""
    try:
        kubernetes_validate.validate(value, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise InvalidError(f"{'.'.join(map(str, error.path))}: {error.message}") from None
    name = value["metadata"]["name"]
    if not NAME.fullmatch(name) or len(name) > 63:
        raise InvalidError(f"metadata.name: {name!r} is not a DNS label")
    for labels in _all_labels(value):
        for key, text in labels.items():
            if not LABEL.fullmatch(text) or not LABEL.fullmatch(key.rpartition("/")[2]):
                raise InvalidError(f"labels: {key}={text} is invalid")
    if value["kind"] == "Job":
        _check_job(name, value["spec"], has_claim)


def _check_job(name: str, spec: Object, has_claim: Callable[[str], bool]) -> None:
    pod, policy = spec["template"]["spec"], spec.get("podFailurePolicy")
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        raise InvalidError("spec.template.spec.restartPolicy: expected Never or OnFailure")
    if spec.get("completionMode") != "Indexed":
        raise InvalidError("spec.completionMode: the test expects Indexed")
    if not 0 < spec["parallelism"] <= spec["completions"] <= 100_000:
        raise InvalidError(f"parallelism {spec['parallelism']} of {spec['completions']} completions")
    if len(f"{name}-{spec['completions'] - 1}") > 63:
        raise InvalidError(f"{name}: the host names of its pods are too long")
    containers = {one["name"] for one in pod["containers"]}
    for rule in (policy or {}).get("rules", ()):
        codes = rule.get("onExitCodes")
        if pod["restartPolicy"] != "Never" or (
            codes and codes.get("containerName", next(iter(containers))) not in containers
        ):
            raise InvalidError("podFailurePolicy: needs restartPolicy Never and a container of the pod")
        if codes and (0 in codes["values"] or sorted(codes["values"]) != codes["values"]):
            raise InvalidError("podFailurePolicy: exit codes in order, without 0")
        if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in spec:
            raise InvalidError("FailIndex needs backoffLimitPerIndex")
    if spec.get("podReplacementPolicy", "Failed") != "Failed" and policy:
        raise InvalidError("podReplacementPolicy: Failed is the only one with a podFailurePolicy")
    if pod.get("subdomain") and not NAME.fullmatch(pod["subdomain"]):
        raise InvalidError(f"subdomain: {pod['subdomain']!r} is not a DNS label")
    _check_pod(pod, has_claim)


def _check_pod(pod: Object, has_claim: Callable[[str], bool]) -> None:
    volumes = {one["name"]: one for one in pod.get("volumes", [])}
    if len(volumes) != len(pod.get("volumes", [])):
        raise InvalidError("volumes: duplicate name")
    for one in volumes.values():
        claim = one.get("persistentVolumeClaim", {}).get("claimName")
        if claim and not has_claim(claim):
            raise InvalidError(f'persistentvolumeclaim "{claim}" not found')
    for container in pod["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                raise InvalidError(f"volumeMounts: no volume {mount['name']}")
        limits, requests = (container.get("resources", {}).get(name, {}) for name in ("limits", "requests"))
        for name, size in requests.items():
            if name in limits and _amount(size) > _amount(limits[name]):
                raise InvalidError(f"resources: request of {name} above its limit")


class _Handler(BaseHTTPRequestHandler):
    """A connection to the API server."""

    protocol_version = "HTTP/1.1"

    def __init__(self, cluster: FakeKubernetes, *arguments: Any) -> None:
        self.cluster = cluster
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.cluster.requests.append(f"{method} {self.path}")
        if self.cluster.down:
            self.close_connection = True
            return
        fault = self.cluster.fault(method, self.path) or Fault()
        time.sleep(fault.delay_s)
        url = urllib.parse.urlsplit(self.path)
        query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
        try:
            if (fault.code or fault.lost) and not fault.done:
                raise _FaultError
            code, value = self._result(method, url.path.strip("/").split("/"), query, json.loads(body) if body else {})
        except _FaultError:
            code, value = fault.code, _status(fault.code, fault.reason, fault.message)
        except InvalidError as error:
            code, value = 422, _status(422, "Invalid", str(error))
        except FileExistsError as error:
            code, value = 409, _status(409, "AlreadyExists", str(error))
        except PermissionError as error:
            code, value = 403, _status(403, "Forbidden", str(error))
        except KeyError as error:
            code, value = 404, _status(404, "NotFound", f"{error} not found")
        if fault.lost:
            self.close_connection = True
            return
        text = (json.dumps(value) if fault.body is None else fault.body).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(fault.code or code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            for name, header in fault.headers.items():
                self.send_header(name, header)
            self.end_headers()
            self.wfile.write(text[: len(text) // 2] if fault.cut else text)
        self.close_connection = self.close_connection or fault.cut

    def _result(self, method: str, parts: list[str], query: Mapping[str, str], body: Any) -> tuple[int, Object]:
        if method == "GET" and (found := _discovery(parts)) is not None:
            return 200, found
        rest = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
        namespace = rest[1] if rest[:1] == ["namespaces"] else None
        plural, *names = (rest[2:] if namespace else rest) or ["namespaces"]
        if plural not in PLURALS:
            raise KeyError("/".join(parts))
        cluster = self.cluster
        if plural in cluster.forbidden:
            raise PermissionError(f'{plural} is forbidden: User "fake" cannot list resource "{plural}"')
        if method == "POST":
            return 201, cluster.create(plural, namespace or "", body, dry_run=query.get("dryRun") == "All")
        if method == "DELETE" and not names:
            for one in cluster.list(plural, namespace, query)["items"]:
                cluster.delete(plural, namespace or "", one["metadata"]["name"], {**body, **_grace(query)})
            return 200, _status(200, "", "")
        if method == "DELETE":
            return 200, cluster.delete(plural, namespace or "", names[0], {**body, **_grace(query)})
        if method == "GET" and not names:
            return 200, cluster.list(plural, namespace, query)
        stored = cluster.objects[plural, namespace or "", names[0]]
        if method == "PATCH":
            stored["metadata"].update(body.get("metadata") or {})
        return 200, stored


def _discovery(parts: list[str]) -> Object | None:
    """Return what kubectl asks for first: which groups and resources there are."""
    if parts == ["version"]:
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        versions = [
            (group.partition("/")[0], {"groupVersion": group, "version": group.partition("/")[2]}) for group in GROUPS
        ]
        groups = [{"name": name, "versions": [one], "preferredVersion": one} for name, one in versions]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    group = "v1" if parts == ["api", "v1"] else "/".join(parts[1:]) if parts[0] == "apis" and len(parts) == 3 else ""
    names = CORE if group == "v1" else GROUPS.get(group)
    if names is None:
        return None
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch"]
    found = [
        {"name": name, "singularName": "", "namespaced": name != "nodes", "kind": PLURALS[name], "verbs": verbs}
        for name in names
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": found}


def _grace(query: Mapping[str, str]) -> dict[str, int]:
    text = query.get("gracePeriodSeconds")
    return {"gracePeriodSeconds": int(text)} if text is not None else {}


def _status(code: int, reason: str, message: str) -> Object:
    status = "Success" if code < 300 else "Failure"
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": status,
        "reason": reason,
        "message": message,
        "code": code,
    }


def _selected(labels: Mapping[str, str], selector: str) -> bool:
    for one in re.split(r",(?![^(]*\))", selector) if selector else ():
        if match := re.fullmatch(r"\s*(\S+) in \(([^)]*)\)\s*", one):
            if labels.get(match[1]) not in match[2].split(","):
                return False
        else:
            key, _, text = one.partition("=")
            if labels.get(key.strip()) != text.lstrip("="):
                return False
    return True


def _fields_match(one: Object, selector: str) -> bool:
    for part in selector.split(",") if selector else ():
        path, _, text = part.partition("=")
        value: Any = one
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value != text:
            return False
    return True


def _all_labels(value: Any) -> Iterator[Mapping[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("labels", "matchLabels", "nodeSelector"):
                yield inner
            else:
                yield from _all_labels(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _all_labels(inner)


def _rules(spec: Object) -> list[Object]:
    return spec.get("podFailurePolicy", {}).get("rules", [])


def _fits(rule: Object, pod: Object) -> bool:
    """Return whether a rule of a podFailurePolicy is about this end of a pod."""
    conditions = {(one["type"], one["status"]) for one in pod["status"].get("conditions", [])}
    if any((one["type"], one["status"]) in conditions for one in rule.get("onPodConditions", [])):
        return True
    codes = rule.get("onExitCodes")
    states = pod["status"].get("containerStatuses", [])
    code = next((s["state"]["terminated"]["exitCode"] for s in states if "terminated" in s["state"]), None)
    if not codes or not code:
        return False
    return (code in codes["values"]) == (codes["operator"] == "In")


def _add_condition(job: Object, kind: str, reason: str) -> None:
    condition = {"type": kind, "status": "True", "reason": reason or "CompletionsReached"}
    job.setdefault("status", {}).setdefault("conditions", []).append(condition)


def _is_over(job: Object) -> bool:
    return any(one["type"] in ("Complete", "Failed") for one in job.get("status", {}).get("conditions", []))


def _index(pod: Object) -> int:
    return int(pod["metadata"]["labels"][INDEX])


def _ranges(indexes: set[int]) -> str:
    """Return indexes as a Job's status has them: 0-2,5."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(indexes)), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in group]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(parts)


def _needs(pod: Object) -> tuple[float, float, float]:
    """Return the CPUs, MiB and GPUs that a pod asks for."""
    sizes = pod["spec"]["containers"][0].get("resources", {})
    both = {**sizes.get("limits", {}), **sizes.get("requests", {})}
    return (
        _amount(both.get("cpu", "0")),
        _amount(both.get("memory", "0")) / 2**20,
        _amount(both.get("nvidia.com/gpu", "0")),
    )


def _amount(text: str) -> float:
    units = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text))
    assert match, text
    return float(match[1]) * units[match[2]]


def _avoids(pod: Object, other: Object) -> bool:
    """Return whether a pod must not share a host with another one."""
    terms = pod["spec"].get("affinity", {}).get("podAntiAffinity", {})
    wanted = terms.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    labels = other["metadata"].get("labels", {}).items()
    return any(one["labelSelector"]["matchLabels"].items() <= labels for one in wanted)


def _secret_names(container: Object) -> list[str]:
    entries = [one.get("secretRef", {}) for one in container.get("envFrom", [])]
    return [one["name"] for one in entries if one.get("name") and not one.get("optional")]


def _container_status(container: Object, state: Object) -> Object:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": "running" in state,
        "restartCount": 0,
        "state": state,
    }


def _node_object(node: Node) -> Object:
    sizes = {"cpu": str(node.cpus), "memory": f"{node.memory_mib * 1024}Ki", "pods": "110"}
    sizes |= {"nvidia.com/gpu": str(node.gpus)} if node.gpus else {}
    ready = {"type": "Ready", "status": "True"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {"kubernetes.io/hostname": node.name}},
        "spec": {},
        "status": {"allocatable": sizes, "conditions": [ready]},
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
