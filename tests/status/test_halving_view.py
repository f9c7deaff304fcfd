"""`make status` and `make estimate` of a matrix with successive halving."""

from __future__ import annotations

import json

import pytest

from halved import halved_matrix, run_scripted
from kmatrix.cli.status import as_json, lines, plain
from kmatrix.records.paths import MatrixDir
from kmatrix.status.view.overview import Overview
from scripted import name_of

NOW = 1_800_000_000.0
CURVES = {name: {10: 3.0 + place / 10, 30: 2.9 - place / 10} for place, name in enumerate("abcdefghi")}


@pytest.fixture
def matrix(tmp_path):
    folder = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    folder.path.mkdir()
    return halved_matrix(folder, "abcdefghi")


def test_a_run_at_a_rung_waits_and_the_estimate_has_the_rungs_to_come(matrix):
    run_scripted(matrix, CURVES, starts=5)
    view = Overview(matrix).poll(NOW)
    assert view.status == "stopped"
    text = plain(view)
    assert text[0].endswith(": stopped, 4 planned, 5 waiting at a rung")
    assert sum(" waits " in line for line in text) == 5
    assert "5 runs waiting at step 10 for the other configurations" in text
    assert not [line for line in text if " stopped: " in line]
    assert any(line.startswith("continue: ") for line in text)
    assert [run.until for run in view.runs] == [None] * 5 + [10] * 4
    # Each of those four takes as long for its 10 steps as the five before, and 9 times as long for all 90.
    assert view.left_s == pytest.approx(4.0, rel=0.1)
    assert [(leg.configurations, leg.until, leg.run_steps) for leg in view.rungs.legs] == [(3, 30, 60), (2, None, 120)]
    assert view.rungs.whole_s == pytest.approx(view.left_s * 220 / 40)
    estimate = lines(view, NOW, {})
    (further,) = [line for line in estimate if line.startswith("until the next rung only; ")]
    assert further.endswith("; then 3 configurations to step 30, 2 configurations to the end: about 22.0s in all")


def test_the_runs_that_a_rung_has_ended_are_not_stopped(matrix):
    run_scripted(matrix, CURVES)
    view = Overview(matrix).poll(NOW)
    assert (view.status, view.rungs, view.left_s) == ("finished", None, None)
    text = plain(view)
    assert text[0].endswith(": finished, 2 finished, 7 ended at a rung")
    assert "6 runs ended at step 10: not among the best 3 of 9" in text
    assert "1 run ended at step 30: not among the best 2 of 3" in text
    assert not any(line.startswith("continue: ") for line in text)
    estimate = lines(view, NOW, {})
    assert "nothing is left to run" in estimate
    assert "6 runs ended at step 10: not among the best 3 of 9" in estimate
    found = {run["name"]: run for run in json.loads(json.dumps(as_json(view)))["runs"]}
    assert found[name_of("d", 1)]["rung"] == {"step": 10, "kept": 3, "of": 9}
    assert found[name_of("d", 1)]["status"] == "stopped"


def test_the_cost_in_total_has_the_rungs_to_come(matrix):
    for run in matrix.runs():
        record = json.loads(run.run_json.read_text())
        record["train"]["machine_hour_price"] = 3600.0
        run.run_json.write_text(json.dumps(record))
    run_scripted(matrix, CURVES, starts=5)
    view = Overview(matrix).poll(NOW)
    # A second of each run costs a dollar: five of the first rung, four to come, and then 180 of 10 steps each.
    assert view.dollars == pytest.approx(5.0, rel=0.1)
    assert view.all_dollars == pytest.approx(5.0 + 4.0 * 220 / 40, rel=0.1)
    run_scripted(matrix, CURVES)
    view = Overview(matrix).poll(NOW)
    assert view.all_dollars == view.dollars == pytest.approx(14.0, rel=0.1)  # 9, 3 and 2 attempts
