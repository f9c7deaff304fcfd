"""Train matrices on a real Slurm of seven nodes, through make, on storage with the faults of a bad NFS.

All stories share one cluster and overlap in time: the first test submits every matrix, and each later one looks at its
own. A story that needs time for something holds the training, and ends that itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clones import Clone, environment, make_clone
from held_training import HeldTraining
from slurm_stage import SlurmStage
from story import complete_lines, load_json, matrices, only

pytestmark = pytest.mark.nightly

CACHES_S = 30
TINY = {
    **{"DEVICE": "cpu", "MODEL": "custom", "N_LAYER": "2", "N_HEAD": "2", "N_EMBD": "32", "BLOCK_SIZE": "32"},
    **{"BATCH_SIZE": "2", "GLOBAL_BATCH": "8", "EVAL_SAMPLES": "8", "EVAL_INTERVAL": "20", "LOG_INTERVAL": "1"},
    **{"MAX_ITERS": "40", "REUSE": "n", "OPTIMIZER": "adamw", "NUM_GPUS": "1", "CPU_THREADS": "1", "GPU_MONITOR": "n"},
    "STALL_FACTOR": "0",  # steps that wait do not hang,
}
# Seven steps, and then none until the story frees them. A further attempt, which starts at a checkpoint, is not held.
PAUSE = "steps >= 8 and step - steps < 2"


def tiny(*words: str) -> list[str]:
    """Return the words of a tiny matrix, with these instead of its own."""
    return [f"{name}={text}" for name, text in (TINY | dict(word.split("=", 1) for word in words)).items()]


def on_nodes(*names: str) -> str:
    return f"SLURM_EXTRA_FLAGS=--nodelist={','.join(names)}"


@dataclass
class Story:
    """A matrix that was submitted."""

    cluster: Cluster
    results: Path
    output: str = ""  # of the command that submitted it
    slow: HeldTraining | None = None

    @property
    def matrix(self) -> Path:
        return only(matrices(self.results))

    @property
    def runs(self) -> dict[str, Path]:
        return {path.parent.name: path.parent for path in self.matrix.glob("*/run.json")}

    @property
    def run(self) -> Path:
        return only(self.runs.values())

    def statuses(self) -> list[str]:
        return sorted(self.status(run)["status"] for run in self.runs.values())

    def status(self, run: Path) -> dict[str, Any]:
        path = run / "status.json"
        return load_json(path) if path.exists() else {"status": "planned", "attempts": []}

    def attempts(self) -> list[dict[str, Any]]:
        return self.status(self.run)["attempts"]

    def steps(self, run: Path | None = None) -> list[int]:
        """Return the steps that were logged, in the order of the log."""
        lines = complete_lines((run or self.run) / "metrics.jsonl")
        return [line["step"] for line in lines if "train/loss" in line]

    def jobs(self) -> list[str]:
        """Return the ids of the jobs that were submitted for runs, not that of the report."""
        folder = self.matrix / "jobs"
        lines = [line for line in complete_lines(folder / "jobs.jsonl") if line["event"] == "submitted"]
        kinds = {line["job"]: load_json(folder / f"{line['submission']:04d}/submission.json")["kind"] for line in lines}
        return [job for job, kind in kinds.items() if kind == "runs"]

    def make(self, command: str, *words: str, status: int = 0) -> str:
        """Run a command on the matrix, on the login node; return its output."""
        return self.cluster.make(command, f"TARGET={self.matrix}", *words, status=status).stdout

    def wait(self, condition: Any, what: str, seconds: float = 400.0) -> None:
        def tried() -> Any:
            try:
                return condition()
            except (OSError, ValueError, KeyError, IndexError):  # files that are not there yet
                return False

        try:
            self.cluster.stage.wait(tried, what, seconds)
        except AssertionError as error:
            logs = [path.read_text(errors="replace")[-3000:] for path in sorted(self.results.rglob("slurm.log"))]
            found = {path.parent.name: load_json(path) for path in self.results.glob("*/*/status.json")}
            raise AssertionError("\n".join([str(error), json.dumps(found, indent=1)[-4000:], *logs])) from None

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: max(self.steps()) >= step, f"step {step} in {self.results.name}")

    def wait_finished(self) -> None:
        self.wait(lambda: set(self.statuses()) == {"finished"}, f"{self.results.name} finished")


@dataclass
class Cluster:
    """The Slurm, and a clone of the project on its shared folder."""

    stage: SlurmStage
    clone: Clone
    stories: dict[str, Story] = field(default_factory=dict)

    def make(self, *words: str, status: int | None = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run make on the login node, as a user does after logging in."""
        done = self.stage.login(
            ["make", "--no-print-directory", *words],
            cwd=self.clone.root,
            env=environment(**variables),
            check=False,
        )
        assert status is None or done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def submit(self, name: str, *words: str, steps: str | None = None) -> Story:
        """Submit a matrix. steps: which of its steps are held."""
        slow = HeldTraining(self.stage.folder / f"control_{name}", steps) if steps else None
        results = self.clone.root / "results" / name
        done = self.make(
            "test-matrix",
            "ENGINE=slurm",
            f"RESULTS_DIR={results}",
            *tiny(*words),
            **(slow.environment if slow else {}),
        )
        self.stories[name] = Story(self, results, done.stdout, slow)
        return self.stories[name]


