"""What a reader may conclude: seeds that differ, runs that diverged, sizes that differ, noise, zeros and simulation."""

from __future__ import annotations

import csv
import re
from html import unescape
from statistics import mean

import pytest
from scipy import stats

from gpu_factory import FakeGpus, record
from kmatrix.records.files import read_json, write_json
from kmatrix.report import tables
from kmatrix.report.analyse import analyse
from kmatrix.report.page import render_page
from kmatrix.report.ranking import COSTS
from kmatrix.report.write import ending, markdown, original, results_csv, summary
from kmatrix.verdict.family import Method
from records_factory import FakeRun, make_matrix, replan, runs_with_seeds


def texts_of(matrix):
    """Return each report of a matrix on one line."""
    results = analyse(matrix)
    found = summary(results), ending(results, []), markdown(matrix, results).replace("`", "").replace("\\", "")
    page = unescape(re.sub(r"<[^>]+>", "", render_page(matrix, results).partition("<main")[2].partition("<script")[0]))
    return [" ".join(text.split()) for text in (*found, page)]


def change_results(matrix, change):
    """Change what the trainer measured. change: new values, from the name of a run."""
    for run in matrix.runs():
        write_json(run.result, read_json(run.result) | change(run.name))


def test_means_over_different_seeds_are_said_to_be_and_who_failed(tmp_path):
    """By its mean adamw leads; where both have a loss it is worse."""
    failed = FakeRun(seed=3, axes={"seed": "3"}, status="failed", kind="oom", stop_at=40)
    runs = [*runs_with_seeds(2, [3.0, 3.101]), failed, *runs_with_seeds(3, [2.99, 3.09, 3.5], optimizer="muon")]
    for text in texts_of(make_matrix(tmp_path, runs)):
        assert "muon beats adamw by 0.0105" in text
        assert "different seeds; over seeds 1, 2, which all have: muon 3.0400, adamw 3.0505" in text
        assert "adamw: 1 of 3 runs failed" in text


def test_losses_without_common_seeds_are_compared_by_welch_and_nothing_is_called_paired(tmp_path):
    losses = [3.20, 3.21, 3.22], [3.10, 3.11, 3.13]
    others = [
        FakeRun(optimizer="muon", seed=n, axes={"seed": str(n)}, final_loss=x) for n, x in enumerate(losses[1], 7)
    ]
    matrix = make_matrix(tmp_path, [*runs_with_seeds(3, losses[0]), *others])
    (pair,) = analyse(matrix).rankings[0].pairs
    assert (pair.method, pair.p) == (Method.WELCH, pytest.approx(stats.ttest_ind(*losses, equal_var=False).pvalue))
    for text in texts_of(matrix):
        assert "Welch" in text
        assert not re.search(r"(?<!not )paired", text)


def test_costs_of_equal_seeds_are_not_paired(tmp_path):
    """Steps of one seed have nothing in common but the machine: a paired test would find any drift of it."""
    times = {"adamw": [100.0, 200.0, 300.0], "muon": [101.0, 202.0, 301.0]}
    matrix = make_matrix(
        tmp_path, [run for name in times for run in runs_with_seeds(3, [3.1, 3.2, 3.3], optimizer=name)]
    )
    change_results(matrix, lambda name: {"step_ms": times[name.split("_")[1]][int(name.split("seed")[1][0]) - 1]})
    cost = next(one for one in analyse(matrix).rankings[0].costs if one.quantity == "step_ms")
    assert cost.p == pytest.approx(stats.ttest_ind(times[cost.a], times[cost.b], equal_var=False).pvalue)


@pytest.mark.parametrize("others", [True, False])
def test_a_finished_run_that_diverged_is_marked_and_a_matrix_of_them_has_no_result(tmp_path, others):
    runs = [*runs_with_seeds(2, [20.0, 10.9], optimizer="muon"), *(runs_with_seeds(2, [3.1, 3.2]) if others else [])]
    matrix = make_matrix(tmp_path, runs)
    assert [(run.status, run.diverged) for run in analyse(matrix).runs[:2]] == [("finished", True)] * 2
    headline = "Only one configuration has a result: adamw" if others else "No result of muon (2 of 2 runs diverged)"
    for text in texts_of(matrix):
        assert headline in text
        assert re.search("muon.{0,30}2 of 2 runs diverged", text)
    (text, *_) = texts_of(matrix)
    assert "20.0000*" in text
    assert "*: the run has not finished, or diverged" in text


@pytest.mark.parametrize(("field", "what"), [("params", "parameters"), ("tokens", "tokens")])
def test_no_size_or_length_beats_another_without_a_word_on_it(tmp_path, field, what):
    losses = {width: [4 - width / 100 + noise * width / 9e4 for noise in (0, 1, 3)] for width in (64, 96, 128)}
    runs = [run for width in losses for run in runs_with_seeds(3, losses[width], axes={"width": str(width)})]
    matrix = make_matrix(tmp_path, runs)
    change_results(matrix, lambda run: {field: 1000 * int(run.split("width")[1].split("_")[0])})
    (headline,) = analyse(matrix).verdict
    assert headline.startswith("adamw, width 128 beats 2 of 2")
    assert headline.endswith(f"; the runs differ in {what}")
    for text in texts_of(matrix):
        assert f"the runs differ in {what} (" in text


