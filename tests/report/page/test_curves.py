"""The curves of report.html: exact losses, thinned training, and a static figure without scripts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from scipy import stats

from html_reader import read_html
from kmatrix.report.analysis import analyse
from kmatrix.report.metrics import Evaluations, Metrics
from kmatrix.report.page.assemble import render_page
from kmatrix.report.page.curves import curve_of, curves
from kmatrix.report.page.parts.groups import page_groups
from page_sections import section as section_by_id
from records_factory import FakeRun, make_matrix, runs_with_seeds


def section_of(tmp_path, *runs, **fields):
    numbers = analyse(make_matrix(tmp_path, runs, **fields))
    return numbers, curves(numbers, page_groups(numbers))


def two_optimizers(seeds: int) -> list[FakeRun]:
    losses = {"muon": 3.27, "adamw": 3.30}
    return [
        run
        for optimizer, loss in losses.items()
        for run in runs_with_seeds(seeds, [loss + 0.01 * seed for seed in range(seeds)], optimizer=optimizer)
    ]


def expand(steps) -> list[float]:
    return steps if isinstance(steps, list) else [steps["a"] + steps["d"] * at for at in range(steps["n"])]


def test_validation_losses_keep_all_their_digits(tmp_path):
    numbers, section = section_of(tmp_path, *two_optimizers(3))

    for run, own in zip(numbers.runs, section.script["runs"], strict=True):
        assert own["v"]["y"] == [*run.val.loss]
        assert expand(own["v"]["x"]) == [*run.val.step]
        assert own["v"]["s"] == pytest.approx([*run.val.seconds], abs=0.05)
    json.dumps(section.script, allow_nan=False)


def test_critical_values_are_those_of_student(tmp_path):
    _, section = section_of(tmp_path, *two_optimizers(5))

    assert section.script["t"] == [round(stats.t.ppf(0.975, freedom), 4) for freedom in (1, 2, 3, 4)]


def test_without_any_loss_there_is_no_section(tmp_path):
    _, section = section_of(tmp_path, FakeRun(status="planned", result=False))

    assert section is None


def test_unknown_seconds_joules_and_dollars_are_absent(tmp_path):
    numbers, _ = section_of(tmp_path, FakeRun())
    nothing = (None, None)
    val = Evaluations(step=(0, 10), loss=(9.0, 3.0), tokens=nothing, seconds=nothing, joules=nothing)
    own = curve_of(replace(numbers.runs[0], metrics=Metrics(val=val), dollars=None), 60)

    assert own == {"v": {"x": [0, 10], "y": [9.0, 3.0]}}


def test_the_static_figure_names_its_lines_and_draws_the_range_of_the_seeds(tmp_path):
    _, section = section_of(tmp_path, *two_optimizers(3))
    static = section.static

    assert [line.name for line in static.lines] == ["muon", "adamw"]
    assert all(line.band for line in static.lines)
    for line in static.lines:
        xs = [float(place.split(",")[0]) for place in line.points.split()]
        assert xs == sorted(xs)
        assert xs[-1] == pytest.approx(static.panel.right, abs=0.1)
    assert abs(static.lines[0].label_y - static.lines[1].label_y) >= 14
    assert static.more == 0


def test_runs_without_a_second_loss_have_a_sentence_instead_of_figures(tmp_path):
    found = read_html(render_page(analyse(make_matrix(tmp_path, [FakeRun(status="failed", kind="oom", stop_at=0)]))))
    text = section_by_id(found, "curves").text
    assert "No run has two losses of one kind: there is no curve to draw." in text
    assert "Progress" not in text
