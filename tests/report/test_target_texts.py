"""TARGET_LOSS in results.json, the summary and report.md: runs that never reach it count as not reached."""

from __future__ import annotations

import statistics

import pytest
from scipy import stats

from kmatrix.records.files import read_json
from kmatrix.report.analysis import analyse
from kmatrix.report.write import write_summary
from records_factory import FakeRun, loss_at, make_matrix, runs_with_seeds

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


def test_a_run_has_its_first_evaluation_at_or_below_the_target(results):
    for run in results["runs"]:
        fake = FakeRun(final_loss=run["final_val_loss"] or 0.0, steps=100)
        below = [step for step in range(0, 101, 10) if run["final_val_loss"] and loss_at(fake, step) <= TARGET]
        if not below or run["status"] != "finished":
            assert run["reached"] is None
            continue
        seconds = below[0] * 8 * 128 / 4000.0
        assert run["reached"] == {
            "step": below[0],
            "tokens": below[0] * 8 * 128,
            "seconds": pytest.approx(seconds),
            "joules": None,
            "dollars": pytest.approx(run["dollars"] / run["wall_s"] * seconds),
        }


def test_runs_that_never_reach_it_are_counted_and_never_left_out(results):
    found = {one["name"]: one for one in results["target"]["configurations"]}
    assert {name: (one["reached"], one["runs"]) for name, one in found.items()} == {
        "muon, 1 rank": (5, 5),
        "adamw, 1 rank": (3, 5),
        "sgd, 1 rank": (0, 1),
    }
    steps = [run["reached"]["step"] for run in results["runs"] if run["optimizer"] == "adamw" and run["reached"]]
    assert found["adamw, 1 rank"]["median"]["step"] == statistics.median([*steps, 1e9, 1e9])
    assert found["sgd, 1 rank"]["median"] == dict.fromkeys(("step", "tokens", "seconds", "joules", "dollars"))


def test_p_is_that_of_a_one_sided_t_test_corrected_for_the_configurations(results):
    found = {one["name"]: one for one in results["target"]["configurations"]}
    ps = {
        name: stats.ttest_1samp(losses, TARGET, alternative="less").pvalue
        for name, losses in (("muon, 1 rank", MUON), ("adamw, 1 rank", ADAMW))
    }
    for name, p in ps.items():
        assert found[name]["p"] == pytest.approx(p, rel=1e-9)
    # sgd diverged: it has no p, and counts as a comparison.
    assert found["muon, 1 rank"]["p_holm"] == pytest.approx(3 * ps["muon, 1 rank"], rel=1e-9)
    assert (found["muon, 1 rank"]["below"], found["adamw, 1 rank"]["below"]) == (True, False)
    assert (found["sgd, 1 rank"]["p"], found["sgd, 1 rank"]["reason"]) == (None, "diverged in 1 of 1 runs")


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
