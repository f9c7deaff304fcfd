"""Train matrices on a fake Kubernetes through make: pods are processes, each with a mount of the claim with caches.

All stories share one cluster and overlap in time: the first test submits every matrix, and each later one looks at its
own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clones import Clone, make_clone
from fake_kubernetes import NAMESPACE, FakeKubernetes, Node
from fake_pods import require_pods
from held_training import HeldTraining
from skips import require_program
from story import complete_lines, load_json, matrices, only
from waiting import wait_until

pytestmark = pytest.mark.nightly

IMAGE = "registry.test/kmatrix:1"
KEY = "0f3c5ab77e0d4c1e9a1b2c3d4e5f60718293a4b5"  # of the form of a W&B key
CACHES_S = 3
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=4"),
    *("GLOBAL_BATCH=8", "EVAL_SAMPLES=8", "EVAL_INTERVAL=1000", "LOG_INTERVAL=1", "REUSE=n", "MAX_ITERS=24"),
    *("OPTIMIZER=adamw", "CPU_THREADS=1", "GPU_MONITOR=n", "CHECKPOINT_INTERVAL=4"),
    "STALL_FACTOR=0",  # steps that wait do not hang
)
# In the pods of the run that must not fit: micro-batches of more than one sequence run out of memory.
OUT_OF_MEMORY = """
if "gpt2.train" in sys.orig_argv and os.path.exists({folder!r} + "/oom") and "--micro-batch" not in sys.orig_argv:
    if "oom" in " ".join(sys.orig_argv):
        import torch, gpt2.model.gpt2
        forward = gpt2.model.gpt2.GPT.forward
        def fits(self, idx, targets=None):
            if self.training and len(idx) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return forward(self, idx, targets)
        gpt2.model.gpt2.GPT.forward = fits
"""
# An attempt waits in its ninth step until it is asked to stop, or all may go on: however slow this machine is, no run
# ends before the story comes to it. One rank waits, and the other one for it: if the pod of the first one is killed,
# the other one notices that at once, and a rank that is asked to stop need not wait for its peer.
IS_HELD = """
def is_held(steps):
    words = sys.orig_argv
    loses_its_second_pod = "/lost/" in " ".join(words) and words[words.index("--attempt") + 1] == "1"
    return steps > 8 and os.environ["RANK"] == ("1" if loses_its_second_pod else "0")
