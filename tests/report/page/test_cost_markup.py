"""The sections on target, cost, scaling and devices as HTML: numbers and hostile names are text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpu_factory import FakeGpus, record, write_phases, write_timings
from kmatrix.records.files import read_json, write_json
from kmatrix.report.analysis import analyse
from kmatrix.report.page.assemble import render_page
from kmatrix.report.page.parts.text import fixed
from kmatrix.report.page.values import page_of
from records_factory import FakeRun, make_matrix, runs_with_seeds

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return values and HTML of a matrix that has all four sections."""
    losses = {"adamw": (3.2917, 3.2925, 3.2921), "muon": (3.2800, 3.2812, 3.2806)}
    runs = [
        replace(run, gpus=gpus, tokens_per_s=900.0 * gpus + run.seed)
        for optimizer, each in losses.items()
        for gpus in (1, 2)
        for run in runs_with_seeds(
            3, each, optimizer=optimizer, axes={"note": EVIL if optimizer == "muon" else f"{EVIL}2"}
        )
    ]
    matrix = make_matrix(tmp_path_factory.mktemp("page"), runs)
    for folder, run in zip(matrix.runs(), sorted(runs, key=lambda run: run.name), strict=True):
        gpus = FakeGpus(
            memory=(1000.0, 1001.0)[: run.gpus],
            power=(100.0, 101.0)[: run.gpus],
            utilization=(90.0, 91.0)[: run.gpus],
            samples=130,
            counter=True,
            lost={0: 20} if run.seed == 3 else None,
            name=f"GPU {EVIL}",
        )
        record(folder, gpus)
        write_phases(folder, ("set-up", 0, 10), ("evaluation", 30, 33))
        write_timings(folder, (100.0, 150.0)[: run.gpus])
    write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "verdict": {"target_loss": 3.281}})
    numbers = analyse(matrix)
    return page_of(numbers), render_page(numbers)


def section(html, name):
    found = re.search(rf'<section id="{name}".*?</section>', html, re.DOTALL)
    assert found, name
    return found[0]


def test_every_section_is_there_and_shows_no_value_of_python(page):
    for name in ("target", "cost", "scaling", "devices"):
        text = re.sub(r"<[^>]*>", " ", section(page[1], name))
        assert not re.findall(r"\b(?:None|nan|inf|True|False)\b|PageGroup|Panel\(", text), name


def test_hostile_names_are_text(page):
    assert EVIL not in page[1]
    assert "alert(1)" in section(page[1], "devices")
    assert not re.findall(r'<[^>]*\sstyle="', page[1])


def test_the_table_of_costs_has_the_amounts(page):
    values, html = page
    text = section(html, "cost")
    for row in values.cost.rows:
        for column, amount in zip(values.cost.columns, row.amounts, strict=True):
            interval = "" if amount is None or amount.half is None else f" <small>± {fixed(amount.half, column.digits)}"
            assert amount is None or f"{fixed(amount.mean, column.digits)}{interval}" in text


def test_missed_targets_are_counted(page):
    values, html = page
    text = section(html, "target")
    assert "TARGET_LOSS of this matrix" in text
    assert f"Not reached in {values.target.missed} of {values.target.runs} runs" in text
    assert "not reached in 3" in text


def test_a_lost_gpu_is_named(page):
    assert "GPU 0 was lost at" in section(page[1], "devices")


def test_sections_without_values_are_absent(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="failed", stop_at=40)])
    html = render_page(analyse(matrix))

    for name in ("target", "cost", "scaling", "devices"):
        assert f'<section id="{name}"' not in html