@pytest.fixture(scope="module")
def stage() -> Iterator[SlurmStage]:
    caches = {"login": CACHES_S, "n3": CACHES_S}
    with SlurmStage(nodes=7, gpus=2, caches=caches, installed=[Path(sys.prefix)], requeue_delay=10) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(stage: SlurmStage) -> Cluster:
    """The cluster with every matrix of this file submitted, those first that need the longest."""
    cluster = Cluster(stage, make_clone(stage.shared / "kmatrix"))
    cluster.make("defconfig-gpt2-cpu-quick")
    cluster.submit("limit", on_nodes("n1"), "SLURM_TIME=3m", "SLURM_NOTICE=60", steps=PAUSE)
    cluster.submit(
        "lost",
        *("NUM_GPUS=2", "NUM_NODES=2", "CHECKPOINT_INTERVAL=5", "SLURM_EXTRA_FLAGS=--exclude=n[1-4]"),
        steps=PAUSE,
    )
    cluster.submit("preempted", on_nodes("n4"), "SLURM_PARTITION=main", steps=PAUSE)
    cluster.submit("stopped", on_nodes("n3"), "SEED=1,2", steps=PAUSE)
    cluster.submit("killed", "NUM_GPUS=2", "NUM_NODES=2", on_nodes("n1", "n2"), steps=PAUSE)
    return cluster


@pytest.fixture(scope="module")
def quick(cluster: Cluster) -> Cluster:
    """The same cluster with further matrices, which train while other jobs wait for their next start."""
    cluster.submit("silent", on_nodes("n3"), steps=PAUSE)  # it trains until its own test
    cluster.submit("two", "NUM_GPUS=2", "NUM_NODES=1,2", "SLURM_EXTRA_FLAGS=--exclude=n[3-7]")
    return cluster


def losses(run: Path) -> dict[int, float]:
    """Return step -> loss of training."""
    return {line["step"]: line["train/loss"] for line in complete_lines(run / "metrics.jsonl") if "train/loss" in line}


def live_jobs(cluster: Cluster, story: Story) -> list[str]:
    """Return the jobs of a matrix that wait or run."""
    known = set(story.jobs())
    return [job for job, *_ in cluster.stage.squeue() if job.partition("_")[0] in known]


