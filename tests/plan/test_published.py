"""The plan of published runs: each time is inside the band, and each memory within 15 % or on the safe side."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from functools import cache

import pytest

from factories import ROOT
from kmatrix.plan.feasibility import PUBLISHED
from kmatrix.text import GIB

sys.path.insert(0, str(ROOT / "bench"))
import published

RUNS = published.published()
AS_GPT2 = ("MODEL", "HEAD_DIM", "BIAS", "WEIGHT_TYING")  # symbols that make a GPT-2 of nanochat's shape


@cache
def compared():
    return {run.name: published.compare(run) for run in RUNS}


@cache
def rows():
    return list(compared().values())


@pytest.mark.parametrize("name", [run.name for run in RUNS])
def test_the_published_time_and_memory_agree_with_the_plan(name):
    """Also if the run itself is left out of the fit."""
    row = compared()[name]
    assert row.in_band() is not False
    assert row.in_band(published.without(rows(), row)) is not False
    assert row.memory_right is not False


def test_most_times_are_in_the_band_of_a_fit_to_other_trainers():
    timed = [row for row in rows() if row.run.seconds]
    assert sum(row.in_band(published.without_code(rows(), row)) for row in timed) >= 5 / 6 * len(timed)


def test_the_expected_time_is_not_biased():
    """Neither with the fit to all runs nor with those that leave each out."""
    errors = [row.time_error() for row in rows() if row.run.seconds]
    left_out = [row.time_error(published.without(rows(), row)) for row in rows() if row.run.seconds]
    assert abs(statistics.median(errors)) < 0.05
    assert abs(statistics.median(left_out)) < 0.05


def test_the_constants_of_the_plan_are_those_of_the_fit():
    model = published.fit_mfu(rows())
    assert model.size == PUBLISHED.size
    assert model.spread == pytest.approx(PUBLISHED.spread, abs=0.005)
    assert model.middle == pytest.approx(PUBLISHED.middle, abs=0.005)


@pytest.mark.parametrize("name", [run.name for run in RUNS if run.code == "nanochat"])
def test_a_run_of_nanochat_has_the_published_memory_as_its_own_architecture_too(name):
    """d24 and d26 are of 2026, the others of 2025."""
    row = compared()[name]
    arch = "nanochat" if "d24" in name or "d26" in name else "nanochat2025"
    words = [word for word in row.run.arguments.split() if word.partition("=")[0] not in AS_GPT2]
    own = published.compare(replace(row.run, arguments=" ".join([*words, f"ARCH={arch}"])))
    assert own.config.shape.is_nanochat
    assert own.memory_right is not False
    if arch == "nanochat2025":
        assert own.memory == pytest.approx(row.memory, abs=0.2 * GIB)


def test_the_table_prints_the_error_of_each_row(capsys, monkeypatch):
    monkeypatch.setattr(published, "compare", lambda run: compared()[run.name])
    published.main([])
    lines = capsys.readouterr().out.splitlines()
    for run in RUNS:
        (line,) = (line for line in lines if line.startswith(run.name + " "))
        assert ("%" in line) == (run.seconds is not None or run.memory_mib is not None)
        assert "WRONG" not in line
