"""Adaptive seeds through make and the real runner, with a trainer whose losses are scripted."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import psutil
import pytest

import scripted_trainer
from clones import environment
from factories import make_data
from fake_torchrun import install
from kmatrix.records.lock import holder
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import read_run_file
from kmatrix.status.outcomes import Outcomes, adaptive_seeds
from kmatrix.status.status_file import recover_status
from story import complete_lines, kill, load_json, matrices, processes_of
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(600)]

FIRST = 1337  # the default of SEED
FAILED = 2  # exit status of make if a recipe fails
SETTINGS = (
    *("OPTIMIZER=adamw,muon", "NUM_GPUS=1", "MAX_ITERS=10", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "PREFLIGHT=n"),
    *("DATASET=shards", "BLOCK_SIZE=32", "EVAL_SAMPLES=10", "MATRIX_SEEDS_AUTO=y", "MATRIX_SEEDS_MAX=5"),
)
CLEAR = {"adamw": [3.30, 3.31, 3.29, 3.30, 3.31], "muon": [3.20, 3.2101, 3.1902, 3.2003, 3.2101]}
# The difference fits into 0.01 nats/token with all five seeds, and not with four.
TIE = {"adamw": [3.285, 3.271, 3.28, 3.279, 3.265], "muon": [3.287, 3.272, 3.29, 3.28, 3.264]}
# It never fits into it, and is never clear either.
NEVER = {"adamw": [3.267, 3.289, 3.282, 3.276, 3.255], "muon": [3.258, 3.284, 3.28, 3.27, 3.263]}


class Story:
    """Matrices with scripted losses in one results folder."""

    def __init__(self, clone, folder: Path) -> None:
        self.clone, self.results = clone, folder / "results"
        self.results.mkdir(parents=True)
        self.path = install(folder / "python", scripted_trainer.__file__)
        self.data = folder / "data"
        make_data(self.data)
        assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0

    def script(self, losses, seconds=0.0):
        text = json.dumps({"losses": losses, "first": FIRST, "seconds": seconds})
        (self.results / "losses.json").write_text(text)

    def words(self, *more):
        return (*SETTINGS, f"DATA_PATH={self.data}", f"RESULTS_DIR={self.results}", *more)

    def make(self, *arguments, status=0):
        done = self.clone.make(*arguments, PYTHONPATH=self.path)
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def matrix(self, losses, *more, status=0):
        """Run a matrix, and return it with what was printed."""
        self.script(losses)
        printed = self.make("test-matrix", *self.words(*more), status=status)
        return MatrixDir(matrices(self.results)[-1]), printed

    def starts(self, matrix):
        lines = complete_lines(self.results / "starts.jsonl")
        return [(line["run"], line["attempt"]) for line in lines if line["matrix"] == matrix.name]


@pytest.fixture
def story(clone, tmp_path):
    yield Story(clone, tmp_path)
    for processes in processes_of(tmp_path).values():
        kill(processes)


def run_of(optimizer, number):
    """Return the name of a run. number: of its seed, from 1."""
    return f"gpt2_{optimizer}_seed{FIRST + number - 1}_1cpu"


def verdict_of(matrix):
    """Return the replay of the only family, and the runs that it wants."""
    records = {run.name: read_run_file(run) for run in matrix.runs()}
    seeds = adaptive_seeds(matrix, records)
    states = {run.name: recover_status(run, has_runner=False) for run in matrix.runs()}
    wanted = seeds.wanted(Outcomes(matrix, records).ends(states))
    (replay,) = seeds.replays
    return replay, wanted


def test_a_clear_difference_stops_early_and_a_reused_seed_changes_nothing(story):
    matrix, printed = story.matrix(CLEAR)
    assert "6 runs in " in printed
    assert "4 in reserve" in printed
    assert "looked after 3 seeds: muon better than adamw" in printed
    assert story.starts(matrix) == [(run_of(one, n), 1) for n in (1, 2, 3) for one in ("adamw", "muon")]
    assert load_json(matrix.status)["status"] == "finished"
    assert "Runs 10: 6 finished, 4 in reserve" in summary_of(matrix)
    replay, wanted = verdict_of(matrix)
    assert (replay.rounds, wanted) == ((3,), frozenset())
    # Nothing is left, and the commands say why.
    again = story.make("continue", f"TARGET={matrix.path}")
    assert "nothing to run" in again
    assert "4 runs in reserve: their seeds are not needed so far" in again
    assert "4 runs in reserve: their seeds are not needed so far" in story.make("status", f"TARGET={matrix.path}")
    assert "nothing is left to run" in story.make("estimate", f"TARGET={matrix.path}")
    # In another matrix the seeds are reused: no run starts, and the verdict is the same one.
    second, printed = story.matrix(CLEAR)
    assert printed.count("reused from") == 6
    assert story.starts(second) == []
    assert verdict_of(second) == (replay, frozenset())


def test_a_tie_is_equivalent_only_with_all_seeds_or_stays_open(story):
    tie, _ = story.matrix(TIE, "MATRIX_MIN_DIFFERENCE=0.01")
    assert "are equivalent within 0.01 nats/token" in summary_of(tie)
    assert len(story.starts(tie)) == 10
    replay, wanted = verdict_of(tie)
    assert replay.rounds == (3, 4, 5)
    assert [(pair.outcome, pair.no_more) for pair in replay.verdict.pairs] == [("equivalent", None)]
    never, _ = story.matrix(NEVER, "MATRIX_MIN_DIFFERENCE=0.01", "REUSE=n")
    assert "Open: muon, 1 rank against adamw, 1 rank: " in summary_of(never)
    assert "all 5 seeds ran; equal within 0.0103" in summary_of(never)
    replay, wanted = verdict_of(never)
    assert wanted == frozenset()
    (pair,) = replay.verdict.pairs
    assert (pair.outcome, pair.no_more) == ("open", "maximum")
    assert pair.margin > 0.01  # equal within this
    assert load_json(never.status)["status"] == "finished"
    # More seeds: the maximum is raised, its former value noted, and only the new seeds run.
    story.script({name: [*known, known[0] + 0.002, known[1] - 0.001] for name, known in NEVER.items()})
    before = len(story.starts(never))
    printed = story.make("add", "MATRIX_SEEDS_MAX=7", f"TARGET={never.path}")
    assert "added 4 runs" in printed
    rules = load_json(never.matrix_json)["verdict"]
    assert (rules["raised"], len(rules["seeds"])) == ([5], 7)
    assert {run for run, _ in story.starts(never)[before:]} <= {run_of(o, n) for o in TIE for n in (6, 7)}


def summary_of(matrix):
    """Return the summary without its line breaks."""
    return " ".join(matrix.summary.read_text().split())


def start(story, *words):
    """Start make with the output of nobody, in a session of its own."""
    return subprocess.Popen(
        ["make", "--no-print-directory", *words],
        cwd=story.clone.root,
        env=environment(PYTHONPATH=story.path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_runner_after(story, matrix, make, more):
    """Kill the runner that make has started after some more starts of runs, and wait until its runs have ended."""
    number = len(story.starts(matrix)) + more
    wait_until(lambda: len(story.starts(matrix)) >= number or make.poll() is not None, "the next runs start")
    assert make.poll() is None
    owner = holder(matrix)
    assert owner is not None
    assert kill([psutil.Process(owner.pid)]) == 1
    make.wait()
    wait_until(lambda: not processes_of(matrix.path)["trainer"], "its runs have ended with it")


def test_kills_change_neither_the_seeds_nor_the_verdict(story):
    calm, _ = story.matrix(TIE, "MATRIX_MIN_DIFFERENCE=0.01")
    story.script(TIE, seconds=0.2)
    known, chance = len(matrices(story.results)), random.Random(14)
    make = start(story, "test-matrix", *story.words("MATRIX_MIN_DIFFERENCE=0.01", "REUSE=n"))
    matrix = MatrixDir(wait_until(lambda: matrices(story.results)[known:], "the matrix is made")[0])
    for _ in range(5):
        kill_runner_after(story, matrix, make, chance.randrange(1, 3))
        make = start(story, "continue", f"TARGET={matrix.path}")
    assert make.wait() == 0
    assert verdict_of(matrix) == verdict_of(calm)
    assert load_json(matrix.status)["status"] == "finished"
    # No attempt follows one that finished, and only wanted seeds ran.
    finished = {run.name: load_json(run.result)["attempt"] for run in matrix.runs() if run.result.exists()}
    assert all(attempt <= finished[run] for run, attempt in story.starts(matrix))
    assert {run for run, _ in story.starts(matrix)} == {run for run, _ in story.starts(calm)}


def test_a_budget_is_respected_and_the_verdict_stays_open(story):
    story.script(NEVER, seconds=0.3)
    words = story.words("BUDGET_DOLLARS=1", "MACHINE_HOUR_PRICE=2000")  # 1.8 s: the first round takes at least that
    printed = story.make("test-matrix", *words, status=FAILED)
    matrix = MatrixDir(matrices(story.results)[-1])
    # The printed command has a larger budget: without one, it would be refused.
    assert "\nThe budget of the matrix is spent: $" in printed
    for text in (
        printed,
        story.make("status", f"TARGET={matrix.path}"),
        story.make("estimate", f"TARGET={matrix.path}"),
    ):
        assert re.search(r" continue TARGET=\S+ BUDGET_DOLLARS=\d", text), text
        assert "the budget of the matrix is spent" in text
    assert any(line["event"] == "budget spent" for line in complete_lines(matrix.journal))
    assert len(story.starts(matrix)) < 10
    assert load_json(matrix.status)["status"] == "stopped"
    _, wanted = verdict_of(matrix)
    assert wanted
    (ranking,) = load_json(matrix.results)["rankings"]
    assert [(pair["outcome"], pair["no_more"]) for pair in ranking["comparisons"]] == [("open", "budget")]
    # Neither command trains on a spent budget, nor adds a run to it.
    for command in (["continue"], ["add", "OPTIMIZER=sgd"]):
        refused = story.clone.make(*command, f"TARGET={matrix.path}", PYTHONPATH=story.path)
        assert refused.returncode == FAILED
        assert "is spent" in refused.stderr
    assert len(matrix.runs()) == 10


def test_a_failed_seed_runs_once_more_and_a_diverged_configuration_is_never_better(story):
    script = {"adamw": [3.30, "fail", 3.29, 3.30, 3.31], "muon": [3.20, 3.2101, "fails", "nan", 3.2101]}
    matrix, printed = story.matrix(script, status=FAILED)
    assert "Retry killed runs" not in printed  # without RETRY_FAILED=1, `continue` has nothing to do
    assert re.search(r"\nRetry failed runs: make continue TARGET=\S+ RETRY_FAILED=1", printed)
    starts = story.starts(matrix)
    assert [attempt for run, attempt in starts if run == run_of("adamw", 2)] == [1, 2]
    assert [attempt for run, attempt in starts if run == run_of("muon", 3)] == [1, 2]
    assert [attempt for run, attempt in starts if run == run_of("muon", 4)] == [1]
    replay, wanted = verdict_of(matrix)
    assert wanted == frozenset()
    assert replay.verdict.diverged == {"adamw": 0, "muon": 1}
    assert {pair.outcome for pair in replay.verdict.pairs} == {"open"}
