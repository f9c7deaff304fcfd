"""The section on cost: intervals over seeds, measured energy only, and how sure the Pareto fronts are."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest
from scipy import stats

from gpu_factory import FakeGpus, record
from kmatrix.report.analysis import analyse
from kmatrix.report.page.cost import RESAMPLES, cost, front_shares
from kmatrix.report.page.parts.figures import pareto_front
from kmatrix.report.page.parts.groups import page_groups
from records_factory import make_matrix, runs_with_seeds

SPEEDS = {"adamw": (4000.0, 4100.0, 4050.0), "muon": (3900.0, 3880.0, 3910.0)}
LOSSES = {"adamw": (3.2917, 3.2925, 3.2921), "muon": (3.2800, 3.2812, 3.2806)}


def runs_of(optimizer, **more):
    runs = runs_with_seeds(3, LOSSES[optimizer], optimizer=optimizer, **more)
    return [replace(run, tokens_per_s=speed) for run, speed in zip(runs, SPEEDS[optimizer], strict=True)]


def section_of(matrix):
    numbers = analyse(matrix)
    return cost(numbers, page_groups(numbers))


def amount(section, optimizer, key):
    at = [column.key for column in section.columns].index(key)
    row = next(row for row in section.rows if row.group.numbers.axes["optimizer"] == optimizer)
    return row.amounts[at]


def test_amounts_are_means_with_the_interval_of_scipy(tmp_path):
    section = section_of(make_matrix(tmp_path, [*runs_of("adamw"), *runs_of("muon")]))

    values = SPEEDS["adamw"]
    low, high = stats.t.interval(0.95, 2, statistics.fmean(values), stats.sem(values))
    found = amount(section, "adamw", "speed")
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.half == pytest.approx((high - low) / 2, rel=1e-9)
    assert (found.low, found.high, found.runs) == (4000.0, 4100.0, 3)
    assert {"MFU", "energy", "energy per token", "price"} == set(section.missing)


def test_energy_counts_only_if_it_was_measured_over_the_whole_training(tmp_path):
    matrix = make_matrix(tmp_path, [*runs_of("adamw"), *runs_of("muon")])
    seconds = {run.name: run.seconds for run in analyse(matrix).runs}
    for folder in matrix.runs():
        whole = int(seconds[folder.name]) + 2
        simulated = " (simulated)" if "muon" in folder.name else ""
        samples = whole // 2 if folder.name.endswith("seed3_1cpu") else whole
        record(folder, FakeGpus(samples=samples, counter=True, name=f"NVIDIA A10G{simulated}"))

    section = section_of(matrix)

    assert amount(section, "adamw", "joules").runs == 2  # the third recording covers half of the training
    assert amount(section, "muon", "joules") is None
    assert section.simulated
    # Simulated energy is on no front: one configuration alone has none.
    assert [panel.title for panel in section.fronts[0].panels] == ["Loss and training time", "Loss and peak memory"]


def test_a_single_run_has_no_interval_and_no_share(tmp_path):
    section = section_of(make_matrix(tmp_path, [runs_of("adamw")[0], runs_of("muon")[0]]))

    assert amount(section, "adamw", "seconds").half is None
    assert section.fronts[0].panels
    assert section.fronts[0].shares == ()


SAMPLES = [
    [(1, 3.280, 10.0), (2, 3.284, 11.0), (3, 3.279, 10.5)],
    [(1, 3.281, 9.9), (2, 3.280, 10.9), (3, 3.283, 10.4)],
    [(1, 3.300, 8.0), (2, 3.301, 8.1), (3, 3.299, 8.2)],
    [(1, 3.400, 9.0), (2, 3.401, 9.0), (3, 3.400, 9.0)],
]


def test_shares_of_a_front_agree_with_all_resamples_of_three_seeds():
    exact = [0.0] * len(SAMPLES)
    draws = list(itertools.product(range(3), repeat=3))  # of seeds, common to all configurations
    for draw in draws:
        means = [tuple(statistics.fmean(one[at][value] for at in draw) for value in (2, 1)) for one in SAMPLES]
        for index in pareto_front(means):
            exact[index] += 1 / len(draws)

    found = front_shares(SAMPLES)

    assert found == pytest.approx(exact, abs=4 * 0.5 / RESAMPLES**0.5)
    assert (found[2], found[3]) == (1.0, 0.0)  # the cheapest; beaten in both
    assert 0.05 < found[0] < 0.95  # an honest doubt
    assert front_shares(SAMPLES) == found  # the same page for the same runs