def test_too_many_gpus_and_too_long_times_are_refused_before_anything_is_made(cluster):
    results = cluster.clone.root / "results" / "refused"
    where = ("test-matrix", "ENGINE=slurm", f"RESULTS_DIR={results}")
    for words, fix in (
        (("NUM_GPUS=9", "GLOBAL_BATCH=18", "GPUS_PER_NODE=4"), "NUM_NODES=3"),
        (("SLURM_PARTITION=short", "SLURM_TIME=1h"), "SLURM_TIME="),
        (("SLURM_PARTITION=nope",), "main"),
    ):
        done = cluster.make(*where, *tiny(*words), status=2)
        assert fix in done.stderr, done.stderr
    assert not results.exists() or not list(results.iterdir())


def test_on_storage_that_lags_a_run_is_seen_as_running_and_is_not_started_twice(cluster):
    story = cluster.stories["stopped"]
    for run in story.runs.values():
        story.wait(lambda run=run: max(story.steps(run)) >= 5, "its first steps")
    jobs = story.jobs()
    shown = story.make("status")
    assert len(re.findall(r"\brunning\b", shown)) >= 2, shown
    assert not re.search(r"\b(lost|failed|died)\b", shown), shown
    story.make("continue")
    assert story.jobs() == jobs
    assert [len(story.status(run)["attempts"]) for run in story.runs.values()] == [1, 1]


def test_stop_saves_checkpoints_before_slurm_kills_and_continue_goes_on_from_them(cluster):
    story = cluster.stories["stopped"]
    story.make("stop")
    story.wait(lambda: story.statuses() == ["stopped", "stopped"], "both are stopped")
    steps = {}
    for name, run in story.runs.items():
        result = load_json(run / "result.json")
        assert result["status"] == "stopped"
        steps[name] = result["step"]
        assert max(load_json(path)["step"] for path in (run / "checkpoints").glob("step_*.json")) == steps[name]
    story.wait(lambda: not live_jobs(cluster, story), "its jobs have ended")
    story.slow.free()
    story.make("continue")
    story.wait_finished()
    for name, run in story.runs.items():
        assert len(story.status(run)["attempts"]) == 2
        assert story.steps(run).count(steps[name]) == 1, "no step was trained twice"


def test_a_node_that_dies_is_named_within_a_minute(cluster):
    story = cluster.stories["lost"]
    story.wait_for_step(5)
    hosts = {load_json(path)["host"] for path in story.run.glob("ranks/*/state.json")}
    other = only(hosts - {load_json(story.run / "ranks/0/state.json")["host"]})
    cluster.stage.kill_node(int(other.removeprefix("n")))
    named = re.compile(rf"\b(lost|down)\b[^\n]*\b{other}\b|\b{other} (stopped answering|does not answer|is down)")
    story.wait(lambda: named.search(story.make("status")), f"status names {other}", 60)
    story.wait(lambda: story.attempts()[0]["kind"] == "node lost", "the end of its attempt")
    story.slow.free()


def test_a_rank_that_was_killed_on_another_node_is_named_with_its_host_and_signal(cluster, quick):
    story = cluster.stories["killed"]
    story.wait_for_step(5)
    rank = load_json(story.run / "ranks/1/state.json")
    assert rank["host"] == "n2"
    cluster.stage.on("n2", ["kill", "-KILL", str(rank["pid"])])
    story.wait(lambda: story.attempts()[0]["status"] != "running", "the end of its attempt")
    first = story.attempts()[0]
    assert re.search(r"\brank 1\b", first["reason"]), first
    assert "n2" in first["reason"], first
    assert "signal 9" in first["reason"], first
    story.slow.free()


def test_a_preempted_run_goes_on_at_the_step_that_it_saved(cluster):
    story = cluster.stories["preempted"]
    story.wait_for_step(5)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodelist=n4", "--exclusive", "--output=/dev/null"]
    job = cluster.stage.login([*urgent, "--wrap=sleep 1"]).stdout.strip()
    story.wait(lambda: story.attempts()[0]["status"] != "running", "the end of its attempt")
    saved = load_json(story.run / "result.json")["step"]
    first = story.attempts()[0]
    assert first["kind"] == "preempted", first
    story.slow.free()
    cluster.stage.wait(lambda: cluster.stage.job_state(job) == "COMPLETED", "the end of the other job")
    story.wait_finished()
    assert len(story.attempts()) == 2
    steps = story.steps()
    assert steps == sorted(set(steps)), "no step was trained twice"
    assert saved + 1 in steps


