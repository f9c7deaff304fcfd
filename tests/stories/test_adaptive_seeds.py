"""Adaptive seeds through make and the real runner, with a trainer whose losses are scripted."""

from __future__ import annotations

import psutil
import pytest

from kmatrix.records.lock import holder
from kmatrix.records.runs import read_run_file
from kmatrix.status.outcomes import Outcomes, adaptive_seeds
from kmatrix.status.status_file import recover_status
from scripted_story import run_of
from story import kill, load_json, processes_of
from waiting import wait_until

pytestmark = pytest.mark.story

ADAPTIVE = ("MATRIX_SEEDS_AUTO=y", "MATRIX_SEEDS_MAX=5")
CLEAR = {"adamw": [3.30, 3.31, 3.29, 3.30, 3.31], "muon": [3.20, 3.2101, 3.1902, 3.2003, 3.2101]}
# The difference fits into 0.01 nats/token with all five seeds, and not with four.
TIE = {"adamw": [3.285, 3.271, 3.28, 3.279, 3.265], "muon": [3.287, 3.272, 3.29, 3.28, 3.264]}


def verdict_of(matrix):
    """Return the replay of the only family, and the runs that it wants."""
    records = {run.name: read_run_file(run) for run in matrix.runs()}
    seeds = adaptive_seeds(matrix, records)
    states = {run.name: recover_status(run, has_runner=False) for run in matrix.runs()}
    wanted = seeds.wanted(Outcomes(matrix, records).ends(states))
    (replay,) = seeds.replays
    return replay, wanted


def summary_of(matrix):
    """Return the summary without its line breaks."""
    return " ".join(matrix.summary.read_text().split())


def test_a_clear_difference_stops_early_and_a_reused_seed_changes_nothing(story):
    matrix, printed = story.matrix(CLEAR, *ADAPTIVE)
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
    # In another matrix the seeds are reused: no run starts, and the verdict is the same one.
    second, printed = story.matrix(CLEAR, *ADAPTIVE, "REUSE=y")
    assert printed.count("reused from") == 6
    assert story.starts(second) == []
    assert verdict_of(second) == (replay, frozenset())


def test_kills_of_the_runner_change_neither_the_seeds_nor_the_verdict_of_a_tie(story):
    words = (*ADAPTIVE, "MATRIX_MIN_DIFFERENCE=0.01", "REUSE=n")
    calm, _ = story.matrix(TIE, *words)
    assert "are equivalent within 0.01 nats/token" in summary_of(calm)
    replay, _ = verdict_of(calm)
    assert replay.rounds == (3, 4, 5)
    assert [(pair.outcome, pair.no_more) for pair in replay.verdict.pairs] == [("equivalent", None)]

    starts = len(story.starts(calm))
    story.hold(starts + 1)
    runner = story.start("test-matrix", *story.words(*words))
    for number in (2, 7, 12):  # in the first round, at the begin of the second one, and in the last one
        story.hold(starts + number)
        story.wait_for_start(starts + number)
        matrix = story.newest()
        assert kill([psutil.Process(holder(matrix).pid)]) == 1
        runner.wait()
        wait_until(lambda matrix=matrix: not processes_of(matrix.path)["trainer"], "its run has ended with it")
        runner = story.start("continue", f"TARGET={matrix.path}")
    story.let_go()
    assert runner.wait() == 0
    assert verdict_of(matrix) == verdict_of(calm)
    assert load_json(matrix.status)["status"] == "finished"
    # No attempt follows one that finished, and only wanted seeds ran.
    finished = {run.name: load_json(run.result)["attempt"] for run in matrix.runs() if run.result.exists()}
    assert all(attempt <= finished[run] for run, attempt in story.starts(matrix))
    assert {run for run, _ in story.starts(matrix)} == {run for run, _ in story.starts(calm)}
