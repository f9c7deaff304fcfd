"""Adaptive seeds in `make status` and `make estimate`: the reserve, and the time of further seeds."""

from __future__ import annotations

import json

import pytest

from kmatrix.cli.status import as_json, lines, plain
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.status.view.overview import Overview
from running import plan_of
from scripted import NAN, adaptive_matrix, name_of, write_end

CLEAR = {"adamw": [3.30, 3.31, 3.29], "muon": [3.20, 3.2101, 3.1902]}
OPEN = {"adamw": [3.30, 3.20, 3.27], "muon": [3.22, 3.28, 3.20]}
NOW = 1_800_000_000.0


@pytest.fixture
def matrix(tmp_path):
    folder = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    folder.path.mkdir()
    return adaptive_matrix(folder, ["adamw", "muon"])


def end(matrix, losses, *, seconds=100.0):
    """Write the files of the first seeds, which took this long."""
    for configuration, known in losses.items():
        for seed, loss in enumerate(known, 1):
            name = name_of(configuration, seed)
            code = write_end(plan_of(matrix, name), loss)
            status = "failed" if code else "finished"
            attempt = {"attempt": 1, "status": status, "started": NOW - 1000, "seconds": seconds, "kind": None}
            attempt["kind"] = "nan" if code else None
            write_json(matrix.run(name).status, {"status": status, "attempts": [attempt], "attempt": 1})


def test_runs_whose_seeds_are_not_needed_are_a_reserve_and_the_matrix_is_finished(matrix):
    end(matrix, CLEAR)
    view = Overview(matrix).poll(NOW)
    assert view.status == "finished"
    assert [run.name for run in view.runs if run.reserve] == [name_of(one, seed) for seed in (4, 5, 6) for one in CLEAR]
    assert view.left_s is None
    text = plain(view)
    assert text[0].endswith(": finished, 6 finished, 6 in reserve")
    assert "6 runs in reserve: their seeds are not needed so far" in text
    assert sum(" reserve " in line for line in text) == 6
    assert "continue:" not in "\n".join(text)
    estimate = lines(view, NOW)
    assert "nothing is left to run" in estimate
    assert "6 runs in reserve: their seeds are not needed so far" in estimate
    # Programs find the status that the files have, and the reserve next to it.
    found = json.loads(json.dumps(as_json(view)))
    assert found["counts"] == {"planned": 6, "finished": 6}
    assert sum(run["reserve"] for run in found["runs"]) == 6


def test_the_estimate_has_what_is_wanted_what_is_expected_and_the_most(matrix):
    # Before the first look, only the first seeds are sure.
    end(matrix, {"adamw": [3.30]})
    view = Overview(matrix).poll(NOW)
    assert (view.left_s, view.seeds.runs, view.seeds.likely_runs) == (500.0, 6, None)
    assert view.seeds.most_s == 1100.0
    assert any("nothing is expected before the first look" in line for line in lines(view, NOW))
    # Afterwards one more seed of both is wanted, and more are expected.
    end(matrix, OPEN)
    view = Overview(matrix).poll(NOW)
    assert (view.status, view.left_s) == ("stopped", 200.0)
    assert (view.seeds.runs, view.seeds.likely_runs, view.seeds.most_s) == (4, 4, 600.0)
    (further,) = [line for line in lines(view, NOW) if line.startswith("with further seeds")]
    assert further == "with further seeds: about 10m00s (4 runs), at most 10m00s (4 runs in reserve)"


def test_a_view_that_is_read_again_follows_the_runs_and_the_plan(matrix):
    overview = Overview(matrix)
    assert sum(run.reserve for run in overview.poll(NOW).runs) == 6
    end(matrix, CLEAR)
    assert overview.poll(NOW).status == "finished"
    end(matrix, {**CLEAR, "muon": [NAN, *CLEAR["muon"][1:]]})
    view = overview.poll(NOW)
    assert (view.status, sum(run.reserve for run in view.runs)) == ("stopped", 4)  # one more seed of each
    record = read_json(matrix.matrix_json)
    write_json(matrix.matrix_json, {**record, "verdict": {}})
    view = overview.poll(NOW)
    assert (sum(run.reserve for run in view.runs), view.seeds) == (0, None)


def test_a_damaged_plan_has_no_reserve(matrix):
    end(matrix, CLEAR)
    matrix.matrix_json.write_text("{")
    assert sum(run.reserve for run in Overview(matrix).poll(NOW).runs) == 0
