"""Successive halving through make and the real runner: a trainer with scripted losses, and real training on the CPU."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

import rung_trainer
from clones import environment
from factories import make_data
from fake_torchrun import install
from kmatrix.records.lock import holder
from kmatrix.records.paths import MatrixDir
from story import complete_lines, kill, load_json, matrices, processes_of
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(600)]

FAILED = 2  # exit status of make if a recipe fails
MAX_ITERS, FIRST, SECOND = 90, 10, 30
RATES = [f"0.00{place}" for place in range(1, 10)]
# At the first rung 3, 6 and 9 are best; then 6 and 9, which were the worse of the three. 1 diverges, 4 fails each time.
CURVES = {rate: {"5": 5.0, str(FIRST): 4.0 + place / 10} for place, rate in enumerate(RATES)}
CURVES["0.003"] = {"5": 5.0, str(FIRST): 3.1, str(SECOND): 2.9}
CURVES["0.006"] = {"5": 5.0, str(FIRST): 3.2, str(SECOND): 2.8, str(MAX_ITERS): 2.6}
CURVES["0.009"] = {"5": 5.0, str(FIRST): 3.3, str(SECOND): 2.7, str(MAX_ITERS): 2.5}
CURVES["0.001"] = {"5": 5.0, "7": "nan"}
CURVES["0.004"] = {"5": 5.0, "8": "fails"}
STEPS = dict.fromkeys(RATES, FIRST) | {"0.003": SECOND, "0.006": MAX_ITERS, "0.009": MAX_ITERS, "0.001": 6, "0.004": 7}
SETTINGS = (
    *("OPTIMIZER=adamw", "NUM_GPUS=1", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "PREFLIGHT=n", "MATRIX_HALVING=3"),
    *("DATASET=shards", "BLOCK_SIZE=32", "EVAL_SAMPLES=10", f"LEARNING_RATE={','.join(RATES)}"),
)


class Story:
    """Matrices with successive halving in one results folder."""

    def __init__(self, clone, folder: Path) -> None:
        self.clone, self.results, self.data = clone, folder / "results", folder / "data"
        self.results.mkdir(parents=True)
        self.path = install(folder / "python", rung_trainer.__file__)
        make_data(self.data)
        assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
        self.script()

    def script(self, seconds=0.0):
        (self.results / "curves.json").write_text(json.dumps({"curves": CURVES, "seconds": seconds}))

    def words(self, *more):
        length = (f"MAX_ITERS={MAX_ITERS}", "EVAL_INTERVAL=5")
        return (*SETTINGS, *length, f"DATA_PATH={self.data}", f"RESULTS_DIR={self.results}", *more)

    def make(self, *arguments, status=0, real=False):
        done = self.clone.make(*arguments, **({} if real else {"PYTHONPATH": self.path}))
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def start(self, *words):
        """Start make with the output of nobody, in a session of its own."""
        return subprocess.Popen(
            ["make", "--no-print-directory", *words],
            cwd=self.clone.root,
            env=environment(PYTHONPATH=self.path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def trained(self, matrix):
        lines = complete_lines(self.results / "trained.jsonl")
        return [line for line in lines if line["matrix"] == matrix.name]


@pytest.fixture
def story(clone, tmp_path):
    yield Story(clone, tmp_path)
    for processes in processes_of(tmp_path).values():
        kill(processes)


def steps_of(matrix):
    """Return the step of the checkpoint of each run, by its learning rate."""
    return {rate_of(run): int((run.path / "scripted_step").read_text()) for run in matrix.runs()}


def rate_of(run):
    return f"{load_json(run.run_json)['train']['learning_rate']:g}"


def halving_of(matrix):
    (found,) = load_json(matrix.results)["halving"]
    return found


def wait_for_parts(story, matrix, make, more):
    """Wait until some more attempts have started, or make has ended."""
    number = len(story.trained(matrix)) + more
    wait_until(lambda: len(story.trained(matrix)) >= number or make.poll() is not None, "the next runs start")


def test_the_best_train_on_and_kills_and_reuse_change_nothing(story):
    story.make("test-matrix", *story.words(), status=FAILED)  # two configurations have no loss
    calm = MatrixDir(matrices(story.results)[-1])
    assert steps_of(calm) == STEPS
    assert [(rung["step"], len(rung["kept"])) for rung in halving_of(calm)["rungs"]] == [(FIRST, 3), (SECOND, 2)]
    assert load_json(calm.status)["status"] == "failed"
    text = " ".join(calm.summary.read_text().split())
    assert "2 finished, 2 failed, 5 ended at a rung" in text
    # Each part was trained once; the failed one twice.
    parts = sorted((rate_of(calm.run(line["run"])), line["from"], line["until"]) for line in story.trained(calm))
    whole = [(rate, 0, FIRST) for rate in RATES] + [("0.004", 7, FIRST)]
    whole += [(rate, FIRST, SECOND) for rate in ("0.003", "0.006", "0.009")] + [
        (rate, SECOND, MAX_ITERS) for rate in ("0.006", "0.009")
    ]
    assert parts == sorted(whole)
    # Nothing is left, and the commands say why.
    again = story.make("continue", f"TARGET={calm.path}", status=FAILED)
    assert "nothing to run" in again
    assert "4 runs ended at step 10: not among the best 3 of 9" in again
    assert "5 ended at a rung" in story.make("status", f"TARGET={calm.path}")
    assert len(story.trained(calm)) == len(parts)

    # In another matrix the finished runs are reused, and their losses at the rungs with it.
    story.make("test-matrix", *story.words(), status=FAILED)
    second = MatrixDir(matrices(story.results)[-1])
    assert halving_of(second) == halving_of(calm)
    assert not {"0.006", "0.009"} & {rate_of(second.run(line["run"])) for line in story.trained(second)}

    # A third one is killed and stopped again and again.
    story.script(seconds=0.01)
    known, chance = len(matrices(story.results)), random.Random(3)
    make = story.start("test-matrix", *story.words("REUSE=n"))
    third = MatrixDir(wait_until(lambda: matrices(story.results)[known:], "the matrix is made")[0])
    for number in range(4):
        wait_for_parts(story, third, make, chance.randrange(1, 3))
        owner = holder(third)
        assert owner is not None
        if number % 2:
            psutil.Process(owner.pid).send_signal(signal.SIGINT)
        else:
            assert kill([psutil.Process(owner.pid)]) == 1
        make.wait()
        wait_until(lambda: not processes_of(third.path)["trainer"], "its runs have ended with it")
        make = story.start("continue", f"TARGET={third.path}")
    assert make.wait() == FAILED
    assert halving_of(third) == halving_of(calm)
    assert steps_of(third) == STEPS


def test_real_training_waits_at_the_rung_and_goes_on_from_its_checkpoint(story):
    rates = "LEARNING_RATE=0.0001,0.001,0.01"
    words = [word for word in story.words("MAX_ITERS=12", "EVAL_INTERVAL=2", rates) if "=" in word]
    last = {word.partition("=")[0]: word for word in words}  # of two values of a setting, the later one
    story.make("test-matrix", *last.values(), real=True)
    matrix = MatrixDir(matrices(story.results)[-1])
    (rung,) = halving_of(matrix)["rungs"]
    assert rung["step"] == 4
    assert len(rung["kept"]) == 2
    runs = {run["name"]: run for run in load_json(matrix.results)["runs"]}
    assert sorted(run["steps"] for run in runs.values()) == [4, 12, 12]
    for best in (run for run in runs.values() if run["status"] == "finished"):
        ends = [(attempt["status"], attempt["kind"], attempt["resume"]) for attempt in best["attempts"]]
        assert ends == [("stopped", "rung", "none"), ("finished", None, "auto")]
    losses = {one["name"]: one["loss"] for one in rung["configurations"]}
    assert sorted(losses[name] for name in rung["kept"]) == sorted(losses.values())[:2]
