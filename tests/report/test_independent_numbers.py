"""The numbers of results.json, the summary and report.md equal those that SciPy computes here, to the last digit."""

from __future__ import annotations

import itertools
import statistics

import pytest
from scipy import stats

from kmatrix.records.files import read_json
from kmatrix.report.analyse import analyse
from kmatrix.report.write import write_summary
from records_factory import make_matrix, runs_with_seeds

LOSSES = {
    "adamw": [3.2917, 3.2931, 3.2924, 3.2909, 3.2928, 3.2921],
    "muon": [3.2799, 3.2806, 3.2810, 3.2796, 3.2808, 3.2811],
    "soap": [3.2805, 3.2801, 3.2817, 3.2799, 3.2804, 3.2812],
    "lion": [3.2949, 3.2935, 3.2953, 3.2921, 3.2966, 3.2940],
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    runs = [run for name, losses in LOSSES.items() for run in runs_with_seeds(6, losses, optimizer=name)]
    made = make_matrix(tmp_path_factory.mktemp("numbers"), runs)
    write_summary(made, analyse(made))
    return made


@pytest.fixture(scope="module")
def ranking(matrix):
    (found,) = read_json(matrix.results)["rankings"]
    return found


def differences(a, b):
    return [x - y for x, y in zip(LOSSES[a], LOSSES[b], strict=True)]


def half_of(values):
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def corrected():
    """Return the p value of each pair after Holm's correction over all six."""
    alone = {
        frozenset(pair): stats.ttest_rel(*(LOSSES[name] for name in pair)).pvalue
        for pair in itertools.combinations(LOSSES, 2)
    }
    found, largest = {}, 0.0
    for rank, (pair, p) in enumerate(sorted(alone.items(), key=lambda item: item[1])):
        found[pair] = largest = max(largest, min(1.0, (len(alone) - rank) * p))
    return alone, found


def test_results_json_has_the_numbers_of_scipy(ranking):
    alone, after = corrected()
    assert len(ranking["pairs"]) == 6
    for pair in ranking["pairs"]:
        a, b = pair["a"], pair["b"]
        d, key = differences(a, b), frozenset((a, b))
        assert pair["difference"] == pytest.approx(statistics.fmean(d), rel=1e-9)
        assert pair["deviation"] == pytest.approx(statistics.stdev(d), rel=1e-9)
        assert pair["interval"]["low"] == pytest.approx(statistics.fmean(d) - half_of(d), rel=1e-9)
        assert pair["interval"]["high"] == pytest.approx(statistics.fmean(d) + half_of(d), rel=1e-9)
        assert pair["p"] == pytest.approx(alone[key], rel=1e-8)
        assert pair["p_holm"] == pytest.approx(after[key], rel=1e-8)
        sure = after[key] <= 0.05
        assert pair["outcome"] == ("open" if not sure else "better" if statistics.fmean(d) < 0 else "worse")
        # Of six, Holm's method asks 5 % / (6 - rank) of those that are sure, and 5 % / their number of the others.
        sure_ones = [one for one in after if after[one] <= 0.05]
        steps = 6 - sorted(sure_ones, key=alone.__getitem__).index(key) if sure else max(1, 6 - len(sure_ones))
        power = stats.nct.sf(stats.t.isf(0.05 / steps / 2, 5), 5, pair["detectable"] / (statistics.stdev(d) / 6**0.5))
        assert power == pytest.approx(0.8, abs=1e-6)
