"""What it took to reach a target loss: a run that never reached it is never left out."""

from __future__ import annotations

import json
import math

import pytest
from scipy import stats

from gpu_factory import STARTED, FakeGpus, record
from kmatrix.records.files import read_json, write_json
from kmatrix.report.analyse import analyse
from kmatrix.report.results import Effort
from kmatrix.report.target import reached
from recordings import read_jsonl
from records_factory import FakeRun, make_matrix, runs_with_seeds


def numbers_of(matrix, value=None):
    if value is not None:
        write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "verdict": {"target_loss": value}})
    return analyse(matrix).target


def recorded_matrix(root, **gpus):
    """Return a matrix of one run on one GPU, recorded from its first line to its end, with the lines of its log."""
    matrix = make_matrix(root, runs_with_seeds(1, (3.2,), device="cuda"))
    (folder,) = matrix.runs()
    lines = [{**line, "time": STARTED + line["elapsed_s"]} for line in read_jsonl(folder.metrics)]
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    length = int(lines[-1]["elapsed_s"]) + 2
    one = {"memory": (1000.0,), "power": (100.0,), "utilization": (90.0,), "counter": True}
    record(folder, FakeGpus(samples=length, **one, **gpus))
    return matrix, lines


def group_of(found, optimizer):
    return next(one for one in found.configurations if one.name.startswith(optimizer))


def test_a_run_that_never_reaches_the_target_is_later_than_all_others(tmp_path):
    losses = (3.27, 3.28, 3.29, 3.31, 3.32)
    found = numbers_of(make_matrix(tmp_path, runs_with_seeds(5, losses)), 3.295)

    one = group_of(found, "adamw")
    assert (one.runs, one.reached) == (5, 3)
    assert one.median.step == 100  # the third of five, not the mean of three
    assert found.of is None


def test_no_median_when_half_of_the_runs_miss_the_target(tmp_path):
    found = numbers_of(make_matrix(tmp_path, runs_with_seeds(4, (3.27, 3.28, 3.31, 3.32))), 3.295)

    assert group_of(found, "adamw").median == Effort()


def test_failed_runs_did_not_reach_the_target_and_planned_ones_may(tmp_path):
    runs = runs_with_seeds(2, (3.27, 3.28))
    lost = {"status": "failed", "stop_at": 40, "final_loss": 3.2}
    runs += [
        FakeRun(seed=3, axes={"seed": "3"}, kind="oom", **lost),
        FakeRun(optimizer="sgd", seed=1, axes={"seed": "1"}, kind="nan", **lost),
    ]
    found = numbers_of(make_matrix(tmp_path, runs, planned=[FakeRun(seed=4, axes={"seed": "4"})]), 3.295)

    adamw = group_of(found, "adamw")
    assert (adamw.reached, adamw.runs, adamw.pending) == (2, 3, 1)
    # Two of three took 100 steps; the third failed at step 40, and nobody knows when it would have been there.
    assert adamw.median.step is None
    # No run of sgd finished, so it is in no ranking; its runs count all the same.
    sgd = group_of(found, "sgd")
    assert (sgd.reached, sgd.runs) == (0, 1)


def test_a_run_that_diverged_would_never_have_reached_the_target(tmp_path):
    runs = [
        *runs_with_seeds(2, (3.27, 3.28)),
        FakeRun(seed=3, axes={"seed": "3"}, status="failed", kind="nan", stop_at=40, final_loss=3.2),
    ]
    found = numbers_of(make_matrix(tmp_path, runs), 3.295)

    assert group_of(found, "adamw").median.step == 100
    assert group_of(found, "adamw").test.p is None
    assert group_of(found, "adamw").test.reason == "diverged in 1 of 3 runs"


def test_a_finished_run_that_missed_the_target_is_later_than_all_others_even_if_it_was_faster(tmp_path):
    fast = FakeRun(seed=3, axes={"seed": "3"}, final_loss=3.4, tokens_per_s=400_000.0)
    matrix = make_matrix(tmp_path, [*runs_with_seeds(2, (3.27, 3.28)), fast])
    found = numbers_of(matrix, 3.295)
    seconds = [run.reached.seconds for run in analyse(matrix).runs if run.reached]
    assert (len(seconds), group_of(found, "adamw").median.seconds) == (2, max(seconds))


def test_the_default_is_the_mean_of_the_leader_rounded_up(tmp_path):
    runs = [
        *runs_with_seeds(2, (3.27004, 3.27), optimizer="muon"),
        *runs_with_seeds(2, (3.8, 3.81), optimizer="sgd"),
    ]
    found = numbers_of(make_matrix(tmp_path, runs))

    assert (found.loss, found.of) == (3.2701, "muon")
    assert group_of(found, "muon").test is None
    assert group_of(found, "sgd").reached == 0


def test_the_test_against_the_target_is_one_sided_and_corrected(tmp_path):
    losses = {"muon": (3.270, 3.272, 3.271), "adamw": (3.278, 3.284, 3.281)}
    runs = [run for name, each in losses.items() for run in runs_with_seeds(3, each, optimizer=name)]
    found = numbers_of(make_matrix(tmp_path, runs), 3.28)

    p = {name: stats.ttest_1samp(each, 3.28, alternative="less").pvalue for name, each in losses.items()}
    muon, adamw = group_of(found, "muon").test, group_of(found, "adamw").test
    assert (muon.p, adamw.p) == (pytest.approx(p["muon"], rel=1e-9), pytest.approx(p["adamw"], rel=1e-9))
    assert muon.p_holm == pytest.approx(2 * p["muon"], rel=1e-9)
    assert (muon.is_below, adamw.is_below) == (True, False)


def test_time_and_energy_are_those_at_the_evaluation(tmp_path):
    matrix, lines = recorded_matrix(tmp_path)
    (one,) = analyse(matrix).runs
    found = reached(one, 5.0)

    expected = next(line for line in lines if line.get("val/loss", math.inf) <= 5.0)
    assert (found.step, found.tokens) == (expected["step"], expected["tokens"])
    assert found.seconds == pytest.approx(expected["elapsed_s"])
    assert found.joules == pytest.approx(100.0 * expected["elapsed_s"], abs=110)
    assert reached(one, 3.0) is None


def test_energy_of_simulated_gpus_is_unknown(tmp_path):
    matrix, _ = recorded_matrix(tmp_path, name="NVIDIA A10G (simulated)")
    (one,) = analyse(matrix).runs

    assert reached(one, 5.0).joules is None


def test_without_a_ranking_and_a_target_there_are_no_numbers(tmp_path):
    assert numbers_of(make_matrix(tmp_path, [FakeRun(status="failed", stop_at=40)])) is None
