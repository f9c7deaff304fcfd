"""No fault of a tracker affects a run: each ends as without trackers, and missing data can be sent later.

Unresponsive servers, refusals, 401 replies, a wrong key, killed processes and full disks; and no connection at all
without a tracker.
"""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from clones import Clone, environment
from held_training import HeldTraining
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status, merged_metrics
from kmatrix.records.tracking import SyncState, SyncStatus, read_track
from kmatrix.status.look import look
from kmatrix.track.wandb import records
from silent_server import SilentServer, refusing_url
from story import complete_lines, matrices, only, processes_of
from tracker_readers import read_tensorboard
from waiting import wait_until
from wandb_server import KEY, WandbServer

pytestmark = pytest.mark.nightly

QUICK = ["OPTIMIZER=adamw", "NUM_GPUS=1", "EVAL_SAMPLES=20", "GPU_MONITOR_HZ=1"]
TOKEN = "hf_" + "0" * 34  # has the form of a Hugging Face token, but is not one


@dataclass(frozen=True, slots=True)
class Story:
    """Matrices of one run each in a results folder, and their output.

    home: without any login.  limit_s: time limit per tracker, too long to count if the trackers work.
    """

    clone: Clone
    results: Path
    home: Path
    limit_s: int = 600

    def matrix(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.make("test-matrix", *QUICK, *arguments, f"TRACKER_LIMIT={self.limit_s}", **environ)

    def replay(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.make("track-sync", f"TARGET={matrices(self.results)[-1]}", *arguments, **environ)

    def make(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.clone.make(*arguments, f"RESULTS_DIR={self.results}", HOME=str(self.home), **environ)

    @property
    def run(self) -> RunDir:
        """The run of the newest matrix."""
        return RunDir(only(path.parent for path in matrices(self.results)[-1].glob("*/run.json")))

    @property
    def sent(self) -> dict[str, SyncStatus]:
        return {sent.tracker: sent for sent in read_track(self.run)}

    def has_sent(self, tracker: str) -> bool:
        """Return whether a tracker has accepted a step of the run that trains."""
        return any(sent.points for sent in self._reported(tracker))

    def has_failed(self, tracker: str, error: str) -> bool:
        """Return whether a tracker has reported an error of the run that trains."""
        return any(error in sent.error for sent in self._reported(tracker))

    def _reported(self, tracker: str) -> list[SyncStatus]:
        runs = [RunDir(path.parent) for path in self.results.glob("*/*/track.json")]
        return [sent for run in runs for sent in read_track(run) if sent.tracker == tracker]

    @property
    def losses(self) -> dict[int, float]:
        """Return step -> training loss of the finished run."""
        state = look(self.run.path.parent).states[self.run.name]
        assert state.status is Status.FINISHED, state.reason
        lines = merged_metrics(self.run.metrics)
        return {line.step: line.values["train/loss"] for line in lines if "train/loss" in line.values}

    @property
    def steps(self) -> list[int]:
        return sorted({line["step"] for line in complete_lines(self.run.metrics)})


@pytest.fixture
def story(clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "HF_TOKEN"):  # the tester's own login
        monkeypatch.delenv(name, raising=False)
    for folder in ("results", "home"):
        (tmp_path / folder).mkdir()
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    return Story(clone, tmp_path / "results", tmp_path / "home")


@pytest.fixture(scope="module")
def losses_without_trackers() -> dict[int, float]:
    """The training losses of the run without trackers, trained once."""
    return {}


@pytest.fixture
def check_same_losses(story: Story, losses_without_trackers: dict[int, float]):
    """Return a function that compares the newest run with the same run under TRACKER=none."""
    if not losses_without_trackers:
        untracked = replace(story, results=story.home.parent / "plain")  # otherwise the finished run would be reused
        assert untracked.matrix("MAX_ITERS=10", "TRACKER=none").returncode == 0
        losses_without_trackers.update(untracked.losses)
    return lambda: story.losses == losses_without_trackers


def summary_of(story):
    return (matrices(story.results)[-1] / "summary_report.txt").read_text(encoding="utf-8")


def test_unresponsive_servers_do_not_slow_a_run_and_receive_it_later(story, check_same_losses, tmp_path):
    keys = {"WANDB_API_KEY": KEY, "HF_TOKEN": TOKEN}
    slow, limited = HeldTraining(tmp_path / "slow", "steps > 5"), replace(story, limit_s=20)
    with SilentServer() as silent:
        # W&B alone is late: before the limit begins, it waits for the server, and the other tracker has some steps.
        with slow.freed_when(lambda: silent.connections and story.has_sent("trackio"), "both trackers work"):
            completed = limited.matrix(
                *("MAX_ITERS=10", "TRACKER=wandb,trackio"),
                **keys | slow.environment | {"WANDB_BASE_URL": silent.root, "HF_ENDPOINT": silent.root},
            )
        assert completed.returncode == 0, completed.stderr
    assert check_same_losses()
    assert story.sent["trackio"].state is SyncState.DONE  # it does not ask for a login
    assert story.sent["wandb"].waiting == len(story.steps)
    assert f"pending for wandb: {len(story.steps)} of {len(story.steps)} steps" in summary_of(story)
    assert f"make track-sync TARGET={matrices(story.results)[-1].name}" in completed.stdout.replace(
        f"{story.results}/", ""
    )
    with WandbServer() as server:
        for _ in range(2):
            replayed = story.replay(**server.environment)
            assert replayed.returncode == 0, replayed.stdout + replayed.stderr
            assert only(server.runs.values()).steps == story.steps
        second_replay = story.replay("TRACKER=wandb,trackio", **server.environment)  # ask each tracker for its steps
        assert second_replay.returncode == 0, second_replay.stdout + second_replay.stderr
        assert only(server.runs.values()).steps == story.steps
        assert only(server.runs.values()).summary["status"] == "finished"
    assert trackio_steps(story.results) == story.steps


@pytest.mark.parametrize(
    ("fault", "arguments"), [("refused", "connection refused"), ("401", "401"), ("key", "API key must have 40")]
)
def test_a_server_that_refuses_does_not_affect_a_run_and_its_error_is_in_the_summary(
    story, check_same_losses, tmp_path, fault, arguments
):
    slow = HeldTraining(tmp_path / "slow", "steps > 5")
    story = replace(story, limit_s=10)
    with WandbServer() as server:
        server.refuse = {"graphql": 401} if fault == "401" else {}
        root = refusing_url() if fault == "refused" else server.root
        key = "none" if fault == "key" else KEY
        # Before the end of the run, from which the limit counts: wandb itself retries for 20 s.
        with slow.freed_when(lambda: story.has_failed("wandb", arguments), "the error is reported"):
            completed = story.matrix(
                *("MAX_ITERS=10", "TRACKER=wandb"), **slow.environment, WANDB_BASE_URL=root, WANDB_API_KEY=key
            )
        assert completed.returncode == 0, completed.stderr
        assert check_same_losses()
        assert story.sent["wandb"].state in (SyncState.FAILED, SyncState.BEHIND)
        assert arguments in story.sent["wandb"].error
        assert f"pending for wandb: {len(story.steps)} of {len(story.steps)} steps" in summary_of(story)
        server.refuse = {}
        assert story.replay(**server.environment).returncode == 0
        assert only(server.runs.values()).steps == story.steps


def test_killed_tracker_processes_are_restarted_and_each_step_is_stored_once(story, tmp_path):
    # W&B is noticed to be gone by the next row, so steps come on; they do not end before both kills.
    is_slow = 'steps > 10 and not os.path.exists(folder + "/free")'
    slow = HeldTraining(tmp_path / "slow", f"{is_slow} and (time.sleep(0.5) or steps > 590)")
    command = ["make", "--no-print-directory", "test-matrix", *QUICK, f"RESULTS_DIR={story.results}"]
    arguments = ["MAX_ITERS=600", "EVAL_INTERVAL=100", "TRACKER=all", "TRACKER_LIMIT=600"]
    make = subprocess.Popen(
        [*command, *arguments],
        cwd=story.clone.root,
        env=environment(HOME=str(story.home), **slow.environment),
        stdout=subprocess.DEVNULL,
    )

    try:
        first = wait_until(lambda: wandb_service(story))
        first.kill()
        second = wait_until(lambda: wandb_service(story, previous=first))
        tracker = only(processes_of(story.results)["tracker"])
        tracker.kill()
        wait_until(lambda: wandb_service(story, previous=second))
        assert only(processes_of(story.results)["tracker"]).pid != tracker.pid
        (tmp_path / "slow/free").touch()
        assert make.wait(timeout=900) == 0
    finally:
        make.terminate()
        make.wait(timeout=60)
    assert story.losses  # the run finished
    assert {sent.state for sent in story.sent.values()} == {SyncState.DONE}
    assert wandb_steps(story.run) == story.steps
    assert trackio_steps(story.results) == story.steps
    assert read_tensorboard(story.run.path.parent / "tb" / story.run.name).steps == story.steps


def wandb_service(story: Story, previous: psutil.Process | None = None) -> psutil.Process | None:
    """Return the wandb service below a tracker process, if it is another than `previous`."""
    with suppress(psutil.Error):  # a process may exit while it is inspected
        for tracker in processes_of(story.results)["tracker"]:
            for child in tracker.children(recursive=True):
                if "wandb-core" in child.name() and child.status() != psutil.STATUS_ZOMBIE and child != previous:
                    return child
    return None


def test_full_tracker_disks_do_not_affect_a_run_and_its_data_is_synced_later(story, check_same_losses):
    with mount_small_disk(story.results / "trackio", "16k"):
        completed = replace(story, limit_s=20).matrix("MAX_ITERS=10", "TRACKER=trackio")
        assert completed.returncode == 0, completed.stderr
        assert check_same_losses()
        assert story.sent["trackio"].waiting == len(story.steps)
        assert "pending for trackio" in summary_of(story)
        assert "Upload pending steps: make track-sync" in completed.stdout
        store = story.run.path / "wandb"
        with mount_small_disk(store, "4k"):
            assert story.replay("TRACKER=wandb").returncode != 0
        assert story.sent["wandb"].waiting
    with mount_small_disk(story.results / "trackio", "20m"), mount_small_disk(store, "20m"):
        for _ in range(2):
            completed = story.replay("TRACKER=wandb,trackio")
            assert completed.returncode == 0, completed.stdout + completed.stderr
        assert wandb_steps(story.run) == story.steps
        assert trackio_steps(story.results) == story.steps


def test_without_a_key_no_tracker_opens_a_connection(story, check_same_losses):
    with SilentServer() as listener:
        variables = dict.fromkeys(
            ["WANDB_BASE_URL", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"], listener.root
        )
        variables |= {name.lower(): root for name, root in variables.items() if name.endswith("PROXY")}
        completed = story.matrix("MAX_ITERS=10", "TRACKER=wandb,trackio,tensorboard", HF_TOKEN=TOKEN, **variables)
        assert completed.returncode == 0, completed.stderr
        assert check_same_losses()
        assert {sent.state for sent in story.sent.values()} == {SyncState.DONE}
        assert listener.connections == 0


def wandb_steps(run: RunDir) -> list[int]:
    """Return the step of each row, read by wandb's own reader."""
    offline_runs = sorted((run.path / "wandb").glob("offline-run-*"), key=lambda offline_run: offline_run.name)
    rows = [
        record["history"]["item"]
        for offline_run in offline_runs
        for record in records(offline_run)
        if "history" in record
    ]
    return [int(row["_step"]) for row in rows]


def trackio_steps(results: Path) -> list[int]:
    """Return the step of each row in Trackio's database."""
    with sqlite3.connect(f"file:{only((results / 'trackio').glob('*.db'))}?mode=ro", uri=True) as database:
        return sorted(step for (step,) in database.execute("SELECT step FROM metrics"))


@contextmanager
def mount_small_disk(folder: Path, size: str) -> Iterator[None]:
    """Limit the size of a folder; skip if only another user may mount."""
    folder.mkdir(exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    if subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