"""


@dataclass
class Story:
    """A matrix that was submitted."""

    cluster: Cluster
    results: Path

    @property
    def matrix(self) -> Path:
        return only(matrices(self.results))

    @property
    def run(self) -> Path:
        return only(path.parent for path in self.matrix.glob("*/run.json"))

    def status(self) -> dict[str, Any]:
        return load_json(self.run / "status.json")

    def steps(self, attempt: int | None = None) -> list[int]:
        """Return the steps that an attempt has logged, None: any."""
        lines = [line for line in complete_lines(self.run / "metrics.jsonl") if "train/loss" in line]
        return [line["step"] for line in lines if attempt in (None, line["attempt"])]

    def base(self) -> str:
        return next(
            line["job"] for line in complete_lines(self.matrix / "jobs" / "jobs.jsonl") if line["event"] == "submitted"
        )

    def pods(self) -> list[dict[str, Any]]:
        """Return its living pods."""
        base = self.base()
        return [pod for pod in self.cluster.fake.pods() if pod["metadata"]["labels"]["kmatrix/submission"] == base]

    def make(self, command: str, *words: str, status: int = 0) -> str:
        return self.cluster.make(command, f"TARGET={self.matrix}", *words, status=status).stdout

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        def tried() -> Any:
            try:
                return condition()
            except (OSError, ValueError, KeyError, IndexError, StopIteration):  # files that are not there yet
                return False

        try:
            return wait_until(tried, what, 600)
        except AssertionError as error:
            logs = [path.read_text(errors="replace")[-2000:] for path in self.results.rglob("output.log")]
            raise AssertionError("\n".join([str(error), *logs, self.cluster.fake.report()])) from None


@dataclass
class Cluster:
    """The fake Kubernetes, and a clone of the project on its claim."""

    fake: FakeKubernetes
    clone: Clone
    claim: Path
    slow: HeldTraining

    def make(self, *words: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = self.clone.make(*words, KUBECONFIG=str(self.fake.kubeconfig), WANDB_API_KEY=KEY)
        assert status is None or done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def settings(self, *words: str) -> list[str]:
        place = [
            f"K8S_IMAGE={IMAGE}",
            "K8S_CLAIM=results",
            f"K8S_MOUNT={self.claim}",
            f"K8S_NAMESPACE={NAMESPACE}",
        ]
        return ["ENGINE=kubernetes", *place, f"DATA_DIR={self.claim / 'data'}", "K8S_SECRET_NAME=keys", *TINY, *words]

    def submit(self, name: str, *words: str) -> Story:
        results = self.claim / name
        self.make("test-matrix", *self.settings(f"RESULTS_DIR={results}", *words))
        return Story(self, results)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    require_pods()
    folder = tmp_path_factory.mktemp("kubernetes")
    claim = folder / "claim"
    claim.mkdir()
    slow = HeldTraining(
        folder / "control",
        "is_held(steps)",
        before=OUT_OF_MEMORY.format(folder=str(folder / "control")) + IS_HELD,
    )
    (folder / "control" / "oom").touch()
    clone = make_clone(folder / "kmatrix")
    image = (clone.root, Path(sys.prefix) / "bin")
    nodes = (Node("node-a"), Node("node-b"))
    variables = {"PYTHONPATH": f"{slow.environment['PYTHONPATH']}:{clone.root / 'lib'}:{clone.root}"}
    with FakeKubernetes(
        claim=claim,
        images={IMAGE: image},
        nodes=nodes,
        caches=CACHES_S,
        secrets={"keys": {"WANDB_API_KEY": KEY}},
        variables=variables,
    ) as fake:
        found = Cluster(fake, clone, claim, slow)
        found.make("defconfig-gpt2-cpu-quick")
        yield found


@pytest.fixture(scope="module")
def stories(cluster) -> dict[str, Story]:
    """Submit the matrices that train, and return them by name."""
    with ThreadPoolExecutor(2) as at_once:
        lost = at_once.submit(cluster.submit, "lost", "NUM_NODES=2", "NUM_GPUS=2")
        oom = at_once.submit(cluster.submit, "oom", "NUM_GPUS=1")
    return {"lost": lost.result(), "oom": oom.result()}


def kubectl(cluster: FakeKubernetes, *words: str) -> str:
    """Return the output of kubectl."""
    command = ["kubectl", f"--kubeconfig={cluster.kubeconfig}", f"--cache-dir={cluster.kubeconfig.parent}", *words]
    done = subprocess.run([*command, "--validate=false"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def applied(*files: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply --dry-run=client` would create in an empty cluster."""
    with FakeKubernetes() as empty:
        words = [f"--filename={file}" for file in files]
        text, found = kubectl(empty, "apply", "--dry-run=client", "--output=json", *words), []
    decoder = json.JSONDecoder()
    while text.strip():
        one, end = decoder.raw_decode(text.strip())
        found += one["items"] if one["kind"] == "List" else [one]
        text = text.strip()[end:]
    return [without_note(one) for one in found]


