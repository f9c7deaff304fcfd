"""The plan of published runs: each time is inside the band, and each memory within 15 % or on the safe side."""

from __future__ import annotations

import re
import sys
from functools import cache

import pytest

from factories import ROOT
from kmatrix.plan.feasibility import Fit

sys.path.insert(0, str(ROOT / "bench"))
import published

RUNS = published.published()


@cache
def compared(name):
    return published.compare(next(run for run in RUNS if run.name == name))


@pytest.mark.parametrize("name", [run.name for run in RUNS])
def test_the_published_time_and_memory_agree_with_the_plan(name):
    row = compared(name)
    assert row.in_band is not False
    assert row.memory_right is not False


def test_at_least_six_runs_have_a_time_and_every_run_a_source():
    assert sum(run.seconds is not None for run in RUNS) >= 6
    assert all(re.search(r"https://|report", run.source) for run in RUNS)


def test_the_published_peak_of_nanochat_fits_into_80_gb():
    row = compared("nanochat d20, 8 x H100")
    assert row.verdict in (Fit.FITS, Fit.TIGHT)
    assert 0 <= row.memory_error < 0.15


def test_the_band_is_not_so_wide_that_every_time_fits():
    for run in RUNS:
        if run.seconds is not None:
            row = compared(run.name)
            assert row.longest / row.shortest < 3 or "10.7M" in run.name


def test_the_table_prints_the_error_of_each_row(capsys):
    published.main([])
    lines = capsys.readouterr().out.splitlines()
    for run in RUNS:
        (line,) = (line for line in lines if line.startswith(run.name + " "))
        assert ("%" in line) == (run.seconds is not None or run.memory_mib is not None)
        assert "WRONG" not in line
