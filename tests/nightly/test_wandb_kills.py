"""W&B has each row of metrics.jsonl once, whenever the trainer and the tracker process were killed.

KMATRIX_KILLS=20 kills more often. The trainer is a program that writes metrics: only its files and its death matter.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clones import Clone, environment
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from story import complete_lines
from track_factory import append_metrics, append_resume, make_run_dir, write_end
from tracker_readers import expected_values, read_wandb
from wandb_server import ServerRun, WandbServer

pytestmark = pytest.mark.nightly

SEED = 20261122
KILLS = int(os.environ.get("KMATRIX_KILLS", "5"))
LONGEST_S = 4.0  # of an attempt; a tracker process needs one to two seconds until it has opened its run
CHECKPOINT = 10  # steps
REST = 40  # steps of the last attempt, which nothing kills
ATTEMPT_VALUES = ("attempt", "elapsed_s")  # differ between attempts, unlike losses

TRAINER = """
import json, sys, time
path, step, attempt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
began = time.time()
with open(path, "a", buffering=1) as file:
    while True:
        now = time.time()
        line = {"step": step, "time": now, "attempt": attempt, "elapsed_s": now - began}
        if step % 10 == 0:
            file.write(json.dumps({**line, "val/loss": 9 - step / 1000}) + "\\n")
        file.write(json.dumps({**line, "train/loss": 8 - step / 1000, "tokens": step * 100}) + "\\n")
        step += 1
        time.sleep(0.01)
"""


@dataclass
class Story:
    """One run whose trainer and tracker process are killed together."""

    clone: Clone
    run: RunDir
    random: random.Random
    home: Path
    attempts: int = 0
    trackers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def attempt(self, **variables: str) -> None:
        """Train from the newest checkpoint until both processes are killed, at a random time."""
        trainer = subprocess.Popen([self.clone.python, "-c", TRAINER, str(self.run.metrics), *self._begin()])
        tracker = self.start_tracker(trainer.pid, **variables)
        time.sleep(self.random.uniform(0.0, LONGEST_S))
        for process in self.random.sample([trainer, tracker], 2):
            process.kill()
        # Not waited for: the next tracker process starts while W&B's service of this one is still alive.
        trainer.wait()

    def finish(self) -> None:
        """Train the rest, without a tracker process."""
        first = int(self._begin()[0])
        last = max((line["step"] for line in complete_lines(self.run.metrics)), default=first)
        for step in range(first, last + REST):
            append_metrics(self.run, step, attempt=self.attempts, train__loss=8 - step / 1000, tokens=step * 100)
        write_end(self.run, attempt=self.attempts)

    def _begin(self) -> tuple[str, str]:
        """Begin an attempt as the trainer does after a kill; return its first step and its number."""
        self.attempts += 1
        newest = max((line["step"] for line in complete_lines(self.run.metrics)), default=0)
        first = newest // CHECKPOINT * CHECKPOINT
        if self.attempts > 1:
            append_resume(self.run, first, attempt=self.attempts)
        return str(first), str(self.attempts)

    def start_tracker(self, parent: int, **variables: str) -> subprocess.Popen[bytes]:
        command = [self.clone.python, "-m", "kmatrix.track", str(self.run.path), "--parent", str(parent)]
        with self.run.track_log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.clone.root,
                env={**self.environment, **variables, "PYTHONPATH": f"{self.clone.root}/lib"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.trackers.append(process)
        return process

    def sync(self, server: WandbServer) -> str:
        """Run make track-sync and return its output."""
        target = f"TARGET={self.run.path.parent}"
        done = self.clone.make("track-sync", target, "TRACKER=wandb", **server.environment, HOME=str(self.home))
        assert done.returncode == 0, done.stdout + done.stderr + self.run.track_log.read_text()
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {**environment(), "HOME": str(self.home)}


@pytest.fixture
def story(clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):  # the tester's own login
        monkeypatch.delenv(name, raising=False)
    run = make_run_dir(tmp_path, trackers=("wandb",))
    write_json(
        run.path.parent / "matrix.json",
        {"name": run.path.parent.name, "runs": [{"name": run.name, "run_id": "0123456789ab"}]},
    )
    home = tmp_path / "home"
    home.mkdir()
    story = Story(clone, run, random.Random(SEED), home)
    yield story
    for process in story.trackers:
        process.kill()
        process.wait()


def check_server(story: Story, server: WandbServer, *, ignored: tuple[str, ...]) -> None:
    """Sync twice; check after each that the server has the rows of metrics.jsonl, each once."""
    expected = {step: without(values, ignored) for step, values in expected_values(story.run.path).items()}
    for _ in range(2):
        output = story.sync(server)
        (stored,) = server.runs.values()
        assert stored.steps == sorted(expected), difference(stored, expected)
        assert {step: without(row, ignored) for step, row in rows_of(stored)} == expected
        assert f"has all {len(expected)} steps" in output
        assert stored.summary["status"] == "finished"


def rows_of(stored: ServerRun) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line in stored.lines:
        yield line["_step"], {key: value for key, value in line.items() if not key.startswith("_")}


def without(values: Mapping[str, Any], ignored: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in ignored}


def difference(stored: ServerRun, expected: Mapping[int, Any]) -> str:
    counts = Counter(stored.steps)
    twice = [step for step, count in counts.items() if count > 1]
    return f"missing {sorted(set(expected) - set(counts))}, twice {twice}, extra {sorted(set(counts) - set(expected))}"


def test_track_sync_uploads_exactly_the_rows_of_an_offline_run_that_was_killed_several_times(story: Story):
    for _ in range(-(-KILLS // 2)):
        story.attempt(WANDB_MODE="offline")
    story.finish()
    local = Counter(step for step, _ in read_wandb(story.clone.python, story.run.path).rows)
    assert max(local.values(), default=1) == 1, "two sessions have the same steps"
    with WandbServer() as server:
        check_server(story, server, ignored=())


def test_track_sync_completes_an_online_run_that_was_killed_several_times(story: Story):
    with WandbServer() as server:
        for _ in range(KILLS // 2):
            story.attempt(**server.environment)
        story.finish()
        # Rows of killed attempts are on the server as they were sent first.
        check_server(story, server, ignored=ATTEMPT_VALUES)
