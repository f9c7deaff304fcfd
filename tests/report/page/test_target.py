"""The section on the target loss: runs that never reach it count as not reached, never left out of a mean."""

from __future__ import annotations

import math

import pytest

from kmatrix.records.files import read_json, write_json
from kmatrix.report.analysis import analyse
from kmatrix.report.page.parts.groups import page_groups
from kmatrix.report.page.target import censored_median, rounded_up, target
from records_factory import FakeRun, make_matrix, runs_with_seeds


def section_of(matrix, value=None):
    if value is not None:
        write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "verdict": {"target_loss": value}})
    numbers = analyse(matrix)
    return target(numbers, page_groups(numbers))


def row_of(section, optimizer):
    return next(row for row in section.rows if row.group.numbers.axes["optimizer"] == optimizer)


def test_a_run_that_never_reaches_the_target_is_later_than_all_others(tmp_path):
    losses = (3.27, 3.28, 3.29, 3.31, 3.32)
    section = section_of(make_matrix(tmp_path, runs_with_seeds(5, losses)), 3.295)

    row = row_of(section, "adamw")
    assert (row.reached, row.runs, row.missed, row.late) == (3, 5, 2, 2)
    assert len(row.marks) == 3
    steps = row.medians[section.axes.index("step")].value
    assert steps == 100  # the third of five, not the mean of three
    assert section.is_set
    assert (section.missed, section.runs) == (2, 5)


def test_no_median_when_half_of_the_runs_miss_the_target(tmp_path):
    section = section_of(make_matrix(tmp_path, runs_with_seeds(4, (3.27, 3.28, 3.31, 3.32))), 3.295)

    row = row_of(section, "adamw")
    assert [median.value for median in row.medians] == [None] * len(section.axes)
    assert all(median.is_known for median in row.medians)
    assert row.ratio is None


def test_failed_runs_did_not_reach_the_target_and_running_ones_may(tmp_path):
    runs = runs_with_seeds(2, (3.27, 3.28))
    runs += [
        FakeRun(seed=3, axes={"seed": "3"}, status="failed", kind="nan", stop_at=40, final_loss=3.2),
        FakeRun(optimizer="sgd", seed=1, axes={"seed": "1"}, status="failed", kind="nan", stop_at=40, final_loss=3.2),
    ]
    section = section_of(make_matrix(tmp_path, runs, planned=[FakeRun(seed=4, axes={"seed": "4"})]), 3.295)

    row = row_of(section, "adamw")
    assert (row.reached, row.runs, row.pending) == (2, 3, 1)
    # No run of sgd finished, so it is in no ranking; its runs count all the same.
    assert (row_of(section, "sgd").reached, row_of(section, "sgd").runs) == (0, 1)
    assert [row.group.numbers.axes["optimizer"] for row in section.rows] == ["adamw", "sgd"]


def test_the_default_is_the_mean_of_the_middle_configuration_rounded_up(tmp_path):
    runs = [
        *runs_with_seeds(2, (3.27, 3.28), optimizer="muon"),
        *runs_with_seeds(2, (3.29, 3.29004), optimizer="adamw"),
        *runs_with_seeds(2, (3.8, 3.81), optimizer="sgd"),
    ]
    section = section_of(make_matrix(tmp_path, runs))

    assert (section.value, section.is_set) == (3.2901, False)
    assert section.middle.numbers.axes["optimizer"] == "adamw"
    assert [row.group.numbers.axes["optimizer"] for row in section.rows] == ["muon", "adamw", "sgd"]
    assert row_of(section, "muon").ratio == 1.0
    assert row_of(section, "sgd").reached == 0


def test_the_fastest_comes_first_and_others_are_multiples_of_it(tmp_path):
    runs = [
        *runs_with_seeds(3, (3.27, 3.271, 3.272), optimizer="muon", tokens_per_s=1000.0),
        *runs_with_seeds(3, (3.28, 3.281, 3.282), optimizer="adamw", tokens_per_s=4000.0),
    ]
    section = section_of(make_matrix(tmp_path, runs), 4.0)

    assert [row.group.numbers.axes["optimizer"] for row in section.rows] == ["adamw", "muon"]
    seconds = [row.medians[section.axes.index("seconds")].value for row in section.rows]
    assert section.rows[1].ratio == pytest.approx(seconds[1] / seconds[0])


def test_without_a_ranking_and_a_target_there_is_no_section(tmp_path):
    assert section_of(make_matrix(tmp_path, [FakeRun(status="failed", stop_at=40)])) is None


@pytest.mark.parametrize(
    ("reached", "runs", "median"),
    [([5.0], 1, 5.0), ([3.0, 1.0], 3, 3.0), ([1.0], 2, None), ([1.0, 2.0], 4, None), ([], 0, None), ([], 3, None)],
)
def test_a_median_needs_more_than_half_of_the_runs(reached, runs, median):
    assert censored_median(reached, runs) == median


@pytest.mark.parametrize("loss", [3.28, 3.28001, 3.0, 10.12345, 2.1 + 0.7])
def test_a_run_reaches_its_own_final_loss_rounded_up(loss):
    assert loss <= rounded_up(loss) + 1e-12
    assert rounded_up(loss) - loss < 1.1e-4
    assert math.isclose(rounded_up(loss) * 1e4, round(rounded_up(loss) * 1e4))
