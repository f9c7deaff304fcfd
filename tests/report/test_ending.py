"""The short form of the report, which ends a matrix on the terminal."""

from __future__ import annotations

import pytest

from kmatrix.report.analyse import analyse
from kmatrix.report.write import ending as render_ending
from records_factory import FakeRun, make_matrix, runs_with_seeds

FILES = ["Report: test_matrix_results_20261120_052300/summary_report.txt"]


def ending(tmp_path, runs):
    return render_ending(analyse(make_matrix(tmp_path, runs)), FILES).splitlines()


@pytest.mark.parametrize(
    "runs",
    [
        [FakeRun(), FakeRun(optimizer="muon")],
        runs_with_seeds(3, [3.28, 3.29, 3.30]) + runs_with_seeds(3, [3.1, 3.2, 3.15], optimizer="muon"),
        [
            FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan " * 30, stop_at=47)
            for _ in range(1)
        ],
        [FakeRun(axes={"seed": str(seed)}, final_loss=3.0 + seed / 100) for seed in range(60)],
    ],
)
def test_the_end_of_a_matrix_has_at_most_thirty_lines_of_eighty_columns(tmp_path, runs):
    lines = ending(tmp_path, runs)
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert lines[-1] == FILES[0]


def test_the_end_has_the_ranking_and_the_reason_of_a_failure(tmp_path):
    failed = FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan at step 47", stop_at=47)
    text = "\n".join(ending(tmp_path, [FakeRun(final_loss=3.3), FakeRun(optimizer="muon", final_loss=3.1), failed]))
    assert "2 finished, 1 failed" in text
    assert "1. muon" in text
    assert "gpt2_sgd_1cpu failed: loss is nan at step 47" in text


def test_runs_in_reserve_are_neither_planned_nor_unfinished(tmp_path):
    losses = {"adamw": [3.30, 3.31, 3.29], "muon": [3.20, 3.2101, 3.1902]}
    runs = [run for name, known in losses.items() for run in runs_with_seeds(3, known, optimizer=name)]
    planned = [FakeRun(optimizer=name, seed=4, axes={"seed": "4"}) for name in losses]
    rules = {"seeds_auto": True, "seeds": [1, 2, 3, 4], "seeds_min": 3}
    matrix = make_matrix(tmp_path, runs, planned=planned, verdict=rules)
    numbers = analyse(matrix)
    assert numbers.counts == {"finished": 6, "in reserve": 2}
    text = render_ending(numbers, FILES)
    assert "6 finished, 2 in reserve" in text.replace("\u00a0", " ")