def without_note(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object without the note that `kubectl apply` adds to each."""
    notes = value["metadata"].get("annotations", {})
    notes.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    if not notes:
        value["metadata"].pop("annotations", None)
    return value


def by_host(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(pods, key=lambda pod: pod["spec"]["hostname"])


def names_of(story: Story) -> list[str]:
    return [pod["metadata"]["name"] for pod in story.pods()]


def test_job_yaml_is_to_kubectl_what_was_submitted(cluster, stories):
    require_program("kubectl")
    sent = {one["metadata"]["name"]: one for one in cluster.fake.created}
    for story in stories.values():
        for manifest in story.matrix.glob("jobs/*/job.yaml"):
            objects = applied(manifest)
            assert objects
            assert objects == [sent[one["metadata"]["name"]] for one in objects]


@pytest.fixture(scope="module")
def lost(cluster, stories) -> list[dict[str, Any]]:
    """Kill the second pod of a run that trains, and return both pods."""
    story = stories["lost"]
    story.wait(lambda: max(story.steps()) >= 4, "some steps")
    pods = by_host(story.pods())
    cluster.fake.kill(pods[1])
    return pods


def test_a_killed_pod_alone_is_replaced(stories, lost):
    first, second = lost
    story = stories["lost"]
    story.wait(lambda: len(story.pods()) == 2 and second["metadata"]["name"] not in names_of(story), "another pod")

    assert first["metadata"]["name"] in names_of(story)


def test_a_run_out_of_memory_goes_on_with_a_smaller_micro_batch_in_the_same_pod(cluster, stories):
    story = stories["oom"]
    story.wait(lambda: story.status()["attempts"][-1]["micro_batch"], "a smaller micro-batch")
    submission = story.base()

    assert story.status()["attempts"][0]["kind"] == "oom"
    assert story.status()["attempts"][-1]["micro_batch"] in (1, 2)
    pods = cluster.fake.pods(live=False)
    assert len([pod for pod in pods if pod["metadata"]["labels"]["kmatrix/submission"] == submission]) == 1


def test_stop_saves_a_checkpoint_and_its_attempts_say_who_asked(cluster, stories):
    story = stories["oom"]
    story.wait(lambda: max(story.steps()) >= 4, "some steps")
    job = story.base()
    shown = story.make("stop")

    state = story.status()
    assert f"{story.run.name}: stopped, asked to stop: job {job} was cancelled" in shown
    assert (state["status"], state["attempts"][-1]["kind"]) == ("stopped", "signal")


def test_a_run_that_lost_a_pod_resumes_without_replacing_the_first_one(stories, lost):
    first, second = lost
    story = stories["lost"]
    story.wait(lambda: len(story.status()["attempts"]) > 1, "attempt 2")
    story.wait(lambda: story.steps(attempt=2), "a step of attempt 2")

    assert first["metadata"]["name"] in names_of(story)
    attempt = story.status()["attempts"][0]
    assert attempt["kind"] == "node lost"
    assert second["spec"]["hostname"] in attempt["reason"]


def test_an_evicted_pod_0_saves_and_its_attempt_says_why(cluster, stories):
    story = stories["lost"]
    first, _ = by_host(story.pods())
    cluster.fake.evict(first)
    story.wait(lambda: story.status()["attempts"][1]["status"] == "stopped", "the end of attempt 2")
    cluster.slow.free()

    attempt = story.status()["attempts"][1]
    assert attempt["kind"] == "preempted"
    assert first["spec"]["hostname"] in attempt["reason"]


def test_continue_goes_on_from_the_checkpoint_and_wait_follows_it(cluster, stories):
    story = stories["oom"]
    before = max(story.steps())
    text = story.make("continue", "WAIT=1")

    assert f"{story.run.name}: finished" in text
    assert story.status()["attempts"][-1]["resume"] != "none"
    assert story.steps().count(before) == 1


def test_the_replacement_of_pod_0_finishes_the_run(stories):
    story = stories["lost"]
    story.wait(lambda: story.status()["status"] == "finished", "the end of the run")

    assert len(story.status()["attempts"]) == 3
    assert story.status()["attempts"][-1]["resume"] != "none"


def test_no_value_of_a_secret_is_in_a_manifest_a_file_or_a_log(cluster, stories):
    assert KEY not in json.dumps(cluster.fake.created)
    # Pods that end still write, remove and rename files: until none has vanished meanwhile.
    files = wait_until(
        lambda: {path: path.read_bytes() for path in cluster.claim.rglob("*") if path.is_file()}, "files"
    )
    assert not [path for path, content in files.items() if KEY.encode() in content]
    logs = [cluster.fake.log(pod) for pod in cluster.fake.pods(live=False)]
    assert any(stories["lost"].run.name in log for log in logs)
    assert not [log for log in logs if KEY in log]
