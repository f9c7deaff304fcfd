"""Kubernetes as a scheduler: Indexed Jobs, by kubectl, which knows kubeconfig files, log-in programs and retries.

Jobs on one node are the indexes of one Job of Kubernetes; a run over several nodes has one of its own, whose pods are
its nodes.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from kmatrix.engines.jobs import content_of, template
from kmatrix.engines.ports import Batch, Phase, Seen, Shape, UnreachableError
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.redaction.redactor import keys_in
from kmatrix.text import printable

ASK_S = 60.0
LONGEST = 300  # characters of a reason: that of a pod without a node names each reason of each node
LIVE = ("Running", "Unknown")  # phases of a pod whose processes may live
# Of a Job that has ended, or whose pods are being ended: kubernetes.io/docs/concepts/workloads/controllers/job
OVER = ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")
IDENTITY = {  # what a patch cannot change -> where it is in a Job
    "the name of the Job": "{.metadata.name} {.metadata.namespace}",
    "labels": "{.metadata.labels.kmatrix} {.metadata.labels.kmatrix-nodes} {.spec.template.metadata.labels.kmatrix}",
    "completions": "{.spec.completions} {.spec.completionMode}",
    "podReplacementPolicy": "{.spec.podReplacementPolicy}",
    "the grace period": "{.spec.template.spec.terminationGracePeriodSeconds}",
    "the command": '{.spec.template.spec.containers[?(@.name=="kmatrix")].command}',
}
NO_ANSWER = re.compile(  # of a kubectl that did not reach the API server, or got no answer
    r"unable to connect|connection to the server|dial tcp|connection re(fused|set)|no route|time(d )?out|EOF|etcd"
    r"|deadline exceeded|TLS handshake|ServiceUnavailable|TooManyRequests|InternalError|currently unable",
    re.IGNORECASE,
)


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, rename=lambda name: f"K8S_{name.upper()}"):
    """How Jobs are made: the symbols K8S_*, and PARALLEL_JOBS. Empty: not set."""

    image: str = ""
    claim: str = ""  # PersistentVolumeClaim with results and data
    mount: str = ""  # absolute path of the claim, the same in the pods as here
    secret_name: str = ""  # its entries become variables
    context: str = ""  # of the kubeconfig; "": the current one
    namespace: str = ""  # "": that of the context
    queue: str = ""  # LocalQueue of Kueue
    memory: str = ""  # quantity, per pod; "": as planned
    gpu_resource: str = "nvidia.com/gpu"
    user: str = ""  # numbers: user, or user:group; "": that of the image
    grace: int = 90  # s, from SIGTERM to SIGKILL
    patch: str = ""  # path of a strategic merge patch
    parallel: int = msgspec.field(default=0, name="PARALLEL_JOBS")  # pods of a Job at a time; 0: all


def read_settings(symbols: Mapping[str, str]) -> KubernetesSettings:
    """Return the settings. symbols: symbol -> value, whose form Kconfig has checked. Raises ConfigError."""
    texts = {name: text for name, value in symbols.items() if (text := value.strip())}
    needed = {"K8S_IMAGE": "container image", "K8S_CLAIM": "PersistentVolumeClaim", "K8S_MOUNT": "path of the claim"}
    for name in (name for name in needed if name not in texts):
        hint = f"pass {name}=, or run `make menuconfig`, menu Kubernetes"
        raise ConfigError(f"ENGINE=kubernetes needs {name}, the {needed[name]}", hint=hint)
    return msgspec.convert(texts, KubernetesSettings, strict=False)


class Part(msgspec.Struct, frozen=True, rename="camel"):
    """A part of an answer. Other members are ignored; missing ones have defaults."""


class Words(Part, frozen=True):  # a condition, or the state of a container
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    exit_code: int = 0

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}".strip(": ")


class Container(Part, frozen=True):
    name: str = ""
    state: dict[str, Words] = {}  # waiting, running or terminated


class Status(Words, frozen=True):
    phase: str = ""
    conditions: tuple[Words, ...] = ()
    init_container_statuses: tuple[Container, ...] = ()
    container_statuses: tuple[Container, ...] = ()
    completed_indexes: str = ""
    failed_indexes: str = ""


class Meta(Part, frozen=True):
    name: str
    namespace: str = ""
    labels: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str = ""


class Spec(Part, frozen=True):  # of a Job, or of a pod
    completions: int = 1
    suspend: bool = False
    node_name: str = ""


class Item(Part, frozen=True):
    kind: str
    metadata: Meta
    spec: Spec = Spec()
    status: Status = Status()


class Answer(Part, frozen=True):
    items: tuple[Item, ...] = ()


@dataclass(slots=True)
class Kubernetes:
    """One namespace of a cluster. It fulfils `ports.Scheduler`, and its reasons are Kubernetes' own words."""

    settings: KubernetesSettings
    run: Callable[..., subprocess.CompletedProcess[str]] = field(default=subprocess.run, repr=False)
    name: str = "Kubernetes"
    most: int = 1000
    most_wide: int = 1

    @property
    def last(self) -> Shape:
        return Shape()

    @property
    def whole_node(self) -> Shape | None:
        return None

    def fit(self, planned: Shape) -> Shape:
        """Return what the pods of a run ask for: no time limit. See the port."""
        return replace(planned, seconds=None)

    def check_paths(self, paths: Iterable[Path]) -> Iterator[LaunchError]:
        """Yield which of these paths, of results and data, the pods would not see."""
        mount, claim = self.settings.mount, self.settings.claim
        why = f"pods see only the claim {claim}, which has to be mounted there on this machine, too"
        hint = "set RESULTS_DIR and DATA_DIR to folders of the claim (docs/kubernetes.md)"
        outside = (path for path in paths if not path.is_relative_to(mount))
        yield from (LaunchError(f"{path} is not below K8S_MOUNT={mount}", why=why, hint=hint) for path in outside)

    def check(self, shapes: Sequence[Shape]) -> Iterator[LaunchError]:
        """Yield what the API server says against Jobs of these shapes: quotas, policies and fields. See the port."""
        folder = Path(self.settings.mount, "check/jobs/0000")
        for shape in shapes:
            try:
                text = self.script(Batch(folder=folder, label="km-check", shape=shape, runs=("check",)))[1]
                self._kubectl("create", "--dry-run=server", "--validate=strict", "--filename=-", text=text)
            except UnreachableError:
                raise
            except LaunchError as error:
                yield error

    def script(self, batch: Batch) -> tuple[str, str]:
        """Return the name and the text of a manifest. Raises LaunchError for a path or a patch that it cannot have."""
        if problem := next(self.check_paths([batch.folder]), None):
            raise problem
        if not str(batch.folder).isprintable():  # a line break would end a comment
            raise LaunchError(f"{str(batch.folder)!a} cannot be in a manifest", hint="use another path")
        settings, shape = self.settings, batch.shape
        folder = str(batch.folder).replace("$", "$$")  # Kubernetes replaces $(NAME)
        index = "0" if shape.nodes > 1 else "$(JOB_COMPLETION_INDEX)"
        memory = settings.memory or (f"{shape.memory_mib}Mi" if shape.memory_mib else "")
        words = ["last", "--wait", folder] if batch.is_last else ["run", "--jobs", folder, index]
        text: str = template("job.yaml.j2").render(
            batch=batch,
            settings=settings,
            content=content_of(batch),
            several=shape.nodes > 1,
            pods=shape.nodes if shape.nodes > 1 else max(1, len(batch.runs)),
            command=["python", "-m", "kmatrix", *words],
            limits=({"memory": memory} if memory else {}) | ({settings.gpu_resource: shape.gpus} if shape.gpus else {}),
            user=settings.user.split(":"),
        )
        return "job.yaml", self._patched(text) if settings.patch else text

    def submit(self, batch: Batch, after: Sequence[str] = ()) -> str:
        """Create the Job of a batch; return its name. See the port."""
        del after  # Kubernetes has no order of Jobs: the last one waits for the files of the runs
        try:
            self._kubectl("create", f"--filename={batch.folder}/job.yaml")
        except LaunchError as error:
            if "(AlreadyExists)" not in error.why:  # the answer to an earlier try was lost
                raise
        return batch.name

    def poll(self, label: str) -> list[Seen]:
        """Return the jobs of a matrix, one per index, also of pods whose Job was deleted. See the port."""
        out = self._kubectl("get", "jobs,pods", f"--selector=kmatrix={label}", "--output=json")
        try:
            items = msgspec.json.decode(out, type=Answer).items
        except msgspec.MsgspecError as error:
            raise UnreachableError("kubectl get printed no list of Jobs and pods", why=str(error)) from None
        jobs = {item.metadata.name: item for item in items if item.kind == "Job"}
        pods: dict[str, dict[int, list[Item]]] = {name: {} for name in jobs}  # Job -> index -> the newest pod last
        for pod in sorted(items, key=lambda item: (item.metadata.creation_timestamp, item.status.phase in LIVE)):
            known = pod.metadata.labels
            name, index = (known.get(f"batch.kubernetes.io/job-{what}", "") for what in ("name", "completion-index"))
            if pod.kind == "Pod" and index.isdecimal():
                pods.setdefault(name, {}).setdefault(int(index), []).append(pod)
        ours = sorted(name for name in pods if re.fullmatch(rf"{label}-\d+", name))
        return [one for name in ours for one in _seen(name, jobs.get(name), pods[name])]

    def cancel(self, jobs: Sequence[str]) -> None:
        """Delete Jobs: their pods get the grace period. The indexes of one Job are cancelled together. See the port."""
        if names := dict.fromkeys(job.partition("/")[0] for job in jobs):
            self._kubectl("delete", "jobs", *names, "--cascade=foreground", "--wait=false", "--ignore-not-found")

    def _patched(self, text: str) -> str:
        """Return a manifest with K8S_PATCH, as `kubectl patch` merges it. Raises LaunchError."""
        patch = self.settings.patch
        words = ("patch", "--local", "--type=strategic", "--filename=-")
        given, facts = f"--patch-file={patch}", "--output=jsonpath=" + '{"\\n"}'.join(IDENTITY.values())
        found = self._kubectl(*words, given, "--output=yaml", text=text)
        before, after = (self._kubectl(*words, one, facts, text=text).split("\n") for one in ("--patch={}", given))
        if changed := next((name for name, was, now in zip(IDENTITY, before, after, strict=True) if was != now), None):
            why = "jobs are found, started and stopped by it"
            raise LaunchError(f"K8S_PATCH={patch} changes {changed}", why=why, hint="remove it from the file")
        if kinds := keys_in(found):
            why, hint = "manifests are stored with the results", "put it into a Secret, and pass K8S_SECRET_NAME="
            raise LaunchError(f"K8S_PATCH={patch} contains a key ({kinds[0]})", why=why, hint=hint)
        return found

    def _kubectl(self, *words: str, text: str = "") -> str:
        """Return what kubectl prints. Raises UnreachableError, or LaunchError if it refuses a manifest or a patch."""
        place = {"context": self.settings.context, "namespace": self.settings.namespace}
        flags = [f"--{name}={value}" for name, value in place.items() if value and words[0] != "patch"]
        options: dict[str, Any] = {"input": text, "capture_output": True, "encoding": "utf-8", "errors": "replace"}
        try:
            done = self.run(["kubectl", *flags, *words], check=False, timeout=ASK_S, **options)
        except FileNotFoundError:
            why, hint = "ENGINE=kubernetes needs it", "install it: https://kubernetes.io/docs/tasks/tools"
            raise LaunchError("kubectl not found", why=why, hint=hint) from None
        except subprocess.TimeoutExpired:
            raise _silence(f"kubectl {words[0]} has not ended after {ASK_S:.0f} s") from None
        if done.returncode == 0:
            return done.stdout
        why = _words_of(done)
        if words[0] == "patch":
            raise LaunchError(f"K8S_PATCH={self.settings.patch} cannot be applied", why=why, hint="correct the file")
        if words[0] == "create" and not NO_ANSWER.search(why):
            hint = "check the K8S_ settings, and `kubectl auth can-i create jobs`"
            raise LaunchError("Kubernetes refuses the Job", why=why, hint=hint)
        raise _silence(why)


