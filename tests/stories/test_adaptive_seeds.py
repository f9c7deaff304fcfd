"""Adaptive seeds through make and the real runner, with a trainer whose losses are scripted."""

from __future__ import annotations

import pytest

from kmatrix.status.look import look
from kmatrix.status.wanted import wanted
from scripted_story import run_of
from story import kill, load_json, only, processes_of
from waiting import wait_until

pytestmark = pytest.mark.story

ADAPTIVE = ("MATRIX_SEEDS_AUTO=y", "MATRIX_SEEDS_MAX=5")
CLEAR = {"adamw": [3.30, 3.31, 3.29, 3.30, 3.31], "muon": [3.20, 3.2101, 3.1902, 3.2003, 3.2101]}
# The difference fits into 0.01 nats/token with all five seeds, and not with four.
TIE = {"adamw": [3.285, 3.271, 3.28, 3.279, 3.265], "muon": [3.287, 3.272, 3.29, 3.28, 3.264]}


def summary_of(matrix):
    """Return the summary without its line breaks."""
    return " ".join(matrix.summary.read_text().split())


def ranking_of(matrix):
    return only(load_json(matrix.results)["rankings"])


def test_a_clear_difference_stops_early_and_a_reused_seed_changes_nothing(story):
    matrix, printed = story.matrix(CLEAR, *ADAPTIVE)
    assert "6 runs in " in printed
    assert "4 in reserve" in printed
    first = [run_of(one, n) for n in (1, 2, 3) for one in ("adamw", "muon")]
    assert sorted(story.starts(matrix)) == sorted((run, 1) for run in first)
    assert "Runs 10: 6 finished, 4 in reserve" in summary_of(matrix)
    assert (ranking_of(matrix)["seeds_auto"]["rounds"], set(wanted(look(matrix.path)))) == ([3], set(first))
    assert "nothing to run" in story.make("continue", f"TARGET={matrix.path}")
    # In another matrix the seeds are reused: no run starts, and the verdict is the same one.
    second, printed = story.matrix(CLEAR, *ADAPTIVE, "REUSE=y")
    assert printed.count("reused from") == 6
    assert story.starts(second) == []
    assert ranking_of(second)["pairs"] == ranking_of(matrix)["pairs"]


def test_kills_of_the_runner_change_neither_the_seeds_nor_the_verdict_of_a_tie(story):
    words = (*ADAPTIVE, "MATRIX_MIN_DIFFERENCE=0.01", "REUSE=n")
    calm, _ = story.matrix(TIE, *words)
    assert "equivalent to it within 0.01 nats/token" in summary_of(calm)
    assert ranking_of(calm)["seeds_auto"]["rounds"] == [3, 4, 5]

    starts = len(story.starts(calm))
    story.hold(starts + 1)
    command = story.start("test-matrix", *story.words(*words))
    for number in (2, 7, 12):  # in the first round, at the begin of the second one, and in the last one
        story.hold(starts + number)
        story.wait_for_start(starts + number)
        matrix = story.newest()
        assert kill(processes_of(matrix.path)["runner"]) == 1
        command.wait()
        wait_until(lambda matrix=matrix: not processes_of(matrix.path)["rank"], "its run has ended with it")
        command = story.start("continue", f"TARGET={matrix.path}")
    story.let_go()
    assert command.wait() == 0
    assert ranking_of(matrix)["pairs"] == ranking_of(calm)["pairs"]
    # No attempt follows one that finished, and only wanted seeds ran.
    finished = {run.name: load_json(run.result)["attempt"] for run in matrix.runs() if run.result.exists()}
    assert all(attempt <= finished[run] for run, attempt in story.starts(matrix))
    assert {run for run, _ in story.starts(matrix)} == {run for run, _ in story.starts(calm)}
