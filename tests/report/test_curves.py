"""A report from the thinned curves of its runs has the numbers of one from their logs."""

from __future__ import annotations

import json

import pytest

from gpu_factory import FakeGpus, record
from kmatrix.records import attempts
from kmatrix.records.files import read_json
from kmatrix.report.analysis import analyse
from kmatrix.report.write import write_summary
from records_factory import FakeRun, edit_attempt, make_matrix, replan, runs_with_seeds


@pytest.fixture
def matrix(tmp_path):
    """Finished, failed, stopped, running and planned runs; one of two attempts; one recorded."""
    failed = FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan", stop_at=30)
    stopped = FakeRun(optimizer="adam", status="stopped", stop_at=40, attempt=2, result=False)
    running = FakeRun(optimizer="adafactor", status="running", stop_at=20)
    made = make_matrix(
        tmp_path,
        [*runs_with_seeds(3, [3.1, 3.2, 3.3]), FakeRun(optimizer="muon", device="cuda"), failed, stopped, running],
        planned=[FakeRun(optimizer="lion")],
    )
    record(made.run("gpt2_muon_1gpu"), FakeGpus(counter=True))
    run = made.run(stopped.name)
    lines = run.metrics.read_text().splitlines()
    first = [line.replace('"attempt": 2', '"attempt": 1') for line in lines[:8]]
    run.metrics.write_text("\n".join([*first, '{"step": 10, "attempt": 2, "resumed": true}', "{", *lines[5:], ""]))
    edit_attempt(run, 1)
    return made


def results_of(matrix):
    """Write the report, and return results.json without what grows with time."""
    write_summary(analyse(matrix))
    value = read_json(matrix.results)
    for run in value["runs"]:
        run.update(wall_s=0, gpu_hours=0, gpu=None if run["gpu"] is None else run["gpu"]["gpus"])
    return value


def test_results_are_equal_with_and_without_curves(matrix):
    without = results_of(matrix)
    assert {path.parent.name for path in matrix.path.glob("*/curves.json")} == {
        run["name"] for run in without["runs"] if run["status"] not in ("running", "planned")
    }
    assert results_of(matrix) == without


def test_a_report_reads_no_log_of_a_run_that_has_curves(matrix, monkeypatch):
    analyse(matrix)
    running = matrix.run("gpt2_adafactor_1cpu")
    assert not running.curves.exists()  # it goes on
    edit_attempt(running, end={"kind": "stopped"})
    analyse(matrix)
    monkeypatch.setattr("kmatrix.curves.make.read_metrics", lambda *_: pytest.fail("a log was read"))
    analyse(matrix)


def test_an_attempt_that_wrote_no_line_makes_the_curves_outdated(matrix):
    """The numbers stay those of the lines, and the curves name the attempt again."""
    run = matrix.run("gpt2_adam_1cpu")
    before = {one.name: one for one in analyse(matrix).runs}[run.name]
    edit_attempt(run, 3)
    after = {one.name: one for one in analyse(matrix).runs}[run.name]
    assert after.curves == before.curves
    assert read_json(run.curves)["attempt"] == 3


def test_a_reused_run_needs_only_the_curves_that_it_got(tmp_path, monkeypatch):
    matrix = make_matrix(tmp_path, [FakeRun(attempt=2)])
    run = matrix.run("gpt2_adamw_1cpu")
    (numbers,) = analyse(matrix).runs
    replan(matrix, lambda record: record | {"reused_from": "test_matrix_results_x/gpt2_adamw_1cpu"})
    attempts.path_of(run.path, 2).rename(attempts.path_of(run.path, 1))
    monkeypatch.setattr("kmatrix.curves.make.read_metrics", lambda *_: pytest.fail("the log was read"))
    (reused,) = analyse(matrix).runs
    assert reused.reused_from
    assert (reused.val[-1], len(reused.curves.train)) == (numbers.val[-1], len(numbers.curves.train))


def test_all_evaluations_are_in_results_json(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(steps=400, eval_interval=1, log_interval=400)])
    (run,) = results_of(matrix)["runs"]
    lines = [json.loads(line) for line in matrix.run(run["name"]).metrics.open()]
    evaluated = [line for line in lines if "val/loss" in line]
    kept = run["val"]
    assert kept["loss"][0] == evaluated[0]["val/loss"]
    assert kept["loss"][-1] == evaluated[-1]["val/loss"]
    assert len(kept["loss"]) <= 400 < len(evaluated)
    few = make_matrix(tmp_path / "few", [FakeRun(steps=399, eval_interval=1, log_interval=400)])
    (run,) = results_of(few)["runs"]
    lines = [json.loads(line) for line in few.run(run["name"]).metrics.open()]
    assert run["val"] == {
        "step": [line["step"] for line in lines if "val/loss" in line],
        "tokens": [line["tokens"] for line in lines if "val/loss" in line],
        "seconds": [line["elapsed_s"] for line in lines if "val/loss" in line],
        "loss": [line["val/loss"] for line in lines if "val/loss" in line],
    }