def _seen(name: str, job: Item | None, pods: Mapping[int, list[Item]]) -> Iterator[Seen]:
    """Yield the jobs of a Job: of each index, or of all together for the nodes of one run. job: None if deleted."""
    labels = (job or next(iter(pods.values()))[-1]).metadata.labels
    is_wide = labels.get("kmatrix-nodes", "1") != "1"
    status = job.status if job else Status()
    kinds = {"Failed": status.failed_indexes, "Complete": status.completed_indexes}
    ends = {} if is_wide else {index: kind for kind, text in kinds.items() for index in _indexes(text)}
    for task in (0,) if is_wide else range(job.spec.completions) if job else sorted(pods):
        own = dict(sorted(pods.items())) if is_wide else {task: pods[task]} if task in pods else {}
        phase, state, reason = _state(job, own, task, ends.get(task, ""))
        reason = " ".join(printable(reason).split())
        reason = reason if len(reason) <= LONGEST else f"{reason[: LONGEST - 3]}..."
        nodes = ",".join(node for of in own.values() if (node := of[-1].spec.node_name))
        job_id, number = name if is_wide else f"{name}/{task}", name.rpartition("-")[2]
        yield Seen(number=number, task=task, id=job_id, phase=phase, state=state, reason=reason, nodes=nodes)


