"""Train matrices on a real Slurm of seven nodes, through make, on storage with the faults of a bad NFS.

All stories share one cluster and overlap in time: the first test submits every matrix, and each later one looks at its
own. A story that needs time for something holds the training, and ends that itself.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clones import make_clone
from slurm_stage import SlurmStage
from slurm_story import PAUSE, Cluster, on_nodes, tiny
from story import complete_lines, load_json, matrices, only

pytestmark = pytest.mark.nightly

CACHES_S = 30


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
    where = "SLURM_EXTRA_FLAGS=--exclude=n[1-4]"
    cluster.submit("lost", "NUM_GPUS=2", "NUM_NODES=2", "CHECKPOINT_INTERVAL=5", where, steps=PAUSE)
    cluster.submit("preempted", on_nodes("n4"), "SLURM_PARTITION=main", steps=PAUSE)
    cluster.submit("stopped", on_nodes("n3"), "SEED=1,2", steps=PAUSE)
    cluster.submit("killed", "NUM_GPUS=2", "NUM_NODES=2", on_nodes("n1", "n2"), steps=PAUSE)
    return cluster


@pytest.fixture(scope="module")
def quick(cluster: Cluster) -> Cluster:
    """The same cluster with further matrices, which train while other jobs wait for their next start."""
    cluster.submit("silent", on_nodes("n3"), steps=PAUSE)  # it trains until its own test
    cluster.submit("two", "NUM_GPUS=2", "NUM_NODES=1,2", "SLURM_EXTRA_FLAGS=--exclude=n[3-7]")
    seeds = ("MATRIX_SEEDS_AUTO=y", "MATRIX_SEEDS_MIN=3", "MATRIX_SEEDS_MAX=4")
    cluster.submit("seeds", *seeds, "N_HEAD=1,2", "MAX_ITERS=1")
    return cluster


def losses(run: Path) -> dict[int, float]:
    """Return step -> loss of training."""
    return {line["step"]: line["train/loss"] for line in complete_lines(run / "metrics.jsonl") if "train/loss" in line}


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
    story.wait_for_step(5)
    shown = story.make("status")
    assert len(re.findall(r"\brunning\b", shown)) >= 2, shown
    assert not re.search(r"\b(lost|failed|died)\b", shown), shown
    story.make("continue")
    assert len(story.submissions()) == 1
    assert [len(state.attempts) for state in story.states().values()] == [1, 1]


def test_stop_saves_checkpoints_before_slurm_kills_and_continue_goes_on_from_them(cluster):
    story = cluster.stories["stopped"]
    story.make("stop")
    story.wait(lambda: story.statuses() == {"stopped"}, "both are stopped")
    for run in story.runs:
        step = load_json(run / "result.json")["step"]
        assert max(load_json(path)["step"] for path in (run / "checkpoints").glob("step_*.json")) == step
    story.wait_for_ends()
    story.free()
    story.make("continue")
    story.wait_finished()
    assert [len(state.attempts) for state in story.states().values()] == [2, 2]
    story.check_steps()


def test_a_run_whose_node_dies_goes_on_with_another_one(cluster):
    """Slurm queues its job again. The leader has saved nothing: its peer was gone."""
    story = cluster.stories["lost"]
    story.wait_for_step(5)
    hosts = {load_json(path)["host"] for path in story.run.glob("ranks/*/state.json")}
    other = only(hosts - {load_json(story.run / "ranks/0/state.json")["host"]})
    cluster.stage.kill_node(int(other.removeprefix("n")))
    story.wait(lambda: story.attempts()[0].end, "the end of its attempt")
    story.free()
    story.wait_finished()
    first, second = story.attempts()
    assert first.end.kind in ("signal", "node lost")  # whoever is faster: Slurm's SlurmdTimeout, or the leader
    assert second.step >= 5


def test_a_rank_that_was_killed_on_another_node_is_named_with_its_host_and_signal(cluster, quick):
    story = cluster.stories["killed"]
    story.wait_for_step(5)
    cluster.stage.on("n2", ["pkill", "-KILL", "-f", f"gpt2.train {story.run}"])  # a host has its own processes
    story.wait(lambda: story.attempts()[0].end, "the end of its attempt")
    end = story.attempts()[0].end
    assert (end.kind, end.exits[0].rank, end.exits[0].host) == ("killed", 1, "n2")
    assert "rank 1 on n2 killed by signal 9" in end.reason
    story.free()


def test_a_preempted_run_goes_on_at_the_step_that_it_saved(cluster):
    story = cluster.stories["preempted"]
    story.wait_for_step(5)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodelist=n4", "--exclusive", "--output=/dev/null"]
    job = cluster.stage.login([*urgent, "--wrap=sleep 1"]).stdout.strip()
    story.wait(lambda: story.attempts()[0].end, "the end of its attempt")
    assert story.kinds() == ["preempted"]
    story.free()
    cluster.stage.wait(lambda: cluster.stage.job_state(job) == "COMPLETED", "the end of the other job")
    story.wait_finished()
    assert len(story.attempts()) == 2
    story.check_steps()


def test_a_run_on_two_nodes_has_the_losses_of_this_machine(cluster, quick):
    story = cluster.stories["two"]
    assert len(story.submissions()) == 2, "one for each shape"
    local = cluster.clone.root / "results" / "local"
    cluster.make("test-matrix", "ENGINE=local", f"RESULTS_DIR={local}", *tiny("NUM_GPUS=2"))
    story.wait_finished()
    expected = losses(only(only(matrices(local)).glob("*/run.json")).parent)
    assert len(expected) == 40
    assert [losses(run) for run in story.runs] == [expected, expected]
    assert sorted(state.attempts[0].nodes for state in story.states().values()) == [1, 2]


def test_the_last_job_submits_the_seeds_that_the_losses_want_and_then_reports(cluster, quick):
    story = cluster.stories["seeds"]
    story.wait((story.matrix / "report.html").exists, "the report after the second round")
    story.wait_for_ends()
    assert len(story.submissions()) >= 2
    assert sum(str(state.status) == "finished" for state in story.states().values()) > 6


def test_a_run_longer_than_its_time_limit_finishes_after_a_requeue(cluster):
    story = cluster.stories["limit"]
    story.wait(lambda: story.attempts()[0].end, "the end of its first start")
    assert story.kinds()[0] == "time limit"
    story.free()
    story.wait_finished()
    story.check_steps()
    assert len(story.submissions()) == 1, "the same job"


def test_a_run_whose_rank_was_killed_finishes_after_continue(cluster):
    story = cluster.stories["killed"]
    story.wait_for_ends()
    assert story.kinds() == ["killed"], "a rank that is killed may be killed again: its user decides"
    story.make("continue")
    story.wait_finished()
    assert story.steps()[-40:] == list(range(40)), "there was no checkpoint yet"


def test_a_run_on_four_nodes_reports_its_eight_devices_and_the_log_of_each_node(cluster):
    nodes = on_nodes("n1", "n2", "n3", "n4")
    story = cluster.submit("eight", "NUM_GPUS=8", "NUM_NODES=4", "GLOBAL_BATCH=16", "GPU_MONITOR=y", nodes)
    story.wait_finished()
    assert len(load_json(story.run / "result.json")["devices"]) == 8
    # The login node has looked for the run before there was one.
    story.wait(lambda: json.loads(story.make("status", "JSON=1"))["counts"] == {"finished": 1}, "it is seen on login")
    story.make("summary")
    report = (story.matrix / "summary_report.txt").read_text(encoding="utf-8")
    for host in ("n1", "n2", "n3", "n4"):
        assert re.search(rf"\b{host}\b", report), report
    log = story.make("logs", "NODE=3")
    assert (story.run / "nodes/3.log").read_text(encoding="utf-8").strip().splitlines()[-1] in log, log


def test_while_slurm_does_not_answer_status_and_stop_work_and_continue_goes_on_after_it(cluster, quick):
    story, stage = cluster.stories["silent"], cluster.stage
    story.wait_for_step(5)
    stage.stop_controller()
    try:
        shown = story.make("status")
        assert "does not answer" in shown, shown
        assert re.search(r"\brunning\b", shown), shown
        story.make("stop")
        story.wait(lambda: story.statuses() == {"stopped"}, "it has saved")
    finally:
        stage.start_controller()
    story.wait_for_ends()
    story.free()
    story.make("continue")
    story.wait_finished()
    story.check_steps()
