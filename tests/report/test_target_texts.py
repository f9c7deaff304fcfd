"""TARGET_LOSS in results.json, the summary and report.md: runs that never reach it count as not reached."""

from __future__ import annotations

import pytest

from kmatrix.records.files import read_json
from kmatrix.report.analysis import analyse
from kmatrix.report.write import write_summary
from records_factory import FakeRun, make_matrix, runs_with_seeds

TARGET = 3.28
MUON = [3.2715, 3.2741, 3.2702, 3.2722, 3.2731]
ADAMW = [3.2771, 3.2834, 3.2792, 3.2861, 3.2794]  # two of five end above the target
PRICE = 2.0  # dollars per hour


@pytest.fixture
def matrix(tmp_path):
    price = {"gpu_hour_price": PRICE, "max_cost": 100.0}
    runs = runs_with_seeds(5, MUON, optimizer="muon", train=price) + runs_with_seeds(5, ADAMW, train=price)
    runs.append(FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan", stop_at=40, train=price))
    return make_matrix(tmp_path, runs, verdict={"target_loss": TARGET})


@pytest.fixture
def results(matrix):
    write_summary(analyse(matrix))
    return read_json(matrix.results)


def test_the_texts_say_in_how_many_runs_it_was_not_reached(matrix, results):
    for text in (matrix.summary.read_text(), matrix.report_md.read_text()):
        one_line = " ".join(text.split())
        assert "not reached in 2 of 5 runs" in one_line
        assert "reached in 5 of 5 runs" in one_line
        assert "not reached in 1 of 1 run" in one_line


def test_without_a_target_there_is_nothing_about_one(tmp_path):
    matrix = make_matrix(tmp_path, runs_with_seeds(3, MUON[:3]))
    text = write_summary(analyse(matrix))
    results = read_json(matrix.results)
    assert "Target" not in text
    assert results["target"] is None
    assert results["runs"][0]["reached"] is None