def _state(job: Item | None, own: Mapping[int, list[Item]], first: int, end: str) -> tuple[Phase, str, str]:
    """Return phase, state and reason of a job. own: its pods.  first: the index that leads.  end: of its index."""
    is_live = any(of[-1].status.phase in LIVE for of in own.values())
    over = Phase.RUNS if is_live else Phase.ENDED  # pods get the grace period
    whys = ((index, _why(of)) for index, of in own.items())
    why = "; ".join(f"pod {index}: {text}" if len(own) > 1 else text for index, text in whys if text)
    if job is None:
        return over, "Deleted", "its Job was deleted"
    condition = next((one for one in job.status.conditions if one.type in OVER and one.status == "True"), None)
    if end or condition:
        kind = end or (condition.type if condition else "")
        return over, kind, "" if kind == "Complete" else why or str(condition or "")
    if job.metadata.deletion_timestamp:
        return over, "Deleted", why
    if job.spec.suspend:
        queue = job.metadata.labels.get("kueue.x-k8s.io/queue-name", "")
        return Phase.RUNS if is_live else Phase.WAITS, "Suspended", f"waits for the queue {queue}"
    if first not in own:
        return Phase.WAITS, "NoPod", why or f"no pod yet: kubectl describe job {job.metadata.name}"
    head = own[first][-1].status.phase
    return Phase.RUNS if head in LIVE else Phase.WAITS, head, why