def test_noise_that_four_digits_do_not_show_has_more(tmp_path):
    losses = [3.28001, 3.28002, 3.28004]
    text, short, _, page = texts_of(make_matrix(tmp_path, runs_with_seeds(3, losses)))
    half = stats.t.ppf(0.975, 2) * stats.sem(losses)
    assert f"3.280023 ±{half:.6f} {stats.tstd(losses):.6f}" in text
    assert f"3.280023±{half:.6f}" in page
    assert "1. adamw val loss 3.280023" in short
    runs = FakeRun(final_loss=3.28), FakeRun(optimizer="muon", final_loss=3.28002)
    assert "< 0.0001 (one seed, not significant)" in texts_of(make_matrix(tmp_path / "one", runs))[0]


def test_a_measured_zero_is_zero(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(device="cuda"), FakeRun(optimizer="muon", device="cuda")])
    zeros = dict.fromkeys([*COSTS[:2], "final_val_loss", "mfu", "sparsity", "hellaswag_accuracy"], 0.0)
    change_results(matrix, lambda name: zeros if "muon" in name else {"step_ms": 0.0})
    results = analyse(matrix)
    run = results.runs[1]
    assert {getattr(run, name) for name in zeros} == {0.0}
    assert (results.rankings[0].order[0], results.configurations[0].amounts["peak_memory_mib"]) == ("muon", 0.0)
    assert {"0.0000", "1.00", "0.0%"} <= set(tables.runs(results).rows[1])
    assert "0.0000" in tables.benchmarks(results).rows[0]


def test_simulated_energy_is_in_no_table_without_its_mark(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(optimizer=name, device="cuda") for name in ("adamw", "muon")])
    real, simulated = matrix.runs()
    for run, name in ((real, "NVIDIA A10G"), (simulated, "NVIDIA A10G (simulated)")):
        record(run, FakeGpus(name=name))
    results = analyse(matrix)
    assert [run.joules_per_token is None for run in results.runs] == [False, True]
    assert [original(run)["gpu_simulated"] for run in results.runs] == [False, True]
    assert [row["simulated"] for row in csv.DictReader(results_csv(results).splitlines())] == ["false", "true"]
    found = [getattr(tables, name)(results) for name in ("runs", "cost", "target", "benchmarks")]
    found.append(tables.devices(results.runs))
    assert [one.titles.index("energy") for one in found if "energy" in one.titles]
    for table in found:
        for row in (row for row in table.rows if "muon" in row[0] and not any("(simulated)" in cell for cell in row)):
            assert {cell for title, cell in zip(table.titles, row, strict=True) if "energy" in title} <= {"-"}


def test_two_runs_of_one_configuration_and_seed_both_count(tmp_path):
    matrix = make_matrix(tmp_path, [*runs_with_seeds(2, [3.1, 3.2]), *runs_with_seeds(1, [3.3], optimizer="muon")])
    replan(matrix, lambda run: {**run, "train": {**run["train"], "seed": 1}})
    results = analyse(matrix)
    one = next(one for one in results.configurations if one.name == "adamw")
    assert (one.mean, one.counted, one.seeds) == (pytest.approx(3.15), one.runs, (1, 1))
    assert one.amounts["seconds"] == mean([run.seconds for run in results.runs if run.name in one.runs])
    assert all("adamw" in text for text in texts_of(matrix))


def test_with_adaptive_seeds_the_mean_is_over_the_losses_of_the_verdict(tmp_path):
    """A second run of seed 1 is not the one that a round asked for."""
    losses = {"adamw": [3.30, 3.31, 3.29, 9.0], "muon": [3.20, 3.21, 3.19, 9.1]}
    runs = [run for name, known in losses.items() for run in runs_with_seeds(4, known, optimizer=name)]
    matrix = make_matrix(tmp_path, runs, verdict={"seeds_auto": True, "seeds": [1, 2, 3], "seeds_min": 3})
    replan(matrix, lambda run: {**run, "train": {**run["train"], "seed": run["train"]["seed"] % 4 or 1}})
    results = analyse(matrix)
    assert {one.name: one.mean for one in results.configurations} == {
        "muon": pytest.approx(3.2), "adamw": pytest.approx(3.3)
    }  # fmt: skip
    assert results.rankings[0].seeds_auto.unused == 2


def test_a_number_in_the_text_of_others_stays_as_it_is(tmp_path):
    reason = "exit status -1 at 3-1"
    failed = FakeRun(optimizer="sgd", status="failed", reason=reason, stop_at=40, log_tail=("x = -1",))
    for text in texts_of(make_matrix(tmp_path, [FakeRun(), failed])):
        assert reason in text
        assert "\N{MINUS SIGN}1" not in text
