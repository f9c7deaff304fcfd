"""The numbers of results.json, the summary and report.md equal those that SciPy computes here, to the last digit."""

from __future__ import annotations

import itertools
import re
import statistics

import pytest
from scipy import stats

from kmatrix.records.files import read_json
from kmatrix.report.analysis import analyse
from kmatrix.report.write import write_summary
from records_factory import make_matrix, runs_with_seeds

LOSSES = {
    "adamw": [3.2917, 3.2931, 3.2924, 3.2909, 3.2928, 3.2921],
    "muon": [3.2799, 3.2806, 3.2810, 3.2796, 3.2808, 3.2811],
    "soap": [3.2805, 3.2801, 3.2817, 3.2799, 3.2804, 3.2812],
    "lion": [3.2949, 3.2935, 3.2953, 3.2921, 3.2966, 3.2940],
}
LEADER = "muon"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    runs = [run for name, losses in LOSSES.items() for run in runs_with_seeds(6, losses, optimizer=name)]
    made = make_matrix(tmp_path_factory.mktemp("numbers"), runs)
    write_summary(analyse(made))
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


def plain(name):
    return name.removesuffix(", 1 rank")


def test_results_json_has_the_numbers_of_scipy(ranking):
    alone, after = corrected()
    assert len(ranking["pairs"]) == 6
    for pair in ranking["pairs"]:
        a, b = plain(pair["a"]), plain(pair["b"])
        d, key = differences(a, b), frozenset((a, b))
        spread = statistics.variance(LOSSES[a]) + statistics.variance(LOSSES[b])
        assert pair["difference"] == pytest.approx(statistics.fmean(d), rel=1e-9)
        assert pair["deviation"] == pytest.approx(statistics.stdev(d), rel=1e-9)
        assert pair["interval"]["low"] == pytest.approx(statistics.fmean(d) - half_of(d), rel=1e-9)
        assert pair["interval"]["high"] == pytest.approx(statistics.fmean(d) + half_of(d), rel=1e-9)
        assert pair["p"] == pytest.approx(alone[key], rel=1e-8)
        assert pair["p_holm"] == pytest.approx(after[key], rel=1e-8)
        assert pair["share_removed"] == pytest.approx(1 - statistics.variance(d) / spread, rel=1e-9)
        whole = [round(value * 10_000) for value in d]  # exact, so that equal sums are equal
        sums = [sum(map(int.__mul__, whole, signs)) for signs in itertools.product((-1, 1), repeat=6)]
        assert pair["sign_flip_p"] == sum(abs(one) >= abs(sum(whole)) for one in sums) / 64
        sure = after[key] <= 0.05
        assert pair["outcome"] == ("open" if not sure else "better" if statistics.fmean(d) < 0 else "worse")
        power = stats.nct.sf(stats.t.isf(pair["level"] / 2, 5), 5, pair["detectable"] / (statistics.stdev(d) / 6**0.5))
        assert power == pytest.approx(0.8, abs=1e-6)


def test_the_ranking_of_the_summary_is_that_of_scipy_to_the_last_digit(matrix):
    _, after = corrected()
    number = r"[+-]?\d+\.\d+"
    row = re.compile(
        rf" *\d (\w+), 1 rank +({number}) +±({number}) +({number}) +6  "
        rf"(?:leader|({number}) \[({number}), ({number})\], p ([=<]) ({number}): .*)"
    )
    found = {match[1]: match for line in matrix.summary.read_text().splitlines() if (match := row.fullmatch(line))}
    assert found.keys() == LOSSES.keys()
    for name, match in found.items():
        losses = LOSSES[name]
        assert match[2] == f"{statistics.fmean(losses):.4f}"
        assert match[3] == f"{half_of(losses):.4f}"
        assert match[4] == f"{statistics.stdev(losses):.4f}"
        if name == LEADER:
            continue
        d = differences(name, LEADER)
        digits = len(match[5].partition(".")[2])
        assert match[5] == f"{statistics.fmean(d):+.{digits}f}"
        assert match[6] == f"{statistics.fmean(d) - half_of(d):+.{digits}f}"
        assert match[7] == f"{statistics.fmean(d) + half_of(d):+.{digits}f}"
        p = after[frozenset((name, LEADER))]
        assert (match[8], match[9]) == (("<", "0.001") if p < 0.001 else ("=", f"{p:.3f}"))


def test_the_markdown_has_the_same_numbers(matrix):
    rows = [line.split("|")[1:-1] for line in matrix.report_md.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [cells[1].strip().strip("`").removesuffix(", 1 rank") for cells in rows] == sorted(
        LOSSES, key=lambda name: statistics.fmean(LOSSES[name])
    )
    for cells in rows:
        _, name, mean, interval, deviation, seeds, difference, _, _ = (cell.strip() for cell in cells)
        losses = LOSSES[name.strip("`").removesuffix(", 1 rank")]
        digits = len(mean.partition(".")[2])
        assert mean == f"{statistics.fmean(losses):.{digits}f}"
        assert interval == f"± {half_of(losses):.{digits}f}"
        assert (deviation, seeds) == (f"{statistics.stdev(losses):.{digits}f}", "6")
        if difference != "-":
            d = differences(name.strip("`").removesuffix(", 1 rank"), LEADER)
            size, half = difference.split(" ± ")
            digits = len(half.partition(".")[2])
            assert (size, half) == (f"{statistics.fmean(d):.{digits}f}", f"{half_of(d):.{digits}f}")


def test_the_headline_has_the_numbers_of_the_main_comparison(ranking, matrix):
    assert ranking["evidence"] == "muon, 1 rank leads, but soap, 1 rank is not distinguishable from it"
    d = differences("adamw", LEADER)
    text = " ".join(matrix.summary.read_text().split())
    assert f"adamw, 1 rank, by {statistics.fmean(d):.5f} ± {half_of(d):.5f} nats/token" in text