def test_a_run_on_two_nodes_has_the_losses_of_this_machine(cluster, quick):
    story = cluster.stories["two"]
    jobs = story.jobs()
    assert len(jobs) == 2, "one job for each shape"
    assert all(re.search(rf"\b{job}\b", story.output) for job in jobs), story.output
    local = cluster.clone.root / "results" / "local"
    cluster.make("test-matrix", "ENGINE=local", f"RESULTS_DIR={local}", *tiny("NUM_GPUS=2"))
    story.wait_finished()
    shown = story.make("status")
    assert len(re.findall(r"\bfinished\b", shown)) >= 2, shown
    expected = losses(only(only(matrices(local)).glob("*/run.json")).parent)
    assert len(expected) == 40
    for run in story.runs.values():
        assert losses(run) == pytest.approx(expected, abs=1e-5), run.name
    nodes = sorted(load_json(run / "run.json")["train"].get("num_nodes", 1) for run in story.runs.values())
    assert nodes == [1, 2]


def test_a_run_longer_than_its_time_limit_finishes_after_a_requeue(cluster):
    story = cluster.stories["limit"]
    story.wait(lambda: story.attempts()[0]["status"] != "running", "the end of its first start")
    assert story.attempts()[0]["kind"] == "time limit"
    story.slow.free()
    story.wait_finished()
    assert story.steps() == sorted(set(story.steps())), "no step was trained twice"
    assert len(story.jobs()) == 1, "the same job"


def test_the_runs_whose_node_or_rank_died_finish(cluster):
    killed, lost = cluster.stories["killed"], cluster.stories["lost"]
    if killed.statuses() == ["failed"]:  # a rank that is killed may be killed again: the user decides
        killed.make("continue", "RETRY_FAILED=1")
    for story in (killed, lost):
        story.wait_finished()
        assert len(story.attempts()) >= 2
        assert max(story.steps()) == 39


def test_a_run_on_four_nodes_reports_its_eight_devices_and_the_log_of_each_node(cluster):
    story = cluster.submit(
        "eight", "NUM_GPUS=8", "NUM_NODES=4", "GLOBAL_BATCH=16", "GPU_MONITOR=y", on_nodes("n1", "n2", "n3", "n4")
    )
    story.wait_finished()
    used = load_json(story.run / "run_used.json")
    assert len(used["devices"]) == 8
    story.make("summary")
    report = (story.matrix / "summary_report.txt").read_text(encoding="utf-8")
    for host in ("n1", "n2", "n3", "n4"):
        assert re.search(rf"\b{host}\b", report), report
    log = story.make("logs", "NODE=3")
    node_log = only(story.run.glob("nodes/3/output.log")).read_text(encoding="utf-8")
    assert node_log.strip().splitlines()[-1] in log, log


def test_while_slurm_does_not_answer_status_shows_steps_and_the_run_finishes(cluster, quick):
    story, stage = cluster.stories["silent"], cluster.stage
    story.wait_for_step(5)
    stage.stop_controller()
    try:
        # The last answer of Slurm counts for some seconds.
        story.wait(lambda: "does not answer" in story.make("status"), "status says that Slurm does not answer")
        shown = story.make("status")
        assert re.search(r"\brunning\b", shown), shown
        steps = re.search(r"\b(\d+)/40\b", shown)
        assert steps, shown
        assert 5 <= int(steps[1]) < 40, shown
        story.slow.free()
        story.wait_finished()
    finally:
        stage.start_controller()
    shown = story.make("status")
    assert re.search(r"\bfinished\b", shown), shown
