"""The section on the target loss: fastest first, and what was missed."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from html_reader import read_html
from kmatrix.records.files import read_json, write_json
from kmatrix.report.analysis import analyse
from kmatrix.report.page.assemble import render_page
from kmatrix.report.page.parts.groups import page_groups
from kmatrix.report.page.target import target
from records_factory import FakeRun, make_matrix, runs_with_seeds


def section_of(matrix, value=None):
    if value is not None:
        write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "verdict": {"target_loss": value}})
    numbers = analyse(matrix)
    return target(numbers, page_groups(numbers))


def row_of(section, optimizer):
    return next(row for row in section.rows if row.group.numbers.axes["optimizer"] == optimizer)


def test_missed_runs_are_counted_and_have_no_mark(tmp_path):
    section = section_of(make_matrix(tmp_path, runs_with_seeds(5, (3.27, 3.28, 3.29, 3.31, 3.32))), 3.295)

    row = row_of(section, "adamw")
    assert (row.reached, row.runs, row.missed, len(row.marks)) == (3, 5, 2, 3)
    assert (section.missed, section.runs, section.is_set) == (2, 5, True)
    assert not row.is_too_few
    assert section.quantities == ("step", "tokens", "seconds")


def test_the_fastest_comes_first_and_others_are_multiples_of_it(tmp_path):
    runs = [
        *runs_with_seeds(3, (3.27, 3.271, 3.272), optimizer="muon", tokens_per_s=1000.0),
        *runs_with_seeds(3, (3.28, 3.281, 3.282), optimizer="adamw", tokens_per_s=4000.0),
        *runs_with_seeds(3, (5.28, 5.281, 5.282), optimizer="sgd", tokens_per_s=9000.0),
    ]
    section = section_of(make_matrix(tmp_path, runs), 4.0)

    assert [row.group.numbers.axes["optimizer"] for row in section.rows] == ["adamw", "muon", "sgd"]
    seconds = [row.reach[section.quantities.index("seconds")].median for row in section.rows]
    assert section.rows[1].ratio == pytest.approx(seconds[1] / seconds[0])
    assert (section.rows[2].ratio, section.rows[2].is_too_few) == (None, True)
    # Four times faster: a quarter of the way to the right.
    assert section.rows[1].marks[0] == pytest.approx(section.rows[0].marks[0] * seconds[1] / seconds[0], rel=1e-3)


def test_configurations_without_a_finished_run_are_listed(tmp_path):
    runs = [
        *runs_with_seeds(2, (3.27, 3.28)),
        FakeRun(optimizer="sgd", seed=1, axes={"seed": "1"}, status="failed", kind="nan", stop_at=40),
    ]
    section = section_of(make_matrix(tmp_path, runs), 3.295)

    assert [row.group.numbers.axes["optimizer"] for row in section.rows] == ["adamw", "sgd"]
    assert (row_of(section, "sgd").reached, row_of(section, "sgd").runs) == (0, 1)


def test_no_section_without_a_ranking_and_a_target(tmp_path):
    assert section_of(make_matrix(tmp_path, [FakeRun(status="failed", stop_at=40)])) is None


def test_a_target_holds_for_every_ranking(tmp_path):
    runs = [
        *runs_with_seeds(3, (3.27, 3.271, 3.272), optimizer="muon"),
        *runs_with_seeds(3, (3.28, 3.281, 3.282), optimizer="adamw", data_sha256="f" * 64),
        *runs_with_seeds(3, (3.5, 3.6, 3.7), optimizer="sgd", data_sha256="f" * 64),
    ]
    section = section_of(make_matrix(tmp_path, runs), 3.295)

    found = {row.group.numbers.axes["optimizer"]: row for row in section.rows}
    assert {name: (row.reached, row.runs) for name, row in found.items()} == {
        "muon": (3, 3),
        "adamw": (3, 3),
        "sgd": (0, 3),
    }
    # Holm's correction is that of each family: one comparison for muon, two for the others.
    assert found["muon"].test.p_holm == pytest.approx(found["muon"].test.p)
    assert found["adamw"].test.p_holm == pytest.approx(2 * found["adamw"].test.p)
    assert {name: row.test.is_below for name, row in found.items()} == {"muon": True, "adamw": True, "sgd": False}


def test_joules_to_the_target_come_from_the_evaluations(tmp_path):
    numbers = analyse(make_matrix(tmp_path, runs_with_seeds(3, (3.27, 3.271, 3.272))))

    def with_joules(run):
        val = replace(run.curves.val, joules=array("d", (2.0 * step for step in run.curves.val.step)))
        return replace(run, curves=replace(run.curves, val=val))

    groups = tuple(replace(group, runs=tuple(map(with_joules, group.runs))) for group in numbers.groups)
    section = target(replace(numbers, groups=groups), page_groups(numbers))

    place = section.quantities.index("joules")
    assert section.rows[0].reach[place].median == 2 * section.rows[0].reach[0].median


def test_the_script_knows_which_runs_more_training_would_not_have_helped(tmp_path):
    runs = [
        *runs_with_seeds(2, (3.27, 3.28)),
        FakeRun(optimizer="sgd", seed=1, axes={"seed": "1"}, status="failed", kind="nan", stop_at=40),
        FakeRun(optimizer="lion", seed=1, axes={"seed": "1"}, status="failed", kind="error", stop_at=40),
    ]
    section = section_of(make_matrix(tmp_path, runs), 3.29501)

    assert section.script["never"] == [0, 1, 2]
    assert (section.script["value"], section.script["text"], section.script["stride"]) == (3.29501, "3.29501", 0)


def test_a_configuration_without_a_run_that_ended_has_no_result(tmp_path):
    runs = [
        *runs_with_seeds(3, (3.27, 3.28, 3.29)),
        FakeRun(optimizer="soap", status="stopped", seed=1, axes={"seed": "1"}, stop_at=20),
        FakeRun(optimizer="soap", status="skipped", seed=2, axes={"seed": "2"}),
    ]
    matrix = make_matrix(tmp_path, runs)
    row = row_of(section_of(matrix, 3.295), "soap")
    assert (row.runs, row.pending, row.is_too_few) == (0, 1, False)
    page = read_html(render_page(analyse(matrix)))
    reached = [cell for cell in page.all("td") if cell.attributes.get("data-q") == "reached"]
    assert [cell.attributes.get("data-pending") for cell in reached] == [None, "1"]


def test_without_a_run_that_ended_there_is_no_section(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="stopped", stop_at=20)], planned=[FakeRun(optimizer="sgd")])
    assert section_of(matrix, 3.295) is None
    assert 'id="target"' not in render_page(analyse(matrix))