def _why(pods: Sequence[Item]) -> str:
    """Return why the newest pod of an index waits or has ended, or else how the one before it ended; "" if neither."""
    before = _pod_words(pods[-2]) if len(pods) > 1 and pods[-2].status.phase == "Failed" else ""
    return _pod_words(pods[-1]) or (f"the pod before: {before}" if before else "")


def _pod_words(pod: Item) -> str:
    """Return why a pod waits or has ended, in the words of Kubernetes; "" while it runs."""
    status, meta = pod.status, pod.metadata
    if status.reason:  # Evicted
        return str(status)
    for one in status.conditions:
        if (one.type, one.status) in (("DisruptionTarget", "True"), ("PodScheduled", "False")):
            return str(one)
    for container in (*status.container_statuses, *status.init_container_statuses):
        waits, ended = container.state.get("waiting"), container.state.get("terminated")
        if ended and ended.exit_code and container.name == "kmatrix":
            place = f" --namespace={meta.namespace}" if meta.namespace else ""
            return f"{ended.reason} (exit code {ended.exit_code}): kubectl logs{place} {meta.name}"
        if waits and waits.reason != "PodInitializing":  # an init container has the reason
            return str(waits)
    return ""


def _indexes(text: str) -> frozenset[int]:
    """Return the indexes of a list such as 0-3,5."""
    spans = (part.split("-") for part in text.split(",") if part)
    return frozenset(index for span in spans for index in range(int(span[0]), int(span[-1]) + 1))


def _silence(why: str) -> UnreachableError:
    return UnreachableError("Kubernetes does not answer", why=why, hint="jobs go on without an answer: try again later")


def _words_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines that kubectl wrote to stderr, without warnings and lines of its log."""
    lines = [line.strip() for line in printable(done.stderr).splitlines()]
    lines = [line for line in lines if line and not re.match(r"Warning:|[EWI]\d{4} ", line)]
    return "; ".join(lines[-6:]) or f"exit status {done.returncode}"
