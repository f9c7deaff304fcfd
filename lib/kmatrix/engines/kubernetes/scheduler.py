"""Kubernetes as the scheduler of a matrix: what a cluster has, Jobs submitted once, their states, and their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kmatrix.engines.base import Capacity, JobRules, NodeKind, Partition, UnreachableError, node_kinds
from kmatrix.engines.kubernetes.api import CONFLICT, FORBIDDEN, INSTALL, Api, ApiRefusedError
from kmatrix.engines.kubernetes.manifests import (
    APPLICATION,
    JOB_LABEL,
    MOST_TASKS,
    SHARES_NOTE,
    SUBMISSION_LABEL,
    Object,
    base_name,
    job_name,
    job_objects,
    manifests,
)
from kmatrix.engines.kubernetes.patch import patched
from kmatrix.engines.kubernetes.settings import is_below, mib, read_settings
from kmatrix.engines.kubernetes.views import (
    CREATING,
    ENDED,
    PodView,
    gone_view,
    lacks_pods,
    newest,
    open_indexes,
    pod_view,
    share_view,
)
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records.files import write_text
from kmatrix.records.jobs.files import JobView, SubmissionFile
from kmatrix.records.jobs.paths import SubmissionDir
from kmatrix.redaction.redactor import keys_in
from kmatrix.text import plural

MANIFEST = "job.yaml"
HEADER = "# Made by kmatrix: `kubectl apply -f {name}` submits the same. K8S_PATCH changes it (docs/kubernetes.md).\n"
WRITE_MANY = "ReadWriteMany"


class KubernetesScheduler:
    """The Jobs of a matrix in one namespace."""

    name = "Kubernetes"

    def __init__(self, settings: Mapping[str, str], *, api: Api | None = None) -> None:
        """Create a scheduler. settings: symbol -> value, as in engine.json. Raises ConfigError naming a fault."""
        self.settings = read_settings(settings)
        self.api = api or Api(self.settings.context, self.settings.namespace)

    def capacity(self) -> Capacity:
        """Return the nodes that pods may run on, as one partition.

        None if this user may not list nodes, or if nodes are added on demand.
        """
        there = Capacity(kill_s=float(self.settings.grace_s), most_tasks=MOST_TASKS)
        if self.settings.autoscale:
            return there
        labels = ",".join(f"{key}={value}" for key, value in (self.settings.node_selector or {}).items())
        try:
            nodes = [node for node in self.api.nodes(labels) if _is_usable(node)]
        except ApiRefusedError as error:
            if error.code != FORBIDDEN:
                raise
            return there
        return replace(there, partitions=(_partition(nodes, self.settings.gpu_resource),))

    def rules(self) -> JobRules:
        """Return how Jobs are cut from the runs of a matrix. Their times are not limited."""
        known = self.capacity()
        kinds = [kind for one in known.partitions for kind in one.kinds if kind.cpus]
        shares = [(kind.cpus or 1) // kind.gpus for kind in kinds if kind.gpus]
        return JobRules(
            most_tasks=known.most_tasks,
            cpus_per_gpu=max(1, min(shares)) if shares else None,
            cpus_per_node=min((kind.cpus for kind in kinds if kind.cpus), default=None),
            gpus_per_node=max((kind.gpus for kind in kinds), default=0),
        )

    def check(self, submissions: Sequence[SubmissionFile]) -> list[str]:
        """Return why these submissions would be refused, or would never start."""
        found = [*self._claim_problems(submissions), *self._size_problems(submissions)]
        if not found:
            found += self._refusals(submissions)
        return found

    def check_paths(self, paths: Collection[Path]) -> list[str]:
        """Return which of these paths, of results and data, the pods would not see."""
        mount = self.settings.mount
        return [
            f"{path} is not below K8S_MOUNT={mount}: pods see only the claim {self.settings.claim}, which is mounted"
            " there in the pods, and must be here"
            for path in paths
            if not is_below(path, mount)
        ]

    def render(self, folder: SubmissionDir, submission: SubmissionFile) -> dict[str, str]:
        """Return the manifest of a submission. Raises ConfigError if K8S_PATCH cannot be applied."""
        return {MANIFEST: as_yaml(self._objects(folder, submission))}

    def submit(self, folder: SubmissionDir, submission: SubmissionFile, after: Sequence[str] = ()) -> str:
        """Create the objects of a submission, as its job.yaml has them, and return the job.

        Objects that exist count as created, if they are ours: names are made from the label of the submission, so
        that nothing is created twice. Raises LaunchError if one is refused.
        """
        del after  # Kubernetes has no order among Jobs; a share that comes too early finds nothing to do
        objects = self._objects(folder, submission)
        text = as_yaml(objects)
        # What is stored with the results is what runs, even if K8S_PATCH changed since.
        if not folder.manifest.exists() or folder.manifest.read_text(encoding="utf-8") != text:
            write_text(folder.manifest, text)
        owners, services = [], [one for one in objects if one["kind"] == "Service"]
        try:
            for one in objects:
                stored = self._create(one)
                if one["kind"] != "Service":
                    owners.append(_owner(stored))
        except UnreachableError:  # in doubt: the next command finds them
            raise
        except LaunchError:  # such as a quota: without the others, these would wait, and end at once
            made = [(one["kind"], one["name"]) for one in owners]
            for kind, name in [*made, *((one["kind"], one["metadata"]["name"]) for one in services)]:
                with suppress(LaunchError):
                    self.api.delete(kind, name)
            raise
        for one in services:
            with suppress(ApiRefusedError):  # without the permission, an unused Service is left
                self.api.set_owners(one["metadata"]["name"], owners)
        return base_name(submission.label)

    def find(self, labels: Collection[str]) -> Mapping[str, str]:
        """Return label -> job of the submissions whose Jobs are all there."""
        names = {base_name(label): label for label in labels}
        counts: dict[str, int] = {}
        for job in self._jobs(names):
            base = job["metadata"]["labels"][SUBMISSION_LABEL]
            alone = JOB_LABEL not in job["metadata"]["labels"] and job["metadata"]["name"] == base
            wanted = 1 if alone else int(job["metadata"].get("annotations", {}).get(SHARES_NOTE) or 1)
            counts[base] = counts.get(base, -wanted) + 1
        # A submitter that was killed between two Jobs of a submission has to create the others.
        return {names[base]: base for base, missing in counts.items() if base in names and missing >= 0}

    def poll(self, jobs: Mapping[str, str]) -> Mapping[str, JobView]:
        """Return share id -> view, from one list of Jobs and one of pods."""
        bases = {share: _split(job) for share, job in jobs.items()}
        known = {job["metadata"]["name"]: job for job in self._jobs({base for base, _ in bases.values()})}
        chosen = _selector(base for base, _ in bases.values())
        pods = self._with_mounts(newest(view for pod in self.api.pods(chosen) if (view := pod_view(pod))))
        failures = self._failures(known, pods.values())
        nodes: dict[str, list[PodView]] = {}  # Job -> its pods
        for (name, _), pod in pods.items():
            nodes.setdefault(name, []).append(pod)
        found = {}
        for share, job in jobs.items():
            base, task = bases[share]
            own = job_name(base, task)
            if own in known:
                found[share] = share_view(job, known[own], None, pods, failures.get(own, ""))
            elif base in known:
                found[share] = share_view(job, known[base], task, pods, failures.get(base, ""))
            else:
                of_index = [pods[base, task]] if (base, task) in pods else []
                ended = [*nodes.get(own, ()), *of_index]
                found[share] = gone_view(job, ended, has_ttl=self.settings.ttl_s is not None)
        return found

    def cancel(self, jobs: Collection[str], *, now: bool = False) -> None:
        """Delete Jobs; their pods get the grace period to save checkpoints. now: they are killed.

        Shares of one node each are indexes of one Job, which is deleted as a whole. Raises LaunchError, before
        anything is deleted, if that would end others: Kubernetes replaces a pod that is deleted alone.
        """
        wanted = [_split(job) for job in jobs]
        known = {job["metadata"]["name"]: job for job in self._jobs({base for base, _ in wanted})}
        names = {job_name(base, task) if job_name(base, task) in known else base for base, task in wanted}
        for name in sorted(names & set(known)):
            if others := _open_indexes(known[name]) - {task for base, task in wanted if base == name}:
                some = ", ".join(f"{name}_{task}" for task in sorted(others)[:3])
                raise LaunchError(
                    f"cannot cancel a part of the Job {name}",
                    why=f"{some} {'has' if len(others) == 1 else 'have'} not ended, and a Job is deleted as a whole",
                    hint="make hold RUN=<run> stops one run; make stop stops all",
                )
        for name in sorted(names & set(known)):
            self.api.delete(known[name]["kind"], name)
        if now:
            for name in sorted(names):
                self.api.delete_pods(f"{JOB_LABEL}={name}")

    def _objects(self, folder: SubmissionDir, submission: SubmissionFile) -> list[Object]:
        matrix = folder.path.parent.parent
        if problems := self.check_paths([matrix]):
            raise LaunchError(problems[0], hint="set RESULTS_DIR to a folder of the claim (docs/kubernetes.md)")
        found = manifests(self.settings, matrix, folder.number, submission)
        return self._patched(found)

    def _patched(self, objects: list[Object]) -> list[Object]:
        """Return objects with K8S_PATCH applied. Raises ConfigError for a key in it: manifests are stored."""
        if not self.settings.patch:
            return objects
        found = patched(objects, self.settings.patch)
        if kinds := keys_in(as_yaml(found)):
            raise ConfigError(
                f"K8S_PATCH={self.settings.patch} contains a key ({kinds[0]})",
                why="manifests are stored with the results",
                hint="put it into a Secret, and pass K8S_SECRET_NAME=, or refer to it with valueFrom",
            )
        return found

    def _create(self, value: Object) -> Object:
        kind, name = value["kind"], value["metadata"]["name"]
        try:
            return self.api.create(value)
        except ApiRefusedError as error:
            if error.code != CONFLICT:
                raise
        if kind == "Service":
            return value  # equal for every submitter of this submission
        known = self.api.read(kind, name)
        labels = (known or {}).get("metadata", {}).get("labels") or {}
        if known is None or labels.get(SUBMISSION_LABEL) != value["metadata"]["labels"][SUBMISSION_LABEL]:
            raise LaunchError(
                f"a {kind} {name} that is not of this matrix exists in {self.api.place}",
                hint=f"delete it: kubectl delete {kind.lower()} {name}",
            )
        return known

    def _jobs(self, bases: Collection[str]) -> list[Object]:
        """Return the Jobs of submissions."""
        if not bases:
            return []
        chosen = _selector(bases)
        return [{**job, "kind": "Job"} for job in self.api.jobs(chosen)]

    def _failures(self, known: Mapping[str, Object], pods: Iterable[PodView]) -> dict[str, str]:
        """Return Job -> why its pods cannot be created, such as a quota; only asked for if a Job has too few."""
        living = Counter(pod.job for pod in pods if pod.phase not in ENDED)
        if not any(lacks_pods(job, living[name]) for name, job in known.items()):
            return {}
        why = self._events("Job", "FailedCreate")
        short = {name: text for name, text in why.items() if name in known and lacks_pods(known[name], living[name])}
        return {name: f"no pod can be created: {text}" for name, text in short.items()}

    def _with_mounts(self, pods: dict[tuple[str, int], PodView]) -> dict[tuple[str, int], PodView]:
        """Return the pods; one whose container is not created perhaps with the reason: a volume cannot be mounted."""
        if any(pod.reason == CREATING for pod in pods.values()):
            why = self._events("Pod", "FailedMount")
            for key, pod in pods.items():
                if pod.reason == CREATING and pod.name in why:
                    pods[key] = replace(pod, reason=f"a volume cannot be mounted: {why[pod.name]}")
        return pods

    def _events(self, kind: str, reason: str) -> dict[str, str]:
        """Return name of an object -> message of its newest event; none if this user may not list events."""
        found: dict[str, tuple[str, str]] = {}
        with suppress(ApiRefusedError):
            for event in self.api.events(kind, reason):
                name = str((event.get("involvedObject") or {}).get("name"))
                at = str(event.get("lastTimestamp") or event.get("eventTime") or "")
                found[name] = max(found.get(name, ("", "")), (at, str(event.get("message") or "no reason given")))
        return {name: message for name, (_, message) in found.items()}

    def _claim_problems(self, submissions: Sequence[SubmissionFile]) -> list[str]:
        claim = self.settings.claim
        try:
            found = self.api.read("PersistentVolumeClaim", claim)
        except ApiRefusedError as error:
            if error.code == FORBIDDEN:  # this user may not read claims; a pod shows whether it exists
                return []
            raise
        if found is None:
            return [
                f"no PersistentVolumeClaim {claim} in the namespace {self.api.place}: `kubectl get pvc` lists them;"
                " pass K8S_CLAIM="
            ]
        modes = (found.get("spec") or {}).get("accessModes") or []
        pods = sum(one.shape.nodes * len(one.shares) for one in submissions)
        if pods > 1 and WRITE_MANY not in modes:
            return [
                f"the claim {claim} has {', '.join(modes) or 'no access mode'}: {plural(pods, 'pod')} on several nodes"
                f" need {WRITE_MANY}"
            ]
        return []

    def _size_problems(self, submissions: Sequence[SubmissionFile]) -> list[str]:
        partitions = self.capacity().partitions
        if not partitions:
            return []
        there, found = partitions[0], []
        for shape in {one.shape for one in submissions}:
            memory = mib(self.settings.memory) or shape.memory_mib
            pairs = (
                (shape.nodes, there.nodes, "nodes", "NUM_NODES"),
                (shape.gpus_per_node, there.gpus_per_node, "GPUs per node", "NUM_NODES or NUM_GPUS"),
                (memory, there.node_memory_mib, "MiB of memory per node", "K8S_MEMORY"),
                (self.settings.cpus or shape.cpus_per_node, there.cpus_per_node, "CPUs per node", "K8S_CPUS"),
            )
            for wanted, most, what, fix in pairs:
                if wanted and most is not None and wanted > most:
                    found.append(
                        f"{wanted} {what}: the cluster has {most} at most; change {fix}, or set K8S_AUTOSCALE=y if"
                        " nodes are added on demand"
                    )
        return found

    def _refusals(self, submissions: Sequence[SubmissionFile]) -> list[str]:
        """Return what the API server says to Jobs of these shapes, without creating one."""
        found = []
        matrix = Path(self.settings.mount, "kmatrix-check")
        for submission in {one.shape: one for one in submissions}.values():
            objects = self._patched(manifests(self.settings, matrix, 1, submission))
            try:
                self.api.create(job_objects(objects)[0], dry_run=True)
            except ApiRefusedError as error:
                if error.code != CONFLICT:
                    found.append(f"{error.what}: {error.why}")
        return found


def as_yaml(objects: Sequence[Object]) -> str:
    """Return objects as YAML that kubectl takes."""
    try:
        import yaml
    except ImportError:
        raise LaunchError("PyYAML is not installed", why="ENGINE=kubernetes needs it", hint=INSTALL) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  (the signature of the class)
            return True  # anchors are hard to read and to edit

    text: str = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120, explicit_start=True)
    return HEADER.format(name=MANIFEST) + text


def _split(job: str) -> tuple[str, int]:
    """Return the submission and the task of a job such as km-1a2b-1_3; task 0 of a job of one share."""
    base, underscore, task = job.rpartition("_")
    return (base, int(task)) if underscore and task.isdecimal() else (job, 0)


def _open_indexes(job: Object) -> set[int]:
    """Return the indexes of a Job of several shares that have not ended; none for the nodes of one run."""
    alone = job["metadata"]["name"] == job["metadata"]["labels"][SUBMISSION_LABEL]
    return open_indexes(job) if alone else set()


def _selector(bases: Iterable[str]) -> str:
    ours = ",".join(f"{key}={value}" for key, value in APPLICATION.items())
    return f"{ours},{SUBMISSION_LABEL} in ({','.join(sorted(set(bases)))})"


def _owner(stored: Object) -> Object:
    meta = stored["metadata"]
    return {"apiVersion": stored.get("apiVersion", "batch/v1"), "kind": stored.get("kind", "Job"),
            "name": meta["name"], "uid": meta.get("uid", "")}  # fmt: skip


def _is_usable(node: Object) -> bool:
    conditions = {one.get("type"): one.get("status") for one in (node.get("status") or {}).get("conditions") or ()}
    return conditions.get("Ready", "True") == "True" and not (node.get("spec") or {}).get("unschedulable")


def _partition(nodes: Sequence[Object], gpu_resource: str) -> Partition:
    """Return the nodes as one partition: pods go where they fit, so the largest node decides."""
    return Partition(name="nodes", is_default=True, kinds=node_kinds(_node(node, gpu_resource) for node in nodes))


def _node(node: Object, gpu_resource: str) -> NodeKind:
    size = (node.get("status") or {}).get("allocatable") or {}
    labels = (node.get("metadata") or {}).get("labels") or {}
    return NodeKind(
        cpus=_cpus(str(size.get("cpu") or "0")),
        memory_mib=mib(str(size.get("memory") or "")),
        gpus=int(size.get(gpu_resource) or 0),
        gpu_type=str(labels.get("nvidia.com/gpu.product") or ""),
    )


def _cpus(quantity: str) -> int:
    """Return a number of CPUs, such as 15890m, rounded down."""
    return int(quantity[:-1]) // 1000 if quantity.endswith("m") else int(float(quantity or 0))
