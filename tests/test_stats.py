"""Means and intervals, checked with published tables and properties."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.gpu.balance import balance_quality, coefficient_of_variation, cv_text
from kmatrix.stats import critical, mean, mean_interval, sample_deviation

ROOT = Path(__file__).resolve().parents[1]
losses = st.floats(0.1, 20)


@pytest.mark.parametrize(("cv", "quality"), [(4.99, "Excellent"), (5.0, "Good"), (10.0, "Fair"), (20.0, "Poor")])
def test_each_bound_belongs_to_the_class_above_it(cv, quality):
    assert balance_quality(cv) == quality


def test_the_coefficient_of_variation_uses_the_population_deviation():
    assert coefficient_of_variation([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx(40.0)


@pytest.mark.parametrize("values", [[7.0], [0.0, 0.0]])
def test_a_single_value_and_all_zeros_have_no_variation(values):
    assert coefficient_of_variation(values) == 0.0


@pytest.mark.parametrize("function", [mean, coefficient_of_variation])
def test_an_empty_list_is_refused(function):
    with pytest.raises(ValueError, match="no values"):
        function([])


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=16), st.floats(0.5, 8))
def test_balance_does_not_depend_on_the_unit_of_memory(values, factor):
    scaled = [value * factor for value in values]
    assert coefficient_of_variation(scaled) == pytest.approx(coefficient_of_variation(values), abs=1e-6)


def test_one_value_has_no_deviation_and_no_interval():
    assert sample_deviation([3.28]) is None
    assert mean_interval([3.28]) is None


# NIST/SEMATECH e-Handbook, table 1.3.6.7.2, two-sided 95 % and 99 %.
@pytest.mark.parametrize(
    ("freedom", "t95", "t99"),
    [
        *((1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (4, 2.776, 4.604), (5, 2.571, 4.032)),
        *((9, 2.262, 3.250), (10, 2.228, 3.169), (30, 2.042, 2.750), (100, 1.984, 2.626)),
    ],
)
def test_quantiles_of_students_t_match_published_tables(freedom, t95, t99):
    assert critical(0.025, freedom) == pytest.approx(t95, abs=5.1e-4)
    assert critical(0.005, freedom) == pytest.approx(t99, abs=5.1e-4)


# Computed without SciPy, by the continued fraction of the incomplete beta function (DLMF 8.17.22).
FREEDOMS = (1, 2, 2.94, 5, 30)
QUANTILES = {  # by level, for each of FREEDOMS
    0.5: (0.9999999999999999, 0.8164965809277268, 0.7669142129537972, 0.7266868438004234, 0.682755693321298),
    0.9: (6.313751514675041, 2.919985580353726, 2.3730730481323548, 2.015048373333023, 1.6972608865939547),
    0.95: (12.706204736174683, 4.30265272974946, 3.219506066349277, 2.5705818356363146, 2.042272456301234),
    0.999: (636.6192487687182, 31.599054576443603, 13.378556168490395, 6.868826625881107, 3.6459586350420197),
}


@pytest.mark.parametrize("level", QUANTILES)
def test_quantiles_match_those_of_the_continued_fraction(level):
    assert [critical((1 - level) / 2, freedom) for freedom in FREEDOMS] == pytest.approx(
        list(QUANTILES[level]), rel=1e-10
    )


@pytest.mark.process
def test_scipy_is_imported_when_a_test_needs_it():
    """The trainer and light commands import `stats`, too, and SciPy takes 0.2 s to import."""
    code = "import sys, kmatrix.stats; sys.exit('scipy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": "lib:."}, check=True)


def test_with_many_degrees_of_freedom_t_is_normal():
    assert critical(0.025, 1e7) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-6)


def test_an_interval_matches_a_calculation_by_hand():
    # mean 3, s = 1, n = 3, t = 4.30265: 3 -+ 4.30265 / sqrt 3
    interval = mean_interval([2.0, 3.0, 4.0])
    assert (interval.low, interval.high) == pytest.approx((0.51586, 5.48414), abs=1e-5)


@given(st.lists(losses, min_size=2, max_size=10))
def test_an_interval_contains_its_mean(values):
    interval = mean_interval(values)
    assert interval.low <= mean(values) + 1e-9
    assert interval.high >= mean(values) - 1e-9


@pytest.mark.parametrize(
    ("cv", "text"),
    [(0.0, "0.0%"), (5.21, "5.2%"), (4.96, "4.96%"), (9.996, "9.996%"), (20.0, "20.0%"), (27.35, "27.4%")],
)
def test_a_cv_is_rounded_within_its_class(cv, text):
    assert cv_text(cv) == text
    assert balance_quality(float(cv_text(cv)[:-1])) == balance_quality(cv)
